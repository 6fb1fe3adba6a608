"""Layers as functions that choose between a fused kernel and the composed form."""
