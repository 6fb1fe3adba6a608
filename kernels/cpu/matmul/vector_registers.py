"""Intrinsics for matrix products that keep a block of C in vector registers.

Computes   C += A·B, a block of C at a time: :func:`load_block`, :func:`add_outer` for each step of the
           depth, :func:`store_block`.
Source     Van Zee and van de Geijn, BLIS: A Framework for Rapidly Instantiating BLAS Functionality
           (2015), the micro-kernel.
Block      ``BLOCK_ROWS`` rows of a few vectors.  It stays in registers over the whole depth: a step
           loads one row of B, and one number of each row of A that all lanes are multiplied by.
Edges      a block may have fewer rows.  The last row then stands in for the missing ones, which
           writes the same numbers to the same place.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import extending, int64, types
from numba.extending import models, register_model

from kernels.cpu.runtime import plain_python

intrinsic: Any = extending.intrinsic(prefer_literal=True)

_FEATURES = binding.get_host_cpu_features()
#: Bytes of a vector register.
VECTOR_BYTES = 64 if _FEATURES.get("avx512f") else 32 if _FEATURES.get("avx") else 16
#: With two vectors to a row, 16 of 32 registers, or 8 of 16, hold a block of C.
BLOCK_ROWS = 4 if _FEATURES.get("sse2") and VECTOR_BYTES < 64 else 8

#: Columns of B and C come in multiples of this: whole vectors on every processor, of float32 or wider.
LANES = 16

_INT, _INDEX = ir.IntType(64), ir.IntType(32)


class Registers(types.Type):
    """The type of a block of C: ``BLOCK_ROWS`` rows with a number of vectors of scalars each."""

    def __init__(self, scalar: Any, vectors: int):
        self.scalar, self.vectors = scalar, vectors
        self.lanes = VECTOR_BYTES * 8 // scalar.bitwidth
        super().__init__(f"Registers({scalar}, {BLOCK_ROWS}, {vectors}, {self.lanes})")


@register_model(Registers)
class _RegistersModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any):
        vector = ir.VectorType(manager[kind.scalar].get_value_type(), kind.lanes)
        super().__init__(manager, kind, ir.ArrayType(vector, BLOCK_ROWS * kind.vectors))


class _Lines:
    """A range of rows of an array, from a row and column on, in the compiler's representation.

    ``compiler`` are its context and its instruction builder, and ``place`` the array, the first row
    and the first column.
    """

    def __init__(self, compiler: Any, kind: Any, place: Any, count: int = BLOCK_ROWS):
        context, builder = compiler
        array, row, col = place
        x = context.make_array(kind)(context, builder, array)
        by_row, by_col = (builder.extract_value(x.strides, axis) for axis in (0, 1))
        size = kind.dtype.bitwidth // 8
        if kind.layout == "C":
            by_col = ir.Constant(_INT, size)
        self.builder, self.size, self.scalar = builder, size, context.get_data_type(kind.dtype)
        start = builder.add(builder.ptrtoint(x.data, _INT), builder.mul(col, by_col))
        last = builder.sub(builder.extract_value(x.shape, 0), ir.Constant(_INT, 1))
        self.addresses = []
        for r in range(count):
            own = builder.add(row, ir.Constant(_INT, r))
            own = builder.select(builder.icmp_signed("<", own, last), own, last)
            self.addresses.append(builder.add(start, builder.mul(own, by_row)))

    def vector(self, r: int, number: int) -> Any:
        """Return a pointer to a vector of row ``r``."""
        vector = ir.VectorType(self.scalar, VECTOR_BYTES // self.size)
        offset = ir.Constant(_INT, number * VECTOR_BYTES)
        return self.builder.inttoptr(
            self.builder.add(self.addresses[r], offset), vector.as_pointer()
        )

    def spread(self, r: int) -> Any:
        """Load the first number of row ``r`` into every lane of a vector."""
        pointer = self.builder.inttoptr(self.addresses[r], self.scalar.as_pointer())
        vector = ir.VectorType(self.scalar, VECTOR_BYTES // self.size)
        undefined, first = ir.Constant(vector, ir.Undefined), ir.Constant(_INDEX, 0)
        one = self.builder.insert_element(undefined, self.builder.load(pointer), first)
        zeros = ir.Constant(ir.VectorType(_INDEX, vector.count), None)
        return self.builder.shuffle_vector(one, undefined, zeros)


@intrinsic
def zero_block(_context, array, vectors):
    """Return a block of zeros of an array's dtype, with a literal number of vectors in each row."""
    kind = Registers(array.dtype, vectors.literal_value)

    def generate(context, builder, signature, values):
        return ir.Constant(context.get_value_type(kind), None)

    return kind(array, vectors), generate


