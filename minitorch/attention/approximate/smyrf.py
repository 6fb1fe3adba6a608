"""Smyrf: exact attention within balanced clusters of queries and keys with large products."""

from __future__ import annotations

import math
from typing import Any

from kernels.common.arguments import whole
from kernels.common.geometry import ceil_div

from ...functions.indexing import inverted
from ...nn import max as max_over
from ...tensor import Tensor
from .chunks import Grouping, Groups, balanced, grouped, grouping, swap, ungrouped_results
from .hashing import gaussian, hash_seed
from .rounds import merged
from .support import Masked, check_operands, check_options, kept_keys, shared_constant, widened


def smyrf(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    key_mask: Any = None,
    cluster: int = 64,
    rounds: int = 2,
    seed: int | None = None,
) -> Tensor:
    """Compute exact attention within balanced clusters of queries and keys with similar hashes.

    F(q) = [q; 0; √(M² - ‖q‖²)] and G(k) = [k; √(M² - ‖k‖²); 0], with M² = max ‖q‖² + max ‖k‖², turn large
    products into small distances: ‖F(q) - G(k)‖² = 2 M² - 2 q·k.  In each round, a random vector w orders
    queries by w·F(q) and keys by w·G(k).  Both orders are cut into the same number of clusters, whose
    sizes differ by 1 at most, and queries attend to the keys of the cluster with the same number.  The
    paper's hash ⌊(w·x + b) / r⌋ grows with w·x, so that sorting needs neither b nor r.  The rounds are
    merged by their log-sum-exp, and a key that is visible in several rounds counts several times.

    Args:
        q: (…, heads, seq_q, head_dim).
        k: (…, heads, seq_k, head_dim).
        v: (…, heads, seq_k, value_dim).
        attn_mask: Not supported: positions are regrouped.
        dropout_p: Probability of dropping an attention weight.
        is_causal: Not supported: the keys of a cluster may all come later than a query.
        scale: Factor of the scores; 1 / sqrt(head_dim) when None.
        key_mask: (…, seq_k); False or 0 masks a key.
        cluster: Maximum number of queries in a cluster.
        rounds: Number of hashes, each with its own direction.
        seed: Seed of the directions; when None, drawn from the generator of ``manual_seed``.

    Returns:
        (…, heads, seq_q, value_dim); 0 for a query whose clusters contain only masked keys.

    Raises:
        TypeError: If an operand is not a tensor, or the operands differ in dtype or backend.
        ValueError: If a shape or number does not fit, or for an option that the method does not support.

    Source: Daras, Kitaev, Odena and Dimakis, SMYRF: efficient attention using asymmetric clustering (2020),
    section 3 and algorithm 1.
    """
    check_options("smyrf", Masked(attn_mask, dropout_p, is_causal, scale))
    check_operands("smyrf", q, k, v)
    seq_q, head_dim, seq_k = q.shape[-2], q.shape[-1], k.shape[-2]
    count = min(ceil_div(seq_q, whole("cluster", cluster, 1)), seq_k)
    rounds, seed = whole("rounds", rounds, 1), hash_seed(seed)
    of_q, of_k = balanced(seq_q, count), balanced(seq_k, count)
    rest_q, rest_k = _lacking(widened(q.detach()), widened(k.detach()))  # each (…, seq, 1)
    keep = kept_keys(key_mask, k)
    parts = []
    for number in range(rounds):
        direction = gaussian((head_dim + 2,), seed + number)
        a = shared_constant(q, direction[:head_dim, None])  # (head_dim, 1)
        hash_q = widened(q.detach()) @ a + rest_q * float(direction[-1])
        hash_k = widened(k.detach()) @ a + rest_k * float(direction[-2])
        q_at, k_at = _grouping(hash_q, of_q), _grouping(hash_k, of_k)
        out, lse = grouped(q, q_at).flash_attention(
            grouped(k, k_at),
            grouped(v, k_at),
            attn_mask=_mask(k, k_at, keep),
            dropout_p=dropout_p,
            scale=scale,
            return_lse=True,
        )
        parts.append(ungrouped_results(out, lse, q_at))
    return merged(parts)


def _lacking(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return √(M² - ‖q‖²) and √(M² - ‖k‖²), (…, seq, 1) each: they bring every vector to the length M."""
    squares_q, squares_k = (q * q).sum(-1), (k * k).sum(-1)
    largest = max_over(squares_q, -2) + max_over(squares_k, -2)  # (…, 1, 1)
    return (largest - squares_q) ** 0.5, (largest - squares_k) ** 0.5


def _grouping(hashes: Tensor, groups: Groups) -> Grouping:
    """Return the groups of positions in the order of their hashes, (…, seq, 1)."""
    order = hashes.view(*hashes.shape[:-1]).argsort()
    return grouping(order, inverted(order), groups)


def _mask(k: Tensor, k_at: Grouping, keep: Tensor | None) -> Any:
    """Return the mask of padding in clusters and of masked keys, or None."""
    shown = k_at.groups.shown
    if keep is None:
        return None if shown.all() else shown[:, None, :]
    kept = keep + keep.zeros((*k.shape[:-1], 1))  # (…, heads, seq_k, 1)
    visible = swap(grouped(kept, k_at)) * shared_constant(k, shown[:, None, :])
    hidden = visible.zeros(visible.shape).where(visible, -math.inf)  # (…, clusters, 1, width_k)
    return hidden.to(k.dtype)
