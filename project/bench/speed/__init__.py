"""Scripts that time one family of kernels on a GPU, by hand."""
