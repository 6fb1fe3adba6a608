"""Launch Hopper's matrix product: tensor maps of operands as they lie, layouts by size, long sums in parts."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

from kernels.cuda.arrays import device_pointer, to_device
from kernels.cuda.product_layout import LINE, PANEL, Form, Order, ProductLayout
from kernels.cuda.product_wgmma import product_kernel
from kernels.cuda.ptx.tensor_map import encode_tensor_map
from kernels.cuda.ptx.wgmma import ROWS
from kernels.geometry import ceil_div
from kernels.targets import cuda

Ints = tuple[int, ...]

#: Tiles of rows of a band, in rows of the result.
BAND_ROWS = 2048


@cache
def multiprocessors() -> int:
    """Return how many the device has."""
    return int(cuda.get_current_device().MULTIPROCESSOR_COUNT)


@lru_cache(maxsize=4096)
def _tensor_map(address: int, shape: Ints, strides: Ints, box: Ints, dtype: str) -> Any:
    # Arrays come and go at the same addresses: a training step finds all its maps here.
    return to_device(encode_tensor_map(address, shape, strides, box, dtype))


def _map_of(array: Any, shape: Ints, steps: Ints, box: Ints, dtype: str) -> tuple[Any, int, int]:
    """Return a tensor map, and whether heads and batches differ: 1, or 0 where one stands for all.

    Args:
        array: Flat, on the device.
        shape: (batch, heads, lines, elements of a line).
        steps: In elements; the last is 1.
        box: Lines and elements that a copy brings.
        dtype: Of the map.
    """
    size = array.dtype.itemsize
    sizes, strides = list(shape), [size * step for step in steps[:3]] + [size]
    for axis in (0, 1):
        if steps[axis] == 0:
            sizes[axis] = 1
    for axis in (0, 1, 2):
        if sizes[axis] == 1:
            strides[axis] = LINE  # never taken, but the engine asks for one
    address = device_pointer(array)
    tensor_map = _tensor_map(address, tuple(sizes), tuple(strides), (1, 1, *box), dtype)
    return tensor_map, int(sizes[1] > 1), int(sizes[0] > 1)


def multiply(
    out: Any, out_steps: Ints, a: Any, a_steps: Ints, b: Any, b_steps: Ints, shape: Ints,
    form: Form, layout: ProductLayout, bias: Any = 0, before_gelu: Any = 0,
    plane: int = 0, parts: int = 1, band: int | None = None,
) -> None:  # fmt: skip
    """Launch."""
    batch, heads, rows, cols, depth = shape
    kind = "float32" if form.dtype == "tf32" else form.dtype
    deep = depth if form.planes == 1 else form.planes * plane
    a_shape, b_shape = (batch, heads, rows, deep), (batch, heads, cols, deep)
    b_steps = (*b_steps[:2], b_steps[3], b_steps[2])
    a_box, b_box = (layout.rows, form.depth), (layout.cols // layout.cluster, form.depth)
    if form.a_turned:
        a_shape, a_steps, a_box = _turned(a_shape), _turned(a_steps), (form.depth, PANEL)
    if form.b_turned:
        b_shape, b_steps, b_box = _turned(b_shape), _turned(b_steps), (form.depth, PANEL)
    a_map, *a_differs = _map_of(a, a_shape, a_steps, a_box, kind)
    b_map, *b_differs = _map_of(b, b_shape, b_steps, b_box, kind)
    targets = [out, before_gelu]
    if form.out != "float32":
        for i, target in enumerate(targets):
            if target is not 0:  # noqa: F632
                targets[i] = _map_of(
                    target, shape[:4], out_steps, (ROWS, PANEL), form.out
                )[0]  # fmt: skip
    steps = ceil_div(depth, form.depth)
    part_steps = ceil_div(steps, parts)
    sizes = (rows, cols, steps, part_steps, parts, heads, *a_differs, *b_differs, plane)
    row_tiles = ceil_div(rows, layout.rows * layout.cluster)
    band = band or max(BAND_ROWS // (layout.rows * layout.cluster), 1)
    order = Order(
        row_tiles, ceil_div(cols, layout.cols), min(band, row_tiles), batch * heads * parts
    )
    clusters = min(multiprocessors() // layout.cluster, order.items)
    matrix = out_steps[1] // parts
    even = int(all(step % 2 == 0 for step in (*out_steps[:3], cols, matrix)))
    floats = (out_steps[0], out_steps[1], matrix, out_steps[2], even)
    product_kernel(layout, form)[clusters * layout.cluster, layout.threads](
        a_map, b_map, targets[0], targets[1], bias, floats, sizes, order
    )


def _turned(ints: Ints) -> Ints:
    return (*ints[:2], ints[3], ints[2])
