"""A GPU in Python: threads in a drawn order, memory that begins as garbage, races that are named."""
