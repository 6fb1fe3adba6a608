"""What stands between the kernels and NumPy, numba and CUDA's package: dtypes, host memory, compilation."""
