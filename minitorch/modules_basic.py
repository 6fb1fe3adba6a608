"""Layers with parameters: embedding, linear, layer and RMS norm, dropout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import not_negative, number, whole
from kernels.runtime.dtypes import is_floating

from .backends.elements import dtype_or_default
from .backends.operations import operation  # beyond module 5
from .functions.base import check_tensor
from .layers.checks import switch
from .layers.indices import integer_array
from .layers.linear import linear
from .module import Module, Parameter
from .nn import one_hot
from .scalars.modes import modes  # beyond module 5
from .tensor import Tensor
from .tensor_ops import SimpleBackend, TensorBackend
from .tensors.factories import from_numpy, ones, rand, randn, tensor, zeros


def parameter_dtype(dtype: npt.DTypeLike | None) -> np.dtype[Any]:
    """Return the dtype of parameters, the default dtype for None.

    Raises:
        TypeError: If it is not a floating-point dtype.
    """
    found = dtype_or_default(dtype)
    if not is_floating(found):
        raise TypeError(
            f"the dtype of parameters must be floating, got {found}; pass numpy.float32 or leave it out"
        )
    return found


class Embedding(Module):
    """A table of vectors, looked up by index.

    Args:
        num_embeddings: Number of rows of the table.
        embedding_dim: Length of a vector.
        backend: Backend of the parameters.
        dtype: Dtype of the parameters; the default dtype when None.
        std: Standard deviation of the initial table.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        backend: TensorBackend = SimpleBackend,
        dtype: npt.DTypeLike | None = None,
        std: float = 1.0,
    ):
        super().__init__()
        dtype = parameter_dtype(dtype)
        self.backend = backend
        self.num_embeddings = whole("num_embeddings", num_embeddings, 1)
        self.embedding_dim = whole("embedding_dim", embedding_dim, 1)
        draw = randn
        if not modes.drawing:  # beyond module 5
            draw = zeros
        table = draw((num_embeddings, embedding_dim), backend, dtype=dtype)
        std = number("std", std)
        self.weights = Parameter(table if std == 1.0 else table * std)

    def forward(self, x: Any) -> Tensor:
        """Look up each index.

        Args:
            x: Indices of any shape, a tensor or an integer array.

        Returns:
            (*x.shape, embedding_dim).
        """
        return lookup(self.weights.value, x)


@operation  # beyond module 5
def lookup(table: Tensor, x: Any) -> Tensor:
    """Return rows of a table, as a product with one-hot rows.

    Args:
        table: (count, dim).
        x: Indices of any shape, a tensor or an integer array.

    Returns:
        (*x.shape, dim).
    """
    count, dim = table.shape
    ids = integer_array(x, count, "token ids")
    chosen = one_hot(from_numpy(ids, table.backend), count).to(table.dtype)
    return (chosen.view(ids.size, count) @ table).view(*ids.shape, dim)


class Linear(Module):
    """x @ weights + bias over the last dimension.

    Args:
        in_size: Length of a row of x.
        out_size: Length of a row of the result.
        bias: Whether there is a bias.
        backend: Backend of the parameters.
        dtype: Dtype of the parameters; the default dtype when None.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        bias: bool = True,
        backend: TensorBackend = SimpleBackend,
        dtype: npt.DTypeLike | None = None,
    ):
        super().__init__()
        dtype = parameter_dtype(dtype)
        self.in_size, self.out_size = whole("in_size", in_size, 1), whole("out_size", out_size, 1)
        limit = 1.0 / math.sqrt(in_size)

        def uniform(*shape: int) -> Parameter:
            if not modes.drawing:  # beyond module 5
                return Parameter(zeros(shape, backend, dtype=dtype))
            return Parameter((rand(shape, backend, dtype=dtype) - 0.5) * (2.0 * limit))

        self.weights = uniform(in_size, out_size)
        self.bias = uniform(out_size) if switch("bias", bias) else None

    def forward(self, x: Tensor, has_gelu: bool = False) -> Tensor:
        """Apply the layer to x; the result is (…, out_size).

        Args:
            x: Input, (…, in_size).
            has_gelu: Apply GELU to the result, in the epilogue of the product if the backend can do so.
        """
        bias = None if self.bias is None else self.bias.value
        return linear(x, self.weights.value, bias, has_gelu)


class Norm(Module):
    """The base class of layers that normalise the last dimension; see :class:`LayerNorm1d`."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        backend: TensorBackend = SimpleBackend,
        dtype: npt.DTypeLike | None = None,
    ):
        super().__init__()
        self.dim = whole("dim", dim, 1)
        self.eps = not_negative("eps", eps, hint="; 1e-5 is common")
        self.weights = Parameter(ones((dim,), backend, dtype=parameter_dtype(dtype)))


class LayerNorm1d(Norm):
    """Normalise the last dimension to mean 0 and variance 1, then scale and shift it.

    Args:
        dim: Length of the last dimension.
        eps: Added to the variance.
        backend: Backend of the parameters.
        dtype: Dtype of the parameters; the default dtype when None.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        backend: TensorBackend = SimpleBackend,
        dtype: npt.DTypeLike | None = None,
    ):
        super().__init__(dim, eps, backend, dtype)
        self.bias = Parameter(zeros((dim,), backend, dtype=parameter_dtype(dtype)))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x, (…, dim); the result has the same shape."""
        return layer_norm(x, self.weights.value, self.bias.value, self.eps)


@operation  # beyond module 5
def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """Return layer norm over the last dimension, in the dtype of x.

    Args:
        x: Input, (…, n).
        gamma: Factors, (n,).
        beta: Terms, (n,).
        eps: Added to the variance.

    Returns:
        (…, n).
    """
    check_tensor("input", x)
    x = x if is_floating(x.dtype) else x * 1.0  # the mean of integers is not an integer
    last = x.dims - 1
    deviation = x - x.mean(last)
    variance = (deviation * deviation).mean(last)
    return (deviation / (variance + eps) ** 0.5 * gamma + beta).to(x.dtype)


class Dropout(Module):
    """In training mode, set elements to 0 at random and scale up the others; otherwise do nothing.

    Args:
        p_dropout: Probability that an element becomes 0, in [0, 1).
    """

    def __init__(self, p_dropout: float = 0.1):
        super().__init__()
        self.p_dropout = not_negative("p_dropout", p_dropout, 1.0, "; 0 turns dropout off")

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout, which keeps the shape and the expected value of each element."""
        check_tensor("input", x)
        if not modes.dropping:  # beyond module 5
            return x
        if not self.training or self.p_dropout == 0.0:
            return x
        return scaled_dropout(x, self.p_dropout)


@operation  # beyond module 5
def scaled_dropout(x: Tensor, rate: float) -> Tensor:
    """Set each element to 0 with probability ``rate``, and divide the others by 1 - ``rate``."""
    keep = np.random.binomial(1, 1.0 - rate, x.shape)  # as published
    return x * tensor(keep, x.backend, False, x.dtype) / (1.0 - rate)
