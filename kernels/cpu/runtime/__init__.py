"""The runtime of compiled CPU loops: function pointers, vectorised math, a memory pool."""
