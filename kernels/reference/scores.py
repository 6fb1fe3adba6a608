"""The scores of attention in NumPy: what every option makes of them, for the whole or for one tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.common.philox import COLUMNS, HALF, HALF_MASK, PLAIN, attention_threshold, keep_scale
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.scores.mods import evaluate
from kernels.scores.visibility import is_visible

Array = npt.NDArray[Any]


class Scores:
    """The scores of one call, or of one of its packed sequences.

    Args:
        problem: The checked call.
        operands: As kernels take them, (batch, heads, seq, dim).
        sequence: Number of the packed sequence that the operands are.
    """

    def __init__(self, problem: Problem, operands: Operands, sequence: int = 0):
        self.problem = problem
        self.operands = operands
        batch, heads = operands.q.shape[:2]
        flat = np.arange(batch * heads).reshape(batch, heads, 1, 1)
        # Kernels count (batch, heads) in the same order, whatever they call a batch.
        self.head = flat % problem.heads
        self.batch = flat // problem.heads + sequence

    def tile(self, rows: slice, cols: slice) -> tuple[Array, Array | float, Array]:
        """Return scores (batch, heads, rows, cols), their derivative by scale · q · k, and what is seen.

        The last tells a score that is hidden from one that overflows to minus infinity.
        """
        problem, operands = self.problem, self.operands
        row, col = np.arange(rows.start, rows.stop)[:, None], np.arange(cols.start, cols.stop)
        q, k = operands.q[..., rows, :], operands.k[..., cols, :]  # (…, rows, dim), (…, cols, dim)
        s = (q @ np.swapaxes(k, -1, -2)) * problem.scale  # (…, rows, cols)
        derivative: Array | float = 1.0
        place = self.batch, self.head, row, col
        if problem.softcap:
            bent = np.tanh(s / problem.softcap)
            s, derivative = problem.softcap * bent, 1.0 - bent * bent
        if problem.score_mod is not None:
            function, slope = problem.score_mod
            if slope is not None:
                derivative = derivative * evaluate(slope, s.dtype, s, *place)
            s = evaluate(function, s.dtype, s, *place)
        if problem.slopes:
            distance = np.abs(row + problem.diagonal - col).astype(s.dtype)  # (rows, cols)
            s = s - operands.slopes * distance
        seen = is_visible(row, col, problem.lower, problem.upper)  # (rows, cols)
        if problem.mask:
            mask = operands.mask[..., rows, cols][operands.mask_batch]  # (batch, heads, rows, cols)
            if problem.mask == "float":
                s = s + mask
                seen = seen & (mask != -np.inf)
            else:
                seen = seen & mask
        if problem.block_mask is not None:
            sizes = rows.start, rows.stop - rows.start, cols.start, cols.stop - cols.start
            blocks = problem.block_mask.visible(*sizes)  # (1 or heads, rows, cols)
            seen = seen & blocks[self.head[..., 0, 0] % len(blocks)]
        if problem.mask_mod is not None:
            seen = seen & evaluate(problem.mask_mod, bool, *place)
        seen = np.broadcast_to(seen, s.shape)
        return np.where(seen, s, s.dtype.type(-np.inf)), derivative, seen

    def kept(self, rows: slice, cols: slice) -> Array | None:
        """Return what dropout multiplies probabilities by, 0 or ``keep_scale``; None without dropout."""
        problem = self.problem
        if not problem.dropout_p:
            return None
        batch_head = self.batch * problem.heads + self.head  # (batch, heads, 1, 1)
        row, col = np.arange(rows.start, rows.stop)[:, None], np.arange(cols.start, cols.stop)
        keep = kept(problem.seed, problem.dropout_p, batch_head, row, col)
        return keep * self.operands.q.dtype.type(keep_scale(problem.dropout_p))


def kept(seed: int, dropout_p: float, batch_head: Array, row: Array, col: Array) -> Array:
    """Return which probabilities dropout keeps, for arrays of places that broadcast."""
    words_of: Any = PLAIN.attention_words  # of arrays as of numbers
    words = words_of(seed, batch_head, row, col // COLUMNS)
    shape = np.broadcast_shapes(batch_head.shape, row.shape, col.shape)
    number = np.broadcast_to(col % COLUMNS, shape)
    own = np.choose(number // 2, [np.broadcast_to(word, shape) for word in words])
    return (own >> HALF * (number % 2)) & HALF_MASK >= attention_threshold(dropout_p)


def packed_parts(problem: Problem, operands: Operands) -> Iterator[tuple[Scores, Operands]]:
    """Yield the scores and the operands of each packed sequence; of the whole call if none are packed."""
    sequences = problem.sequences
    if sequences is None:
        yield Scores(problem, operands), operands
        return
    for number in range(sequences.count):
        rows = slice(*sequences.cu_seqlens_q[number : number + 2])
        cols = slice(*sequences.cu_seqlens_k[number : number + 2])

        def part(name: str, array: Any, rows: slice = rows, cols: slice = cols) -> Any:
            if array is None or name == "slopes":
                return array
            if name in ("lse", "dlse"):
                return array[..., rows]
            return array[..., cols if name in ("k", "v", "dk", "dv") else rows, :]

        names = ("q", "k", "v", "slopes", "out", "lse", "dout", "dlse", "dq", "dk", "dv")
        own = Operands(**{name: part(name, getattr(operands, name)) for name in names})
        yield Scores(problem, own, number), own
