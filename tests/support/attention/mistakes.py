"""What common mistakes in attention compute: a wrong result that equals one of these is explained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def _shrink(growth: Array) -> Array:
    return np.exp(-growth)


def _finish(acc: Array, total: Array, m: Array) -> tuple[Array, Array]:
    return acc / total[..., None], m + np.log(total)


#: Sentence → what becomes of the sum and of the accumulator when m grows, and the end of a row.
ONLINE: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "rows after a tile with a larger maximum are too large: is the accumulator rescaled?": (
        _shrink, np.ones_like, _finish
    ),
    "rows after a tile with a larger maximum are too small: is the sum rescaled?": (
        np.ones_like, _shrink, _finish
    ),
    "neither the sum nor the accumulator shrinks when a tile has a larger maximum": (
        np.ones_like, np.ones_like, _finish
    ),
    "the factor e^(m - m_new) has the wrong sign: what was summed grows where it should shrink": (
        np.exp, np.exp, _finish
    ),
    "out is not divided by the sum at the end": (
        _shrink, _shrink, lambda acc, total, m: (acc, m + np.log(total))
    ),
    "lse lacks m: it is m + log of the sum": (
        _shrink, _shrink, lambda acc, total, m: (acc / total[..., None], np.log(total))
    ),
    "lse lacks the logarithm: it is m + log of the sum": (
        _shrink, _shrink, lambda acc, total, m: (acc / total[..., None], m + total)
    ),
    "lse is l, the sum: L is m + log l": (
        _shrink, _shrink, lambda acc, total, m: (acc / total[..., None], total)
    ),
}  # fmt: skip


#: Sentence → weights of the old sum and of the tile's, in the new sum; of the old output and of the
#: tile's, in the new output; and its divisor. Given a = e^(m - m_new), b = e^(m~ - m_new), the old and
#: the new sum.
FLASH1: dict[str, Callable[..., tuple[Any, ...]]] = {
    "l_new lacks the factor e^(m~ - m_new) of the tile's sum": (
        lambda a, b, old, new: (a, 1, a * old, b, new)
    ),
    "l_new lacks the factor e^(m - m_new) of the old sum": (
        lambda a, b, old, new: (1, b, a * old, b, new)
    ),
    "O is divided by l already: what is added up so far is l O": (
        lambda a, b, old, new: (a, b, a, b, new)
    ),
    "O lacks the factor e^(m~ - m_new) of the tile's product": (
        lambda a, b, old, new: (a, b, a * old, 1, new)
    ),
    "O lacks the factor e^(m - m_new) of the old output": (
        lambda a, b, old, new: (a, b, old, b, new)
    ),
    "O is not divided by l_new": lambda a, b, old, new: (a, b, a * old, b, 1),
}  # fmt: skip


def _flash1_results(s: Array, v: Array, block_k: int) -> Iterator[tuple[str, Array]]:
    """Yield what each mistake in line 11 or 12 of Algorithm 1 computes for out."""
    for sentence, weights in FLASH1.items():
        m, total = np.full(s.shape[:-1], -np.inf), np.zeros(s.shape[:-1])
        out = np.zeros((*s.shape[:-1], v.shape[-1]))
        for col in range(0, s.shape[-1], block_k):
            tile = s[..., col : col + block_k]
            m_tile = tile.max(-1)
            p, new = np.exp(tile - m_tile[..., None]), np.maximum(m, m_tile)
            a, b = np.exp(m - new), np.exp(m_tile - new)
            old_sum, tile_sum, *_ = weights(a, b, total, 1)
            after = old_sum * total + tile_sum * p.sum(-1)
            _, _, *parts = weights(a, b, total, after)
            of_old, of_tile, divisor = (np.broadcast_to(x, total.shape)[..., None] for x in parts)
            out = (of_old * out + of_tile * (p @ v[..., col : col + block_k, :])) / divisor
            m, total = new, after
        yield sentence, out


def online_mistake(results: dict[str, Array], arrays: tuple[Array, ...], block_k: int) -> str:
    """Return the sentence of the mistake that gives these results without masks, or nothing.

    Args:
        results: out and lse.
        arrays: q, k, v, and more.
        block_k: Keys per tile.
    """
    q, k, v = arrays[:3]
    s = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    for sentence, (of_sum, of_acc, finish) in ONLINE.items():
        m, total, acc = s[..., 0], np.zeros(s.shape[:-1]), np.zeros((*s.shape[:-1], v.shape[-1]))
        with np.errstate(all="ignore"):
            for col in range(0, s.shape[-1], block_k):
                tile = s[..., col : col + block_k]
                new = np.maximum(m, tile.max(-1))
                p = np.exp(tile - new[..., None])
                total = total * of_sum(new - m) + p.sum(-1)
                acc = acc * of_acc(new - m)[..., None] + p @ v[..., col : col + block_k, :]
                m = new
            out, lse = finish(acc, total, m)
        if np.allclose(results["out"], out) and np.allclose(results["lse"], lse):
            return f"{sentence}\n"
    m = s.max(-1)
    log_sum = np.log(np.exp(s - m[..., None]).sum(-1))
    right = np.exp(s - (m + log_sum)[..., None]) @ v
    if np.allclose(results["out"], right):
        is_base_2 = np.allclose(results["lse"], m / np.log(2.0) + log_sum)
        return "m is to base 2: multiply it by ln 2 for L\n" if is_base_2 else ""
    with np.errstate(all="ignore"):
        for sentence, out in (
            *_flash1_results(s, v, block_k),
            *_softmax_results(s, v, q.shape[-1], block_k),
        ):
            if np.allclose(results["out"], out):
                return f"{sentence}\n"
    if (results["out"] * right > 0.0).all():
        return "out is right but for factors: is it divided once by l, the sum of the whole row?\n"
    return ""


def _softmax_results(s: Array, v: Array, dim: int, block_k: int) -> Iterator[tuple[str, Array]]:
    """Yield what mistakes before the sums compute for out."""
    factors = {
        "the scale τ is missing in S": np.sqrt(dim),
        "the scale τ is there twice in S": 1.0 / np.sqrt(dim),
        "exp in place of exp2: log2 e is in the scores already": 1.0 / np.log(2.0),
    }
    for sentence, factor in factors.items():
        p = np.exp(s * factor - (s * factor).max(-1, keepdims=True))
        yield sentence, p @ v / p.sum(-1, keepdims=True)
    for lanes in (2, 4, 8, 16) if s.shape[-1] <= block_k else ():
        p = np.empty_like(s)
        for lane in range(min(lanes, s.shape[-1])):
            own = s[..., lane::lanes]
            p[..., lane::lanes] = np.exp(own - own.max(-1, keepdims=True))
        sentence = "the maximum is that of a thread's own columns: take row_max_of over the row"
        yield sentence, p @ v / p.sum(-1, keepdims=True)


def statistics_mistake(x: Array, block: int, total: float) -> str:
    """Return the sentence of the mistake that gives this sum of exponentials, or nothing."""

    def summed(x: Array, weight: Callable[[float], float]) -> float:
        m, total = -np.inf, 0.0
        for start in range(0, len(x), block):
            part = x[start : start + block]
            new = max(m, part.max())
            if new > -np.inf:
                total, m = total * weight(m - new) + np.exp(part - new).sum(), new
        return total

    whole = len(x) // block * block
    with np.errstate(all="ignore"):
        mistakes = {
            "where the maximum grows, the sum so far must shrink by e^(m - m_new), and it does not": (
                summed(x, lambda change: 1.0)
            ),
            "the factor e^(m - m_new) has the wrong sign: the sum so far must shrink": (
                summed(x, lambda change: np.exp(-change))
            ),
            "the last block, which is short, is left out": summed(x[:whole], np.exp),
        }
    if np.isnan(total) and x[0] == -np.inf:
        return "-inf - (-inf) is NaN: skip a block while there is no maximum yet\n"
    for sentence, wrong in mistakes.items():
        if np.allclose(total, wrong, equal_nan=True):
            return f"{sentence}\n"
    return ""


def gradient_mistake(
    name: str, got: Array, arrays: tuple[Array, ...], right: tuple[Array, Array], dlse: Any,
    factor: Any = 1.0, tile: tuple[int, int] | None = None,
) -> str:  # fmt: skip
    """Return the sentence of the mistake that gives a gradient without masks, or nothing.

    Args:
        name: "dq", "dk" or "dv".
        got: The gradient.
        arrays: q, k, v and dout.
        right: out and lse.
        dlse: The gradient of lse, or 0.
        factor: Of dropout, or 1.
        tile: (block_q, block_k), or None without tiles.
    """
    (q, k, v, dout), (out, lse) = arrays, right
    scale = 1.0 / np.sqrt(q.shape[-1])
    s = scale * q @ np.swapaxes(k, -1, -2)  # (…, seq_q, seq_k)
    p, m = np.exp(s - lse[..., None]), s.max(-1, keepdims=True)
    total = np.exp(lse[..., None] - m)  # l
    undropped = dout @ np.swapaxes(v, -1, -2)
    dp = undropped * factor
    d = (dout * out).sum(-1)[..., None]
    more = np.broadcast_to(dlse, lse.shape)[..., None]

    def of(ds: Array) -> Array:
        return scale * (ds @ k if name == "dq" else np.swapaxes(ds, -1, -2) @ q)

    mistakes = {
        "D is left out: dS = P ∘ (dP - D)": of(p * (dp + more)),
        "dlse is left out: D = rowsum(dO ∘ O) - dlse": of(p * (dp - d)),
        "dlse has the wrong sign: D = rowsum(dO ∘ O) - dlse": of(p * (dp - d - more)),
        "D has the wrong sign: dS = P ∘ (dP - D)": of(p * (dp + d - more)),
        "P is left out: dS = P ∘ (dP - D)": of(dp - d + more),
        "the factor τ is missing in dQ and dK": of(p * (dp - d + more)) / scale,
        "the factor τ is there twice, in dS and in dQ or dK": of(p * (dp - d + more)) * scale,
    }
    if np.ndim(factor):
        mistakes |= {
            "Z is missing in dP: dP = (dO Vᵀ) ∘ Z": of(p * (undropped - d + more)),
            "dS takes P ∘ Z in place of P: dS = P ∘ (dP - D)": of(p * factor * (dp - d + more)),
        }
    right_ds = p * (dp - d + more)
    right_dv = np.swapaxes(p * factor, -1, -2) @ dout
    if name == "dk":
        mistakes["dK and dV are exchanged"] = right_dv
    if name == "dv":
        mistakes = (
            {"dV takes P in place of P ∘ Z": np.swapaxes(p, -1, -2) @ dout}
            if np.ndim(factor)
            else {}
        )
    for sentence, shift in {
        "P lacks L: P = exp(S - L)": 0.0,
        "P takes l in place of L: P = exp(S - L)": total,
        "P takes m in place of L: P = exp(S - L)": m,
    }.items():
        other = np.exp(s - shift)
        mistakes[sentence] = (
            np.swapaxes(other * factor, -1, -2) @ dout
            if name == "dv"
            else of(other * (dp - d + more))
        )
    if tile:
        mistakes |= _of_tiles(name, right_ds, p * factor, (q, k, dout), scale, tile)
    for sentence, wrong in mistakes.items():
        if wrong.shape == got.shape and np.allclose(got, wrong, rtol=1e-5, atol=1e-7):
            return f"{sentence}\n"
    return ""


def _of_tiles(
    name: str, ds: Array, p: Array, arrays: tuple[Array, ...], scale: float, tile: tuple[int, int]
) -> dict[str, Array]:
    """Return what mistakes with tiles compute."""
    (q, k, dout), (rows, cols) = arrays, ds.shape[-2:]
    if name == "dq":
        last = (cols - 1) // tile[1] * tile[1]
        return {
            "dQ is overwritten by each tile of keys: add to it": scale
            * ds[..., last:]
            @ k[..., last:, :]
        }
    # Rows that the last tile lacks still hold what the tile before it has left there.
    twice = np.ones(rows)
    if rows > tile[0] and rows % tile[0]:
        start = rows // tile[0] * tile[0]
        twice[start - tile[0] + rows % tile[0] : start] = 2.0
    left, right, factor = (p, dout, 1.0) if name == "dv" else (ds, q, scale)
    more = factor * np.swapaxes(left * twice[:, None], -1, -2) @ right
    return {"rows beyond the end of the last tile are added up: loop over rows, not block_q": more}
