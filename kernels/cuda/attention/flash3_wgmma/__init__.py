"""FlashAttention-3 on Hopper: what its forward and backward kernels share."""
