"""Evaluate a ``mask_mod`` once into a block mask, whose hidden tiles the kernels skip."""

from __future__ import annotations

import dis
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kernels.problem.question import Problem
from kernels.scores.mods import is_varying
from kernels.sparsity.block_mask import BlockMask
from kernels.sparsity.elements import compiled_fill, from_strips
from kernels.sparsity.states import FULL, BlockGrid, Bools, Layout

#: Rows and columns of a block.
BLOCK = (128, 64)
#: Maximum number of blocks of all heads, whose states take 16 MiB.
MOST_BLOCKS = 2**22
#: Maximum number of different partial blocks, which take 32 MiB.
MOST_PATTERNS = 4096


class Evaluated(NamedTuple):
    """The result of evaluating a ``mask_mod`` within the bounds of a call."""

    mask: BlockMask  #: The block mask.
    #: Whether its patterns contain every element; else it only tells which blocks are hidden.
    is_exact: bool


class Asked(NamedTuple):
    """A request to evaluate a user function at every position, for the batches and heads that it uses."""

    function: Callable[..., Any]  #: The user function.
    grid: BlockGrid  #: The blocks.
    batches: int  #: Number of batches, 1 if the function does not use the batch.
    heads: int  #: Number of heads, 1 if the function does not use the head.
    #: The bounds ``lower`` and ``upper`` of a ``Problem``; elements beyond them are hidden.
    bounds: tuple[int, int]
    dtype: np.dtype[Any]  #: The dtype in which the kernels compute scores.


#: Evaluates each element; returns the layout and whether it is exact.  It raises if the function does not
#: compile, or raises.
Evaluate = Callable[[Asked], tuple[Layout, bool]]


def listed(problem: Problem, evaluate: Evaluate) -> Problem:
    """Return a problem with a block mask in the place of its ``mask_mod``, evaluated on a target.

    The function is evaluated for each element within the bounds, once for all batches and heads if it
    does not use them.  The block mask has states for all, for each head, or for each (batch, head) in
    turn, which only kernels know how to read.  A call without a block mask evaluates the function for
    every (batch, head), which is more work.  The problem is returned as it is:

    - if there is a single row of blocks, as in decoding, where every step has another seq_k;
    - if the function is marked by ``kernels.varying``;
    - if the call is packed or has a block mask of its own;
    - if the function does not compile, or raises, which the kernels then report;
    - if there are more blocks than ``MOST_BLOCKS``, or more patterns than ``MOST_PATTERNS`` and nothing to
      skip.
    """
    found = evaluated(problem, evaluate)
    if found is None:
        return problem
    return replace(
        problem, block_mask=found.mask, mask_mod=None if found.is_exact else problem.mask_mod
    )


def evaluated(problem: Problem, evaluate: Evaluate) -> Evaluated | None:
    """Return the elements of a problem's ``mask_mod``, or None where :func:`listed` changes nothing."""
    mod = problem.mask_mod
    if mod is None or problem.block_mask is not None or problem.sequences is not None:
        return None
    if problem.seq_q <= BLOCK[0] or is_varying(mod):
        return None
    batches = math.prod(problem.lead[:-1]) if _uses(mod, 0) else 1
    heads = problem.heads if _uses(mod, 1) else 1
    repeats = problem.heads // heads if batches > 1 else 1
    grid, bounds = BlockGrid(problem.seq_q, problem.seq_k, *BLOCK), (problem.lower, problem.upper)
    asked = Asked(mod, grid, batches, heads, bounds, problem.acc_dtype)
    return _evaluated(evaluate, asked, repeats)


def _uses(function: Callable[..., Any], place: int) -> bool:
    """Return whether a function uses its argument at ``place``; True if its bytecode is not known."""
    code = getattr(getattr(function, "py_func", function), "__code__", None)
    if code is None or code.co_argcount < 4:
        return True
    name = code.co_varnames[place]
    return any(name in re.findall(r"\w+", step.argrepr) for step in dis.get_instructions(code))


@lru_cache(maxsize=32)
def _evaluated(evaluate: Evaluate, asked: Asked, repeats: int) -> Evaluated | None:
    """Evaluate a function, or return None if it fails or the result is of no use.

    ``repeats`` is the number of heads for each one that is evaluated.
    """
    grid = asked.grid
    if asked.batches * asked.heads * repeats * math.prod(grid.counts) > MOST_BLOCKS:
        return None
    try:
        layout, is_exact = evaluate(asked)
    except Exception:  # of numba or of the function
        return None
    if not is_exact and (layout.blocks.states == FULL).all():
        return None
    states, patterns = layout.blocks
    states = np.repeat(states, repeats, axis=0)
    return Evaluated(BlockMask(states, *grid.seq, BLOCK, patterns), is_exact)


def on_host(asked: Asked) -> tuple[Layout, bool]:
    """Evaluate a function in compiled loops on the host; see :data:`Evaluate`."""
    evaluate = compiled_fill(asked.function, "numpy")
    if evaluate is None:
        raise TypeError("numba cannot compile the function")

    def fill(head: int, row: int, rows: int, out: Bools) -> None:
        evaluate(*divmod(head, asked.heads), row, rows, asked.grid.seq_k, asked.bounds, out)

    return from_strips(asked.grid, asked.batches * asked.heads, fill, MOST_PATTERNS)
