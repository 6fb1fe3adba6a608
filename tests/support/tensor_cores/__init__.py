"""Calls of tensor-core kernels, and what must come out."""
