"""Rotary positions: queries and keys turned by angles that grow with their position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import number, short, shown, whole
from kernels.runtime.dtypes import acc_dtype

from ..autodiff import Context
from ..backends.tensor_protocol import TensorLike
from ..functions.base import Function
from ..functions.indexing import gathered, table_like
from ..modules_basic import lookup
from ..tensor import Tensor
from ..tensors.factories import from_numpy

Array = npt.NDArray[np.float64]
#: Numbers of each type of scaling, by Hugging Face's name; "factor" is one of all but "default".
SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ),
}  # fmt: skip


class Rotate(Function):
    """Turn the pairs (x[i], x[i + dim / 2]) of the last dimension by angles."""

    is_multilinear = True

    @staticmethod
    def forward(ctx: Context, x: TensorLike, cos: TensorLike, sin: TensorLike) -> TensorLike:
        """Return x ∘ cos + swap(x) ∘ sin, where ``swap`` exchanges the halves of the last dimension.

        Args:
            ctx: Keeps the angles.
            x: (batch, seq, heads, dim).
            cos: (seq, 1, dim).
            sin: (seq, 1, dim), of opposite sign in the two halves.
        """
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Context, grad_output: TensorLike) -> tuple[TensorLike, None, None]:
        """Turn the gradient back."""
        cos, sin = ctx.saved_values
        return _rotated(grad_output, cos, sin.f.neg_map(sin)), None, None


def _rotated(x: Any, cos: Any, sin: Any) -> Any:
    f, last = x.f, x.dims - 1
    order = table_like(x, _swap(x.dims, x.shape[-1]))  # (1, 1, 1, dim)
    swapped = gathered(x, last, order)  # (batch, seq, heads, dim)
    out = f.add_zip(f.mul_zip(x, cos), f.mul_zip(swapped, sin))
    return out if out.dtype == x.dtype else f.id_map(out, x.empty(x.shape))


@lru_cache(maxsize=16)
def _swap(dims: int, dim: int) -> Any:
    """Return the places of the last dimension with its halves exchanged, (1, …, 1, dim)."""
    order = np.roll(np.arange(dim), dim // 2).reshape(*[1] * (dims - 1), dim)
    order.setflags(write=False)
    return order


class Rotary:
    """Rotary positions: rotate queries or keys of a head by angles proportional to their positions.

    Coordinates i and i + head_dim / 2 are a pair, as in Hugging Face's models. The product of a
    rotated query and a rotated key depends only on the distance between their positions.

    Args:
        head_dim: Size of a query and of a key, an even number.
        n_positions: Maximum number of positions.
        theta: Base of the frequencies theta^(-2i / head_dim).
        scaling: None, or a change of the frequencies for long contexts, as in a Hugging Face config.json:
            ``{"rope_type": "linear", "factor": 2.0}``, or "llama3" with its four numbers.

    Attributes:
        frequencies: Angle of one position, (head_dim / 2,), float64.

    Raises:
        TypeError: If a value is not a number.
        ValueError: If head_dim is odd, a number is not positive, or the type of the scaling is unknown.

    Source: Su et al. (2021), RoFormer, section 3.2.2; for "linear", Chen et al. (2023), Extending context
    window of large language models via positional interpolation; for "llama3", the configuration of
    Llama 3.1 in Hugging Face's transformers.
    """

    def __init__(
        self,
        head_dim: int,
        n_positions: int,
        theta: float = 10_000.0,
        scaling: Mapping[str, Any] | None = None,
    ):
        if whole("head_dim", head_dim, 1) % 2:
            raise ValueError(
                f"rotary positions need heads of even size, got head_dim {head_dim}; pass an even head_dim"
            )
        theta, given = number("rotary_theta", theta), theta
        if not 0.0 < theta < math.inf:
            raise ValueError(f"rotary_theta must be positive and finite, got {short(given)}")
        self.n_positions, self.theta, self.scaling = n_positions, theta, checked_scaling(scaling)
        plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)  # (head_dim / 2,)
        self.frequencies = plain if self.scaling is None else _scaled(plain, self.scaling)
        self._tables: dict[Any, tuple[Tensor, Tensor]] = {}

    def __repr__(self) -> str:
        return (
            f"Rotary(head_dim={2 * len(self.frequencies)}, theta={self.theta}, "
            f"scaling={self.scaling})"
        )

    def __call__(self, x: Tensor, start: int) -> Tensor:
        """Turn (batch, seq, heads, head_dim), whose first position is ``start``; the same shape."""
        stop = start + x.shape[1]
        if stop > self.n_positions:
            raise ValueError(
                f"the context holds {self.n_positions} positions, got {x.shape[1]} after {start}; pass "
                "the last ones"
            )
        cos, sin = (table[start:stop] for table in self._up_to(stop, x))  # (seq, 1, head_dim)
        return Rotate.apply(x, cos, sin)

    def turns(self, places: Any, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of given positions, (count, 1, head_dim) each.

        Args:
            places: (count,) positions, an integer array.
            like: A tensor of the backend and dtype of the queries.
        """
        cos, sin = (
            lookup(table.view(*table.shape[::2]), places).view(len(places), 1, table.shape[-1])
            for table in self._up_to(self.n_positions, like)
        )
        return cos, sin

    def _up_to(self, stop: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of at least the first ``stop`` positions, on the backend of a tensor.

        They are kept, so that a later call neither computes nor copies them.
        """
        dtype = acc_dtype(like.dtype)
        key = like.backend, dtype
        tables = self._tables.get(key)
        if tables is None or len(tables[0]) < stop:
            count = min(max(stop, 2 * (0 if tables is None else len(tables[0]))), self.n_positions)
            angles = np.arange(count)[:, None, None] * self.frequencies  # (count, 1, head_dim / 2)
            parts = (np.cos(angles), np.cos(angles)), (-np.sin(angles), np.sin(angles))
            cos, sin = (
                from_numpy(np.concatenate(part, -1).astype(dtype), like.backend) for part in parts
            )  # (count, 1, head_dim)
            tables = self._tables[key] = cos, sin
        return tables


def with_rotary(config: Any, theta: float | None, scaling: Mapping[str, Any] | None) -> Any:
    """Return a Config with the rotary positions of a :class:`minitorch.DecoderLM`.

    Raises:
        ValueError: For a scaling without rotary positions.
    """
    if theta is not None:
        return replace(config, rotary=Rotary(config.head_size, config.n_positions, theta, scaling))
    if scaling is not None:
        raise ValueError(
            "rotary_scaling needs rotary positions; pass rotary_theta as well, such as 10000.0"
        )
    return config


def checked_scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a scaling with the numbers of its type only; None for none.

    Raises:
        TypeError: If a value is not a number.
        ValueError: If the type is unknown, or a number is missing or not positive.
    """
    if scaling is None:
        return None
    if not isinstance(scaling, Mapping):
        raise TypeError(f"a rotary scaling must be a dict or None, got {shown(scaling)}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in SCALINGS:
        raise ValueError(
            f"rotary positions have a scaling of type {kind!r:.40}, supported is {' or '.join(SCALINGS)}"
        )
    if missing := [name for name in SCALINGS[kind] if name not in scaling]:
        raise ValueError(f"the rotary scaling {kind!r} needs {missing[0]}, got {dict(scaling)}")
    found = {name: number(name, scaling[name]) for name in SCALINGS[kind]}
    if wrong := [name for name, value in found.items() if not 0.0 < value < math.inf]:
        raise ValueError(
            f"{wrong[0]} of a rotary scaling must be positive and finite, got {found[wrong[0]]}"
        )
    return {"rope_type": kind, **found} if found else None


def _scaled(frequencies: Array, scaling: dict[str, Any]) -> Array:
    """Return frequencies changed for a longer context."""
    slow = frequencies / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return slow
    # Waves that fit into the original context often keep their frequency, and long ones are stretched.
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if not low < high:
        raise ValueError(f"low_freq_factor must be below high_freq_factor, got {low} and {high}")
    waves = scaling["original_max_position_embeddings"] * frequencies / (2.0 * math.pi)
    kept = np.clip((waves - low) / (high - low), 0.0, 1.0)
    return (1.0 - kept) * slow + kept * frequencies
