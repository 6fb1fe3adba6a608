"""The layout of tiles in the shared memory of a block."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from kernels.common.geometry import PLAIN


def round_up(size: int, multiple: int) -> int:
    """Return ``size`` rounded up to a multiple."""
    return PLAIN.ceil_div(size, multiple) * multiple


class SharedTiles:
    """The offsets of the tiles of a block in its dynamic shared memory, which are consecutive.

    Args:
        elements: Number of elements of each tile, by name, in their order in memory.
    """

    def __init__(self, **elements: int):
        self._offsets = dict(zip(elements, accumulate(elements.values(), initial=0), strict=False))
        #: Number of elements of all tiles.
        self.elements = sum(elements.values())

    def __iter__(self) -> Iterator[int]:
        """Yield the first element of each tile, in their order."""
        return iter(self._offsets.values())

    def __getitem__(self, name: str) -> int:
        """Return the first element of a tile."""
        return self._offsets[name]
