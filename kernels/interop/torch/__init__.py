"""Attention in PyTorch: an operator, an attention of Hugging Face's models, and a backend of SDPA."""

from kernels.interop.torch.eager import FlashAttention2
from kernels.interop.torch.flex_masks import block_mask_from_flex, block_mask_to_flex
from kernels.interop.torch.hugging_face import register_with_transformers
from kernels.interop.torch.operator import flash_attention, flash_attention_varlen
from kernels.interop.torch.sdpa import register_with_sdpa

__all__ = [
    "FlashAttention2",
    "block_mask_from_flex",
    "block_mask_to_flex",
    "flash_attention",
    "flash_attention_varlen",
    "register_with_sdpa",
    "register_with_transformers",
]
