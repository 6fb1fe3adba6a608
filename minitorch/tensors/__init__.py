"""What the Tensor class inherits, how tensors are made, and the gradient check."""
