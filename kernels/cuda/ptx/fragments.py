"""The layouts of tensor-core operands: the element of a tile that each register of each lane holds.

A warp's 32 lanes hold a tile together.  All layouts are made of one pattern, eight rows of four pairs:

::

    lane        0  0  1  1  2  2  3  3      lane // 4 is the row,
                4  4  5  5  6  6  7  7      lane % 4 the pair of columns
                …                           (a register of 32 bits is a pair of 16-bit numbers;
               28 28 29 29 30 30 31 31      of float32 accumulators two registers are)

Apart from their width, the accumulators of a product have the layout of the left operand of the next
product, so that probabilities go from S = QKᵀ to P·V without leaving their lane.

Every function takes ints (or arrays of them, which broadcast) and returns ints.  :func:`make_fragments`
builds the functions for a compiler.

Source: PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type", "… mma.m16n8k8",
"ldmatrix", "Register fragments and shared memory matrix layouts" of wgmma.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kernels.common.geometry import same
from kernels.cuda.runtime.kernel import device_function


class Fragments(NamedTuple):
    """The functions that :func:`make_fragments` returns.

    ``half`` is 0 for the low 16 bits of a register and 1 for the high ones.
    """

    #: ``(lane, register, half)``: row and column of A, (16, 16), that the left operand's registers 0-3
    #: hold; its registers 0 and 1 are that of (16, 8).
    a_element: Callable[..., Any]
    #: ``(lane, register, half)``: row and column of B, (16, 8), that the right operand's registers 0 and 1
    #: hold; register 0 is that of (8, 8).
    b_element: Callable[..., Any]
    #: ``(lane, i)``: row and column of a 16 x 8 tile of accumulators, or of several side by side: four of
    #: ``i`` each.
    accumulator_element: Callable[..., Any]
    #: ``(lane, register)``: row and column of A, (16, 8), of 32-bit elements.
    a_element_tf32: Callable[..., Any]
    #: ``(lane, register)``: row and column of B, (8, 8), of 32-bit elements.
    b_element_tf32: Callable[..., Any]
    #: ``(lane, register, byte)``: row and column of A, (16, 32), of 8-bit elements.
    a_element_8: Callable[..., Any]
    #: ``(lane, half)``: row and column of one 8 x 8 matrix of ``ldmatrix``.
    matrix_element: Callable[..., Any]
    #: ``(lane)``: the matrix and the row whose address a lane passes to ``ldmatrix``.
    matrix_row: Callable[..., Any]
    #: ``(lane)``: the row and the group of eight columns of a 16 x 16 tile that a lane of ``ldmatrix.x4``
    #: reads, if its four matrices are top left, bottom left, top right, bottom right: for A stored by rows,
    #: or with ``.trans`` for two right operands side by side, stored by rows.
    square_place: Callable[..., Any]
    #: ``(lane)``: the same for top left, top right, bottom left, bottom right: for two right operands
    #: stored by columns, or with ``.trans`` for A stored by columns.
    turned_place: Callable[..., Any]


def make_fragments(compile_: Callable[[Any], Any]) -> Fragments:
    """Return the maps for one compiler (see ``geometry.make_geometry``)."""

    @compile_
    def a_element(lane, register, half):
        return (lane >> 2) + 8 * (register & 1), 2 * (lane & 3) + half + 8 * (register >> 1)

    @compile_
    def b_element(lane, register, half):
        return 2 * (lane & 3) + half + 8 * register, lane >> 2

    @compile_
    def accumulator_element(lane, i):
        return (lane >> 2) + 8 * ((i >> 1) & 1), 8 * (i >> 2) + 2 * (lane & 3) + (i & 1)

    @compile_
    def a_element_tf32(lane, register):
        return (lane >> 2) + 8 * (register & 1), (lane & 3) + 4 * (register >> 1)

    @compile_
    def b_element_tf32(lane, register):
        return (lane & 3) + 4 * register, lane >> 2

    @compile_
    def a_element_8(lane, register, byte):
        return (lane >> 2) + 8 * (register & 1), 4 * (lane & 3) + byte + 16 * (register >> 1)

    @compile_
    def matrix_element(lane, half):
        return lane >> 2, 2 * (lane & 3) + half

    @compile_
    def matrix_row(lane):
        return lane >> 3, lane & 7

    @compile_
    def square_place(lane):
        return lane & 15, lane >> 4

    @compile_
    def turned_place(lane):
        return (lane & 7) + 8 * (lane >> 4), (lane >> 3) & 1

    return Fragments(
        a_element,
        b_element,
        accumulator_element,
        a_element_tf32,
        b_element_tf32,
        a_element_8,
        matrix_element,
        matrix_row,
        square_place,
        turned_place,
    )


#: The functions for plain Python and NumPy arrays of lanes.
PLAIN = make_fragments(same)
#: The functions for kernels.
DEVICE = make_fragments(device_function)


@device_function
def lane_row(lane):
    """Return the first row of a lane's accumulators in a 16 x 8 tile."""
    return lane >> 2


@device_function
def lane_col(lane):
    """Return the first column of a lane's accumulators in a 16 x 8 tile."""
    return 2 * (lane & 3)
