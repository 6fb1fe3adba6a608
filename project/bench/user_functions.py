"""Mask and score functions as users write them, for the kernels and for FlexAttention.

Each is written once, as a function that makes it of an array, and score functions also of the library that
has its sine: NumPy's array and ``math`` for the kernels, a tensor and PyTorch for FlexAttention.  Those of
:data:`HELD_OUT` are kept out of tuning: no change to the kernels may be chosen by their times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.peer_cases import Case

#: Names of the cases that no change is tuned for: two of masks and two of scores.
HELD_OUT = frozenset(
    ("tiles in threes", "buckets", "Gaussian of the distance", "bias by remainder")
)

Function = Callable[..., Any]


def dilated(table: Any) -> Function:
    return lambda batch, head, row, col: ((row - col) % 4 == 0) & (col <= row)


def prefix(table: Any) -> Function:
    return lambda batch, head, row, col: (col <= row) | (col < 1000)


def sliding_and_global(table: Any) -> Function:
    return lambda batch, head, row, col: (abs(row - col) < 700) | (col < 40)


def causal_documents(table: Any) -> Function:
    return lambda batch, head, row, col: (table[row] == table[col]) & (col <= row)


def block_diagonal(table: Any) -> Function:
    return lambda batch, head, row, col: row // 384 == col // 384


def local_and_strided(table: Any) -> Function:
    return lambda batch, head, row, col: (col <= row) & ((row - col < 128) | (col % 128 >= 120))


def tiles_in_threes(table: Any) -> Function:
    return lambda batch, head, row, col: ((row // 192 + col // 320) % 3 != 1) & (col <= row + 64)


def buckets(table: Any) -> Function:
    return lambda batch, head, row, col: (table[row] == table[col]) | (row == col)


def sine(lib: Any, table: Any) -> Function:
    return lambda score, batch, head, row, col: score + lib.sin(0.01 * (row - col))


def learnt_distance(lib: Any, table: Any) -> Function:
    return lambda score, batch, head, row, col: score + table[abs(row - col) // 64]


def logarithm(lib: Any, table: Any) -> Function:
    return lambda score, batch, head, row, col: score - 0.3 * lib.log(1.0 + abs(row - col))


def cap(lib: Any, table: Any) -> Function:
    return lambda score, batch, head, row, col: 15.0 * lib.tanh(score / 15.0)


def slope_of_cap(lib: Any, table: Any) -> Function:
    return lambda score, batch, head, row, col: 1.0 - lib.tanh(score / 15.0) ** 2


def temperature(lib: Any, table: Any) -> Function:
    return lambda score, batch, head, row, col: score * (1.0 + 0.05 * head)


def slope_of_temperature(lib: Any, table: Any) -> Function:
    return lambda score, batch, head, row, col: 1.0 + 0.05 * head


def gaussian(lib: Any, table: Any) -> Function:
    return lambda score, batch, head, row, col: score - (0.003 * (row - col)) ** 2


def by_remainder(lib: Any, table: Any) -> Function:
    return lambda score, batch, head, row, col: score + table[(row + 3 * col) % 61]


def one(lib: Any, table: Any) -> Function:
    return lambda score, batch, head, row, col: 1.0


def user_cases(heads: int, length: int) -> dict[str, Case]:
    """Return the cases of all functions, by name.

    Args:
        heads: Of q, k and v.
        length: Of queries and keys.
    """
    rng, rows, cols = np.random.default_rng(3), np.arange(length)[:, None], np.arange(length)
    documents = np.sort(rng.integers(0, 12, length)).astype(np.int32)
    drawn = rng.integers(0, 16, length).astype(np.int32)
    learnt = rng.standard_normal(max(length // 64 + 1, 61)).astype(np.float32)

    def of_mask(name: str, make: Function, table: Any = None) -> Case:
        mask = np.broadcast_to(make(table)(0, 0, rows, cols), (length, length))
        return Case(
            name, heads, length, {"mask_mod": make(table)}, {"attn_mask": mask},
            seen=lambda: mask, table=table, part=float(mask.mean()),
            visible=lambda row, col, tensor: make(tensor)(0, 0, row, col),
        )  # fmt: skip

    def of_score(
        name: str, make: Function, slope: Function = one, table: Any = None, textbook: Any = None
    ) -> Case:
        if textbook is None:  # the function adds something
            textbook = {"attn_mask": make(np, table)(np.zeros((1, 1)), 0, 0, rows, cols)}
        return Case(
            name, heads, length, {"score_mod": (make(math, table), slope(math, table))}, textbook,
            score=lambda torch, s, head, row, col, tensor: make(torch, tensor)(s, 0, head, row, col),
            table=table, foreign="has no functions of users",
        )  # fmt: skip

    found = (
        of_mask("dilated causal", dilated),
        of_mask("prefix", prefix),
        of_mask("sliding and global", sliding_and_global),
        of_mask("causal documents", causal_documents, documents),
        of_mask("block diagonal", block_diagonal),
        of_mask("local and strided", local_and_strided),
        of_mask("tiles in threes", tiles_in_threes),
        of_mask("buckets", buckets, drawn),
        of_score("sine of the distance", sine),
        of_score("learnt bias of the distance", learnt_distance, table=learnt),
        of_score("logarithm of the distance", logarithm),
        of_score("cap", cap, slope_of_cap, textbook={"softcap": 15.0}),
        of_score("temperature by head", temperature, slope_of_temperature, textbook={}),
        of_score("Gaussian of the distance", gaussian),
        of_score("bias by remainder", by_remainder, table=learnt[:61]),
    )
    return {case.name: case for case in found}
