"""The layouts of tensor-core operands: the element of a tile that each register of each lane holds.

A warp's 32 lanes hold a tile together.  All layouts are made of one pattern, eight rows of four pairs:

::

    lane        0  0  1  1  2  2  3  3      lane // 4 is the row,
                4  4  5  5  6  6  7  7      lane % 4 the pair of columns
                …                           (a register of 32 bits is a pair of 16-bit numbers;
               28 28 29 29 30 30 31 31      of float32 accumulators two registers are)

Apart from their width, the accumulators of a product have the layout of the left operand of the next
product, so that probabilities go from S = QKᵀ to P·V without leaving their lane.

Every function takes ints (or arrays of them, which broadcast) and returns ints.  ``half`` is 0 for the low
16 bits of a register and 1 for the high ones.

Source: PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type", "… mma.m16n8k8",
"ldmatrix", "Register fragments and shared memory matrix layouts" of wgmma.
"""

from __future__ import annotations

from types import SimpleNamespace

from kernels.cuda.runtime.kernel import device_function


def a_element(lane, register, half):
    """Return row and column of A, (16, 16), in the left operand's registers; 0 and 1 are of (16, 8)."""
    return (lane >> 2) + 8 * (register & 1), 2 * (lane & 3) + half + 8 * (register >> 1)


def b_element(lane, register, half):
    """Return row and column of B, (16, 8), in the right operand's registers; 0 is of (8, 8)."""
    return 2 * (lane & 3) + half + 8 * register, lane >> 2


def accumulator_element(lane, i):
    """Return row and column of a 16 x 8 tile of accumulators, or of several side by side, four each."""
    return (lane >> 2) + 8 * ((i >> 1) & 1), 8 * (i >> 2) + 2 * (lane & 3) + (i & 1)


def a_element_tf32(lane, register):
    """Return row and column of A, (16, 8), of 32-bit elements."""
    return (lane >> 2) + 8 * (register & 1), (lane & 3) + 4 * (register >> 1)


def b_element_tf32(lane, register):
    """Return row and column of B, (8, 8), of 32-bit elements."""
    return (lane & 3) + 4 * register, lane >> 2


def a_element_8(lane, register, byte):
    """Return row and column of A, (16, 32), of 8-bit elements."""
    return (lane >> 2) + 8 * (register & 1), 4 * (lane & 3) + byte + 16 * (register >> 1)


def matrix_element(lane, half):
    """Return row and column of one 8 x 8 matrix of ``ldmatrix``."""
    return lane >> 2, 2 * (lane & 3) + half


def matrix_row(lane):
    """Return the matrix and the row whose address a lane passes to ``ldmatrix``."""
    return lane >> 3, lane & 7


#: The functions of the layouts, for the host.
PLAIN = SimpleNamespace(
    a_element=a_element, b_element=b_element, accumulator_element=accumulator_element,
    a_element_tf32=a_element_tf32, b_element_tf32=b_element_tf32, a_element_8=a_element_8,
    matrix_element=matrix_element, matrix_row=matrix_row,
)  # fmt: skip


@device_function
def square_place(lane):
    """Return the row and the group of eight columns of a 16 x 16 tile that a lane of ``ldmatrix.x4`` reads.

    Its four matrices are top left, bottom left, top right, bottom right: for A stored by rows, or with
    ``.trans`` for two right operands side by side, stored by rows.
    """
    return lane & 15, lane >> 4


@device_function
def turned_place(lane):
    """Return the same for top left, top right, bottom left, bottom right.

    It is for two right operands stored by columns, or with ``.trans`` for A stored by columns.
    """
    return (lane & 7) + 8 * (lane >> 4), (lane >> 3) & 1


@device_function
def lane_row(lane):
    """Return the first row of a lane's accumulators in a 16 x 8 tile."""
    return lane >> 2


@device_function
def lane_col(lane):
    """Return the first column of a lane's accumulators in a 16 x 8 tile."""
    return 2 * (lane & 3)
