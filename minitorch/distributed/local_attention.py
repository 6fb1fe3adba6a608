"""Attention of some rows of a sequence to others, by one call of the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from kernels import Problem
from kernels.array_call import Make
from kernels.problem.operands import Operands
from kernels.problem.options import WITH_GRADIENT, Options
from kernels.problem.packed_problem import PackedMaker
from kernels.problem.question import DropoutOrigin, problem_of

from ..autodiff import Context
from ..functions.flash_attention import FlashAttention, attention_call
from ..tensor import Tensor
from ..tensor_data import TensorData

#: A log-sum-exp and what it loses by rounding, each (…, heads, rows); see ``Operands.lse_rest``.
Lse = tuple[Tensor, Tensor]


class Part(NamedTuple):
    """One call as a part of a larger attention.

    Attributes:
        options: The options of the call.
        make: Builds its problem.
    """

    options: Options
    make: Make


def part_of(
    options: Options,
    row: int = 0,
    col: int = 0,
    sums: tuple[int, ...] = (),
    heads: int = 0,
    batch_head: int = 0,
) -> Part:
    """Return a call for rows and columns that begin at given places of a larger attention.

    Args:
        options: Options of the whole attention.
        row: First query row.
        col: First key column.
        sums: Cumulative lengths of packed sequences, rows and columns alike, or ().
        heads: Number of query heads of the whole attention.
        batch_head: Flat index of the first (batch, head).
    """
    own: Options = {**options}
    if row != col and (options.get("is_causal") or options.get("window_size") is not None):
        own["causal_offset"] = row - col
    make: Make = PackedMaker(sums, sums) if sums else problem_of
    if options.get("dropout_p"):
        make = _Moved(make, DropoutOrigin(heads, batch_head, row, col))
    return Part(own, make)


class _Moved(NamedTuple):
    """Builds the problem of a part of a larger attention."""

    make: Make
    origin: DropoutOrigin

    @property
    def key(self) -> Any:
        """What a call is looked up by."""
        return getattr(self.make, "key", self.make), self.origin

    def __call__(self, q: Any, k: Any, v: Any, options: Options) -> Problem:
        return replace(self.make(q, k, v, options), origin=self.origin)


def view_of(a: Tensor, dim: int, places: range) -> Tensor:
    """View the elements at consecutive places along a dimension, without history.

    The view may have gaps.  It is an operand of attention, which accepts any strides; tensor operations
    would expect one piece of memory.
    """
    data = a._tensor
    shape = (*a.shape[:dim], len(places), *a.shape[dim + 1 :])
    first = places.start * data.strides[dim]
    last = first + sum((n - 1) * step for n, step in zip(shape, data.strides, strict=True))
    storage = a.f.memory.part(data._storage, first, last + 1)
    return a._new(TensorData.fresh(storage, shape, data.strides))


def rows_of(a: Tensor, rows: range) -> Tensor:
    """View some rows of (…, heads, seq, dim); see :func:`view_of`."""
    return view_of(a, a.dims - 2, rows)


def heads_first(a: Tensor) -> Tensor:
    """View (seq, …, heads, dim) as (…, heads, seq, dim)."""
    return a.permute(*range(1, a.dims - 1), 0, a.dims - 1)


def sequence_first(a: Tensor) -> Tensor:
    """View (…, heads, seq, dim) as (seq, …, heads, dim)."""
    return a.permute(a.dims - 2, *range(a.dims - 2), a.dims - 1)


def attend(q: Tensor, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Lse]:
    """Return out (…, heads, rows, value_dim), differentiable, and the log-sum-exp of the keys.

    Args:
        q: (…, heads, rows, head_dim).
        k: (…, key heads, keys, head_dim).
        v: (…, key heads, keys, value_dim).
        part: The call.
    """
    options: Options = {**part.options, "return_lse": True}
    out, *lse = FlashAttention.apply_several(
        q, k, v, *[None] * len(WITH_GRADIENT), options, part.make
    )
    return out, (lse[0], lse[1])


def gradients(
    q: Tensor, k: Tensor, v: Tensor, part: Part, dout: Tensor, out: Tensor, lse: Lse
) -> list[Tensor]:
    """Return the contributions of a call to dq, dk and dv, in the shapes of q, k and v.

    P = exp(S - L) with the L of all keys, and D = rowsum(dO ∘ O) with the O of all keys: the gradients of
    the whole attention are the sums of those of its parts.

    Args:
        q: As in :func:`attend`.
        k: As in :func:`attend`.
        v: As in :func:`attend`.
        part: The call.
        dout: Gradient of the whole out, (…, heads, rows, value_dim).
        out: The result of attention to all keys, (…, heads, rows, value_dim).
        lse: The log-sum-exp of all keys.
    """
    problem = attention_call(q, k, v, part.options, part.make).problem
    ctx = Context(needs_input_grad=(*[True] * 3, *[False] * len(WITH_GRADIENT)))
    saved = Operands(q, k, v, out=out, lse=lse[0], lse_rest=lse[1])
    ctx.save_for_backward(q.backend.target, problem, *saved)
    return [*FlashAttention.backward(ctx, dout)[:3]]  # type: ignore[list-item]
