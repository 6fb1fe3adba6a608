"""Stand-ins for a GPU, and what tests of its kernels share."""
