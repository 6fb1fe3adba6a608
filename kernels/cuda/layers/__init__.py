"""Fused layers and optimisers on CUDA."""
