"""Kernels for CUDA, compiled by numba.  ``emulator`` runs them without a GPU."""
