"""Attention for one query, in five steps from a sum of exponentials to the loop of FlashAttention.

Each function computes out = Σ p_j v_j, (value_dim,), with p the softmax of s_j = scale · k_j·q, for a query
q, (head_dim,), keys k, (seq, head_dim), and values v, (seq, value_dim), which it reads row by row, or block
by block.  They differ in the number of passes, the stored intermediates, and the scores that overflow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def sum_of_exponentials(q: Array, k: Array, v: Array, scale: float) -> Array:
    """Add up e^s v and e^s in one pass, without storing anything; large scores overflow.

    e^s is infinite from s = 88.7 (float32) or 709.8 (float64) on, and infinity divided by infinity is NaN.
    """
    total, acc = q.dtype.type(0), np.zeros(v.shape[1], q.dtype)  # acc: (value_dim,)
    for j in range(len(k)):
        power = np.exp(_score(q, k[j], scale))
        total += power
        acc += power * v[j]
    return acc / total


def maximum_first(q: Array, k: Array, v: Array, scale: float) -> Array:
    """Subtract the largest score, found by an extra pass over the keys: k is read twice.

    The softmax of s - c is the same for any c, and with c = max s no exponential exceeds 1.

    Source: Milakov and Gimelshein (2018), Algorithm 2.
    """
    largest = q.dtype.type(-np.inf)
    for j in range(len(k)):
        largest = max(largest, _score(q, k[j], scale))
    total, acc = q.dtype.type(0), np.zeros(v.shape[1], q.dtype)  # acc: (value_dim,)
    for j in range(len(k)):
        power = np.exp(_score(q, k[j], scale) - largest)
        total += power
        acc += power * v[j]
    return acc / total


def scores_kept(q: Array, k: Array, v: Array, scale: float) -> Array:
    """Store the scores, one number per key, instead of reading the keys twice.

    Attention composed of tensor operations does this, and stores seq² numbers for seq queries.

    Source: FlashAttention, Algorithm 0.
    """
    scores = np.empty(len(k), q.dtype)  # (seq,)
    for j in range(len(k)):
        scores[j] = _score(q, k[j], scale)
    scores -= scores.max()
    np.exp(scores, out=scores)
    total, acc = scores.sum(), np.zeros(v.shape[1], q.dtype)  # acc: (value_dim,)
    for j in range(len(k)):
        acc += scores[j] * v[j]
    return acc / total


def running_maximum(q: Array, k: Array, v: Array, scale: float) -> Array:
    """Subtract the largest score so far, and rescale the sums when it grows, again in one pass.

    Source: Milakov and Gimelshein (2018), Algorithm 3, with the output beside the sum.
    """
    largest = q.dtype.type(-np.inf)
    total, acc = q.dtype.type(0), np.zeros(v.shape[1], q.dtype)  # acc: (value_dim,)
    for j in range(len(k)):
        score = _score(q, k[j], scale)
        # m_new = max(m, s);  l = e^(m - m_new) l + e^(s - m_new);  O = e^(m - m_new) O + e^(s - m_new) v
        new_largest = max(largest, score)
        rescale, power = np.exp(largest - new_largest), np.exp(score - new_largest)
        total = total * rescale + power
        acc *= rescale
        acc += power * v[j]
        largest = new_largest
    return acc / total


def by_blocks(q: Array, k: Array, v: Array, scale: float, block: int = 16) -> Array:
    """Process a block of keys at a time, with one product for its scores and one rescaling.

    With a tile of queries instead of one, this is the loop of the fused kernels, and ``block`` is their
    block_k.

    Source: FlashAttention-2, Algorithm 1, for one row of queries.
    """
    largest = q.dtype.type(-np.inf)
    total, acc = q.dtype.type(0), np.zeros(v.shape[1], q.dtype)  # acc: (value_dim,)
    for start in range(0, len(k), block):
        scores = k[start : start + block] @ q * q.dtype.type(scale)  # (block,)
        # m_new = max(m, rowmax S);  P = e^(S - m_new);  l = e^(m - m_new) l + rowsum P
        new_largest = max(largest, scores.max())
        rescale, powers = np.exp(largest - new_largest), np.exp(scores - new_largest)
        total = total * rescale + powers.sum()
        # O = diag(e^(m - m_new)) O + P V
        acc *= rescale
        acc += powers @ v[start : start + block]
        largest = new_largest
    return acc / total


def _score(q: Array, key: Array, scale: float) -> Any:
    """Return s = scale · k·q."""
    return key @ q * q.dtype.type(scale)


#: The steps by name.
STEPS: dict[str, Callable[..., Array]] = {
    "sum of exponentials": sum_of_exponentials,
    "maximum first": maximum_first,
    "scores kept": scores_kept,
    "running maximum": running_maximum,
    "blocks": by_blocks,
}
