"""The one table of tile and block sizes of the CUDA rungs: for a GPU, and tiny for the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kernels.targets import IS_SIMULATOR


class LayoutSizes(NamedTuple):
    """Tile and threads of one flash2 kernel; see ``register_tiles.Layout``."""

    block_q: int
    block_k: int
    lanes: int
    rows_of_threads: int


#: (kernel, bytes of an element) → (largest head_dim or value_dim, sizes), the first that fits.
LayoutTable = dict[tuple[str, int], tuple[tuple[int, LayoutSizes], ...]]


@dataclass(frozen=True)
class Sizes:
    """Sizes that the rungs take unless a caller asks for a tile.

    Attributes:
        flat_threads: Threads of a block that copies or sums element by element.
        product_tile: Output rows and columns of one block of the naive rung's products; a thread
            each.
        row_threads: Threads that share one row of scores in the naive rung; a power of two.
        flash1_bytes: Shared memory that flash1 divides into its tiles, the device permitting.
        flash1_threads: Threads of one block of flash1.
        flash2: Layouts of the flash2 kernels.
    """

    flat_threads: int
    product_tile: tuple[int, int]
    row_threads: int
    flash1_bytes: int
    flash1_threads: int
    flash2: LayoutTable


# Measured on an H200; see docs/notes-cuda.md.
_FLASH2: LayoutTable = {
    ("forward", 4): (
        (32, LayoutSizes(64, 64, 8, 16)),
        (64, LayoutSizes(64, 64, 16, 8)),
        (128, LayoutSizes(64, 32, 16, 8)),
        (256, LayoutSizes(64, 32, 16, 16)),
    ),
    ("dq", 4): (
        (32, LayoutSizes(64, 64, 8, 16)),
        (64, LayoutSizes(64, 64, 16, 8)),
        (128, LayoutSizes(64, 32, 16, 8)),
        (256, LayoutSizes(32, 32, 16, 16)),
    ),
    ("dkdv", 4): (
        (32, LayoutSizes(64, 64, 8, 16)),
        (64, LayoutSizes(64, 64, 16, 8)),
        (128, LayoutSizes(32, 64, 16, 8)),
        (256, LayoutSizes(32, 32, 16, 16)),
    ),
    ("forward", 8): ((128, LayoutSizes(32, 32, 16, 8)), (256, LayoutSizes(32, 16, 16, 16))),
    ("dq", 8): ((64, LayoutSizes(32, 32, 16, 8)), (256, LayoutSizes(16, 16, 16, 16))),
    ("dkdv", 8): ((64, LayoutSizes(32, 32, 16, 8)), (256, LayoutSizes(16, 16, 16, 16))),
}
_TINY = ((256, LayoutSizes(8, 4, 2, 2)),)

GPU = Sizes(
    flat_threads=256,
    product_tile=(32, 32),
    row_threads=128,
    flash1_bytes=48 * 1024,
    flash1_threads=512,
    flash2=_FLASH2,
)
#: A thread is a Python thread here, and a barrier costs a tenth of a millisecond for each of them.
SIMULATOR = Sizes(
    flat_threads=16,
    product_tile=(3, 4),
    row_threads=4,
    flash1_bytes=400,
    flash1_threads=8,
    flash2=dict.fromkeys(_FLASH2, _TINY),
)

SIZES = SIMULATOR if IS_SIMULATOR else GPU
