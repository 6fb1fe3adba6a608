"""Fused layers and optimisers on the CPU."""
