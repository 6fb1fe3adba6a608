"""The gradient of the table that a ``score_mod`` reads, summed by the kernels of the backward pass.

Any element of the scores may read any element of the table, and atomic sums of floats depend on their
order.  Those of whole numbers do not.  The kernel by query rows therefore finds the largest term of each
element of the table, and the kernel by keys adds all of them as multiples of a small fraction of it.
Gradients are bitwise equal on every run, and take no memory of the size of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.cuda.attention.options.mods import score_function
from kernels.cuda.attention.options.score_functions import make_score_functions, table_type
from kernels.cuda.device.memory import fill
from kernels.cuda.runtime.arrays import empty_device, flattened
from kernels.cuda.runtime.kernel import (
    ALL_LANES,
    WARP,
    Kernel,
    array_type,
    device_function,
    scalar_type,
)
from kernels.cuda.runtime.sizes import launch_each
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.targets import cuda
from kernels.runtime.types import float64, int32, int64, types, void
from kernels.scores.program import Features

#: If the table is small, blocks add to several copies of the sums: the largest number of both.
MOST_SUMS, MOST_COPIES = 1 << 14, 64
#: Bits of a sum, without its sign and one for roundings that differ between the two kernels.
_BITS = 61


class TableSums(NamedTuple):
    """The memory in which the backward kernels sum the gradient of a ``score_table``.

    Attributes:
        table_tops: (elements,): magnitude of the largest term of each element; infinite if one is
            not finite.
        table_sums: (copies, elements, words) int64: sums of the terms over the top, in units of
            1 / ``table_unit``, and in float64 also of what these lose, in units of its square.
        table_unit: Power of two; as many tops as the call can add fit in a word.
    """

    table_tops: Any
    table_sums: Any
    table_unit: Any


@cache
def make_add_reads(features: Features, dtype: np.dtype[Any], by_keys: bool) -> Callable[..., None]:
    """Return ``add_reads(product, ds, place, extras)`` for an element of the scores.

    ``ds`` is the gradient of the score after the user's function; ``by_keys`` tells that it is added, and
    not only compared with the top.
    """
    last, dims, zero = table_type(features, dtype), features.score_table, dtype.type(0)
    reads = [score_function(one, dtype, last, True) for one in features.score_mod.reads(dims)]
    before = make_score_functions(Features(softcap=features.softcap), dtype, 0).program.modified
    act = _make_add(dtype) if by_keys else _make_raise(dtype)
    act_all = _in_turn(reads, _make_act_at(dims, zero, act))

    @device_function
    def add_reads(product, ds, place, extras):
        score, _, _ = before(product, place, extras)
        act_all(score, ds, place, extras)

    return add_reads


def _in_turn(reads: list[Any], act_at: Callable[..., None]) -> Callable[..., None]:
    """Return ``act_all(score, ds, place, extras)``, which acts for each element that a score reads."""
    if not reads:
        return device_function(lambda score, ds, place, extras: None)
    first, rest = reads[0], _in_turn(reads[1:], act_at)

    @device_function
    def act_all(score, ds, place, extras):
        weight, i, j, k = first(
            extras.score_numbers, score, place.batch, place.head, place.row, place.col, extras.table
        )
        act_at(ds, weight, i, j, k, extras)
        rest(score, ds, place, extras)

    return act_all


def _make_act_at(dims: int, zero: Any, act: Callable[..., None]) -> Callable[..., None]:
    """Return ``act_at(ds, weight, i, j, k, extras)``: act with a term of an element, and its flat index.

    Indices count from the end where they are negative, as those of reads.  The term is 0 where the index
    is out of bounds or the score is masked, for which the function may return anything.
    """

    @device_function
    def within(index, size):
        return index + size if index < 0 else index

    @device_function
    def act_at(ds, weight, i, j, k, extras):
        shape = extras.table.shape
        at = within(i, shape[0])
        if dims > 1:
            at = at * shape[1] + within(j, shape[1])
        if dims > 2:
            at = at * shape[2] + within(k, shape[2])
        is_inside = (at >= 0) & (at < extras.table_tops.shape[0])
        act(ds * weight if is_inside and ds != 0 else zero, at, extras)

    return act_at


@cache
def _make_raise(dtype: np.dtype[Any]) -> Callable[..., None]:
    """Return ``act(x, at, extras)``, which raises the top of an element."""
    most, inf = np.finfo(dtype).max, dtype.type(math.inf)

    @device_function
    def act(x, at, extras):
        size = abs(x)
        size = size if size <= most else inf  # and of NaN
        # Most terms are not larger than those before, and need no atomic operation.
        if size != 0 and size > extras.table_tops[at]:
            cuda.atomic.max(extras.table_tops, at, size)

    return act


@cache
def _make_add(dtype: np.dtype[Any]) -> Callable[..., None]:
    """Return ``act(x, at, extras)``, which adds to the sums of an element.

    If all lanes of a warp add to the same element, one adds for all.
    """
    two, half, zero, inf = map(dtype.type, (2, 0.5, 0, math.inf))
    words = _words(dtype)

    @device_function
    def act(x, at, extras):
        sums, unit, scaled = extras.table_sums, extras.table_unit, zero
        top = extras.table_tops[at] if x != 0 else zero
        if 0 < top < inf:
            # A term above 1 consists of rounding errors, which differ between the two kernels.
            scaled = min(max(x / top, -two), two) * unit
        if cuda.blockDim.x % WARP == 0:
            own = int32(at)
            if cuda.all_sync(ALL_LANES, own == cuda.shfl_sync(ALL_LANES, own, 0)):
                for n in range(5):
                    scaled += cuda.shfl_xor_sync(ALL_LANES, scaled, 1 << n)
                scaled = scaled if cuda.threadIdx.x % WARP == 0 else zero
        if scaled != 0:
            copy = (cuda.blockIdx.x + cuda.blockIdx.y) % sums.shape[0]
            whole = int64(
                scaled + math.copysign(half, scaled)
            )  # to the nearest: errors average out
            cuda.atomic.add(sums, (copy, at, 0), whole)
            if words > 1:
                cuda.atomic.add(sums, (copy, at, 1), int64((scaled - whole) * unit))

    return act


def _words(dtype: np.dtype[Any]) -> int:
    return dtype.itemsize // 4


@cache
def _finish_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel that fills the gradient of a table from its sums."""
    words, real, nan = _words(dtype), scalar_type(dtype), dtype.type(math.nan)

    def table_gradient(tops, sums, dtable, unit):
        """Fill the gradient of a table.

        Computes: dtable[n] = top · (Σ sums of the copies) / unit
        One thread does: one element
        Global traffic: tops and sums read once; dtable written once
        """
        n = cuda.grid(1)
        if n < tops.shape[0]:
            high = low = int64(0)
            for copy in range(sums.shape[0]):
                high += sums[copy, n, 0]
                if words > 1:
                    low += sums[copy, n, 1]
            total = (float64(high) + float64(low) / unit) / unit
            dtable[n] = real(total * tops[n]) if tops[n] < math.inf else nan

    flat = array_type(dtype, 1)
    return Kernel(table_gradient, void(flat, types.Array(int64, 3, "A"), flat, float64))


