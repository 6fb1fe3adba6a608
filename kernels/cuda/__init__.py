"""Kernels for CUDA, compiled by numba; they run in its simulator too."""
