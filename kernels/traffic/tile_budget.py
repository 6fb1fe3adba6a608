"""Find the tile with the least memory traffic among those that fit on the chip.

Larger tiles need fewer reads, but shared memory is small.  ``formulas`` has the traffic of a tile; this
module has its size, and the search.
"""

from __future__ import annotations

from kernels.common.geometry import ceil_div
from kernels.traffic.formulas import TRAFFIC, HeadShape, total

#: Rows and columns of a tile are multiples of this, as ``flash2`` requires.
STEP = 4


def tile_elements(rung: str, shape: HeadShape, tile: tuple[int, int]) -> int:
    """Return the number of on-chip elements of a tile, (block_q, block_k), without padding.

    Both rungs keep K_j, V_j, Q_i and the tile of scores there; ``flash1`` keeps O_i too, which
    ``flash2`` has in registers.
    """
    block_q, block_k = tile
    of_row = shape.head_dim + (shape.value_dim if rung == "flash1" else 0)
    return block_q * of_row + block_k * (shape.head_dim + shape.value_dim) + block_q * block_k


def least_traffic_tile(rung: str, shape: HeadShape, elements: int) -> tuple[int, int]:
    """Return the tile of a rung with the least forward traffic that fits into a number of elements.

    Sides are multiples of ``STEP``, up to the length of the sequence, rounded up.  Among tiles with
    the same traffic the smallest is returned.

    Raises:
        ValueError: If not even the smallest tile fits; it names the number of elements.
    """
    tiles = [
        (STEP * i, STEP * j)
        for i in range(1, ceil_div(shape.seq_q, STEP) + 1)
        for j in range(1, ceil_div(shape.seq_k, STEP) + 1)
    ]
    # TASK 5.8: Of the tiles that fit, the one that moves the least; then the one that takes the least.
    fitting = [tile for tile in tiles if tile_elements(rung, shape, tile) <= elements]
    if not fitting:
        smallest = tile_elements(rung, shape, (STEP, STEP))
        raise ValueError(
            f"a tile of {rung} needs at least {smallest} elements, but there are {elements}; pass more, or "
            "a smaller head_dim"
        )

    def cost(tile: tuple[int, int]) -> tuple[int, int]:
        return total(TRAFFIC[rung](shape, tile)).moved, tile_elements(rung, shape, tile)

    return min(fitting, key=cost)
    # END TASK 5.8
