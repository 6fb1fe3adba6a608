"""The lines of attention's algorithms, each a function of arrays: no options, no loops over tiles.

``attention.py`` calls them for all scores at once and tile by tile.  They use the letters of the papers:
s scores, p probabilities, z the dropout factors (0 or 1 / (1 - p); the number 1 without dropout).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Rows(NamedTuple):
    """The state of the online softmax for some rows, after a number of key tiles."""

    row_max: Array  #: m, (…, rows), the largest score so far.
    row_sum: Array  #: ℓ, (…, rows), the sum of e^(s - m) so far.
    acc: Array  #: (…, rows, value_dim), the sum of e^(s - m) · z · v so far.


def shift_of(row_max: Array) -> Array:
    """Return m, with 0 in place of -inf: a fully masked row has s - m = -inf - (-inf), which is NaN."""
    return np.where(row_max == -np.inf, row_max.dtype.type(0), row_max)


def divided(acc: Array, row_sum: Array) -> Array:
    """Return each row of acc, (…, rows, value_dim), divided by its sum, or zeros where that is 0."""
    # By equality, so that a NaN stays one.
    return acc / np.where(row_sum == 0, 1, row_sum)[..., None]


def log(row_sum: Array) -> Array:
    """Return the logarithm; log 0 = -inf is the lse of a fully masked row, and no warning."""
    with np.errstate(divide="ignore"):
        return np.log(row_sum)


def rest_of(lse: Array, shift: Array, row_sum: Array) -> Array:
    """Return what lse = shift + log ℓ loses by rounding, (…, rows): much where |m| is large.

    ℓ is ``row_sum``, Σ exp(S - shift) of each row, and shift m or another number near it.
    """
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(lse), (shift - lse) + log(row_sum), lse.dtype.type(0))


def softmax_times(s: Array, z: Any, v: Array) -> tuple[Array, Array]:
    """Return out and lse of rows whose scores are all there.

    Args:
        s: (…, rows, cols), -inf where masked.
        z: (…, rows, cols) or 1.
        v: (…, cols, value_dim).

    Source: FlashAttention, Algorithm 0, lines 2 and 3.
    """
    # TASK 5.2: P = exp(S - m), ℓ = rowsum P, O = (P ∘ Z) V divided by ℓ, L = m + log ℓ.
    shift = shift_of(s.max(axis=-1, initial=-np.inf))  # (…, rows)
    p = np.exp(s - shift[..., None])  # (…, rows, cols)
    row_sum = p.sum(axis=-1)  # (…, rows)
    return divided((p * z) @ v, row_sum), shift + log(row_sum)
    # END TASK 5.2


def delta_of(dout: Array, out: Array, dlse: Array | None) -> Array:
    """Return D of each row, (…, rows), such that dS = P ∘ (dP - D).

    Args:
        dout: (…, rows, value_dim).
        out: (…, rows, value_dim).
        dlse: (…, rows), the gradient of lse, or None if the caller has not used lse.
    """
    # TASK 5.2: D = rowsum(dO ∘ O), less dlse if there is one.
    delta = (dout * out).sum(axis=-1)  # (…, rows)
    return delta if dlse is None else delta - dlse
    # END TASK 5.2


def softmax_gradient(p: Array, dp: Array, delta: Array) -> Array:
    """Return dS, (…, rows, cols).

    Args:
        p: (…, rows, cols), normalised.
        dp: (…, rows, cols).
        delta: (…, rows).
    """
    # TASK 5.2: Derive the softmax of a row; D is delta.
    return p * (dp - delta[..., None])
    # END TASK 5.2


def softmax_tangent(p: Array, s_tangent: Array) -> tuple[Array, Array]:
    """Return the derivatives of P and of L along a tangent of S: Ṗ, (…, rows, cols), and L̇, (…, rows).

    Args:
        p: (…, rows, cols), normalised.
        s_tangent: (…, rows, cols), finite.
    """
    # TASK 5.11: L̇ = rowsum(P ∘ Ṡ), Ṗ = P ∘ (Ṡ - L̇).
    lse_tangent = (p * s_tangent).sum(axis=-1)  # (…, rows)
    return p * (s_tangent - lse_tangent[..., None]), lse_tangent
    # END TASK 5.11


def product_gradients(
    p: Array, ds: Array, q: Array, k: Array, dout: Array, scale: float
) -> tuple[Array, Array, Array]:
    """Return dQ, dK and dV of O = P V and S = τ Q Kᵀ, shaped like q, k and v.

    Args:
        p: (…, rows, cols), after dropout.
        ds: (…, rows, cols), the gradient of τ q · k.
        q: (…, rows, head_dim).
        k: (…, cols, head_dim).
        dout: (…, rows, value_dim).
        scale: τ.
    """
    # TASK 5.2: As the gradient of a product in module 2; np.swapaxes(x, -1, -2) is xᵀ.
    dq = scale * (ds @ k)  # (…, rows, head_dim)
    dk = scale * (np.swapaxes(ds, -1, -2) @ q)  # (…, cols, head_dim)
    dv = np.swapaxes(p, -1, -2) @ dout  # (…, cols, value_dim)
    return dq, dk, dv
    # END TASK 5.2


def add_tile(rows: Rows, s: Array, z: Any, v: Array) -> Rows:
    """Return what is known of the rows after one more tile of keys.

    Args:
        rows: Before it.
        s: (…, rows, block_k), -inf where masked.
        z: (…, rows, block_k) or 1.
        v: (…, block_k, value_dim).

    Source: FlashAttention-2, Algorithm 1, lines 9 and 10.
    """
    # TASK 5.3: The new m; ℓ and acc both shrink by e^(m - m_new); then add the tile.
    row_max = np.maximum(rows.row_max, s.max(axis=-1))  # (…, rows)
    shift = shift_of(row_max)
    p = np.exp(s - shift[..., None])  # (…, rows, block_k)
    rescale = np.exp(rows.row_max - shift)  # (…, rows)
    row_sum = rescale * rows.row_sum + p.sum(axis=-1)
    acc = rescale[..., None] * rows.acc + (p * z) @ v
    return Rows(row_max, row_sum, acc)
    # END TASK 5.3


def finished(rows: Rows) -> tuple[Array, Array]:
    """Return out and lse of rows that have seen all their keys.

    Source: FlashAttention-2, Algorithm 1, lines 12 and 13.
    """
    # TASK 5.3: One division at the end, and L = m + log ℓ; divided, log and shift_of handle a masked row.
    return divided(rows.acc, rows.row_sum), shift_of(rows.row_max) + log(rows.row_sum)
    # END TASK 5.3


def merged(first: Rows, second: Rows) -> Rows:
    """Return what is known of the rows after the keys of two parts, each of which has its own maximum.

    Source: Dao et al., Flash-Decoding (2023); FlashAttention-2, Algorithm 1, lines 9 and 10.
    """
    # TASK 5.12: The new m is the larger one; ℓ and acc of each part shrink by e^(its own m - m_new).
    row_max = np.maximum(first.row_max, second.row_max)  # (…, rows)
    one, two = (np.exp(part.row_max - shift_of(row_max)) for part in (first, second))  # (…, rows)
    row_sum = one * first.row_sum + two * second.row_sum
    return Rows(row_max, row_sum, one[..., None] * first.acc + two[..., None] * second.acc)
    # END TASK 5.12


def page_places(table: Array, positions: Array, page_size: int) -> tuple[Array, Array]:
    """Return the page of each position, and its place in that page, (batch, count) each.

    Args:
        table: (batch, most pages), the pages of each sequence in the order of its positions.
        positions: (batch, count), positions in the sequences.
        page_size: Number of keys of a page.

    Source: Kwon et al., PagedAttention (2023), section 4.3.
    """
    # TASK 5.13: Find the page in the own row of the table; np.arange(len(table))[:, None] numbers the rows.
    pages = table[np.arange(len(table))[:, None], positions // page_size]
    return pages, positions % page_size
    # END TASK 5.13
