"""Linformer: exact attention to a few learned mixtures of the keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import whole

from ...functions.base import check_tensor
from ...functions.indexing import Gather, table_like
from ...module import Module, Parameter
from ...tensor import Tensor
from ...tensor_ops import TensorBackend
from ...tensors.factories import randn
from .support import Masked, check_operands, check_options, kept_keys


def linformer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    project_k: Tensor,
    project_v: Tensor | None = None,
    key_mask: Any = None,
) -> Tensor:
    """Compute exact attention to ``count`` projected keys and values, in time linear in the sequence.

    O = softmax(scale Q (E K)ᵀ) (F V), with learned E and F of shape (count, length).

    Args:
        q: (…, heads, seq_q, head_dim).
        k: (…, heads, seq_k, head_dim).
        v: (…, heads, seq_k, value_dim).
        attn_mask: Not supported: a projected key mixes all positions.
        dropout_p: Probability of dropping an attention weight.
        is_causal: Not supported: a projected key mixes all positions.
        scale: Factor of the scores; 1 / sqrt(head_dim) when None.
        project_k: E, (count, length) or (heads, count, length); the first seq_k columns are used.
        project_v: F, (count, length) or (heads, count, length); E when None.
        key_mask: (…, seq_k); False or 0 sets a key and its value to 0, so that no mixture contains them.

    Returns:
        (…, heads, seq_q, value_dim).

    Raises:
        TypeError: If an operand is not a tensor, or the operands differ in dtype or backend.
        ValueError: If a shape does not fit, a projection is shorter than the sequence, or for an option
            that the method does not support.

    Source: Wang, Li, Khabsa, Fang and Ma, Linformer (2020), section 4.
    """
    check_options("linformer", Masked(attn_mask, dropout_p, is_causal, scale))
    check_operands("linformer", q, k, v)
    project_v = project_k if project_v is None else project_v
    for name, projection in (("project_k", project_k), ("project_v", project_v)):
        _check_projection(name, projection, k)
    if project_k.shape[-2] != project_v.shape[-2]:
        raise ValueError(
            f"project_k and project_v must project to the same number of positions, got "
            f"{project_k.shape} and {project_v.shape}; make their counts equal"
        )
    keep = kept_keys(key_mask, k)
    if keep is not None:
        k, v = (k * keep).to(q.dtype), (v * keep).to(q.dtype)
    k, v = _columns(project_k, k) @ k, _columns(project_v, v) @ v  # (…, heads, count, …)
    return q.flash_attention(k, v, dropout_p=dropout_p, scale=scale)


def _check_projection(name: str, projection: Any, k: Tensor) -> None:
    check_tensor(name, projection)
    heads, seq = k.shape[-3], k.shape[-2]
    if projection.dims not in (2, 3) or (projection.dims == 3 and projection.shape[0] != heads):
        raise ValueError(
            f"{name} must have shape (count, length) or ({heads}, count, length), got {projection.shape}"
        )
    if projection.shape[-1] < seq:
        raise ValueError(
            f"{name} of shape {projection.shape} projects {projection.shape[-1]} positions, and the "
            f"sequence has {seq}; build it for the longest sequence, or use another method: the other "
            "methods take any length"
        )
    if projection.dtype != k.dtype:
        raise TypeError(
            f"{name} must be {k.dtype}, as k is, got {projection.dtype}; convert it with to"
        )


def _columns(projection: Tensor, like: Tensor) -> Tensor:
    """Return the first columns of a projection, as many as there are positions."""
    seq = like.shape[-2]
    if projection.shape[-1] == seq:
        return projection
    first = np.arange(seq).reshape(*[1] * (projection.dims - 1), seq)
    return Gather.apply(projection, projection.dims - 1, table_like(projection, first))


class Linformer(Module):
    """Linformer attention with its two projections, which all heads share.

    Args:
        length: Length of the longest sequence.
        count: Number of projected keys.
        backend: Backend of the parameters.
        dtype: Dtype of the parameters; the default dtype when None.
    """

    def __init__(
        self, length: int, count: int, backend: TensorBackend, dtype: npt.DTypeLike | None = None
    ):
        super().__init__()
        shape = whole("count", count, 1), whole("length", length, 1)
        # A projected key is then of the size of a key that is the mean of independent ones, times its root.
        first, second = (randn(shape, backend, dtype=dtype) * length**-0.5 for _ in range(2))
        self.project_k, self.project_v = Parameter(first), Parameter(second)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Compute attention; see :func:`linformer`."""
        own = {"project_k": self.project_k.value, "project_v": self.project_v.value}
        return linformer(q, k, v, **own, **options)
