"""Device functions and small kernels used by all CUDA code."""
