"""The calls that kernels and peers are compared on: each option, and functions of users.

A mask or score function is written once, as a function that makes it of an array, and score functions also
of the library that has its sine: NumPy's array and ``math`` for the kernels, a tensor and PyTorch for
FlexAttention.  Those of :data:`HELD_OUT` are kept out of tuning: no change of the kernels may be chosen by
their times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernels import BlockMask
from kernels.runtime.dtypes import rounded
from kernels.traffic.formulas import HeadShape

DROPOUT, SOFTCAP, KEPT, DOCUMENTS = 0.1, 30.0, 0.9, 8
#: Of the window, to each side; of a block of the butterfly.
WINDOW, BLOCK = 256, 64
HELD_OUT = frozenset(
    ("tiles in threes", "buckets", "Gaussian of the distance", "bias by remainder")
)


@dataclass(frozen=True)
class Case:
    """One call of self-attention."""

    name: str  # in the table
    heads: int  # of q, k and v
    length: int  # of queries and keys
    #: Of ``kernels.flash_attention_forward``; masks are NumPy arrays.
    options: dict[str, Any] = field(default_factory=dict)
    #: Options that say the same to the textbook, where they are faster there; None: as above.
    textbook: dict[str, Any] | None = None
    sums: Any = None  # where packed documents begin and end, or None
    is_causal: bool = False  # a peer has an option for it, too
    dropout_p: float = 0.0  # a peer has an option for it, too
    #: (row, col, table) of arrays or tensors to booleans; None: all.
    visible: Callable[..., Any] | None = None
    #: (library, score, head, row, col, table) to a score; None: as it is.
    score: Callable[..., Any] | None = None
    table: Any = None  # array that these two read, or None
    part: float = 1.0  # the share of the scores that are not masked
    foreign: str | None = None  # why PyTorch's scaled_dot_product_attention cannot do it, or None

    def mask(self) -> Any:
        """Return the attn_mask of peers, (length, length) or (heads, length, length), or None."""
        heads, cols = np.arange(self.heads)[:, None, None], np.arange(self.length)
        if self.visible is not None and not self.is_causal:
            return np.broadcast_to(
                self.visible(cols[:, None], cols, self.table), 2 * (self.length,)
            )
        if self.score is not None and self.foreign is None:
            return self.score(np, 0.0, heads, cols[:, None], cols, self.table).astype(np.float32)
        return None

    def options_of(self, dtype: Any) -> dict[str, Any]:
        """Return the options for operands of a dtype: a floating mask has it, too."""
        mask = self.options.get("attn_mask")
        if mask is None or mask.dtype == bool:
            return dict(self.options)
        return {**self.options, "attn_mask": rounded(mask, dtype)}

    def reference_options(self, dtype: Any) -> dict[str, Any]:
        """Return those of the first head alone in float64, the mask rounded; documents are a mask."""
        options = self.options_of(dtype) if self.textbook is None else dict(self.textbook)
        if "alibi_slopes" in options:
            options["alibi_slopes"] = options["alibi_slopes"][:1]
        mask = options.get("attn_mask")
        if mask is not None and mask.dtype != bool:
            options["attn_mask"] = mask.astype(np.float64)
        if self.sums is not None:
            options["attn_mask"] = self.mask()
        return options


def cases(
    heads: int, length: int, window: int = WINDOW, block: int = BLOCK, document: int | None = None
) -> dict[str, Case]:
    """Return a case for each option, by name."""
    rng = np.random.default_rng(2)

    def pairs(lower: int, upper: int) -> float:
        return HeadShape(length, length, 1, 1, lower, upper).pairs / length**2

    mask = rng.random((length, length)) < KEPT
    bias = rng.standard_normal((length, length), dtype=np.float32)
    slopes = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
    cuts = np.sort(rng.choice(np.arange(1, length), min(DOCUMENTS, length) - 1, replace=False))
    if document is not None:
        cuts = np.arange(document, length, document)
    sums = np.array([0, *cuts, length], np.int64)
    owner = np.repeat(np.arange(len(sums) - 1), np.diff(sums))
    window = min(window, length)
    sparse = BlockMask.butterfly(length, length, block)
    by_head = slopes.astype(np.float32)

    def in_butterfly(row: Any, col: Any, table: Any) -> Any:
        bits = (row // block) ^ (col // block)
        return (bits & (bits - 1)) == 0

    def with_distance(score: Any, batch: int, head: int, row: int, col: int) -> Any:
        return score - by_head[head] * abs(row - col)

    def steepness(score: Any, batch: int, head: int, row: int, col: int) -> Any:
        return 1.0

    alibi: dict[str, Any] = {
        "score": lambda torch, s, head, row, col, table: s - table[head] * abs(row - col),
        "table": by_head,
    }
    given: dict[str, dict[str, Any]] = {
        "dense": {},
        "causal": {
            "options": {"is_causal": True}, "is_causal": True, "part": pairs(-length, 0),
            "visible": lambda row, col, table: row >= col,
        },
        "boolean mask": {
            "options": {"attn_mask": mask}, "table": mask,
            "visible": lambda row, col, table: table[row, col],
        },
        "float mask": {
            "options": {"attn_mask": bias}, "table": bias,
            "score": lambda torch, s, head, row, col, table: s + table[row, col],
        },
        "dropout": {"options": {"dropout_p": DROPOUT, "seed": 1}, "dropout_p": DROPOUT},
        "window": {
            "options": {"window_size": (window, window)}, "part": pairs(-window, window),
            "visible": lambda row, col, table: (row - col <= window) & (col - row <= window),
        },
        "softcap": {
            "options": {"softcap": SOFTCAP}, "foreign": "has no softcap",
            "score": lambda torch, s, *_: SOFTCAP * torch.tanh(s / SOFTCAP),
        },
        "ALiBi": {"options": {"alibi_slopes": slopes}, **alibi},
        "ALiBi as score_mod": {
            "options": {"score_mod": (with_distance, steepness)},
            "textbook": {"alibi_slopes": slopes}, **alibi,
        },
        "documents": {
            "sums": sums, "table": owner,
            "part": float((np.diff(sums) ** 2).sum()) / length**2,
            "visible": lambda row, col, table: table[row] == table[col],
        },
        "butterfly": {
            "options": {"block_mask": sparse}, "visible": in_butterfly, "part": sparse.density,
        },
    }  # fmt: skip
    return {name: Case(name, heads, length, **own) for name, own in given.items()}


#: Mask functions, each made of an array; (batch, head, row, col) to a boolean.
MASKS: dict[str, Callable[[Any], Any]] = {
    "dilated causal": lambda t: lambda b, h, row, col: ((row - col) % 4 == 0) & (col <= row),
    "prefix": lambda t: lambda b, h, row, col: (col <= row) | (col < 1000),
    "sliding and global": lambda t: lambda b, h, row, col: (abs(row - col) < 700) | (col < 40),
    "causal documents": lambda t: lambda b, h, row, col: (t[row] == t[col]) & (col <= row),
    "block diagonal": lambda t: lambda b, h, row, col: row // 384 == col // 384,
    "local and strided": lambda t: (
        lambda b, h, row, col: (col <= row) & ((row - col < 128) | (col % 128 >= 120))
    ),
    "tiles in threes": lambda t: (
        lambda b, h, row, col: ((row // 192 + col // 320) % 3 != 1) & (col <= row + 64)
    ),
    "buckets": lambda t: lambda b, h, row, col: (t[row] == t[col]) | (row == col),
}


def _one(lib: Any, table: Any) -> Any:
    return lambda s, b, h, row, col: 1.0


#: Score functions and their derivatives, each made of a library and an array.
SCORES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sine of the distance": (
        lambda lib, t: lambda s, b, h, row, col: s + lib.sin(0.01 * (row - col)), _one,
    ),
    "learnt bias of the distance": (
        lambda lib, t: lambda s, b, h, row, col: s + t[abs(row - col) // 64], _one,
    ),
    "logarithm of the distance": (
        lambda lib, t: lambda s, b, h, row, col: s - 0.3 * lib.log(1.0 + abs(row - col)), _one,
    ),
    "cap": (
        lambda lib, t: lambda s, b, h, row, col: 15.0 * lib.tanh(s / 15.0),
        lambda lib, t: lambda s, b, h, row, col: 1.0 - lib.tanh(s / 15.0) ** 2,
    ),
    "temperature by head": (
        lambda lib, t: lambda s, b, h, row, col: s * (1.0 + 0.05 * h),
        lambda lib, t: lambda s, b, h, row, col: 1.0 + 0.05 * h,
    ),
    "Gaussian of the distance": (
        lambda lib, t: lambda s, b, h, row, col: s - (0.003 * (row - col)) ** 2, _one,
    ),
    "bias by remainder": (
        lambda lib, t: lambda s, b, h, row, col: s + t[(row + 3 * col) % 61], _one,
    ),
}  # fmt: skip


def user_cases(heads: int, length: int) -> dict[str, Case]:
    """Return a case for each function of a user, by name."""
    rng, rows, cols = np.random.default_rng(3), np.arange(length)[:, None], np.arange(length)
    documents = np.sort(rng.integers(0, 12, length)).astype(np.int32)
    buckets = rng.integers(0, 16, length).astype(np.int32)
    learnt = rng.standard_normal(max(length // 64 + 1, 61)).astype(np.float32)
    tables = {
        "causal documents": documents, "buckets": buckets, "learnt bias of the distance": learnt,
        "bias by remainder": learnt[:61],
    }  # fmt: skip
    textbooks: dict[str, Any] = {"cap": {"softcap": 15.0}, "temperature by head": {}}

    def of_mask(name: str, make: Any) -> Case:
        table = tables.get(name)
        mask = np.broadcast_to(make(table)(0, 0, rows, cols), (length, length))
        return Case(
            name, heads, length, {"mask_mod": make(table)}, {"attn_mask": mask},
            table=table, part=float(mask.mean()),
            visible=lambda row, col, tensor: make(tensor)(0, 0, row, col),
        )  # fmt: skip

    def of_score(name: str, make: Any, slope: Any) -> Case:
        table, textbook = tables.get(name), textbooks.get(name)
        if textbook is None:  # the function adds something
            textbook = {"attn_mask": make(np, table)(np.zeros((1, 1)), 0, 0, rows, cols)}
        return Case(
            name, heads, length, {"score_mod": (make(math, table), slope(math, table))}, textbook,
            score=lambda torch, s, head, row, col, tensor: make(torch, tensor)(s, 0, head, row, col),
            table=table, foreign="has no functions of users",
        )  # fmt: skip

    found = {name: of_mask(name, make) for name, make in MASKS.items()}
    return found | {name: of_score(name, *pair) for name, pair in SCORES.items()}
