"""The CPU kernels that a tensor library uses."""

from __future__ import annotations

from kernels.cpu.layers import indexing
from kernels.cpu.matmul import blas
from kernels.cpu.runtime import memory_pool, vector_math
from kernels.cpu.runtime.function_pointers import take

__all__ = ["blas", "indexing", "memory_pool", "take", "vector_math"]
