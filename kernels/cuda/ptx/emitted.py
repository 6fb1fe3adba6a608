"""Functions that numba compiles once and LLVM inlines into kernels, for short compile times.

Numba copies an inlined function at every call, and types and lowers each copy, which takes a minute for the
options of a tile's 64 elements.  An emitted function is compiled once, with a call for each use.  LLVM then
inlines it faster, and arguments that are known at a call become constants.
"""

# An intrinsic's first argument is the compiler's; callers do not pass it.
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from kernels.cuda.runtime.kernel import device_function
from kernels.runtime.targets import cuda, driver, intrinsic
from kernels.runtime.types import types

#: Whether numba.cuda has a compiler that this module supports; otherwise numba inlines.
CAN_EMIT = driver is not None


class Emitted:
    """Compiles a function once for a kernel, and emits its calls.

    Args:
        function: A plain function; it may call device functions.
        signature: Numba's types of its result and its arguments.
        adapt: Converts numba's target of the kernel to that of the function; None keeps the target.
    """

    #: Attributes that are part of a kernel's fingerprint; the last compiled code is not.
    made_of = "function", "signature", "adapt"

    def __init__(
        self,
        function: Callable[..., Any],
        signature: Any,
        adapt: Callable[[Any], Any] | None = None,
    ):
        self.function, self.signature, self.adapt = function, signature, adapt
        self._caller: Any = None  # what is being compiled, and the function for it
        self._compiled: Any = None

    def call(self, context: Any, builder: Any, signature: Any, values: Any) -> Any:
        """Emit a call with values of a signature, which are converted; return the result."""
        if self._caller is not context.active_code_library:
            self._caller = context.active_code_library
            flags = cuda.core.targetconfig.ConfigStack().top().copy()
            flags.forceinline = True
            target = self.adapt(context) if self.adapt else context
            self._compiled = target.compile_subroutine(
                builder, self.function, self.signature, flags=flags, caching=False
            )
        arguments = [
            context.cast(builder, value, *kinds)
            for value, *kinds in zip(values, signature.args, self.signature.args, strict=True)
        ]
        return context.call_internal(builder, self._compiled.fndesc, self.signature, arguments)


def unrolled(count: int, body: Callable[..., None]) -> Any:
    """Return ``(s, bits, given)``, which calls ``body(s, bits, n, given)`` for n from 0 up to ``count``.

    The compiler unrolls only short loops, and only then do local arrays stay in registers.  This loop is
    always unrolled.  ``body`` is a plain function, which may call device functions.
    """
    inner = device_function(body)

    def in_turn(s, bits, given):
        for n in range(count):
            inner(s, bits, n, given)

    if not CAN_EMIT:
        return device_function(in_turn)

    @intrinsic
    def for_each(context, s, bits, given):
        one = Emitted(body, types.void(s, bits, types.int64, given))

        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            kinds = types.void(s, bits, types.int64, given)
            for n in range(count):
                number = context.get_constant(types.int64, n)
                one.call(context, builder, kinds, (values[0], values[1], number, values[2]))
            return context.get_dummy_value()

        return types.void(s, bits, given), emit

    for_each.py_func = in_turn
    return for_each


def captured_array(target: Any, builder: Any, kind: Any, array: Any) -> Any:
    """Return an array that a function captures, in global memory.

    Numba would put it into constant memory, which is limited to 64 KB, and which serves lanes that read
    different elements one after the other.
    """
    array = np.ascontiguousarray(array)
    content = bytearray(array.tobytes())
    data = ir.Constant(ir.ArrayType(ir.IntType(8), len(content)), content)
    name = builder.module.get_unique_name("captured")
    held: Any = ir.GlobalVariable(builder.module, data.type, name, addrspace=1)  # global memory
    held.linkage, held.global_constant, held.initializer, held.align = "internal", True, data, 16
    result = target.make_array(kind)(target, builder)
    pointer = builder.addrspacecast(held, ir.PointerType(data.type))
    shape, strides = (
        [target.get_constant(types.intp, number) for number in numbers]
        for numbers in (array.shape, array.strides)
    )
    target.populate_array(
        result,
        data=builder.bitcast(pointer, result.data.type),
        shape=shape,
        strides=strides,
        itemsize=target.get_constant(types.intp, array.itemsize),
        parent=None,
        meminfo=None,
    )
    return result._getvalue()
