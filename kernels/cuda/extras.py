"""What the options of a call need in a kernel: numbers, and arrays that are copied to the device once."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from kernels.block_mask import TileList
from kernels.cuda.arrays import to_device
from kernels.cuda.mod_rules import check_places
from kernels.cuda.scores import Extras
from kernels.operands import Operands
from kernels.philox import attention_threshold, keep_scale
from kernels.problem import Problem
from kernels.targets import current_device


def make_extras(
    problem: Problem, operands: Operands, block_q: int, block_k: int, by_keys: bool = False
) -> Extras:
    """Return what a kernel with tiles of (block_q, block_k) needs; small arrays are copied once.

    Args:
        problem: The checked call.
        operands: As kernels take them.
        block_q: Rows of the kernel's tiles.
        block_k: Columns of them.
        by_keys: The kernel's work items are tiles of keys.

    Raises:
        ValueError: As :func:`kernels.cuda.mod_rules.check_places`.
    """
    if problem.is_plain:
        return _numbers(problem)
    numbers = _numbers(problem.unseeded)._replace(seed=problem.seed)
    arrays: dict[str, Any] = {}
    if problem.slopes:
        arrays["slopes"] = operands.slopes
    if problem.mask:
        batches = operands.mask_batch
        arrays |= {
            "mask": operands.mask,
            "mask_batch": _constant(batches.tobytes(), "i8", current_device()),
        }
    if problem.block_mask is not None:
        arrays |= _block_arrays(problem.block_mask, block_q, block_k, by_keys, current_device())
    if problem.sequences is not None:
        block = block_k if by_keys else block_q
        arrays["tiles"] = _tiles(problem.sequences, block, by_keys, current_device())
    return numbers._replace(**arrays)


@lru_cache(maxsize=1024)
def _numbers(problem: Problem) -> Extras:
    check_places(problem)
    real = problem.acc_dtype.type
    return Extras(
        problem.lower,
        problem.upper,
        problem.heads,
        problem.diagonal,
        # A launch takes plain numbers, of a value that the dtype of sums has.
        real(problem.softcap).item(),
        problem.seed,
        attention_threshold(problem.dropout_p),
        real(keep_scale(problem.dropout_p)).item(),
    )


@lru_cache(maxsize=256)
def _constant(content: bytes, dtype: str, device: int) -> Any:
    """Return a vector on the device; calls with the same one share it."""
    return to_device(np.frombuffer(content, dtype))


@lru_cache(maxsize=64)
def _block_arrays(
    mask: Any, block_q: int, block_k: int, by_keys: bool, device: int
) -> dict[str, Any]:
    """Return the arrays of a block mask on the device; a mask is copied once for a kernel's tiles."""
    tiles: TileList = mask.tile_list(block_q, block_k, by_keys)
    # A GPU has no empty arrays.
    blocks = (1, mask.block_q, mask.block_k)
    patterns = mask.patterns if len(mask.patterns) else np.zeros(blocks, bool)
    ids, full = (
        array if len(array) else np.zeros(1, array.dtype)
        for array in (tiles.tile_ids, tiles.tile_full)
    )
    host = {
        "states": mask.states,
        "patterns": patterns,
        "tile_ptr": tiles.tile_ptr,
        "tile_ids": ids,
        "tile_full": full,
    }
    return {name: to_device(array) for name, array in host.items()}


@lru_cache(maxsize=64)
def _tiles(sequences: Any, block: int, of_keys: bool, device: int) -> Any:
    """Return the tiles of packed sequences on the device."""
    tiles = sequences.tiles(block, of_keys)
    return to_device(tiles if len(tiles) else np.zeros((1, 6), np.int64))
