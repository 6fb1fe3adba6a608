"""Kernels for CUDA, compiled by numba.  All but the tensor-core kernels run in its simulator too."""
