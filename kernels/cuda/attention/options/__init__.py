"""Attention's options compiled for CUDA, the same for every rung."""
