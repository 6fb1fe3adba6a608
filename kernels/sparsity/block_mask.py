"""Block-sparse masks, which determine the tiles of the scores that are computed."""

from __future__ import annotations

import inspect
import os  # beyond module 5
from collections.abc import Callable, Iterable
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import as_host_array, listed, shown, whole
from kernels.sparsity import builders
from kernels.sparsity.elements import from_dense, from_mask_mod  # beyond module 5
from kernels.sparsity.picture import as_svg, as_text, save_png  # beyond module 5
from kernels.sparsity.states import (
    FULL,
    HIDDEN,
    PARTIAL,
    BlockGrid,
    Blocks,
    Layout,
    States,
    canonical,
    check_blocks,
    check_grid,
    combine,
    shows,
    stack,
)
from kernels.sparsity.tile_lists import TileList, make_tile_list, make_tile_patterns

__all__ = ["FULL", "HIDDEN", "PARTIAL", "BlockMask", "TileList"]

#: Number of cached tile lists per mask: forward and backward, for the tiles of a few kernels.
KEPT_LISTS = 8

P = ParamSpec("P")


def _builder(build: Callable[P, Layout]) -> Callable[Concatenate[type[BlockMask], P], BlockMask]:
    """Return the function of a class method that builds a mask, with the signature of ``build``."""

    @wraps(build)
    def built(_cls: type[BlockMask], *args: P.args, **kwargs: P.kwargs) -> BlockMask:
        return _cls._of(*build(*args, **kwargs))

    parameters = inspect.signature(build).parameters.values()
    first = inspect.Parameter("_cls", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature([first, *parameters], return_annotation="BlockMask")
    built.__signature__ = signature  # type: ignore[attr-defined]
    built.__annotations__ = build.__annotations__ | {"return": "BlockMask"}
    return built


class BlockMask:
    """A mask of hidden, full and partial blocks; a partial block has a pattern of elements.

    Masks are stored in canonical form: partial blocks whose elements are all visible or all hidden are
    stored as full or hidden, and equal patterns are stored once.  The arrays are read-only, because tile
    lists are derived from them and copied to a device only once.

    Args:
        states: (heads, query blocks, key blocks) or (query blocks, key blocks): ``HIDDEN`` (0 or False),
            ``FULL`` (1 or True), or ``PARTIAL`` (2) plus the index of a pattern; a single head applies to
            all heads.
        seq_q: Number of query rows.
        seq_k: Number of key columns.
        block_size: Rows and columns of a block, or one number for both; multiples of 16.
        patterns: (count, block_q, block_k) bool, True keeps; elements beyond the last row or column are
            never read.

    Raises:
        TypeError: If states are not integers, patterns are not booleans, or a size is not an integer.
        ValueError: If a side is not a positive multiple of 16, there is not one state for each block, a
            state has no pattern, or a head has more than 2**28 blocks.
    """

    butterfly = classmethod(_builder(builders.butterfly))
    strided = classmethod(_builder(builders.strided))  # beyond module 5
    dilated = classmethod(_builder(builders.dilated))  # beyond module 5
    bigbird = classmethod(_builder(builders.bigbird))  # beyond module 5
    band = classmethod(_builder(builders.band))
    causal = classmethod(_builder(builders.causal))
    local = classmethod(_builder(builders.local))
    local_global = classmethod(_builder(builders.local_global))  # beyond module 5
    from_dense = classmethod(_builder(from_dense))  # beyond module 5
    from_mask_mod = classmethod(_builder(from_mask_mod))  # beyond module 5

    def __init__(
        self, states: Any, seq_q: int, seq_k: int, block_size: Any = 64, patterns: Any = None
    ):
        self._grid: BlockGrid = check_grid(seq_q, seq_k, block_size)
        self.seq_q, self.seq_k, self.block_q, self.block_k = self._grid
        self._blocks = canonical(check_blocks(states, patterns, self._grid), self._grid)
        self.states: States
        self.states, self.patterns = self._blocks
        for array in self._blocks:
            array.flags.writeable = False
        self._lists: dict[tuple[int, int, bool], TileList] = {}

    @classmethod
    def stack(cls, masks: Iterable[BlockMask]) -> BlockMask:
        """Concatenate the heads of several masks.

        Raises:
            TypeError: If they are not masks.
            ValueError: If there are none, or they differ in lengths or block size.
        """
        masks = [masks] if isinstance(masks, BlockMask) else listed("masks", masks)
        if not masks:
            raise ValueError("stack needs at least one mask, got none")
        for mask in masks:
            if not isinstance(mask, BlockMask):
                raise TypeError(
                    f"stack needs a list of BlockMask objects, got one with {shown(mask)}"
                )
        for mask in masks:
            masks[0]._check_like(mask, "stack")
        return cls._of(masks[0]._grid, stack(mask._blocks for mask in masks))

    @classmethod
    def _of(cls, grid: BlockGrid, blocks: Blocks) -> BlockMask:
        return cls(blocks.states, *grid.seq, grid.block, blocks.patterns)

    @property
    def heads(self) -> int:
        """Number of heads with their own pattern, or 1 if one pattern applies to all."""
        return len(self.states)

    @cached_property
    def density(self) -> float:
        """The fraction of blocks that are not hidden, from 0 to 1."""
        return int(np.count_nonzero(self.states)) / max(self.states.size, 1)

    def visible(self, row: int, rows: int, col: int, cols: int) -> npt.NDArray[np.bool_]:
        """Return a part of the mask, a bool array (heads, rows, cols) in which True means visible.

        Raises:
            ValueError: If the window extends beyond the mask.
        """
        for name, first, count, seq in (
            ("row", row, rows, self.seq_q),
            ("col", col, cols, self.seq_k),
        ):
            if whole(name, first, 0) + whole(f"{name}s", count, 0) > seq:
                raise ValueError(
                    f"{name} {first} plus {count} {name}s is beyond the mask's {seq}; use fewer"
                )
        head = np.arange(len(self.states))[:, None, None]
        return self.shows(head, np.arange(row, row + rows)[:, None], np.arange(col, col + cols))

    def shows(self, head: Any, row: Any, col: Any) -> npt.NDArray[np.bool_]:
        """Tell whether elements are visible, for ints or index arrays that broadcast.

        Raises:
            TypeError: If one of them is not of integers.
            IndexError: If a row or column is out of range.
        """
        head = _places("head", head)
        row, col = _places("row", row, self.seq_q), _places("col", col, self.seq_k)
        return shows(self._blocks, self._grid, head, row, col)

    def dense(self) -> npt.NDArray[np.bool_]:
        """Return the whole mask as an array, (heads, seq_q, seq_k), True where visible; for small masks."""
        return self.visible(0, self.seq_q, 0, self.seq_k)

    def tile_list(self, block_q: int, block_k: int, by_keys: bool = False) -> TileList:
        """Return the list of the key tiles that each query tile of (block_q, block_k) visits.

        A tile is in the list if any of its elements is visible, and it is full if all are
        visible. Tiles need not align with the blocks.  With ``by_keys``, list the query tiles
        that visit each key tile.
        """
        key = whole("block_q", block_q, 1), whole("block_k", block_k, 1), bool(by_keys)
        found = self._lists.pop(key, None)
        if found is None:
            found = make_tile_list(self._blocks, self._grid, *key)
            for array in found:
                array.flags.writeable = False
        self._lists[key] = found  # most recently used last
        while len(self._lists) > KEPT_LISTS:
            self._lists.pop(next(iter(self._lists)), None)
        return found

    def tile_patterns(
        self, block_q: int, block_k: int, by_keys: bool, pack: Callable[[Any], Any]
    ) -> tuple[Any, list[Any]]:
        """Return 0 or 1 + the index of a pattern, for tiles of :meth:`tile_list`, and packed patterns.

        ``pack`` packs the patterns of tiles, a bool array (count, block_q, block_k), to an array
        of any form.
        """
        tiles = self.tile_list(block_q, block_k, by_keys)
        size = block_q, block_k
        return make_tile_patterns(self._blocks, self._grid, size, tiles, by_keys, pack)

    def __and__(self, other: Any) -> BlockMask:
        """Return the intersection of two masks; a single head applies to all heads of the other."""
        return self._combined(other, "&", FULL, np.logical_and)

    def __or__(self, other: Any) -> BlockMask:
        """Return the union of two masks; a single head applies to all heads of the other."""
        return self._combined(other, "|", HIDDEN, np.logical_or)

    def _combined(self, other: Any, sign: str, neutral: int, operation: Any) -> BlockMask:
        if not isinstance(other, BlockMask):
            return NotImplemented
        self._check_like(other, sign)
        if self.heads != other.heads and 1 not in (self.heads, other.heads):
            raise ValueError(
                f"{sign} of masks of {self.heads} and {other.heads} heads; give both the same number, "
                "or one of them a single pattern for all"
            )
        return self._of(self._grid, combine(self._blocks, other._blocks, neutral, operation))

    def _check_like(self, other: BlockMask, what: str) -> None:
        if self._grid != other._grid:
            raise ValueError(
                f"{what} needs masks of the same lengths and block size, got {self!r} and {other!r}; "
                "build them alike"
            )

    def __eq__(self, other: object) -> bool:
        """Tell whether two masks have the same blocks, heads and visible elements."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        if self is other:
            return True
        return self._grid == other._grid and all(
            np.array_equal(mine, its) for mine, its in zip(self._blocks, other._blocks, strict=True)
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self._grid, self.states.tobytes()))

    def __repr__(self) -> str:
        return (
            f"BlockMask(heads={self.heads}, seq_q={self.seq_q}, seq_k={self.seq_k}, "
            f"block_size={self._grid.block}, density={self.density:.4g}, "
            f"patterns={len(self.patterns)})"
        )

    def _repr_svg_(self) -> str:  # beyond module 5
        """Return a picture of the first head for a notebook."""
        return as_svg(self.picture(), repr(self))

    def picture(self, width: int = 64, head: int = 0) -> str:  # beyond module 5
        """Return a string with one character per block of a head: ``█`` full, ``▒`` partial, ``·`` hidden.

        There are at most ``width`` characters in either direction; in larger masks a character
        stands for a square of blocks, and is partial if they differ.

        Raises:
            ValueError: If the head is out of range, or the width below 1.
        """
        if whole("head", head, 0) >= self.heads:
            raise ValueError(f"head must be from 0 to {self.heads - 1}, got {head}")
        return as_text(self.states[head], whole("width", width, 1))

    def save_picture(self, path: str | os.PathLike[str]) -> None:  # beyond module 5
        """Write a PNG file with a panel for each head.

        Raises:
            ImportError: If matplotlib, the extra "plot", is missing.
        """
        save_png(path, self.states, self._grid.seq, repr(self))


def _places(name: str, places: Any, size: int | None = None) -> npt.NDArray[Any]:
    """Check indices, which must be less than ``size`` if it is given, and return them as an array."""
    found = as_host_array(name, places)
    if found.dtype.kind not in "iu":
        raise TypeError(f"{name} must be a whole number or an array of them, got {shown(places)}")
    if size is not None and found.size and not 0 <= found.min() <= found.max() < size:
        raise IndexError(f"{name} must be from 0 to {size - 1}, got {shown(places)}")
    return found
