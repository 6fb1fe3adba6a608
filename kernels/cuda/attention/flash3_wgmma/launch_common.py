"""Common code of the launches of Hopper's rungs: tensor maps and readable operands."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any

from kernels.cuda.attention.flash3_wgmma.layout import KernelWork, Shape, Widths, schedule_of
from kernels.cuda.attention.flash3_wgmma.packed_mask import (
    has_words,
    pack_patterns,
    pack_patterns_by_keys,
    packed_mask,
)
from kernels.cuda.attention.options.extras import make_extras
from kernels.cuda.attention.options.visits import tiles_of
from kernels.cuda.attention.register_tiles import widths_in
from kernels.cuda.attention.tensor_cores import is_bounded
from kernels.cuda.device.half import as_bits
from kernels.cuda.device.memory import row_major_copy
from kernels.cuda.device.per_device import counters, map_of, multiprocessors
from kernels.cuda.device.vector import are_vectors
from kernels.cuda.device.warpgroups import LINE, PANEL
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.dtypes import NAMES, is_half
from kernels.scores.program import Features
from kernels.sparsity.block_mask import BlockMask

#: Bytes of the L2 cache for the keys and values of the heads that are processed at the same time.
CACHE_BYTES = 24 << 20
#: Largest head_dim or value_dim; the threads of a warpgroup have no registers for more sums.
WIDEST = 256


def tensor_map(array: Any, rows: int, dtype: str, heads: int = 1) -> tuple[Any, int, int]:
    """Return the tensor map of an array, and 1 or 0 for whether its heads and its batches differ.

    The array is (batch, heads, seq, dim), where a stride of 0 repeats; a tile has ``rows`` rows of each of
    ``heads`` heads.
    """
    sizes, steps = list(array.shape), list(array.strides)
    for axis in (0, 1):
        if steps[axis] == 0 or sizes[axis] == 1:
            # A single shared head; the engine requires a stride nevertheless.
            sizes[axis], steps[axis] = 1, LINE
    if sizes[2] == 1:  # whatever its stride is
        steps[2] = LINE
    kind = tuple(sizes), tuple(steps), (1, heads, rows, PANEL), dtype
    return map_of(array, *kind), int(sizes[1] > 1), int(sizes[0] > 1)


def read_maps(
    tiles: Iterable[tuple[Any, int]], dtype: str
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Return the tensor maps of operands, and whether their heads and batches differ.

    ``tiles`` are the operands, each with the rows of its tiles.
    """
    found = [tensor_map(array, rows, dtype) for array, rows in tiles]
    return tuple(one[0] for one in found), tuple(chain.from_iterable(one[1:] for one in found))


def readable(*arrays: Any) -> tuple[Any, ...]:
    """Return arrays that the copy engine can read, copied if necessary."""
    if are_vectors(*arrays):
        return arrays
    return tuple(array if are_vectors(array) else row_major_copy(array) for array in arrays)


def work_of(
    problem: Problem, operands: Operands, layout: Any, differs: tuple[int, ...], bytes_a_head: int,
    by_keys: bool = False,
) -> tuple[int, KernelWork]:  # fmt: skip
    """Return the number of blocks of a launch by tiles, and the arguments that all kernels take.

    ``differs`` is of :func:`read_maps`, and ``bytes_a_head`` are the bytes of a head that the kernel reads
    repeatedly.
    """
    seq, block, cols = problem.seq_q, layout.block_q, layout.block_k
    if by_keys:
        seq, block, cols = problem.seq_k, layout.block_k, layout.block_q
    pack = pack_patterns_by_keys if by_keys else pack_patterns
    extras = make_extras(problem, operands, layout.block_q, layout.block_k, by_keys, pack)
    batch, heads = operands.q.shape[:2]
    tiles = tiles_of(seq, block, extras)
    schedule = schedule_of(tiles, batch * heads, bytes_a_head, CACHE_BYTES)
    shape = Shape(problem.seq_q, problem.seq_k, heads, *differs)
    # The bits of a mask in the order of the kernel's lanes.
    words = packed_mask(operands.mask, cols, by_keys) if has_words(problem.features) else 0
    blocks = min(multiprocessors(), tiles * batch * heads)
    return blocks, KernelWork(counters(), shape, problem.scale, schedule, words, extras)


def widths_of(problem: Problem) -> Widths:
    """Return the widths that kernels for a problem are compiled for, forward and backward."""
    return Widths(*widths_in(problem, 16))


def with_scale(features: Features, problem: Problem) -> Features:
    """Return options that tell whether products of the scale are exact, if a kernel asks for it."""
    asks = features.score_mod is not None and not features.softcap
    return features._replace(exact_scale=asks and math.frexp(problem.scale)[0] == 0.5)


def within_blocks(problem: Problem) -> Problem:
    """Return the same call without bounds: its block mask also masks the elements beyond them.

    The words of a partial tile then describe all of its masked elements.
    """
    if problem.block_mask is None or not is_bounded(problem):
        return problem
    return _within_blocks(problem.unseeded).with_seed(problem.seed)


@lru_cache(maxsize=256)
def _within_blocks(problem: Problem) -> Problem:
    mask = problem.block_mask
    assert mask is not None, "within_blocks asks first"
    lengths, block = (mask.seq_q, mask.seq_k), (mask.block_q, mask.block_k)
    mask = mask & BlockMask.band(*lengths, problem.lower, problem.upper, block)
    return replace(problem, block_mask=mask, lower=-problem.seq_q, upper=problem.seq_k)


def with_mask_bits(problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """Return a call with the bits of a 16-bit floating mask, and its dtype as the option ``mask``."""
    if problem.mask == "float" and is_half(operands.mask.dtype):
        bits = as_bits(operands.mask)
        named = _of_mask(problem.unseeded, NAMES[operands.mask.dtype])
        return named.with_seed(problem.seed), operands.having(mask=bits)
    return problem, operands


@lru_cache(maxsize=1024)
def _of_mask(problem: Problem, dtype: str) -> Problem:
    return replace(problem, mask=dtype)
