"""FlashAttention-3 forward on Hopper."""
