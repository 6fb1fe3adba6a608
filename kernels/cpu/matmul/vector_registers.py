"""Intrinsics for matrix products that keep a block of C in vector registers.

Computes   C += A·B, a block of C at a time: :func:`load_block`, :func:`add_outer` for each step of the
           depth, :func:`store_block`.
Source     Van Zee and van de Geijn, BLIS: A Framework for Rapidly Instantiating BLAS Functionality
           (2015), the micro-kernel.
Block      some rows of a few vectors, ``BLOCK_ROWS`` in a product.  It stays in registers over the
           whole depth: a step loads one row of B, and one number of each row of A that all lanes are
           multiplied by.
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


def _fused(builder: Any, total: Any, factor: Any, vector: Any) -> Any:
    """Return total + factor · vector, one fused multiply-add."""
    free = {"flags": ["contract"]}
    return builder.fadd(total, builder.fmul(factor, vector, **free), **free)


class Registers(types.Type):
    """The type of a block of C: a number of rows with a number of vectors of scalars each."""

    def __init__(self, scalar: Any, rows: int, vectors: int):
        self.scalar, self.rows, self.vectors = scalar, rows, vectors
        self.lanes = VECTOR_BYTES * 8 // scalar.bitwidth
        super().__init__(f"Registers({scalar}, {rows}, {vectors}, {self.lanes})")


@register_model(Registers)
class _RegistersModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any):
        vector = ir.VectorType(manager[kind.scalar].get_value_type(), kind.lanes)
        super().__init__(manager, kind, ir.ArrayType(vector, kind.rows * kind.vectors))


class _Lines:
    """A range of rows of an array, from a row and column on, in the compiler's representation.

    ``compiler`` are its context and its instruction builder, and ``place`` the array, the first row
    and the first column.
    """

    def __init__(self, compiler: Any, kind: Any, place: Any, count: int):
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
def zero_block(_context, array, rows, vectors):
    """Return a block of zeros of an array's dtype; the numbers of rows and of their vectors are literal."""
    kind = Registers(array.dtype, rows.literal_value, vectors.literal_value)

    def generate(context, builder, signature, values):
        return ir.Constant(context.get_value_type(kind), None)

    return kind(array, rows, vectors), generate


@intrinsic
def load_block(_context, array, row, col, rows, vectors):
    """Return a block of an array, rows contiguous, from a row and column on."""
    kind = Registers(array.dtype, rows.literal_value, vectors.literal_value)

    def generate(context, builder, signature, values):
        lines = _Lines((context, builder), array, values[:3], kind.rows)
        block = ir.Constant(context.get_value_type(kind), ir.Undefined)
        for i in range(kind.rows * kind.vectors):
            vector = builder.load(lines.vector(*divmod(i, kind.vectors)), align=lines.size)
            block = builder.insert_value(block, vector, i)
        return block

    return kind(array, int64, int64, rows, vectors), generate


@intrinsic
def store_block(_context, block, array, row, col):
    """Write a block to an array, rows contiguous, from a row and column on."""

    def generate(context, builder, signature, values):
        lines = _Lines((context, builder), array, values[1:], block.rows)
        for i in range(block.rows * block.vectors):
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
        factors = _Lines((context, builder), a, (a_value, row_value, step), block.rows)
        lines = _Lines((context, builder), b, (b_value, step, col_value), 1)
        vectors = [builder.load(lines.vector(0, v), align=lines.size) for v in range(block.vectors)]
        for r in range(block.rows):
            factor = factors.spread(r)
            for v, vector in enumerate(vectors):
                place = r * block.vectors + v
                total = builder.extract_value(result, place)
                total = _fused(builder, total, factor, vector)
                result = builder.insert_value(result, total, place)
        return result

    return block(block, a, int64, b, int64, int64), generate


@intrinsic
def add_dots(_context, block, a, first, b, row, i, count):
    """Return a block of one vector a row, to which products of two arrays are added, lane by lane.

    To row r it adds the products of ``count`` vectors, a literal power of two, of row ``first + r`` of A
    and of one row of B, from column ``i`` on.  Rows are contiguous.
    """
    vectors = count.literal_value

    def generate(context, builder, signature, values):
        result, a_value, first_value, b_value, row_value, step, _ = values
        lines = _Lines((context, builder), a, (a_value, first_value, step), block.rows)
        own = _Lines((context, builder), b, (b_value, row_value, step), 1)
        factors = [builder.load(own.vector(0, v), align=own.size) for v in range(vectors)]
        half = max(vectors // 2, 1)
        for r in range(block.rows):
            line = [builder.load(lines.vector(r, v), align=own.size) for v in range(vectors)]
            sums = [builder.fmul(factors[v], line[v]) for v in range(half)]
            for v in range(half, vectors):
                sums[v - half] = _fused(builder, sums[v - half], factors[v], line[v])
            while len(sums) > 1:
                sums = [builder.fadd(*pair) for pair in zip(sums[::2], sums[1::2], strict=True)]
            total = builder.fadd(builder.extract_value(result, r), sums[0])
            result = builder.insert_value(result, total, r)
        return result

    return block(block, a, int64, b, int64, int64, count), generate


@intrinsic
def store_sums(_context, block, array, row, col):
    """Write the sum of the lanes of each row of a block of one vector a row to ``array[row, col + r]``.

    The lanes of every row are added in the same order.
    """
    group = min(block.rows, block.lanes)

    def generate(context, builder, signature, values):
        lines = _Lines((context, builder), array, values[1:], 1)
        for first in range(0, block.rows, group):
            vectors = [builder.extract_value(values[0], first + r) for r in range(group)]
            bit = 1
            while bit < block.lanes:
                # Of a pair of vectors, lanes with this bit hold the sums of the second from here on.
                pairs = [(v, v) for v in vectors]
                if len(vectors) > 1:
                    pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
                masks = [
                    [e if e & bit == odd else e ^ bit for e in range(block.lanes)]
                    for odd in (0, bit)
                ]
                vectors = [_added(builder, pair, masks, bit) for pair in pairs]
                bit *= 2
            sums = _shuffled(builder, (vectors[0], vectors[0]), range(group))
            place = builder.add(lines.addresses[0], ir.Constant(_INT, first * lines.size))
            builder.store(sums, builder.inttoptr(place, sums.type.as_pointer()), align=lines.size)
        return context.get_dummy_value()

    return types.void(block, array, int64, int64), generate


def _added(builder: Any, pair: Any, masks: Any, bit: int) -> Any:
    """Add two shuffles of a pair of vectors; lanes with a bit come from the second."""
    lanes = pair[0].type.count
    parts = [
        _shuffled(builder, pair, [lane + (lanes if e & bit else 0) for e, lane in enumerate(mask)])
        for mask in masks
    ]
    return builder.fadd(*parts)


def _shuffled(builder: Any, pair: Any, mask: Any) -> Any:
    """Return the lanes of two vectors, numbered one after the other, that a mask names."""
    numbers = [_INDEX(e) for e in mask]
    return builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(_INDEX, len(numbers)), numbers))


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
            for r in range(side):
                if not r & step:
                    pair = vectors[r], vectors[r + step]
                    vectors[r], vectors[r + step] = (
                        _shuffled(builder, pair, mask) for mask in (upper, lower)
                    )
            step //= 2
        lines = _Lines((context, builder), target, (values[3], values[2], values[1]), side)
        for r, vector in enumerate(vectors):
            builder.store(vector, lines.vector(r, 0), align=lines.size)
        return context.get_dummy_value()

    return types.void(source, int64, int64, target), generate