@intrinsic
def load_block(_context, array, row, col, vectors):
    """Return a block of an array, rows contiguous, from a row and column on."""
    kind = Registers(array.dtype, vectors.literal_value)

    def generate(context, builder, signature, values):
        lines = _Lines((context, builder), array, values[:3])
        block = ir.Constant(context.get_value_type(kind), ir.Undefined)
        for i in range(BLOCK_ROWS * kind.vectors):
            vector = builder.load(lines.vector(*divmod(i, kind.vectors)), align=lines.size)
            block = builder.insert_value(block, vector, i)
        return block

    return kind(array, int64, int64, vectors), generate


@intrinsic
def store_block(_context, block, array, row, col):
    """Write a block to an array, rows contiguous, from a row and column on."""

    def generate(context, builder, signature, values):
        lines = _Lines((context, builder), array, values[1:])
        for i in range(BLOCK_ROWS * block.vectors):
            place = lines.vector(*divmod(i, block.vectors))
            builder.store(builder.extract_value(values[0], i), place, align=lines.size)
        return context.get_dummy_value()

    return types.void(block, array, int64, int64), generate


@intrinsic
def add_outer(_context, block, a, row, b, col, i):
    """Return a block to which column ``i`` of A times row ``i`` of B is added.

    A is (rows, depth) with any strides, B (depth, columns) with contiguous rows; ``row`` and ``col``
    are where the block begins.
    """

    def generate(context, builder, signature, values):
        result, a_value, row_value, b_value, col_value, step = values
        factors = _Lines((context, builder), a, (a_value, row_value, step))
        lines = _Lines((context, builder), b, (b_value, step, col_value))
        vectors = [builder.load(lines.vector(0, v), align=lines.size) for v in range(block.vectors)]
        free = {"flags": ["contract"]}  # one fused multiply-add
        for r in range(BLOCK_ROWS):
            factor = factors.spread(r)
            for v, vector in enumerate(vectors):
                place = r * block.vectors + v
                total = builder.extract_value(result, place)
                total = builder.fadd(total, builder.fmul(factor, vector, **free), **free)
                result = builder.insert_value(result, total, place)
        return result

    return block(block, a, int64, b, int64, int64), generate


def _transpose_square(source: Any, row: int, col: int, target: Any) -> None:
    side = VECTOR_BYTES // source.itemsize
    target[col : col + side, row : row + side] = source[row : row + side, col : col + side].T


@plain_python.intrinsic(_transpose_square)
def transpose_square(_context, source, row, col, target):
    """Write a square of an array to a second array, transposed; its side is the elements of a vector.

    It begins at (row, col) of ``source`` and (col, row) of ``target``; the rows of both are
    contiguous.

    Source: Eklundh, A Fast Computer Method for Matrix Transposing (1972): squares of half the side change
    places, then those within them.
    """
    side = VECTOR_BYTES * 8 // source.dtype.bitwidth

    def generate(context, builder, signature, values):
        lines = _Lines((context, builder), source, values[:3], side)
        vectors = [builder.load(lines.vector(r, 0), align=lines.size) for r in range(side)]
        step = side // 2
        while step:
            # Of a vector and the one `step` below: lane e of the second stands at side + e.
            upper = [e + side - step if e & step else e for e in range(side)]
            lower = [e + side if e & step else e + step for e in range(side)]
            masks = [
                ir.Constant(ir.VectorType(_INDEX, side), [_INDEX(e) for e in mask])
                for mask in (upper, lower)
            ]
            for r in range(side):
                if not r & step:
                    pair = vectors[r], vectors[r + step]
                    vectors[r], vectors[r + step] = (
                        builder.shuffle_vector(*pair, mask) for mask in masks
                    )
            step //= 2
        lines = _Lines((context, builder), target, (values[3], values[2], values[1]), side)
        for r, vector in enumerate(vectors):
            builder.store(vector, lines.vector(r, 0), align=lines.size)
        return context.get_dummy_value()

    return types.void(source, int64, int64, target), generate
