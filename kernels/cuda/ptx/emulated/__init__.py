"""NumPy emulations of the instructions of ``ptx``."""
