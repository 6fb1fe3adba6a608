"""What loops compiled for the CPU call: function pointers, vectorised math, a pool of memory."""
