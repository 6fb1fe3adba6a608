"""FlashAttention-3 on Hopper: common code of its forward and backward kernels."""
