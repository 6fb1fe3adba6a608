"""Flash-Decoding on CUDA: for few query rows, keys are divided among blocks and merged by L."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kernels.common.geometry import PLAIN
from kernels.cuda.attention.options.score_functions import Extras, extras_type, make_row_end
from kernels.cuda.attention.options.visits import Visit
from kernels.cuda.device.half import as_bits, form
from kernels.cuda.device.one_source import merge_weight, shift_of
from kernels.cuda.runtime.arrays import empty_device
from kernels.cuda.runtime.kernel import Kernel, array_type, device_function, scalar_type
from kernels.cuda.runtime.sizes import SIZES
from kernels.problem.question import Problem
from kernels.runtime.targets import cuda
from kernels.runtime.types import int64, uint32, uint64, void
from kernels.scores.program import Features

#: Elements of a row that a thread merges.
COLUMNS = 4
#: Key tiles of a part where a row must not depend on the call that it is in.
FIXED_PIECE = 16


def parts_of(problem: Problem, layout: Any, grid: tuple[int, int]) -> int:
    """Return the number of blocks among which the keys of one query tile are divided.

    It depends only on shapes, so that results are bitwise equal on all devices.  ``grid`` are the number of
    query tiles, and batch · heads.
    """
    if problem.sequences is not None:  # their tiles are many, and of unequal length
        return 1
    rows, block_k = min(problem.seq_q, layout.block_q), layout.block_k
    first = PLAIN.first_tile(problem.seq_q - rows, block_k, problem.seq_k, problem.lower)
    stop = PLAIN.tiles_stop(problem.seq_q, block_k, problem.seq_k, problem.upper)
    tiles = stop - first
    if problem.cache is not None:  # beyond module 5
        tiles = tiles_in_cache(problem, rows, block_k)
        if problem.features.is_fixed:  # and even one part is merged, which rounds
            return max(parts_in_cache(problem, tiles, block_k, FIXED_PIECE), 2)
    wanted = SIZES.split_blocks // (grid[0] * grid[1])
    return max(min(wanted, tiles // SIZES.split_tiles), 1)


def tiles_in_cache(problem: Problem, rows: int, block_k: int) -> int:  # beyond module 5
    """Return the maximum number of key tiles that adjacent rows of a call on a cache visit."""
    seen = problem.upper - problem.lower + rows  # by a window, which may begin within a tile
    return min(PLAIN.ceil_div(seen, block_k) + 1, PLAIN.ceil_div(problem.seq_k, block_k))


def parts_in_cache(  # beyond module 5
    problem: Problem, tiles: int, block_k: int, piece: int
) -> int:
    """Return the maximum number of parts, of ``piece`` key tiles each, that adjacent tiles are in."""
    every = PLAIN.ceil_div(PLAIN.ceil_div(problem.seq_k, block_k), piece)
    return min(PLAIN.ceil_div(tiles - 1, piece) + 1, every)


@cache
def make_own_part(features: Features) -> Callable[..., Visit]:
    """Return ``own_part(visit, part, parts)``: the part of a ``Visit`` that is a block's.

    The ``parts`` blocks share the entries equally, or if the features ask for it at fixed keys.
    """
    is_fixed = features.is_fixed

    @device_function
    def own_part(visit, part, parts):
        entry, stop, bounds = visit
        if is_fixed:  # beyond module 5
            start = (entry // FIXED_PIECE + part) * FIXED_PIECE
            return Visit(max(entry, start), min(stop, start + FIXED_PIECE), bounds)
        count = max(stop - entry, 0)
        return Visit(entry + count * part // parts, entry + count * (part + 1) // parts, bounds)

    return own_part


@cache
def merge_kernel(
    dtype: np.dtype[Any], stored: np.dtype[Any], features: Features, at_once: int
) -> Kernel:
    """Return the kernel that merges the parts, for the dtype of the parts and that of out.

    A thread reads ``at_once`` parts at a time: more wait together, and fewer threads have the registers.
    """
    narrow, bits = form(stored).narrow, form(stored).stored
    real, zero, minus_inf = scalar_type(dtype), dtype.type(0), dtype.type(-math.inf)

    end_row = make_row_end(features, dtype)

    def flash2_merge(part_out, part_lse, part_rest, out, lse, lse_rest, extras):
        """Merge the results of parts of the keys.

        Computes: L = log Σ exp(L_part), O = Σ exp(L_part - L) O_part
        Source: FlashAttention-2, section 3.1; the split of keys as in Flash-Decoding
        Grid: ceil(batch * heads * seq_q * ceil(value_dim / 4) / threads)
        Block: any number of threads
        One thread does: four elements of out, a fourth of a row apart, and L with the first of a row
        Shared: none
        Registers: acc (4,), one sum and one weight
        Global traffic: reads part_out and part_rest once, part_lse twice per element; writes out,
            lse and lse_rest once
        Needs: nothing
        """
        # Unsigned: a division of 64 bits takes several times as long, and a sign would be tested.
        heads, seq_q, dim = uint32(out.shape[1]), uint32(out.shape[2]), uint32(out.shape[3])
        i, batch, stop = uint32(cuda.grid(1)), int64(out.shape[0]), int64(part_lse.shape[0])
        step = uint32(uint32(dim + uint32(COLUMNS - 1)) // uint32(COLUMNS))
        line, first = uint32(i // step), uint32(i % step)
        row, line = uint64(line % seq_q), uint32(line // seq_q)
        b, h = int64(uint32(line // heads)), uint64(line % heads)
        if b < batch:
            acc = cuda.local.array(COLUMNS, real)  # (COLUMNS,): O
            for m in range(COLUMNS):
                acc[m] = zero
            last, largest, total = stop - batch + b, minus_inf, zero
            # Several parts at a time, whose loads are under way together.
            for n in range(b, stop, at_once * batch):
                for u in range(at_once):
                    largest = max(largest, part_lse[uint64(min(n + u * batch, last)), h, row])
            shift = real(shift_of(largest))
            for n in range(b, stop, at_once * batch):
                for u in range(at_once):
                    at, is_there = uint64(min(n + u * batch, last)), n + u * batch < stop
                    weight = merge_weight(part_lse[at, h, row], part_rest[at, h, row], shift)
                    total += weight if is_there else zero
                    for m in range(COLUMNS):
                        c = uint64(min(first + uint32(m) * step, dim - uint32(1)))
                        weighted = weight * part_out[at, h, row, c]
                        acc[m] += weighted if is_there else zero
            inverse, row_lse, row_rest = end_row(total, shift, b, h, extras)
            at = uint64(b)
            for m in range(COLUMNS):
                c = first + uint32(m) * step
                if c < dim:
                    out[at, h, row, uint64(c)] = narrow(acc[m] * inverse)
            if first == 0:
                lse[at, h, row], lse_rest[at, h, row] = row_lse, row_rest

    four, three = array_type(dtype, 4), array_type(dtype, 3)
    written = array_type(bits, 4), three, three
    signature = void(four, three, three, *written, extras_type(features, dtype))
    return Kernel(flash2_merge, signature, SIZES.flat_threads)


def empty_parts(parts: int, out: Any, dtype: np.dtype[Any]) -> tuple[Any, Any, Any]:
    """Return memory for out, lse and lse_rest of parts of the keys.

    Batch ``n`` of part ``p`` is at p · batch + n.
    """
    batch, *rows, value_dim = out.shape
    shape = parts * batch, *rows
    return tuple(empty_device(own, dtype) for own in ((*shape, value_dim), shape, shape))


def merge_parts(
    of_parts: tuple[Any, Any, Any],
    results: tuple[Any, Any, Any],
    features: Features,
    extras: Extras,
) -> None:
    """Fill the results of a kernel, out, lse and lse_rest, from those of :func:`empty_parts`.

    out has a 16-bit dtype or that of the parts.
    """
    threads, (out, *rows) = SIZES.flat_threads, results
    *lead, dim = out.shape
    blocks = PLAIN.ceil_div(math.prod(lead) * PLAIN.ceil_div(dim, COLUMNS), threads)
    dtypes, is_few = (of_parts[0].dtype, out.dtype), len(of_parts[0]) <= 4 * len(out)
    kernel = merge_kernel(*map(np.dtype, dtypes), features, 2 if is_few else 4)
    kernel[blocks, threads](*of_parts, as_bits(out), *rows, extras)
