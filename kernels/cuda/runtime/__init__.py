"""The host's half of CUDA: arrays, memory, what a kernel is, compiling, launching, graphs."""
