"""FlashAttention-3 backward on Hopper."""
