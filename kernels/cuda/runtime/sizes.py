"""The table of tile and block sizes of the CUDA rungs, with tiny sizes for the emulated GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from kernels.common.geometry import ceil_div
from kernels.runtime.targets import TARGET


class LayoutSizes(NamedTuple):
    """The tile and the numbers of threads of one flash2 kernel; see ``register_tiles.RegisterLayout``."""

    block_q: int
    block_k: int
    lanes: int
    rows_of_threads: int
    resident: int = 1


class ProductTile(NamedTuple):
    """The tile of one block of the matrix product; see ``product.product_kernel``."""

    rows: int  #: Output rows per block; divides the number of threads of a block.
    cols: int  #: Output columns per block; divides the number of threads of a block.
    #: Depth of the sum between two barriers; a multiple of four that divides the number of threads.
    depth: int
    own_rows: int  #: Output rows per thread, in registers; a multiple of four.
    own_cols: int  #: Output columns per thread, in registers; a multiple of four.
    resident: int = 1  #: Blocks that should fit on a multiprocessor at a time.

    @property
    def threads(self) -> int:
        """Threads per block."""
        return (self.rows // self.own_rows) * (self.cols // self.own_cols)


class FoldShape(NamedTuple):
    """How threads share the reduction of one dimension; see ``minitorch/accelerated/cuda_loops.py``."""

    lanes: int  #: Threads that fold one output together.
    outputs: int  #: Outputs per block.
    #: Whether neighbouring threads fold neighbouring elements of one output, in whole warps; else
    #: neighbouring threads have neighbouring outputs.
    along: bool


#: (kernel, bytes of an element) → (largest head_dim or value_dim, sizes), the first that fits; the tiles of
#: the last have fewer rows for larger heads.
LayoutTable = dict[tuple[str, int], tuple[tuple[int, LayoutSizes], ...]]


@dataclass(frozen=True)
class Sizes:
    """Sizes that the rungs use unless the caller passes a tile."""

    flat_threads: int  #: Threads of a block that works element by element.
    flat_items: int  #: Elements per thread of the element-wise kernels.
    fold_short: FoldShape  #: Threads that fold a short contiguous dimension.
    fold_long: FoldShape  #: Threads that fold a long contiguous dimension.
    fold_across: FoldShape  #: Threads that fold a dimension that is not contiguous.
    fold_long_from: int  #: The shortest long dimension.
    #: Number of blocks that keeps a large GPU busy, into which a fold of few outputs is divided.
    fold_blocks: int
    fold_items: int  #: Minimum number of elements per thread of a divided fold.
    #: Bytes of an element → tiles of the matrix product, the largest first.
    product_tiles: dict[int, tuple[ProductTile, ...]]
    #: Number of blocks that keeps a large GPU busy.  If there are fewer, the sum is divided among up to
    #: twice as many, or a smaller tile is used.
    product_blocks: int
    product_depth: int  #: Minimum length of a part of a divided sum.
    #: Threads that share one row of scores in the naive rung; whole warps on a GPU.
    row_threads: int
    flash1_bytes: int  #: Shared memory that flash1 divides into its tiles, the device permitting.
    flash1_threads: int  #: Threads of one block of flash1.
    #: Number of blocks that keeps a large GPU busy.  If the forward kernel of flash2 has fewer, the
    #: keys are divided among that many.
    split_blocks: int
    split_tiles: int  #: Minimum number of key tiles of such a part.
    #: Maximum number of query rows for which the forward kernel uses its layout "few".
    few_rows: int
    width_step: int  #: flash2 kernels are compiled for head_dim and value_dim rounded up to this.
    flash2: LayoutTable  #: Layouts of the flash2 kernels.
    row_threads_least: (
        int  #: Minimum number of threads that share a row of a layer; a warp on a GPU.
    )
    row_threads_most: int  #: Maximum number of threads that share a row.
    row_warps: int  #: Rows per block if each has the minimum number of threads.
    ladder_bytes: int  #: Bytes that a thread of the softmax ladder loads ahead.
    sink_rows: int  #: Rows per block of the gradient of the sinks.
    lookup_columns: (
        int  #: Threads of a block, and columns, of the gradient of an embedding's table.
    )
    lookup_bytes: int  #: Bytes of its table in shared memory.
    #: Minimum number of lookups per part, maximum number of parts, and lookups read ahead.
    lookups: tuple[int, int, int]
    list_chunk: int  #: Elements of a part of a list of tensors.
    list_threads: int  #: Threads of its blocks.
    sort_tile: int  #: Elements that a block sorts.
    part_columns: int  #: Columns of a block that adds up parts of a layer norm's gradients.
    part_lanes: int  #: Threads that share such a column.
    norm_parts: int  #: Maximum number of these parts.
    norm_rows: int  #: Minimum number of rows per part.

    @property
    def product_tile(self) -> tuple[int, int]:
        """Rows and columns of the largest tile of a product, the default of the naive rung."""
        return self.product_tiles[4][0][:2]


# Measured on an H200; see docs/notes-cuda.md.
_FLASH2: LayoutTable = {
    ("forward", 4): (
        (32, LayoutSizes(64, 64, 8, 16)),
        (64, LayoutSizes(64, 64, 16, 8, resident=3)),
        (128, LayoutSizes(64, 32, 16, 8, resident=2)),
        (256, LayoutSizes(64, 32, 16, 16)),
    ),
    ("few", 4): (
        (64, LayoutSizes(8, 32, 16, 8, resident=7)),
        (128, LayoutSizes(8, 32, 16, 8, resident=5)),
        (256, LayoutSizes(8, 32, 16, 8, resident=2)),
    ),
    ("dq", 4): (
        (32, LayoutSizes(64, 64, 8, 16)),
        (64, LayoutSizes(64, 32, 16, 8, resident=3)),
        (128, LayoutSizes(64, 32, 16, 8)),
        (256, LayoutSizes(32, 32, 16, 16)),
    ),
    ("dkdv", 4): (
        (32, LayoutSizes(64, 64, 8, 16)),
        (64, LayoutSizes(32, 64, 16, 8, resident=3)),
        (128, LayoutSizes(32, 64, 16, 8)),
        (256, LayoutSizes(32, 32, 16, 16)),
    ),
    ("atomic", 4): (
        (32, LayoutSizes(64, 64, 8, 16)),
        (64, LayoutSizes(64, 64, 16, 8)),
        (128, LayoutSizes(32, 64, 16, 8)),
        (256, LayoutSizes(32, 32, 16, 16)),
    ),
    ("forward", 8): ((128, LayoutSizes(32, 32, 16, 8)), (256, LayoutSizes(32, 16, 16, 16))),
    ("few", 8): ((256, LayoutSizes(8, 32, 16, 8)),),
    ("dq", 8): ((64, LayoutSizes(32, 32, 16, 8)), (256, LayoutSizes(16, 16, 16, 16))),
    ("dkdv", 8): ((64, LayoutSizes(32, 32, 16, 8)), (256, LayoutSizes(16, 16, 16, 16))),
    ("jvp", 4): (
        (32, LayoutSizes(64, 64, 8, 16)),
        (64, LayoutSizes(64, 32, 16, 8, resident=2)),
        (128, LayoutSizes(64, 32, 16, 16)),
        (256, LayoutSizes(32, 32, 16, 16)),
    ),
    ("dq_tangent", 4): (
        (32, LayoutSizes(64, 32, 8, 16, resident=2)),
        (64, LayoutSizes(64, 32, 16, 8, resident=2)),
        (128, LayoutSizes(64, 32, 16, 16)),
        (256, LayoutSizes(32, 16, 16, 16)),
    ),
    ("dkdv_tangent", 4): (
        (32, LayoutSizes(32, 64, 8, 16, resident=2)),
        (64, LayoutSizes(32, 64, 16, 8, resident=2)),
        (128, LayoutSizes(32, 64, 16, 16)),
        (256, LayoutSizes(16, 32, 16, 16)),
    ),
    ("jvp", 8): (
        (64, LayoutSizes(32, 32, 16, 16)),
        (128, LayoutSizes(32, 16, 16, 16)),
        (256, LayoutSizes(16, 16, 16, 16)),
    ),
    ("dq_tangent", 8): (
        (64, LayoutSizes(32, 32, 16, 16)),
        (128, LayoutSizes(16, 16, 16, 16)),
        (256, LayoutSizes(8, 16, 16, 8)),
    ),
    ("dkdv_tangent", 8): (
        (64, LayoutSizes(32, 32, 16, 16)),
        (128, LayoutSizes(16, 16, 16, 16)),
        (256, LayoutSizes(8, 16, 8, 16)),
    ),
    ("atomic", 8): ((64, LayoutSizes(32, 32, 16, 8)), (256, LayoutSizes(16, 16, 16, 16))),
}
_TINY = ((256, LayoutSizes(8, 4, 2, 2)),)

GPU = Sizes(
    flat_threads=256,
    flat_items=4,
    fold_short=FoldShape(32, 8, True),
    fold_long=FoldShape(256, 1, True),
    fold_across=FoldShape(8, 32, False),
    fold_long_from=1024,
    fold_blocks=1024,
    fold_items=8,
    product_tiles={
        4: (ProductTile(128, 128, 8, 8, 8, 2), ProductTile(64, 64, 8, 8, 8, 1)),
        8: (ProductTile(128, 64, 8, 8, 4, 2), ProductTile(64, 64, 8, 8, 8, 1)),
    },
    product_blocks=128,
    product_depth=1024,
    row_threads=128,
    flash1_bytes=48 * 1024,
    flash1_threads=512,
    split_blocks=660,
    split_tiles=2,
    few_rows=16,
    width_step=16,
    flash2=_FLASH2,
    row_threads_least=32,
    row_threads_most=512,
    row_warps=4,
    ladder_bytes=64,
    sink_rows=16,
    lookup_columns=32,
    lookup_bytes=48 << 10,
    lookups=(256, 256, 8),
    list_chunk=1 << 14,
    list_threads=256,
    sort_tile=1024,
    part_columns=32,
    part_lanes=16,
    norm_parts=1024,
    norm_rows=4,
)
#: Sizes for the emulated GPU, whose threads run in Python, one at a time.
TINY = Sizes(
    flat_threads=8,
    flat_items=2,
    fold_short=FoldShape(4, 2, True),
    fold_long=FoldShape(8, 1, True),
    fold_across=FoldShape(3, 4, False),
    fold_long_from=24,
    fold_blocks=4,
    fold_items=4,
    product_tiles=dict.fromkeys(
        (4, 8), (ProductTile(16, 32, 4, 4, 4), ProductTile(16, 16, 4, 4, 4))
    ),
    product_blocks=2,
    product_depth=8,
    row_threads=2,
    flash1_bytes=400,
    flash1_threads=8,
    split_blocks=6,
    split_tiles=1,
    few_rows=3,
    width_step=4,
    flash2=dict.fromkeys(_FLASH2, _TINY),
    row_threads_least=4,
    row_threads_most=4,
    row_warps=2,
    ladder_bytes=32,
    sink_rows=2,
    lookup_columns=2,
    lookup_bytes=48,
    lookups=(3, 4, 2),
    list_chunk=6,
    list_threads=4,
    sort_tile=4,
    part_columns=4,
    part_lanes=2,
    norm_parts=2,
    norm_rows=3,
)

SIZES = {"gpu": GPU, "emulated": TINY}[TARGET]


def launch_each(kernel: Any, count: int, *args: Any) -> None:
    """Launch one thread for each of ``count`` items; a grid without blocks cannot be launched."""
    if count:
        kernel[ceil_div(count, SIZES.flat_threads), SIZES.flat_threads](*args)
