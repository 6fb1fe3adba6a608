"""The formula of each approximate attention in float64 NumPy, with all pairs of positions written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitorch.attention.approximate.performer import orthogonal_features

Array = np.ndarray[Any, Any]


def weighted(weights: Array, v: Array) -> Array:
    """Return Σ_j w_ij v_j / Σ_j w_ij; 0 where a row has no weight."""
    total = weights.sum(-1, keepdims=True)
    return weights @ v / np.where(total == 0.0, 1.0, total)


def exponentials(q: Array, k: Array, scale: float | None) -> Array:
    """Return e^(scale q·k), shifted by the row's maximum."""
    scores = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return np.exp(scores - scores.max(-1, keepdims=True))


def columns(key_mask: Array | None, k: Array) -> Array:
    """Return 1 for a visible key, 0 for a hidden one: (…, 1, 1, seq_k)."""
    if key_mask is None:
        return np.ones((*k.shape[:-3], 1, 1, k.shape[-2]))
    return 1.0 * key_mask[..., None, None, :]


def exact(q: Array, k: Array, v: Array, *, visible: Any = 1.0, scale: float | None = None) -> Array:
    """Return softmax attention to visible keys."""
    return weighted(exponentials(q, k, scale) * visible, v)


def linformer(
    q: Array, k: Array, v: Array, *, project_k: Array, project_v: Array,
    key_mask: Array | None = None, scale: float | None = None,
) -> Array:  # fmt: skip
    keep, seq = columns(key_mask, k).swapaxes(-1, -2), k.shape[-2]
    k, v = project_k[..., :seq] @ (k * keep), project_v[..., :seq] @ (v * keep)
    return exact(q, k, v, scale=scale)


def by_features(
    phi_q: Array, phi_k: Array, v: Array, key_mask: Array | None, is_causal: bool, eps: float
) -> Array:
    weights = phi_q @ phi_k.swapaxes(-1, -2) * columns(key_mask, phi_k)
    weights = np.tril(weights) if is_causal else weights
    total = weights.sum(-1, keepdims=True) + eps
    return weights @ v / np.where(total == 0.0, 1.0, total)


def linear(
    q: Array, k: Array, v: Array, *, key_mask: Array | None = None, is_causal: bool = False,
    chunk: int = 0,
) -> Array:  # fmt: skip
    q, k = (np.where(x > 0, x + 1.0, np.exp(np.minimum(x, 0.0))) for x in (q, k))
    return by_features(q, k, v, key_mask, is_causal, 1e-6)


def performer(
    q: Array, k: Array, v: Array, *, num_features: int, seed: int = 0, scale: float | None = None,
    key_mask: Array | None = None, is_causal: bool = False, chunk: int = 0,
) -> Array:  # fmt: skip
    head_dim = q.shape[-1]
    w = orthogonal_features(num_features, head_dim, seed)
    root = (head_dim**-0.5 if scale is None else scale) ** 0.5

    def phi(x: Array) -> Array:
        x = x * root
        return np.exp(x @ w.T - 0.5 * (x * x).sum(-1, keepdims=True)) / np.sqrt(num_features)

    return by_features(phi(q), phi(k), v, key_mask, is_causal, 0.0)


def local(
    q: Array, k: Array, v: Array, *, window: int, is_causal: bool = False,
    scale: float | None = None, key_mask: Array | None = None,
) -> Array:  # fmt: skip
    row, col = np.arange(q.shape[-2])[:, None], np.arange(k.shape[-2])[None, :]
    visible = (np.abs(row - col) <= window) & ((col <= row) | (not is_causal))
    return exact(q, k, v, visible=visible * columns(key_mask, k), scale=scale)


