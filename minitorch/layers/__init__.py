"""Layers as functions that pick a fused kernel or the composed form."""
