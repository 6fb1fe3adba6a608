"""Dispatch matrix products to tensor cores if these are accurate enough, otherwise to CUDA cores.

==================  ====================  ===========================================================
kernel              device                operands
==================  ====================  ===========================================================
``wgmma``           cc 9.0                16 bits; float32 as TF32, as 16 bits, or split in three
``mma``             cc 8.0 and newer      16 bits; float32 as TF32 or as 16 bits
``cuda_cores``      every one             float32 and float64, of any strides; numbers that are not finite
==================  ====================  ===========================================================
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import numpy as np

from kernels.common.geometry import ceil_div
from kernels.cuda.device import half
from kernels.cuda.device.partial_sums import sum_parts
from kernels.cuda.device.per_device import multiprocessors, why_no_device
from kernels.cuda.device.shared_tiles import round_up
from kernels.cuda.matmul import cuda_cores
from kernels.cuda.matmul.launch import (
    Output,
    draw_ticket,
    multiply_by_warps,
    multiply_on_hopper,
)
from kernels.cuda.matmul.layout import ProductForm, ProductLayout, WarpLayout
from kernels.cuda.matmul.operands import Ints, Operand, copy, flag, placed, split
from kernels.cuda.ptx.swizzle import CHUNK
from kernels.cuda.runtime.arrays import device_pointer, empty_device
from kernels.cuda.runtime.repeated import repeats
from kernels.runtime.dtypes import FLOAT32, NAMES, is_half
from kernels.runtime.targets import compute_capability

# Measured on an H200; see docs/notes-cuda.md.
#: Planes → layouts for Hopper, each with the cost of a step of the depth and the constant cost of a tile,
#: in units of 0.8 microseconds.
_HOPPER = {
    1: ((ProductLayout(2, 256, 4, 2), 0.82, 8.0), (ProductLayout(2, 128, 5, 2), 0.42, 5.0)),
    3: ((ProductLayout(2, 128, 2, 1), 3.3, 5.0),),
}
#: The layouts for warps with their costs.
_WARPS = ((WarpLayout(128, 128, 2, 2, 3, 2), 2.2, 8.0),)
#: Number of elements of a partial sum that are written and read again in the time of a step.
_SUMMED = 280_000
#: Cost of the additional kernel that adds up the parts, in steps.
_SUM_STEPS = 10.0
_MOST_PARTS = 128
#: The choices of no parts: all blocks stream all tiles, or those that are left after whole rounds.
_STREAMED = _ALL, _AFTER_ROUNDS = 0, -1
#: The least steps of a block that streams.
_LEAST_STREAMED = 16
#: Cost of dividing sums among blocks, and of adding what another block has of a tile, in tiles.
_STREAMING, _SLOT = 3.0, 1.2
#: Division among blocks is taken where it promises more than the model's error.
_MARGIN = 1.05
#: Multiply-adds, and rows, columns and depth, from which numbers are split instead of using CUDA cores.
_SPLIT_WORK, _SPLIT_SIDE = 1 << 29, 128
#: Depth of a tile of split numbers.
_SPLIT_DEPTH = ProductForm("bfloat16", "float32").depth


class Epilogue(NamedTuple):
    """The operations on a product before it is stored."""

    bias: Any = None  # (heads, cols), of the result's dtype, or None
    has_gelu: bool = False  # Apply GELU in its tanh form
    #: An array with the layout of the result, to which the input of GELU is written, or None.
    before_gelu: Any = None


def kind_of(dtype: np.dtype[Any], precision: str, shape: Ints) -> str | None:
    """Return the format in which tensor cores multiply operands, or None for CUDA cores.

    ``precision`` is the format to which float32 numbers may be rounded, "float32" for none; ``shape`` is
    (batch, heads, rows, cols, depth).

    Returns:
        "float16", "bfloat16", "tf32", or "split": three bfloat16 per number, which is as accurate as
        float32 and pays for its copies only in large products.
    """
    if is_half(dtype):
        kind, least = NAMES[dtype], (8, 0)
    elif dtype != FLOAT32:
        return None
    elif precision != "float32":
        kind, least = precision, (8, 0)
    elif math.prod(shape) < _SPLIT_WORK or min(shape[2:]) < _SPLIT_SIDE:
        return None
    else:
        kind, least = "split", (9, 0)
    if 0 in shape or why_no_device(least) is not None:
        return None
    return kind if kind != "split" or is_hopper() else None


def is_hopper() -> bool:
    """Tell whether the current device runs the kernels of ``matmul.wgmma``."""
    return compute_capability()[:1] == (9,)


@repeats
def multiply(
    out: Any, out_steps: Ints, a: Any, a_steps: Ints, b: Any, b_steps: Ints, shape: Ints, kind: str,
    *how: Any,
) -> None:  # fmt: skip
    """Fill out with gelu(a @ b + bias) for each batch and head, on tensor cores.

    Sums are float32; each element of the result is rounded once.  For the arrays, their strides and the
    shape see ``cuda_cores.multiply``; the columns of out are contiguous, and the depth is not 0.  ``kind``
    is a result of :func:`kind_of`.  ``how`` are the fields of an :class:`Epilogue`; with any of them, the
    number of columns must be a multiple of eight, and the kind must not be "split".
    """
    epilogue = Epilogue(*how)
    batch, heads, rows, cols, depth = shape
    if not _is_stored_in_pieces(out, out_steps, shape):
        # Kernels write whole pieces of rows of 16 bits: to a wider result, which is copied.
        wide = round_up(cols, CHUNK // out.dtype.itemsize)
        matrix = rows * wide
        steps = (heads * matrix, matrix, wide, 1)
        room = empty_device((batch * heads * matrix,), out.dtype)
        multiply(room, steps, a, a_steps, b, b_steps, shape, kind, *how)
        copy(room, steps, shape[:4], NAMES[out.dtype], out, out_steps[:3], (rows, cols))
        return
    left = Operand(a, (batch, heads, rows, depth), a_steps)
    right = Operand(b, (batch, heads, cols, depth), (*b_steps[:2], b_steps[3], b_steps[2]))
    if kind == "split":
        ticket = draw_ticket()
        (left, plane), (right, _) = (split(each, _SPLIT_DEPTH, ticket) for each in (left, right))
        form = ProductForm("bfloat16", NAMES[out.dtype], left.is_turned, right.is_turned, planes=3)
        _multiply_placed(left, right, Output(out, out_steps), form, plane)
        # An infinity has no parts that add up to it: such operands are multiplied as they are.
        given = out, out_steps, a, a_steps, b, b_steps, shape
        cuda_cores.multiply(*given, only_if=(flag(), ticket))
        return
    left, right = placed(left, kind), placed(right, kind)
    form = ProductForm(
        kind, NAMES[out.dtype], left.is_turned, right.is_turned,
        has_bias=epilogue.bias is not None, has_gelu=epilogue.has_gelu,
        keeps_input=epilogue.before_gelu is not None,
    )  # fmt: skip
    bias = half.as_bits(epilogue.bias) if form.has_bias else 0
    before = epilogue.before_gelu if form.keeps_input else 0
    _multiply_placed(left, right, Output(out, out_steps, bias, before), form)


@repeats
def multiply_heads(
    counts: Ints, shape: Ints, a_steps: Ints, b_steps: Ints, bias: Any, *arrays: Any
) -> None:
    """Multiply matrices of 16-bit numbers that are separate arrays, in one launch on Hopper.

    If there are several results, each is the product of one head.  If there is one, it is their sum.

    Args:
        counts: The number of arrays of the results, of a and of b; 1, or one array for each head.
        shape: (heads, rows, cols, depth); the number of columns is a multiple of eight.
        a_steps: Strides of the rows and the depth of a, in elements.
        b_steps: Strides of the depth and the columns of b, in elements.
        bias: (heads, cols), of the dtype of the results, or None.
        *arrays: The results, which are row-major, then a and b; all are flat.
    """
    heads, rows, cols, depth = shape
    ends = [0, *accumulate(counts)]
    out, *operands = (arrays[first:stop] for first, stop in pairwise(ends))
    kind = NAMES[out[0].dtype]
    layouts = (rows, depth, *a_steps), (cols, depth, *b_steps[::-1])
    left, right = (
        _placed_heads(own, heads, layout, kind)
        for own, layout in zip(operands, layouts, strict=True)
    )
    form = ProductForm(kind, kind, left.is_turned, right.is_turned, has_bias=bias is not None)
    bias, is_sum = half.as_bits(bias) if form.has_bias else 0, len(out) == 1
    target = Output(out[0] if is_sum else out, (0, 0, cols, 1), bias, is_sum=is_sum)
    _multiply_placed(left, right, target, form)


def _placed_heads(arrays: tuple[Any, ...], heads: int, layout: Ints, kind: str) -> Operand:
    """Return an operand of one array or one for each head; arrays that kernels cannot read are copied.

    ``layout`` are lines and depth, then their strides.
    """
    each = [placed(Operand(x, (1, 1, *layout[:2]), (0, 0, *layout[2:])), kind) for x in arrays]
    array = each[0].array if len(each) == 1 else tuple(x.array for x in each)
    return Operand(array, (1, heads, *layout[:2]), each[0].steps)


def _multiply_placed(
    a: Operand, b: Operand, target: Output, form: ProductForm, plane: int = 0
) -> None:
    """Multiply operands that kernels can read in place, dividing a long sum into parts."""
    (batch, heads, rows, depth), cols = a.shape, b.shape[2]
    steps = ceil_div(depth, form.depth)
    if target.is_sum:
        steps, heads = heads * steps, 1
    is_whole = form.has_bias or form.has_gelu or isinstance(target.array, tuple)
    layout, parts, whole = _layout(
        batch * heads, rows, cols, steps, is_hopper(), form.planes, is_whole
    )
    if parts == 1:
        _launch(a, b, target, form, layout, plane, whole)
        return
    matrix = rows * cols
    partial = empty_device((batch * heads * parts * matrix,), FLOAT32)
    strides = (heads * parts * matrix, parts * matrix, cols, 1)
    sums = Output(partial, strides, parts=parts, is_sum=target.is_sum)
    _launch(a, b, sums, form._replace(out="float32"), layout, plane)
    sum_parts(partial, target.array, target.steps, (batch, heads, rows, cols), parts)


def _launch(
    a: Operand, b: Operand, target: Output, form: ProductForm, layout: Any, plane: int,
    whole: int | None = None,
) -> None:  # fmt: skip
    if isinstance(layout, WarpLayout):
        multiply_by_warps(a, b, target, form, layout)
    else:
        multiply_on_hopper(a, b, target, form, layout, plane, whole)


def _is_stored_in_pieces(out: Any, steps: Ints, shape: Ints) -> bool:
    size = out.dtype.itemsize
    if size == FLOAT32.itemsize:
        return True
    batch_step, head_step, row_step = (step * size % CHUNK for step in steps[:3])
    return (
        row_step == 0
        and (batch_step == 0 or shape[0] == 1)
        and (head_step == 0 or shape[1] == 1)
        and device_pointer(out) % CHUNK == 0
    )


@lru_cache(maxsize=4096)
def _layout(
    matrices: int, rows: int, cols: int, steps: int, is_hopper: bool, planes: int, is_whole: bool
) -> tuple[ProductLayout | WarpLayout, int, int | None]:
    """Return the layout and how sums are divided, with which the device ends first.

    That is the number of parts of the depth, and the number of tiles that are computed by one block each
    before all blocks stream the others; None if they do not.  ``steps`` are tiles of the depth; sums must
    not be divided into parts if ``is_whole``.
    """
    layouts = _HOPPER[planes] if is_hopper else _WARPS
    most = 1 if is_whole else min(_MOST_PARTS, steps)
    blocks = multiprocessors()

    def tiles_of(layout: Any) -> int:
        return matrices * ceil_div(rows, layout.rows) * ceil_div(cols, layout.cols)

    def cost(choice: tuple[Any, int]) -> float:
        (layout, step, tile), parts = choice
        tiles = tiles_of(layout)
        if parts in _STREAMED:
            rounds = tiles // blocks * (parts == _AFTER_ROUNDS)
            left = tiles - rounds * blocks
            if tiles % blocks == 0 or left * steps < _LEAST_STREAMED * blocks:
                return math.inf
            share, slots = ceil_div(left * steps, blocks), ceil_div(blocks, left)
            ends = _STREAMING + slots * _SLOT + max(0, left / blocks - 1)
            return _MARGIN * (rounds * (steps * step + tile) + share * step + ends * tile)
        tiles *= parts
        rounds = ceil_div(tiles, blocks * getattr(layout, "resident", 1))
        summed = _SUM_STEPS + matrices * rows * cols * parts / _SUMMED if parts > 1 else 0.0
        return rounds * (ceil_div(steps, parts) * step + tile) + summed

    streamed = _STREAMED if is_hopper and planes == 1 else ()
    (layout, _, _), parts = min(product(layouts, (*streamed, *range(1, most + 1))), key=cost)
    if parts in _STREAMED:
        return layout, 1, tiles_of(layout) // blocks * blocks * (parts == _AFTER_ROUNDS)
    # Rounding may leave none for the last.
    return layout, ceil_div(steps, ceil_div(steps, parts)), None
