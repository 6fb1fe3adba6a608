"""The rungs of attention on CUDA, one folder each, and what two or more of them share."""
