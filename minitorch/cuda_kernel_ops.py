"""The CUDA operations under the import path of the published transformer course."""

from .cuda_ops import CudaOps

CudaKernelOps = CudaOps

__all__ = ["CudaKernelOps"]
