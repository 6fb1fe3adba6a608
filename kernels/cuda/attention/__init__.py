"""The rungs of attention on CUDA, one folder each, and their common code."""
