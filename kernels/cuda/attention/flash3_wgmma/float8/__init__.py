"""FlashAttention-3 forward with float8 products on Hopper."""
