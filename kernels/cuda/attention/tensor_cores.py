"""Requirements that the tensor-core rungs have in common, for devices and calls."""

from __future__ import annotations

import numpy as np

from kernels.cuda.device import per_device
from kernels.problem.question import Problem
from kernels.scores.program import PLAIN, features_of


def why_not_here(
    problem: Problem, tile: tuple[int, int] | None, needed: tuple[int, int], widest: int
) -> str | None:
    """Return why a device cannot run a problem with a tile, or None.

    The kernel needs a compute capability, and a head_dim and a value_dim of at most ``widest``.
    """
    if (missing := per_device.why_no_device(needed)) is not None:
        return missing
    if max(dims := (problem.head_dim, problem.value_dim)) > widest:
        return f"it takes a head_dim and a value dim of at most {widest}, got {dims}"
    return None if tile is None else f"it takes its own tiles only, got {tile}"


def keys_in_bounds(problem: Problem) -> tuple[int, int]:
    """Return the first key that is within the bounds of some row, and one past the last."""
    if problem.sequences:  # whose bounds count from their own starts
        return 0, problem.seq_k
    return _clipped(problem.lower, problem.seq_q + problem.upper, problem.seq_k)


def rows_in_bounds(problem: Problem) -> tuple[int, int]:
    """Return the first query row that has a key within its bounds, and one past the last."""
    if problem.sequences:
        return 0, problem.seq_q
    return _clipped(-problem.upper, problem.seq_k - problem.lower, problem.seq_q)


def is_bounded(problem: Problem) -> bool:
    """Tell whether the bounds of a call mask elements."""
    return problem.lower > 1 - problem.seq_q or problem.upper < problem.seq_k - 1


def lists_whole_tiles(problem: Problem, *tiles: tuple[int, int, bool]) -> bool:
    """Return whether the block mask is the only mask, and masks nothing in the tiles that it lists.

    ``tiles`` are, for each kernel, block_q, block_k, and whether its work items are tiles of keys.
    """
    mask, features = problem.block_mask, features_of(problem)
    if mask is None or is_bounded(problem) or features._replace(block_mask=False) != PLAIN:
        return False
    return all(bool(np.all(mask.tile_list(*one).tile_full)) for one in tiles)


def _clipped(first: int, stop: int, count: int) -> tuple[int, int]:
    """Return the part of a range within an array of ``count`` places."""
    return max(first, 0), min(stop, count)
