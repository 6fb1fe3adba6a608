"""Attention in PyTorch: an operator, an attention of Hugging Face's models, and a backend of SDPA."""

from kernels.interop.torch.hugging_face import register_with_transformers
from kernels.interop.torch.operator import flash_attention
from kernels.interop.torch.sdpa import register_with_sdpa

__all__ = ["flash_attention", "register_with_sdpa", "register_with_transformers"]
