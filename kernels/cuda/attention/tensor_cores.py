"""What the tensor-core rungs share: what they need of a device and of a call."""

from __future__ import annotations

import numpy as np

from kernels.cuda.attention.options.score_functions import PLAIN, features_of
from kernels.cuda.device import per_device
from kernels.problem.question import Problem


def why_not_here(tile: tuple[int, int] | None, needed: tuple[int, int]) -> str | None:
    """Return why the device cannot run a kernel of tensor cores with a tile, or None.

    Args:
        tile: What the caller asks for.
        needed: The least compute capability.
    """
    if (missing := per_device.why_no_device(needed)) is not None:
        return missing
    return None if tile is None else f"it takes its own tiles only, got {tile}"


def seen_keys(problem: Problem) -> tuple[int, int]:
    """Return the first key that the bounds let some row see, and the one behind the last.

    What the others hold may be anything: kernels neither read it nor scale by it.
    """
    if problem.sequences:  # whose bounds count from their own starts
        return 0, problem.seq_k
    return _seen(problem.seq_k, problem.lower, problem.seq_q + problem.upper)


def seen_rows(problem: Problem) -> tuple[int, int]:
    """Return the first query row that sees a key within the bounds, and the one behind the last."""
    if problem.sequences:
        return 0, problem.seq_q
    return _seen(problem.seq_q, -problem.upper, problem.seq_k - problem.lower)


def lists_whole_tiles(problem: Problem, *tiles: tuple[int, int, bool]) -> bool:
    """Tell whether a block mask is all that hides, and hides nothing of a tile that is visited.

    Args:
        problem: The checked call.
        tiles: Of each kernel block_q, block_k, and whether a line of its list is a tile of keys.
    """
    mask, features = problem.block_mask, features_of(problem)
    is_bounded = problem.lower > 1 - problem.seq_q or problem.upper < problem.seq_k - 1
    if mask is None or is_bounded or features._replace(block_mask=False) != PLAIN:
        return False
    return all(bool(np.all(mask.tile_list(*one).tile_full)) for one in tiles)


def _seen(count: int, first: int, stop: int) -> tuple[int, int]:
    """Return what is within an array of so many places, one at the least: the copy engine needs it."""
    first = min(max(first, 0), count - 1)
    return first, max(min(stop, count), first + 1)
