"""Functions that emit LLVM's instructions: vectors of 128 bits, elements at an address, and conversions."""

# An intrinsic's first argument is the compiler's; callers do not pass it.
# pyright: reportCallIssue=false, reportRedeclaration=false

from __future__ import annotations

from typing import Any

from llvmlite import ir

from kernels.runtime.targets import cgutils, intrinsic
from kernels.runtime.types import float32, int64, types, uint16, uint32

#: Elements that one vector access moves.
VECTOR = 4
#: Alignment, in bytes, that a vector access needs.
ALIGNMENT = 16


def _vector_pointer(
    context: Any, builder: Any, array_type: Any, array: Any, index: Any, element: Any
) -> Any:
    """Return a pointer to a vector of four that begins at an element of an array, and its type."""
    view = context.make_array(array_type)(context, builder, array)
    pointer = cgutils.get_item_pointer(context, builder, array_type, view, index, wraparound=False)
    vector = ir.VectorType(context.get_data_type(element), VECTOR)
    return builder.bitcast(pointer, vector.as_pointer()), vector


def _indices(context: Any, builder: Any, values: Any, kinds: Any) -> list[Any]:
    return [
        context.cast(builder, value, kind, types.intp)
        for value, kind in zip(values, kinds, strict=True)
    ]


def _vector_load(array: Any, *index: Any, element: Any = None) -> Any:
    """Return the intrinsic that loads a vector.

    ``element`` is numba's type of an element of the vector, that of the array when None.
    """
    element = element or array.dtype
    signature = types.UniTuple(element, VECTOR)(array, *index)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        positions = _indices(context, builder, args[1:], sig.args[1:])
        pointer, _ = _vector_pointer(context, builder, sig.args[0], args[0], positions, element)
        value = builder.load(pointer, align=ALIGNMENT)
        lanes = [
            builder.extract_element(value, ir.Constant(ir.IntType(32), i)) for i in range(VECTOR)
        ]
        return context.make_tuple(builder, sig.return_type, lanes)

    return signature, generate


def _vector_store(array: Any, *index: Any, element: Any = None) -> Any:
    """Return the intrinsic that stores a vector, four values after the index; see :func:`_vector_load`."""
    element = element or array.dtype
    signature = types.void(array, *index, *([element] * VECTOR))
    count = len(index)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        positions = _indices(context, builder, args[1 : 1 + count], sig.args[1 : 1 + count])
        pointer, vector = _vector_pointer(
            context, builder, sig.args[0], args[0], positions, element
        )
        value = ir.Constant(vector, ir.Undefined)
        for i in range(VECTOR):
            place = ir.Constant(ir.IntType(32), i)
            value = builder.insert_element(value, args[1 + count + i], place)
        builder.store(value, pointer, align=ALIGNMENT)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def load_shared(_context, a, i):
    """Return four neighbouring elements of a flat shared array: one ``ld.shared.v4``."""
    return _vector_load(a, i)


@intrinsic
def store_shared(_context, a, i, w, x, y, z):
    """Write four neighbouring elements of a flat shared array: one ``st.shared.v4``."""
    return _vector_store(a, i)


@intrinsic
def load_global(_context, a, b, h, i, j):
    """Return four neighbouring elements of a row of a (batch, heads, seq, dim) array."""
    return _vector_load(a, b, h, i, j)


@intrinsic
def load_row(_context, a, i, j):
    """Return four neighbouring elements of a row of a matrix."""
    return _vector_load(a, i, j)


@intrinsic
def store_row(_context, a, i, j, w, x, y, z):
    """Write four neighbouring elements of a row of a matrix."""
    return _vector_store(a, i, j)


@intrinsic
def load_words(_context, a, i):
    """Return eight neighbours of a flat uint16 array as four words: one ``ld.v4``."""
    return _vector_load(a, i, element=uint32)


@intrinsic
def store_words(_context, a, i, w, x, y, z):
    """Write four words as eight neighbours of a flat uint16 array: one ``st.v4``."""
    return _vector_store(a, i, element=uint32)


# The compiler finds out by itself in which memory an array lies.
load_flat, store_flat = load_shared, store_shared


def at_address(element: Any) -> tuple[Any, Any]:
    """Return the functions that load and store element i of an array of a type at an address.

    They are ``(address, i)`` and ``(address, i, value)``.
    """

    def place(context: Any, builder: Any, args: Any) -> Any:
        pointer = ir.PointerType(context.get_data_type(element), 1)  # global memory
        return builder.gep(builder.inttoptr(args[0], pointer), [args[1]])

    @intrinsic
    def load_at(_context, address, i):
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.load(place(context, builder, args))

        return element(int64, int64), generate

    @intrinsic
    def store_at(_context, address, i, value):
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            builder.store(args[2], place(context, builder, args))
            return context.get_dummy_value()

        return types.void(int64, int64, element), generate

    return load_at, store_at


def reinterpreted(of: Any, to: Any) -> Any:
    """Return the function that reinterprets the bits of type ``of`` as type ``to``."""

    @intrinsic
    def reinterpret(_context, x):
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(to))

        return to(of), generate

    return reinterpret


@intrinsic
def widen_float16(_context, bits):
    """Convert the 16 bits of a float16 to float32: one ``cvt.f32.f16``."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return float32(uint16), generate


@intrinsic
def narrow_float16(_context, x):
    """Return the bits of the nearest float16: one ``cvt.rn.f16.f32``."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return uint16(float32), generate
