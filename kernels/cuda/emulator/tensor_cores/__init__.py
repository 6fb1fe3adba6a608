"""Instructions of tensor cores and copy engines on the emulated GPU."""
