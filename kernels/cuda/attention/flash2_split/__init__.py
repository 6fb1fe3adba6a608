"""The rung flash2_split: FlashAttention-2 in float32 on float16 tensor cores, with split operands."""
