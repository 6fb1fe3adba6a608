"""FlashAttention-2 on CUDA cores: query tiles outside and parallel."""
