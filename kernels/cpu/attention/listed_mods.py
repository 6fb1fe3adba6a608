"""Evaluate a ``mask_mod`` once into a block mask, whose hidden tiles the kernels skip."""

from __future__ import annotations

import dis
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from numba import njit

from kernels.cpu.attention.mods import own_mod
from kernels.problem.question import Problem
from kernels.sparsity.block_mask import BlockMask
from kernels.sparsity.elements import from_strips
from kernels.sparsity.states import FULL, Bools, Grid

#: Rows and columns of a block: the tile of the kernels.
BLOCK = (128, 64)
#: Maximum number of blocks of all heads, whose states take 16 MiB.
MOST_BLOCKS = 2**22
#: Maximum number of different partial blocks, which take 4 MiB.
MOST_PATTERNS = 512


class Evaluated(NamedTuple):
    """The elements of a ``mask_mod`` within the bounds of a call.

    Attributes:
        mask: The block mask.
        is_exact: Whether its patterns contain every element; else it only tells which blocks are hidden.
    """

    mask: BlockMask
    is_exact: bool


def listed(problem: Problem) -> Problem:
    """Return a problem with a block mask in the place of its ``mask_mod``.

    The function is evaluated for each element within the bounds, once for all heads if it does not use
    the head.  A call without a block mask evaluates it for every (batch, head), which is more work.  The
    problem is returned as it is:

    - if there is a single row of blocks, as in decoding, where every step has another seq_k;
    - if the function uses the batch and there are several, because block masks have no batch;
    - if the call is packed or has a block mask of its own;
    - if the function does not compile, or raises, which the kernels then report;
    - if there are more blocks than ``MOST_BLOCKS``, or more patterns than ``MOST_PATTERNS`` and nothing to
      skip.

    Args:
        problem: The checked call.
    """
    mod, batches = problem.mask_mod, math.prod(problem.lead[:-1])
    if mod is None or problem.block_mask is not None or problem.sequences is not None:
        return problem
    if problem.seq_q <= BLOCK[0] or (batches > 1 and _uses(mod, 0)):
        return problem
    heads = problem.heads if _uses(mod, 1) else 1
    found = _evaluated(mod, heads, problem.seq_q, problem.seq_k, problem.lower, problem.upper)
    if found is None:
        return problem
    return replace(problem, block_mask=found.mask, mask_mod=None if found.is_exact else mod)


def _uses(function: Callable[..., Any], place: int) -> bool:
    """Return whether a function uses its argument at ``place``; True if its bytecode is not known."""
    code = getattr(getattr(function, "py_func", function), "__code__", None)
    if code is None or code.co_argcount < 4:
        return True
    name = code.co_varnames[place]
    return any(name in re.findall(r"\w+", step.argrepr) for step in dis.get_instructions(code))


@lru_cache(maxsize=32)
def _evaluated(
    function: Callable[..., Any], heads: int, seq_q: int, seq_k: int, lower: int, upper: int
) -> Evaluated | None:
    """Evaluate a function, or return None if it fails or the result is of no use."""
    grid = Grid(seq_q, seq_k, *BLOCK)
    if heads * math.prod(grid.counts) > MOST_BLOCKS:
        return None

    def fill(head: int, row: int, rows: int, out: Bools) -> None:
        _make_fill(function)(head, row, rows, seq_k, lower, upper, out)

    try:
        layout, is_exact = from_strips(grid, heads, fill, MOST_PATTERNS)
    except Exception:  # of numba or of the function
        return None
    if not is_exact and (layout.blocks.states == FULL).all():
        return None
    states, patterns = layout.blocks
    return Evaluated(BlockMask(states, seq_q, seq_k, BLOCK, patterns), is_exact)


@lru_cache(maxsize=64)
def _make_fill(function: Callable[..., Any]) -> Callable[..., None]:
    """Return the compiled function that evaluates ``rows`` rows from ``row`` on; False out of bounds."""
    mod = own_mod(function)

    @njit(error_model="numpy")
    def fill(head, row, rows, seq_k, lower, upper, out):
        for r in range(rows):
            line = out[r]  # (key blocks · block_k,)
            first = min(max(row + r + lower, 0), seq_k)
            stop = max(min(row + r + upper + 1, seq_k), first)
            line[:first] = False
            line[stop:] = False
            for col in range(first, stop):
                line[col] = bool(mod(0, head, row + r, col))

    return fill
