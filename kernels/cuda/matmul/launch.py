"""Launch the products on tensor cores."""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import count as counted
from typing import Any, NamedTuple

import numpy as np

from kernels.common.geometry import ceil_div
from kernels.cuda.device.half import as_bits
from kernels.cuda.device.per_device import map_of, multiprocessors
from kernels.cuda.device.warpgroups import LINE, PANEL
from kernels.cuda.matmul import mma, wgmma
from kernels.cuda.matmul.layout import Order, ProductForm, ProductLayout, Stream, WarpLayout
from kernels.cuda.matmul.operands import Ints, Operand
from kernels.cuda.ptx.wgmma import ROWS
from kernels.cuda.runtime.arrays import empty_device, to_device
from kernels.cuda.runtime.recorder import drawn
from kernels.runtime.dtypes import FLOAT32
from kernels.runtime.targets import current_device

#: Approximate number of rows of the result in a band; see ``Order``.
BAND_ROWS = 2048
#: Number of rows and columns of a result that are stored at a time.
_OUT_BOX = (ROWS, PANEL)
_TICKETS = counted(1)


class Output(NamedTuple):
    """The memory to which a matrix product is written, with the bias and the input of GELU."""

    array: Any  # The result, flat, on the device; or a tuple of one for each head
    steps: Ints  # Strides in batch, heads, rows and columns, in elements; the last is 1
    bias: Any = 0  # One number for each column of each head, or 0
    before_gelu: Any = 0  # An array with the layout of ``array`` for the input of GELU, or 0
    #: Number of parts of the depth, whose sums are consecutive in place of a head's matrix.
    parts: int = 1
    is_sum: bool = False  # Whether the products of all heads are summed, in place of one head's


def _map_of(array: Any, shape: Ints, steps: Ints, box: Ints, dtype: str) -> Any:
    """Return the tensor map of an array, or those of a tuple of arrays.

    ``shape`` is (batch, heads, lines, elements of a line), and ``box`` the lines and elements per copy.
    """
    one = array[0] if isinstance(array, tuple) else array
    sizes, strides = _as_engine_takes(shape, steps, one.dtype.itemsize)
    return map_of(array, sizes, strides, (1, 1, *box), dtype)


@lru_cache(maxsize=4096)
def _as_engine_takes(shape: Ints, steps: Ints, size: int) -> tuple[Ints, Ints]:
    """Return sizes, and strides in bytes; a dimension of matrices that repeat has size 1."""
    lead = [1 if step == 0 else n for n, step in zip(shape[:2], steps, strict=False)]
    sizes = (*lead, *shape[2:])
    # A stride that is never taken must be one that the engine accepts.
    strides = (LINE if n == 1 else size * step for n, step in zip(sizes[:3], steps, strict=False))
    return sizes, (*strides, size)


