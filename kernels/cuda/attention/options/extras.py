"""The kernel arguments of the options of a call: numbers, and arrays copied to the device once."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from kernels.common.philox import attention_threshold, keep_scale
from kernels.cuda.attention.options.mods import check_places, numbers_for  # beyond module 5
from kernels.cuda.attention.options.packed_tiles import device_tiles  # beyond module 5
from kernels.cuda.attention.options.score_functions import Extras
from kernels.cuda.device.memory import device_constant, device_list
from kernels.problem.operands import Operands
from kernels.problem.options import AXES
from kernels.problem.question import DropoutOrigin, Problem
from kernels.runtime.targets import current_device
from kernels.sparsity.block_mask import BlockMask


def make_extras(
    problem: Problem,
    operands: Operands,
    block_q: int,
    block_k: int,
    by_keys: bool = False,
    pack: Callable[[Any], Any] | None = None,
) -> Extras:
    """Return the option arguments of a kernel with tiles of (block_q, block_k).

    ``by_keys`` tells whether its work items are tiles of keys.  ``pack`` packs the patterns of tiles to
    words, see ``tile_lists.make_tile_patterns``; it is None for a kernel that reads elements.

    Raises:
        ValueError: If a call with a user function has too many rows or columns.
    """
    numbers = numbers_of(problem.unseeded)
    if problem.is_plain:
        return numbers
    arrays: dict[str, Any] = {"seed": problem.seed} if problem.dropout_p else {}
    arrays |= {name: getattr(operands, name) for name in AXES if getattr(problem, name)}
    device = current_device()
    if problem.mask:
        batches = operands.mask_batch
        kind = batches.shape, batches.dtype, device
        arrays |= {"mask": operands.mask, "mask_batch": device_constant(batches.tobytes(), *kind)}
    if problem.block_mask is not None:
        arrays |= _list_arrays(problem.block_mask, block_q, block_k, by_keys, pack, device)
    if problem.features.moved:
        arrays["origin"] = _origin(problem.origin, device)
    if problem.score_table:  # beyond module 5
        arrays["table"] = operands.score_table
    if problem.learns_table:  # beyond module 5
        arrays |= operands.dtable._asdict()
    if problem.sequences is not None:  # beyond module 5
        block = block_k if by_keys else block_q
        arrays["tiles"] = device_tiles(problem.sequences, block, by_keys, device)
    if problem.cache is not None:  # beyond module 5
        arrays["tiles"] = operands.cache
    return numbers._replace(**arrays)


@lru_cache(maxsize=1024)
def numbers_of(problem: Problem) -> Extras:
    """Return the option arguments of a kernel that reads no array, for a problem without a seed."""
    check_places(problem)  # beyond module 5
    real = problem.acc_dtype.type
    extras = Extras(
        lower=problem.lower,
        upper=problem.upper,
        heads=problem.heads,
        diagonal=problem.diagonal,
        # A launch takes plain numbers, of a value that the dtype of sums has.
        softcap=real(problem.softcap).item(),
        over_cap=real(1.0 / problem.softcap if problem.softcap else 0.0).item(),
        seed=problem.seed,
        threshold=attention_threshold(problem.dropout_p),
        keep_scale=real(keep_scale(problem.dropout_p)).item(),
    )
    mods = [numbers_for(x, problem.acc_dtype) for x in problem.numbers]  # beyond module 5
    extras = extras._replace(mask_numbers=mods[0], score_numbers=mods[1])  # beyond module 5
    return extras


@lru_cache(maxsize=64)
def _patterns(mask: BlockMask, device: int) -> Any:
    """Return the patterns of a mask on the device, copied once for all kernels."""
    return device_list(mask.patterns)


@lru_cache(maxsize=256)
def _list_arrays(
    mask: BlockMask,
    block_q: int,
    block_k: int,
    by_keys: bool,
    pack: Callable[[Any], Any] | None,
    device: int,
) -> dict[str, Any]:
    """Return a mask on the device, as the tiles that a kernel visits and their patterns."""
    tiles = mask.tile_list(block_q, block_k, by_keys)
    arrays = {name: device_list(array) for name, array in tiles._asdict().items()}
    arrays["states"] = device_list(mask.states)
    if pack is None:
        return arrays | {"patterns": _patterns(mask, device)}
    numbers, packed = mask.tile_patterns(block_q, block_k, by_keys, pack)
    words = np.concatenate([x.ravel() for x in packed] or [np.zeros(1, np.uint32)])
    lists = {"tile_patterns": device_list(numbers), "pattern_words": device_list(words)}
    return arrays | lists | {"tile_full": 0}


@lru_cache(maxsize=256)
def _origin(origin: DropoutOrigin, device: int) -> Any:
    """Return the place of a call in a larger dropout mask as a device array, (4,) int64."""
    return device_list(np.array(origin))