def learning(backward: Callable[..., None], own_tile: Callable[[Problem], Any]) -> Any:
    """Return the backward pass of a rung that also fills ``dtable`` if the operands have it.

    Such a pass is deterministic and takes the tile of the deterministic kernels.

    ``own_tile`` returns the tile of the pass for a problem.
    """

    def run(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
        dtable, dtype = operands.dtable, problem.acc_dtype
        if dtable is None or problem.score_mod is None:
            backward(problem, tile, operands)
            return
        taken = replace(problem, learns_table=True, deterministic=True)
        size, sites = dtable.size, len(problem.score_mod.reads(problem.score_table))
        count = max(math.prod(problem.scores_shape) * sites, 1)
        unit = 2.0 ** (_BITS - math.ceil(math.log2(count)) - 1)
        copies = max(1, min(MOST_COPIES, MOST_SUMS // max(size, 1)))
        sums = empty_device((copies, size, _words(dtype)), np.dtype(np.int64))
        memory = TableSums(empty_device((size,), dtype), sums, unit)
        for array in memory[:2]:
            fill(array, 0)
        backward(
            taken,
            tile if problem.deterministic else own_tile(taken),
            operands.having(dtable=memory),
        )
        launch_each(_finish_kernel(dtype), size, *memory[:2], flattened(dtable), unit)

    return run
