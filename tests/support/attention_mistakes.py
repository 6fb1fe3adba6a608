"""What common mistakes in attention compute: a wrong result that equals one of these is explained."""

from __future__ import annotations

from collections.abc import Callable
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
}  # fmt: skip


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
    return ""


def gradient_mistake(
    name: str, got: Array, arrays: tuple[Array, ...], right: tuple[Array, Array], dlse: Any
) -> str:
    """Return the sentence of the mistake that gives a gradient without masks, or nothing.

    Args:
        name: "dq", "dk" or "dv".
        got: The gradient.
        arrays: q, k, v and dout.
        right: out and lse.
        dlse: The gradient of lse, or 0.
    """
    (q, k, v, dout), (out, lse) = arrays, right
    scale = 1.0 / np.sqrt(q.shape[-1])
    p = np.exp(scale * q @ np.swapaxes(k, -1, -2) - lse[..., None])  # (…, seq_q, seq_k)
    dp = dout @ np.swapaxes(v, -1, -2)
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
    for sentence, wrong in mistakes.items() if name != "dv" else ():
        if wrong.shape == got.shape and np.allclose(got, wrong, rtol=1e-5, atol=1e-7):
            return f"{sentence}\n"
    return ""
