"""Checks of the types of the arguments of attention: options, arrays and tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kernels.common.arguments import is_number, shown
from kernels.sparsity.block_mask import BlockMask

#: Maximum rows or columns of a tile; the scores of a larger one do not fit into fast memory.
MAX_TILE = 4096


def check_tile(tile: Any) -> tuple[int, int] | None:
    """Return the requested tile as two ints, or None if it is None.

    Raises:
        TypeError: If it is not a pair of whole numbers.
        ValueError: If a side is below 1 or beyond ``MAX_TILE``.
    """
    if tile is None:
        return None
    sides = tuple(tile) if isinstance(tile, Sequence) and not isinstance(tile, str) else ()
    if not (len(sides) == 2 and all(_is_whole(side) for side in sides)):
        raise TypeError(
            f"tile must be (block_q, block_k), two whole numbers, or None for the rung's default, got "
            f"{shown(tile)}"
        )
    if not (min(sides) >= 1 and max(sides) <= MAX_TILE):
        raise ValueError(
            f"tile must be (block_q, block_k), each from 1 to {MAX_TILE}, got {sides}; the scores of a "
            "larger tile do not fit into fast memory; None uses the rung's default"
        )
    return int(sides[0]), int(sides[1])


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_flag(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_window(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_is_whole, value))


def _is_score_mod(value: Any) -> bool:
    pair = isinstance(value, (tuple, list)) and len(value) == 2 and all(map(callable, value))
    return pair or callable(value)


def _is_block_mask(value: Any) -> bool:
    return isinstance(value, BlockMask)


_FLAGS = (
    "is_causal", "enable_gqa", "deterministic", "return_lse", "mask_gradient", "sink_gradient",
    "backward",
)  # fmt: skip
#: Option → its most common type, which needs no further check; that of None for all others.
_USUAL: dict[str, type] = {
    **dict.fromkeys(_FLAGS, bool),
    **dict.fromkeys(("dropout_p", "softcap"), float),
    "causal_offset": int,
    "rung": str,
}
_NONE = type(None)
#: Option → the types that it may have in addition to a default of None, and their description.
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_FLAGS, (_is_flag, "True or False")),
    **dict.fromkeys(("dropout_p", "softcap"), (is_number, "a number")),
    "scale": (is_number, "a number or None"),
    "causal_offset": (_is_whole, "a whole number"),
    "seed": (_is_whole, "a whole number or None"),
    "window_size": (_is_window, "(left, right), two whole numbers, or None"),
    "mask_mod": (callable, "a function or None"),
    "score_mod": (_is_score_mod, "a function, a pair of it and its derivative, or None"),
    "block_mask": (
        _is_block_mask,
        "a kernels.BlockMask (BlockMask.from_dense makes one of an array) or None",
    ),
    "precision": (_is_text, "a name or None"),
    "rung": (_is_text, "the name of a kernel or 'auto'"),
}


def check_types(**options: Any) -> None:
    """Check the types of options by name.

    Raises:
        TypeError: If an option has the wrong type.
    """
    for name, value in options.items():
        if type(value) is _USUAL.get(name, _NONE):
            continue
        fits, words = _TYPES[name]
        if not fits(value):
            raise TypeError(f"{name} must be {words}, got {shown(value)}")


def check_array(name: str, operand: Any) -> None:
    """Check that an operand is an array or a tensor of any library.

    Raises:
        TypeError: If it is not.
    """
    shape, dtype = getattr(operand, "shape", None), getattr(operand, "dtype", None)
    if shape is None or dtype is None or isinstance(operand, np.generic):
        raise TypeError(
            f"{name} must be an array or a tensor, got {type(operand).__name__}; convert it first"
        )
