"""Attention in PyTorch: an operator, an attention of Hugging Face's models, and a backend of SDPA."""

from kernels.interop.torch.operator import flash_attention

__all__ = ["flash_attention"]
