"""FlashAttention (2022) as printed: key tiles outside, query tiles inside."""
