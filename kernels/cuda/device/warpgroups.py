"""Hopper's blocks: a producer warpgroup, consumer warpgroups, and the layout of tiles in shared memory."""

from __future__ import annotations

from kernels.cuda.device.shared_tiles import SharedTiles, round_up
from kernels.cuda.ptx.mma import stmatrix_x4
from kernels.cuda.ptx.wgmma import ROWS
from kernels.cuda.runtime.kernel import ALL_LANES, device_function
from kernels.runtime.targets import cuda
from kernels.runtime.types import int32

#: Columns of a panel: 128 bytes of 16-bit elements, the widest swizzle.
PANEL = 64

#: Bytes of a row of a panel.
LINE = 128

#: Alignment of tiles in shared memory, after which the pattern of the swizzle repeats.
ALIGNMENT = 1024

WARPGROUP = 128


class WarpRoles:
    """The roles of warpgroups: a producer that copies, and consumers that multiply 64 rows each."""

    consumers: int

    @property
    def rows(self) -> int:
        """Rows of the tile that the consumers divide."""
        return ROWS * self.consumers

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARPGROUP * (self.consumers + 1)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a producer thread and of a consumer thread, which fit the multiprocessor."""
        return {1: (56, 256), 2: (24, 240), 3: (32, 160)}[self.consumers]


def block_bytes(tiles: SharedTiles) -> int:
    """Return the dynamic shared memory of a block with some tiles, including its alignment."""
    return round_up(tiles.elements, 16) + ALIGNMENT


@device_function
def own_warpgroup():
    """Return the number of a thread's warpgroup in its block.

    The number is broadcast from one lane, so that the compiler knows that it is uniform in a warp.
    Otherwise a product that is issued under a condition would wait for the products before it.
    """
    return int32(cuda.shfl_sync(ALL_LANES, int32(cuda.threadIdx.x // WARPGROUP), 0))


@device_function
def own_warp():
    """Return the number of a thread's warp in its block, like :func:`own_warpgroup`."""
    return int32(cuda.shfl_sync(ALL_LANES, int32(cuda.threadIdx.x // 32), 0))


@device_function
def store_pairs(tile, line, column, t, panel_bytes, pairs):
    """Store a warp's 16 rows of 16 columns to a tile of panels; column is the first of the lane's."""
    chunk = (2 * t + column) % 8
    place = tile + t // 4 * panel_bytes + line * LINE + ((chunk ^ (line % 8)) << 4)
    stmatrix_x4(place, pairs)
