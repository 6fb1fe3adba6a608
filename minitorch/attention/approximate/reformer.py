"""Reformer: exact attention within chunks of positions that hash alike."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernels.common.arguments import whole
from kernels.common.geometry import ceil_div

from ...functions.indexing import inverted
from ...tensor import Tensor
from .chunks import Grouping, consecutive, grouped, grouping, swap, ungrouped_results
from .hashing import gaussian, hash_seed, nearest
from .rounds import merged
from .support import (
    Masked,
    check_operands,
    check_options,
    kept_keys,
    shared_constant,
    widened,
)

#: Maximum default number of buckets; each costs a product with every position.
MOST_BUCKETS = 128


def reformer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    key_mask: Any = None,
    chunk: int = 64,
    rounds: int = 2,
    buckets: int | None = None,
    seed: int | None = None,
) -> Tensor:
    """Sort positions by hash, and compute exact attention to a position's own and the preceding chunk.

    Keys are the queries, normalised: k_j = q_j / ‖q_j‖. In each round a random matrix R gives
    position i the bucket argmax([q_i R; -q_i R]). Positions are sorted by bucket and then by
    position, and cut into chunks of ``chunk``. A position attends to the positions of its chunk and
    of the chunk before, whatever their buckets, but to itself only if no other position is visible.
    The rounds are merged by their log-sum-exp, and a key that is visible in several rounds counts
    several times, as in the authors' code.

    Args:
        q: (…, heads, seq, head_dim).
        k: Must be q, because queries also serve as keys.
        v: (…, heads, seq, value_dim).
        attn_mask: Not supported: positions are regrouped.
        dropout_p: Probability of dropping an attention weight.
        is_causal: Position i attends only to positions j <= i.  Which of them it attends to also
            depends on the later ones, because all positions are sorted together.
        scale: Factor of the scores; 1 / sqrt(head_dim) when None.
        key_mask: (…, seq); False or 0 masks a key for other positions.
        chunk: Number of positions in a chunk; the last chunk of a sequence may be shorter.
        rounds: Number of hashes, each with its own R.
        buckets: Number of buckets, even; when None, the number of chunks, at most 128.
        seed: Seed of R; when None, drawn from the generator of ``manual_seed``.

    Returns:
        (…, heads, seq, value_dim).

    Raises:
        TypeError: If an operand is not a tensor, or the operands differ in dtype or backend.
        ValueError: If k is not q, a shape or number does not fit, or for an option that the method does not
            support.

    Source: Kitaev, Kaiser and Levskaya, Reformer (2020), section 2.
    """
    check_options("reformer", Masked(attn_mask, dropout_p, is_causal, scale))
    if k is not q:
        raise ValueError(
            "reformer attention shares queries and keys: pass the same tensor as q and k; linformer, "
            "linear, performer, local, smyrf and block_sparse take keys of their own"
        )
    check_operands("reformer", q, k, v)
    seq, head_dim = q.shape[-2:]
    chunk, rounds = min(whole("chunk", chunk, 1), seq), whole("rounds", rounds, 1)
    if buckets is None:
        buckets = min(2 * ceil_div(ceil_div(seq, chunk), 2), MOST_BUCKETS)
    if whole("buckets", buckets, 2) % 2:
        raise ValueError(
            f"buckets must be an even number, got {buckets}: they come in pairs, R and -R"
        )
    seed = hash_seed(seed)
    hashed = widened(q.detach())
    keys = (q / ((widened(q) * widened(q)).sum(-1) + 1e-30) ** 0.5).to(q.dtype)
    keep = kept_keys(key_mask, k)
    parts = []
    for number in range(rounds):
        rotation = gaussian((head_dim, buckets // 2), seed + number)
        both = shared_constant(q, np.concatenate([rotation, -rotation], axis=1))
        order = nearest(hashed @ both).view(*q.shape[:-1]).argsort()  # (…, heads, seq)
        parts.append(_one_round(q, keys, v, order, chunk, is_causal, dropout_p, scale, keep))
    return merged(parts)


def _one_round(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor, chunk: int, is_causal: bool, dropout_p: float,
    scale: float | None, keep: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out (…, heads, seq, value_dim) and lse (…, heads, seq) of attention within sorted chunks."""
    seq = q.shape[-2]
    places = inverted(order)
    own = grouping(order, places, consecutive(seq, chunk))
    seen = grouping(order, places, consecutive(seq, chunk, back=chunk))
    visible = _visible(q, own, seen, is_causal, keep)
    out, lse = grouped(q, own).flash_attention(
        grouped(k, seen),
        grouped(v, seen),
        attn_mask=visible.zeros(visible.shape).where(visible, -math.inf).to(q.dtype),
        dropout_p=dropout_p,
        scale=scale,
        return_lse=True,
    )
    return ungrouped_results(out, lse, own)


def _visible(
    q: Tensor, own: Grouping, seen: Grouping, is_causal: bool, keep: Tensor | None
) -> Tensor:
    """Return 1 where a query of a chunk sees a key, else 0: (…, heads, chunks, width_q, width_k)."""
    lead = q.shape[:-2]
    row, col = (
        widened(each.positions.to(widened(q).dtype)).view(*lead, *each.groups.places.shape, 1)
        for each in (own, seen)
    )
    col = swap(col)  # (…, chunks, 1, width_k)
    is_one = shared_constant(q, seen.groups.shown[:, None, :])  # (chunks, 1, width_k)
    others = ((col < row) if is_causal else (col != row)) * is_one
    if keep is not None:
        kept = keep + keep.zeros((*lead, q.shape[-2], 1))  # (…, heads, seq, 1)
        others = others * swap(grouped(kept, seen))
    sees_none = others.sum(-1) == 0.0
    return others + (col == row) * is_one * sees_none
