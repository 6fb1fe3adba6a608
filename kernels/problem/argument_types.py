"""What an argument of attention may be: the types of options, arrays, tiles, and their error texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kernels.common.arguments import shown
from kernels.sparsity.block_mask import BlockMask

#: Most rows or columns of a tile: beyond it nothing is gained, and its scores no longer fit anywhere.
MAX_TILE = 4096


def check_tile(tile: Any) -> tuple[int, int] | None:
    """Return the tile that a caller asks for as two ints, or None if it is None.

    Raises:
        TypeError: If it is no pair of whole numbers.
        ValueError: If a side is below 1 or beyond ``MAX_TILE``.
    """
    if tile is None:
        return None
    sides = tuple(tile) if isinstance(tile, Sequence) and not isinstance(tile, str) else ()
    if not (len(sides) == 2 and all(_is_whole(side) for side in sides)):
        raise TypeError(
            f"tile must be (block_q, block_k), two whole numbers, or None for the rung's own; got "
            f"{shown(tile)}"
        )
    if not (min(sides) >= 1 and max(sides) <= MAX_TILE):
        raise ValueError(
            f"tile is (block_q, block_k), each from 1 to {MAX_TILE}, got {sides}; the scores of a "
            "tile are to stay in fast memory, None takes the rung's own"
        )
    return int(sides[0]), int(sides[1])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


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
#: Option → the type that most calls give, which needs no further look; of all others that of None.
_USUAL: dict[str, type] = {
    **dict.fromkeys(_FLAGS, bool),
    **dict.fromkeys(("dropout_p", "softcap"), float),
    "causal_offset": int,
    "rung": str,
}
_NONE = type(None)
#: Option → what it may be beside None where that is its default, and that in words.
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_FLAGS, (_is_flag, "True or False")),
    **dict.fromkeys(("dropout_p", "softcap"), (_is_number, "a number")),
    "scale": (_is_number, "a number or None"),
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
    """Check options by name, each against what it may be.

    Raises:
        TypeError: It names the option, what it may be and what it is.
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
        TypeError: It names the operand.
    """
    if not (hasattr(operand, "shape") and hasattr(operand, "dtype")):
        raise TypeError(
            f"{name} must be an array or a tensor, got {type(operand).__name__}; convert it first"
        )
