"""The host's part of CUDA: arrays, memory, kernels, compiling, launching, graphs."""
