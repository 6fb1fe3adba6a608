"""FlashAttention-2 on tensor cores with mma.sync."""
