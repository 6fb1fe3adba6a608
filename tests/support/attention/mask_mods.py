"""Mask functions of users, drawn: each says the same of numbers and of arrays of indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

MaskMod = Callable[..., Any]


def dilated(step: int) -> MaskMod:
    return lambda batch, head, row, col: ((row - col) % step == 0) & (col <= row)


def dilated_by_head(step: int) -> MaskMod:
    return lambda batch, head, row, col: (row - col) % (step + head) == 0


def prefix(count: int) -> MaskMod:
    return lambda batch, head, row, col: (col <= row) | (col < count)


def documents(count: int) -> MaskMod:
    ids = np.sort(np.random.default_rng(count).integers(0, count, 1024))
    return lambda batch, head, row, col: (ids[row] == ids[col]) & (col <= row)


def strided(stride: int) -> MaskMod:
    return lambda batch, head, row, col: (row - col < stride) | (col % stride == stride - 1)


def block_diagonal(size: int) -> MaskMod:
    return lambda batch, head, row, col: row // size == col // size


def sliding_and_global(width: int) -> MaskMod:
    return lambda batch, head, row, col: (abs(row - col) < width) | (col < 4) | (row < 2)


def squares(modulus: int) -> MaskMod:
    """Keep what a product of indices decides."""
    return lambda batch, head, row, col: (row * row + 3 * col) % modulus < modulus // 2 + 1


def in_floats(width: int) -> MaskMod:
    return lambda batch, head, row, col: 0.5 * (row - col) <= width / 4


def by_batch(count: int) -> MaskMod:
    return lambda batch, head, row, col: col < count * (batch + 1)


def nothing(count: int) -> MaskMod:
    return lambda batch, head, row, col: (row < 0) & (col < count)


KINDS = (
    dilated, dilated_by_head, prefix, documents, strided, block_diagonal, sliding_and_global, squares,
    in_floats, by_batch, nothing,
)  # fmt: skip


@st.composite
def mask_mods(draw: Any) -> MaskMod:
    """Draw a function of a kind, and the number that it captures."""
    kind, number = draw(st.sampled_from(KINDS)), draw(st.integers(2, 40))
    mod = kind(number)
    mod.__qualname__ = f"{kind.__name__}({number})"
    return mod


def elements(mod: MaskMod, *shape: int) -> Any:
    """Return the mask as an array, (batch, heads, seq_q, seq_k)."""
    return np.broadcast_to(mod(*np.indices(shape, sparse=True)), shape)
