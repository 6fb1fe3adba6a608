"""The layer between the kernels and NumPy, numba and numba.cuda: dtypes, host memory, compilation."""
