"""The feed-forward networks of a transformer: two linear layers with GELU, or SwiGLU."""

from __future__ import annotations

from typing import Any

from ..module import Module
from ..modules_basic import Dropout, Linear
from ..nn import silu  # beyond module 5
from ..tensor import Tensor
from .config import Config, configured


class FeedForward(Module):
    """Two linear layers with GELU between them, applied to each position.

    The options are those of :class:`minitorch.Config`.
    """

    @configured("n_embd", "middle_dim p_dropout bias backend dtype")
    def __init__(self, config: Config):
        super().__init__()
        c = config
        self.linear_in = Linear(c.n_embd, c.middle_dim, c.bias, c.backend, c.dtype)
        self.linear_out = Linear(c.middle_dim, c.n_embd, c.bias, c.backend, c.dtype)
        self.dropout = Dropout(c.p_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to x, (…, n_embd); the result has the same shape."""
        return self.dropout(self.linear_out(self.linear_in(x, has_gelu=True)))


class GatedFeedForward(Module):  # beyond module 5
    """SwiGLU: silu(x @ gate) · (x @ in), and a linear layer back, applied to each position.

    The options are those of :class:`minitorch.Config`; ``bias`` is False by default.

    Source: Shazeer (2020), GLU variants improve transformer.
    """

    @configured("n_embd", "middle_dim p_dropout bias backend dtype", bias=False)
    def __init__(self, config: Config):
        super().__init__()
        c = config
        self.linear_gate = Linear(c.n_embd, c.middle_dim, c.bias, c.backend, c.dtype)
        self.linear_in = Linear(c.n_embd, c.middle_dim, c.bias, c.backend, c.dtype)
        self.linear_out = Linear(c.middle_dim, c.n_embd, c.bias, c.backend, c.dtype)
        self.dropout = Dropout(c.p_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to x, (…, n_embd); the result has the same shape."""
        return self.dropout(self.linear_out(silu(self.linear_gate(x)) * self.linear_in(x)))


def make_feed_forward(config: Config) -> Any:
    """Return the feed-forward network of a layer."""
    if config.feed_forward == "swiglu":  # beyond module 5
        return GatedFeedForward(config)
    return FeedForward(config)
