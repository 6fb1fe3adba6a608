"""Flash-Decoding on CUDA: for few query rows, keys are divided among blocks and merged by L."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import void

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
from kernels.scores.program import Features


def parts_of(problem: Problem, layout: Any, grid: tuple[int, int]) -> int:
    """Return the number of blocks among which the keys of one query tile are divided.

    It depends only on shapes, so that results are bitwise equal on all devices.  ``grid`` are the number of
    query tiles, and batch · heads.
    """
    if problem.sequences is not None:  # their tiles are many, and of unequal length
        return 1
    row_stop = min(problem.seq_q, layout.block_q)
    first = PLAIN.first_tile(problem.seq_q - row_stop, layout.block_k, problem.seq_k, problem.lower)
    stop = PLAIN.tiles_stop(problem.seq_q, layout.block_k, problem.seq_k, problem.upper)
    wanted = SIZES.split_blocks // (grid[0] * grid[1])
    return max(min(wanted, (stop - first) // SIZES.split_tiles), 1)


@device_function
def own_part(visit, part, parts):
    """Return the part of a ``Visit`` that is a block's, if ``parts`` blocks share the entries."""
    entry, stop, bounds = visit
    count = max(stop - entry, 0)
    return Visit(entry + count * part // parts, entry + count * (part + 1) // parts, bounds)


@cache
def merge_kernel(dtype: np.dtype[Any], stored: np.dtype[Any], features: Features) -> Kernel:
    """Return the kernel that merges the parts, for the dtype of the parts and that of out."""
    narrow, bits = form(stored).narrow, form(stored).stored
    real, zero, minus_inf = scalar_type(dtype), dtype.type(0), dtype.type(-math.inf)

    end_row = make_row_end(features, dtype)

    def flash2_merge(part_out, part_lse, part_rest, out, lse, lse_rest, extras):
        """Merge the results of parts of the keys.

        Computes: L = log Σ exp(L_part), O = Σ exp(L_part - L) O_part
        Source: FlashAttention-2, section 3.1; the split of keys as in Flash-Decoding
        Grid: ceil(batch * heads * seq_q * value_dim / threads)
        Block: any number of threads
        One thread does: one element of out, and L where the element is the first of its row
        Shared: none
        Registers: one sum and one weight
        Global traffic: reads part_out and part_rest once, part_lse twice per element; writes out,
            lse and lse_rest once
        Needs: nothing
        """
        batch, heads, seq_q, dim = out.shape[0], out.shape[1], out.shape[2], out.shape[3]
        i = cuda.grid(1)
        if i < batch * heads * seq_q * dim:
            line, c = i // dim, i % dim
            b, h, row = line // seq_q // heads, line // seq_q % heads, line % seq_q
            largest = minus_inf
            for n in range(b, part_lse.shape[0], batch):
                largest = max(largest, part_lse[n, h, row])
            shift = real(shift_of(largest))
            acc = total = zero
            for n in range(b, part_lse.shape[0], batch):
                weight = merge_weight(part_lse[n, h, row], part_rest[n, h, row], shift)
                total += weight
                acc += weight * part_out[n, h, row, c]
            inverse, row_lse, row_rest = end_row(total, shift, b, h, extras)
            out[b, h, row, c] = narrow(acc * inverse)
            if c == 0:
                lse[b, h, row], lse_rest[b, h, row] = row_lse, row_rest

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
    blocks = PLAIN.ceil_div(math.prod(out.shape), threads)
    kernel = merge_kernel(np.dtype(of_parts[0].dtype), np.dtype(out.dtype), features)
    kernel[blocks, threads](*of_parts, as_bits(out), *rows, extras)
