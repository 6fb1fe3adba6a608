"""Draw how arrays lie in memory: order of dimensions, gaps, offsets, negative strides, repeated elements.

One strategy for every array operand of every public function, on the host and on a device.  The memory
around the elements and in the gaps between them is NaN (True for booleans), so that a kernel that reads it
gives a wrong result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from kernels.cuda.runtime.arrays import device_view, to_device

#: Bytes of poison: NaN in every floating dtype, True in booleans, -1 in integers.
POISON = 0xFF


class Layout(NamedTuple):
    """How an array lies in memory.

    Attributes:
        order: The dimensions, the slowest first.
        spread: For each dimension, the factor by which its stride exceeds that of a dense array.
        first: Elements before the first one.
        backwards: For each dimension, whether its stride is negative.
        repeats: For each dimension, whether one entry stands for all, by a stride of 0.
        odd: The stride, in elements, of dimensions of size 1, or None for that of a dense array.
    """

    order: tuple[int, ...]
    spread: tuple[int, ...]
    first: int
    backwards: tuple[bool, ...]
    repeats: tuple[bool, ...]
    odd: int | None = None


#: Factors of a stride: most dimensions have no gaps.
_SPREADS = [1, 1, 1, 1, 2, 3]


@st.composite
def layouts(draw: Any, dims: int) -> Layout:
    """Draw the layout of an array of so many dimensions; one in six is row-major."""
    order, none = tuple(range(dims)), (False,) * dims
    plain = Layout(order, (1,) * dims, 0, none, none)
    kind = draw(
        st.sampled_from(["row-major", "heads behind rows", "permuted", "gaps", "repeated", "any"])
    )
    if kind == "row-major":
        return plain
    if kind == "heads behind rows":  # as x.view(batch, seq, heads, dim).transpose(1, 2) lies
        return plain._replace(order=(*order[:-3], *order[-2:-1], *order[-3:-2], *order[-1:]))
    order = tuple(draw(st.permutations(order)))
    if kind == "permuted":
        return plain._replace(order=order)
    flags = st.tuples(*[st.sampled_from([False, False, True])] * dims)
    return Layout(
        order if kind == "any" else plain.order,
        tuple(draw(st.sampled_from(_SPREADS)) for _ in range(dims)),
        draw(st.sampled_from([0, 0, 1, 2, 8])),
        draw(flags) if kind == "any" else none,
        draw(flags) if kind == "repeated" else none,
        draw(st.sampled_from([None, 0, 1, 3, 40])),
    )


def laid(values: np.ndarray[Any, Any], layout: Layout) -> np.ndarray[Any, Any]:
    """Return an array with these values that lies in memory as a layout says.

    Where the layout repeats entries, the first one stands for the others.
    """
    shape, strides, total = values.shape, [0] * values.ndim, 1
    for axis in reversed(layout.order):
        if layout.repeats[axis] and shape[axis] != 1:
            continue
        strides[axis] = total * layout.spread[axis]
        total = max(strides[axis] * shape[axis], 1)
        if shape[axis] == 1 and layout.odd is not None:
            strides[axis] = layout.odd
        elif layout.backwards[axis]:
            strides[axis] = -strides[axis]
    buffer, offset = _buffer(shape, strides, values.dtype, layout.first)
    return _filled(buffer, offset, strides, values)


def _buffer(shape: Any, strides: Any, dtype: Any, first: int = 0) -> tuple[Any, int]:
    """Return poisoned memory for an array with strides in elements, and where its first element lies."""
    ends = [step * (size - 1) for step, size in zip(strides, shape, strict=True)]
    low, high = sum(min(end, 0) for end in ends), sum(max(end, 0) for end in ends)
    size = 0 if 0 in shape else high - low + 1
    memory = np.full((first + size + 1) * dtype.itemsize, POISON, np.uint8)
    return memory.view(dtype), first - low


def _filled(buffer: Any, offset: int, strides: Any, values: Any) -> Any:
    """Return the array in a buffer, its elements written once each."""
    size = buffer.itemsize
    start = np.ndarray(
        values.shape, buffer.dtype, buffer, offset * size, [step * size for step in strides]
    )
    write_once(start, values)
    return start


def write_once(array: Any, values: Any) -> None:
    """Write values to an array; of entries that a stride of 0 repeats, the first one."""
    once = tuple(slice(None) if step else slice(0, 1) for step in array.strides)
    array[once] = values[once]


def memory_of(array: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], tuple[int, ...], int]:
    """Return what another library needs to lay out an array alike.

    Returns:
        Memory that has the elements and poison between them, (size,); the strides in elements; and the
        place of the first element.
    """
    strides = tuple(step // array.itemsize for step in array.strides)
    buffer, offset = _buffer(array.shape, strides, array.dtype)
    _filled(buffer, offset, strides, array)
    return buffer, strides, offset


def on_device(array: np.ndarray[Any, Any]) -> Any:
    """Return a device array with the elements and the strides of a NumPy array, poison in its gaps."""
    buffer, strides, offset = memory_of(array)
    return device_view(to_device(buffer), array.shape, strides, offset)


def in_order(array: Any, operand: Any) -> bool:
    """Tell whether a result has no gaps and its dimensions are ordered in memory as an operand's.

    Dimensions of size 1 do not count, and a result may have any order where the operand repeats elements
    or broadcasts.
    """
    sizes = [axis for axis, size in enumerate(array.shape) if size != 1]
    if any(operand.strides[axis] == 0 or operand.shape[axis] == 1 for axis in sizes):
        return True
    step = array.dtype.itemsize
    for axis in sorted(sizes, key=lambda axis: (abs(operand.strides[axis]), -axis)):
        if array.strides[axis] != step:
            return False
        step *= array.shape[axis]
    return True
