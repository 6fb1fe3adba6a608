"""Calls whose scores are so large that float32 has lost their fractions, and exact all the same.

Queries are zeros or signs times a power of two, and keys are small integers: a score is the same number in
every dtype and in whatever order its terms are added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from .strategies import Case

#: Queries are multiplied by this; fp16 still has it.
LARGE = 2.0**12
_DIM, _SCALE = 16, 0.25


def _twice(score: float, batch: int, head: int, row: int, col: int) -> float:
    return score * 2.0


def _two(score: float, batch: int, head: int, row: int, col: int) -> float:
    return 2.0


#: Options of calls with large queries and keys; a rung need not have them all.
OPTIONS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "large queries": lambda n, keys: {},
    "a negative scale": lambda n, keys: {"scale": -_SCALE},
    "causal": lambda n, keys: {"is_causal": True, "causal_offset": keys - n},
    "a window": lambda n, keys: {"window_size": (keys // 3, 2)},
    "a boolean mask": lambda n, keys: {"attn_mask": np.arange(n * keys).reshape(n, keys) % 3 > 0},
    "dropout": lambda n, keys: {"dropout_p": 0.25, "seed": 3},
    "softcap": lambda n, keys: {"softcap": LARGE / 4},
    "alibi": lambda n, keys: {"alibi_slopes": np.array([LARGE / 4, -LARGE])},
    "a score_mod": lambda n, keys: {"score_mod": (_twice, _two)},
    "sinks": lambda n, keys: {"sink": np.array([4 * LARGE, -LARGE])},
}


def _mask(n: int, keys: int, rows: Any, cols: Any, value: float) -> Any:
    mask = np.zeros((n, keys))
    mask[rows, cols] = value
    return mask


#: Floating masks, for rows that are zeros: rows, columns, and a value in units of the largest number.
MASKS = {
    "a row of the least number": (2, np.s_[:], -1.0),
    "a row of half the largest number": (2, np.s_[:], 0.5),
    "all of the least number": (np.s_[:], np.s_[:], -1.0),
    "columns of the least number": (np.s_[:], np.s_[::2], -1.0),
    "columns of a large number": (np.s_[:], np.s_[::4], 2.0**-94),
    "a row of a large negative number": (2, np.s_[:], -(2.0**-98)),
}
NAMES = [*OPTIONS, *MASKS, "rows of both kinds", "large sinks"]


def large_case(name: str, dtype: Any, n: int, keys: int, dim: int = _DIM) -> Case:
    """Return a case of ``NAMES`` with two heads."""
    rng = np.random.default_rng(0)
    signs = np.sign(rng.standard_normal((1, 2, n, dim)))
    k = rng.integers(-3, 4, (1, 2, keys, dim))
    v, dout = rng.standard_normal((1, 2, keys, dim)), rng.standard_normal((1, 2, n, dim))
    q = signs * LARGE
    options: dict[str, Any] = {"scale": _SCALE}
    if name in OPTIONS:
        options |= OPTIONS[name](n, keys)
    elif name in MASKS:
        q = signs * 0
        rows, cols, factor = MASKS[name]
        most = float(ml_dtypes.finfo(dtype).max)
        options["attn_mask"] = _mask(n, keys, rows, cols, most * factor)
    elif name == "rows of both kinds":
        q[..., ::3, :] /= LARGE
    else:
        q, options["sink"] = signs, np.array([2.0**40, -(2.0**40)])
    return Case(q, k, v, dout, options, (4, 4)).in_dtype(dtype)
