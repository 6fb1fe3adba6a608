"""The scores of attention in NumPy, with every option, for a whole call or one tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.common.geometry import same
from kernels.common.philox import COLUMNS, HALF, HALF_MASK, PLAIN, attention_threshold, keep_scale
from kernels.problem.operands import OF_KEYS, OF_ROWS, Operands
from kernels.problem.options import AXES
from kernels.problem.question import DropoutOrigin, Problem
from kernels.scores.mods import evaluate  # beyond module 5
from kernels.scores.program import Place, ScoreTarget, features_of, make_score_program
from kernels.scores.visibility import distance

from . import lines

Array = npt.NDArray[Any]


def _numpy_target(operands: Operands) -> ScoreTarget:
    """Return the NumPy target, whose places have arrays of rows and columns that broadcast."""
    dtype = operands.q.dtype

    def mask_at(place: Place, call: Problem) -> Array:
        return operands.mask[:, :, place.row, place.col][operands.mask_batch]

    def element(name: str) -> Any:
        array, once, axes = getattr(operands, name), np.zeros((1, 1), int), AXES[name]

        def read(place: Place, call: Problem) -> Array:
            return array[
                :, :, place.row if "q" in axes else once, place.col if "k" in axes else once
            ]

        return read

    return ScoreTarget(
        compile=same,
        one=dtype.type(1),
        tanh=np.tanh,
        score_function=(  # beyond module 5
            lambda f: (
                lambda score, place, _: evaluate(
                    f, dtype, score, *place[2:], table=operands.score_table
                )
            )
        ),
        mask_function=lambda f: lambda place, _: evaluate(f, bool, *place[2:]),  # beyond module 5
        element=element,
        distance=lambda place, call: distance(place.row, place.col, call.diagonal).astype(dtype),
        bias=mask_at,
        in_mask=mask_at,
        in_blocks=lambda place, call: call.block_mask.shows(place.head, place.row, place.col),
    )


class Scores:
    """The scores of one call, or of one of its packed sequences, from operands (batch, heads, seq, dim)."""

    def __init__(self, problem: Problem, operands: Operands, sequence: int = 0, order: int = 1):
        self.problem = problem
        self.operands = operands
        batch, heads = operands.q.shape[:2]
        flat = np.arange(batch * heads).reshape(batch, heads, 1, 1)
        # The flat order of (batch, heads) is the same in kernels, however they divide it.
        self.head = flat % problem.heads
        self.batch = flat // problem.heads + sequence
        target = _numpy_target(operands)._replace(order=order)
        self.program = make_score_program(features_of(problem), target)

    def tile(self, rows: slice, cols: slice) -> tuple[Array, Array, Array]:
        """Return scores (batch, heads, rows, cols), and their derivatives by scale · q · k, two orders.

        A masked score is minus infinity, and its derivatives are 0.
        """
        problem, operands, program = self.problem, self.operands, self.program
        row, col = np.arange(rows.start, rows.stop)[:, None], np.arange(cols.start, cols.stop)
        place = Place(None, None, self.batch, self.head, row, col)
        q, k = operands.q[..., rows, :], operands.k[..., cols, :]  # (…, rows, dim), (…, cols, dim)
        s = (q @ np.swapaxes(k, -1, -2)) * problem.scale  # (…, rows, cols)
        s, *derivatives = program.modified(s, place, problem)
        s = np.where(program.is_visible(place, problem), s, s.dtype.type(-np.inf))
        # The user's derivatives may be infinite at a masked score, whose gradient is 0.
        slope, bend = (np.where(s == -np.inf, s.dtype.type(0), x) for x in derivatives)
        return s, slope, bend

    def with_sink(self, out: Array, lse: Array, rest: Array) -> tuple[Array, Array, Array]:
        """Return out (…, rows, value_dim), lse and its rest (…, rows) with the sinks in their softmax."""
        if (extra := self.operands.extra_logits(lse.shape)) is None:
            return out, lse, rest
        own = np.exp(rest)  # (…, rows), the sum of e^(s - lse)
        keys = lines.Rows(lse, own, out * own[..., None])
        sink = lines.Rows(extra, np.ones_like(extra), np.zeros_like(out))
        rows = lines.merged(keys, sink)
        whole_out, whole = lines.finished(rows)
        is_none = extra == -np.inf
        return (
            np.where(is_none[..., None], out, whole_out),
            np.where(is_none, lse, whole),
            np.where(
                is_none, rest, lines.rest_of(whole, lines.shift_of(rows.row_max), rows.row_sum)
            ),
        )

    def kept(self, rows: slice, cols: slice) -> Any:
        """Return the dropout factors, 0 or ``keep_scale``; the number 1 without dropout."""
        problem = self.problem
        if not problem.dropout_p:
            return 1
        first = problem.origin or DropoutOrigin(problem.heads)
        batch_head = self.batch * first.heads + self.head + first.batch_head  # (batch, heads, 1, 1)
        row = np.arange(rows.start, rows.stop)[:, None] + first.row
        col = np.arange(cols.start, cols.stop) + first.col
        keep = kept(problem.seed, problem.dropout_p, batch_head, row, col)
        return keep * self.operands.q.dtype.type(keep_scale(problem.dropout_p))


def kept(seed: int, dropout_p: float, batch_head: Array, row: Array, col: Array) -> Array:
    """Return the dropout mask, True where a probability is kept, for index arrays that broadcast."""
    words_of: Any = PLAIN.attention_words  # of arrays as of numbers
    words = words_of(seed, batch_head, row, col // COLUMNS)
    shape = np.broadcast_shapes(batch_head.shape, row.shape, col.shape)
    number = np.broadcast_to(col % COLUMNS, shape)
    own = np.choose(number // 2, [np.broadcast_to(word, shape) for word in words])
    return (own >> HALF * (number % 2)) & HALF_MASK >= attention_threshold(dropout_p)


def packed_parts(
    problem: Problem, operands: Operands, order: int = 1
) -> Iterator[tuple[Scores, Operands]]:
    """Yield the scores and the operands of each packed sequence; of the whole call if none are packed."""
    sequences = problem.sequences
    if sequences is None:
        yield Scores(problem, operands, order=order), operands
        return
    for number in range(sequences.count):
        rows = slice(*sequences.cu_seqlens_q[number : number + 2])
        cols = slice(*sequences.cu_seqlens_k[number : number + 2])

        def part(name: str, array: Any, rows: slice = rows, cols: slice = cols) -> Any:
            if array is None or name in AXES:
                return array
            if name in OF_ROWS:
                return array[..., rows]
            return array[..., cols if name in OF_KEYS else rows, :]

        own = Operands(**{name: part(name, array) for name, array in operands._asdict().items()})
        yield Scores(problem, own, number, order), own
