"""Kernels for the host, compiled by numba."""
