"""NumPy that does what the instructions of ``ptx`` do."""