@lru_cache(maxsize=4096)
def _plan(
    shape: Ints, cols: int, depth: int, layout: ProductLayout | WarpLayout, steps: Ints, parts: int
) -> tuple[Ints, Order, Ints]:
    """Return the arguments of a launch that depend only on shapes.

    They are rows, columns, steps of the depth, steps per part, parts and heads; the order of the tiles; the
    strides of a result of float32, see ``matmul.epilogue``.

    ``shape`` is that of the left operand, ``cols`` the columns of the right one, and ``depth`` that of a
    tile.
    """
    batch, heads, rows, whole_depth = shape
    row_tiles, matrices = ceil_div(rows, layout.rows), batch * heads * parts
    band = min(max(BAND_ROWS // layout.rows, 1), row_tiles)
    order = Order(row_tiles, ceil_div(cols, layout.cols), band, matrices)
    count = ceil_div(whole_depth, depth)
    sizes = (rows, cols, count, ceil_div(count, parts), parts, heads)
    batch_step, head_step, row_step, _ = steps
    own = (batch_step, head_step, head_step // parts, row_step)
    are_pairs = all(step % 2 == 0 for step in (*own, cols))
    return sizes, order, (*own, int(are_pairs))


def multiply_on_hopper(
    a: Operand,
    b: Operand,
    target: Output,
    form: ProductForm,
    layout: ProductLayout,
    plane: int = 0,
    whole: int | None = None,
) -> None:
    """Launch the kernel of ``matmul.wgmma``, the only one that takes tuples of arrays and sums over heads.

    ``a`` is (batch, heads, rows, depth), with planes the depth of one, and ``b`` (batch, heads, cols,
    depth).  Consecutive planes are ``plane`` elements apart.  After ``whole`` items, if given, all blocks
    divide the sums of the others among them.
    """
    kind = "float32" if form.dtype == "tf32" else form.dtype
    (batch, heads, rows, whole_depth), cols, depth = a.shape, b.shape[2], form.depth
    steps_of_head, left = ceil_div(whole_depth, depth), a.shape
    if target.is_sum:
        left, heads = (batch, 1, rows, heads * steps_of_head * depth), 1
    sizes, order, out_steps = _plan(left, cols, depth, layout, target.steps, target.parts)
    maps, differs = [], []
    for operand, lines in ((a, layout.rows), (b, layout.cols)):
        if form.planes > 1:
            operand = operand._replace(shape=(*operand.shape[:3], form.planes * plane))
        box = (depth, PANEL) if operand.is_turned else (lines, depth)
        shape, steps = operand.stored
        maps.append(_map_of(operand.array, shape, steps, box, kind))
        differs += [int(steps[1] != 0), int(steps[0] != 0)]
    out, before = target.array, target.before_gelu
    if form.out != "float32":
        shape = (batch, heads, rows, cols)
        out = _map_of(out, shape, target.steps, _OUT_BOX, form.out)
        if form.keeps_input:
            before = _map_of(before, shape, target.steps, _OUT_BOX, form.out)
    jumps = [LINE * isinstance(x, tuple) for x in (a.array, b.array, target.array)]
    blocks, stream = min(multiprocessors(), order.items), 0
    if whole is not None:
        blocks, form = multiprocessors(), form._replace(streams=True)
        if whole == 0:
            # Blocks that multiply the same lines of the larger operand are then at the same depth, if
            # the tiles along the smaller one divide the number of blocks: the L2 cache reads it once.
            order = order._replace(band=1 if cols > rows else order.row_tiles)
        slots = empty_device((blocks * layout.rows * layout.cols,), FLOAT32)
        stream = Stream(
            whole, draw_ticket(), slots, _flags(blocks * layout.consumers, current_device())
        )
    wgmma.product_kernel(layout, form)[blocks, layout.threads](
        *maps, out, before, target.bias, out_steps, stream,
        (*sizes, *differs, plane, *jumps, steps_of_head), order,
    )  # fmt: skip


def draw_ticket() -> Any:
    """Return the number of a launch: larger than those before, also when the launch is repeated."""
    return drawn(partial(next, _TICKETS))


@lru_cache(maxsize=64)
def _flags(count: int, device: int) -> Any:
    """Return the flags of streamed products on a device, which no launch resets."""
    return to_device(np.zeros(count, np.int64))


def multiply_by_warps(
    a: Operand, b: Operand, target: Output, form: ProductForm, layout: WarpLayout
) -> None:
    """Launch the kernel of ``matmul.mma``; the arguments are those of :func:`multiply_on_hopper`."""
    own = a.shape, b.shape[2], form.depth, layout, target.steps, target.parts
    sizes, order, out_steps = _plan(*own)
    before = as_bits(target.before_gelu) if form.keeps_input else 0
    mma.product_kernel(layout, form)[order.items, layout.threads](
        as_bits(a.array), as_bits(b.array), (as_bits(target.array), before, target.bias),
        a.stored[1][:3], b.stored[1][:3], out_steps, (*sizes, a.shape[3]), order,
    )  # fmt: skip
