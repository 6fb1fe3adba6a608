"""The feed-forward networks of a transformer: two linear layers with GELU, or SwiGLU."""

from __future__ import annotations

import numpy.typing as npt

from ..module import Module
from ..modules_basic import Dropout, Linear
from ..nn import silu
from ..tensor import Tensor
from ..tensor_ops import SimpleBackend, TensorBackend


class FeedForward(Module):
    """Two linear layers with GELU between them, applied to each position.

    Args:
        n_embd: Width of the model.
        middle_dim: Width between the layers.
        p_dropout: Dropout probability of the output.
        bias: Whether the layers have a bias.
        backend: Backend of the parameters.
        dtype: Dtype of the parameters; the default dtype when None.
    """

    def __init__(
        self,
        n_embd: int,
        middle_dim: int = 256,
        p_dropout: float = 0.1,
        bias: bool = True,
        backend: TensorBackend | None = None,
        dtype: npt.DTypeLike | None = None,
    ):
        super().__init__()
        backend = backend or SimpleBackend
        self.linear_in = Linear(n_embd, middle_dim, bias, backend, dtype)
        self.linear_out = Linear(middle_dim, n_embd, bias, backend, dtype)
        self.dropout = Dropout(p_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to x, (…, n_embd); the result has the same shape."""
        return self.dropout(self.linear_out(self.linear_in(x, has_gelu=True)))


class GatedFeedForward(Module):
    """SwiGLU: silu(x @ gate) · (x @ in), and a linear layer back, applied to each position.

    Args:
        n_embd: Width of the model.
        middle_dim: Width between the layers.
        p_dropout: Dropout probability of the output.
        bias: Whether the layers have a bias.
        backend: Backend of the parameters.
        dtype: Dtype of the parameters; the default dtype when None.

    Source: Shazeer (2020), GLU variants improve transformer.
    """

    def __init__(
        self,
        n_embd: int,
        middle_dim: int = 256,
        p_dropout: float = 0.1,
        bias: bool = False,
        backend: TensorBackend | None = None,
        dtype: npt.DTypeLike | None = None,
    ):
        super().__init__()
        backend = backend or SimpleBackend
        self.linear_gate = Linear(n_embd, middle_dim, bias, backend, dtype)
        self.linear_in = Linear(n_embd, middle_dim, bias, backend, dtype)
        self.linear_out = Linear(middle_dim, n_embd, bias, backend, dtype)
        self.dropout = Dropout(p_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to x, (…, n_embd); the result has the same shape."""
        return self.dropout(self.linear_out(silu(self.linear_gate(x)) * self.linear_in(x)))