def block_sparse(
    q: Array, k: Array, v: Array, *, block_size: int, pattern: str = "butterfly",
    is_causal: bool = False, scale: float | None = None, key_mask: Array | None = None,
) -> Array:  # fmt: skip
    row, col = np.arange(q.shape[-2])[:, None], np.arange(k.shape[-2])[None, :]
    counts = [-(-x.shape[-2] // block_size) for x in (q, k)]
    own, other = row // block_size, col // block_size
    if pattern == "butterfly":
        own, other = (x * min(counts) // n for x, n in zip((own, other), counts, strict=True))
        shown = np.vectorize(lambda a, b: bin(a ^ b).count("1") <= 1)(own, other)
    elif pattern == "dilated":
        head = np.arange(q.shape[-3])[:, None, None]
        shown = (other - own - head) % min(4, counts[1]) == 0
    else:
        step = max(int(counts[1] ** 0.5), 1)
        shown = (np.abs(own - other) <= step) | ((own - other) % step == 0)
    visible = shown & ((col <= row) | (not is_causal))
    return exact(q, k, v, visible=visible * columns(key_mask, k), scale=scale)


def by_rounds(
    q: Array, k: Array, v: Array, scale: float | None, rounds: list[Callable[..., Array]]
) -> Array:
    """Attend to each key as often as a round shows it; a round returns what one head shows."""
    shown = np.zeros((*q.shape[:-1], k.shape[-2]))
    for place in np.ndindex(*q.shape[:-2]):
        for one in rounds:
            shown[place] += one(place, q[place], k[place])
    return weighted(exponentials(q, k, scale) * shown, v)


def reformer(
    q: Array, k: Array, v: Array, *, chunk: int, rounds: int, buckets: int, seed: int,
    is_causal: bool = False, scale: float | None = None, key_mask: Array | None = None,
) -> Array:  # fmt: skip
    seq, head_dim = q.shape[-2:]
    chunk = min(chunk, seq)
    keep = np.broadcast_to(columns(key_mask, q), (*q.shape[:-3], 1, 1, seq))

    def one_round(number: int) -> Callable[..., Array]:
        rotation = np.random.default_rng(seed + number).standard_normal((head_dim, buckets // 2))

        def shown(place: Any, q: Array, k: Array) -> Array:
            rotated = q @ rotation
            bucket = np.concatenate([rotated, -rotated], -1).argmax(-1)
            order = sorted(range(seq), key=lambda i: (bucket[i], i))
            own = np.empty(seq, int)
            own[order] = np.arange(seq) // chunk
            row, col = np.arange(seq)[:, None], np.arange(seq)[None, :]
            near = (own[:, None] - own[None, :] >= 0) & (own[:, None] - own[None, :] <= 1)
            others = near & (row != col) & ((col < row) | (not is_causal))
            others = others & (keep[place[:-1]][0, 0] > 0)
            return 1.0 * (others | (np.eye(seq, dtype=bool) & ~others.any(-1, keepdims=True)))

        return shown

    keys = q / np.linalg.norm(q, axis=-1, keepdims=True)
    return by_rounds(q, keys, v, scale, [one_round(n) for n in range(rounds)])


def smyrf(
    q: Array, k: Array, v: Array, *, cluster: int, rounds: int, seed: int,
    scale: float | None = None, key_mask: Array | None = None,
) -> Array:  # fmt: skip
    seq_q, seq_k, head_dim = q.shape[-2], k.shape[-2], q.shape[-1]
    count = min(-(-seq_q // cluster), seq_k)
    keep = np.broadcast_to(columns(key_mask, k), (*k.shape[:-3], 1, 1, seq_k))

    def numbered(hashes: Array) -> Array:
        number = np.empty(len(hashes), int)
        bounds = np.arange(1, count) * len(hashes) // count
        number[np.argsort(hashes, kind="stable")] = np.searchsorted(
            bounds, np.arange(len(hashes)), side="right"
        )
        return number

    def one_round(number: int) -> Callable[..., Array]:
        a = np.random.default_rng(seed + number).standard_normal(head_dim + 2)

        def shown(place: Any, q: Array, k: Array) -> Array:
            nq, nk = (q * q).sum(-1), (k * k).sum(-1)
            rest_q, rest_k = (np.sqrt(nq.max() + nk.max() - n)[:, None] for n in (nq, nk))
            f = np.concatenate([q, np.zeros((seq_q, 1)), rest_q], -1)
            g = np.concatenate([k, rest_k, np.zeros((seq_k, 1))], -1)
            same = numbered(f @ a)[:, None] == numbered(g @ a)[None, :]
            return same * keep[place[:-1]][0, 0]

        return shown

    return by_rounds(q, k, v, scale, [one_round(n) for n in range(rounds)])
