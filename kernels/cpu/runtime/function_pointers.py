"""Calls of separately compiled functions by address.

A kernel that referred to the function by name would be recompiled for each; an address is just a number.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import prange, types

from kernels.cpu.runtime import plain_python
from kernels.cpu.runtime.plain_python import intrinsic
from kernels.runtime.jit import JIT_DISABLED, compile_signature, njit_cached


def address_of(dispatcher: Any, signature: Any) -> int:
    """Compile (or load from disk) a function for one signature and return the address of its code.

    The address is valid while the dispatcher exists.
    """
    if JIT_DISABLED:
        return plain_python.address_of(dispatcher)
    compile_signature(dispatcher, signature)
    compiled = dispatcher.get_compile_result(signature)
    return compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name)


@intrinsic(plain_python.call)
def call(_context, address, args):
    """Call the function at an address with a tuple of arguments; it returns nothing.

    The types must be those of its signature.  The layout of an array is not part of its
    representation: a contiguous array may be passed for a strided one, and the reverse.
    """

    def generate(context, builder, signature, values):
        # An index of a prange may be unsigned where the function takes a signed number: the same bits.
        parts = [builder.extract_value(values[1], n) for n in range(args.count)]
        native = ir.FunctionType(ir.VoidType(), [part.type for part in parts])
        builder.call(builder.inttoptr(values[0], native.as_pointer()), parts)
        return context.get_dummy_value()

    return types.void(address, args), generate


@intrinsic(plain_python.take)
def take(_context, counter):
    """Return the number in a one-element int64 array and count it up, in one step for all threads.

    A thread that reads a number sees all that other threads wrote before they took theirs.
    """

    def generate(context, builder, signature, values):
        place = context.make_array(signature.args[0])(context, builder, values[0]).data
        return builder.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(counter), generate


@intrinsic(plain_python.array_at)
def array_at(_context, address, shape, strides, dtype):
    """Return an array at an address; the caller keeps the memory alive.

    Shape and strides, in bytes, are tuples; the dtype is one such as ``np.uint8`` or ``x.dtype``.
    """
    kind = types.Array(dtype.dtype, shape.count, "A")

    def generate(context, builder, signature, values):
        array = context.make_array(kind)(context, builder)
        scalar = context.get_data_type(kind.dtype)
        context.populate_array(
            array,
            data=builder.inttoptr(values[0], scalar.as_pointer()),
            shape=values[1],
            strides=values[2],
            itemsize=ir.Constant(ir.IntType(64), context.get_abi_sizeof(scalar)),
            meminfo=None,
        )
        return array._getvalue()

    return kind(address, shape, strides, dtype), generate


@intrinsic(plain_python.contiguous)
def contiguous(_context, array):
    """Return an array typed as contiguous, which the caller guarantees.

    LLVM does not vectorise a loop over a stride that it only learns at run time.
    """

    def generate(context, builder, signature, values):
        context.nrt.incref(builder, signature.return_type, values[0])
        return values[0]

    return array.copy(layout="C")(array), generate


@njit_cached
def run_alone(address, settings, items):
    """Call ``address(settings, item)`` for each work item, one after the other.

    ``settings`` are the bytes of a record, or a list with the record.
    """
    for item in range(items):
        call(address, (settings, item))


@njit_cached(parallel=True)
def run_items(address, settings, counter, items, threads):
    """Call ``address(settings, item)`` for each work item: the one parallel loop of these kernels.

    The counter, (1,) int64, is the index of the next work item; a thread takes it when it has
    finished its last.
    """
    for _ in prange(threads):
        item = take(counter)
        while item < items:
            call(address, (settings, item))
            item = take(counter)
