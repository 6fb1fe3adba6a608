"""The base classes of Tensor, the functions that make tensors, and the gradient check."""
