"""What scalars and tensors share beside the modules of the course."""
