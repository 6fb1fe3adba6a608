"""Turn PTX instructions into functions that kernels call.

::

    @instruction("ex2.approx.ftz.f32 $result, $x;", returns=F32, is_pure=True, x=F32)
    def ex2(x):
        '''Return 2**x.'''

In the text, ``$name`` stands for an operand.  A number is one register.  A fragment, several registers of a
thread that an instruction takes together, is a local array of the kernel, or a row of one.  All its
elements are read before the instruction and written after it.  If every index into the array is a
compile-time constant (in loops of constant length, which the compiler unrolls), the array is kept in
registers, and these reads and writes cost nothing.  ``$name`` is then the list of all registers, separated
by commas.

Nothing is linked, so a kernel with these instructions compiles like any other, also without a GPU.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any, NamedTuple

from llvmlite import ir

from kernels.runtime.targets import intrinsic
from kernels.runtime.types import types


class Kind(NamedTuple):
    """The type of a number in a register."""

    numba: Any  # The type in a kernel
    llvm: Any  # The type for the compiler
    letter: str  # The kind of register


U32 = Kind(types.uint32, ir.IntType(32), "r")
I32 = Kind(types.int32, ir.IntType(32), "r")
#: An address or a descriptor.  Signed, because numba types an unsigned one plus an index as float64.
I64 = Kind(types.int64, ir.IntType(64), "l")
F32 = Kind(types.float32, ir.FloatType(), "f")


class Fragment(NamedTuple):
    """An operand of a PTX instruction: the first ``size`` elements of a local array."""

    kind: Kind
    size: int
    is_read: bool
    is_written: bool


class Tuple(NamedTuple):
    """A tuple of ``size`` numbers of one type, as an operand of a PTX instruction."""

    kind: Kind
    size: int


#: Fragments, of a kind and a size, that an instruction reads, writes, or reads and writes in place.
reads = partial(Fragment, is_read=True, is_written=False)
writes = partial(Fragment, is_read=False, is_written=True)
updates = partial(Fragment, is_read=True, is_written=True)
Operand = Kind | Fragment | Tuple


class _Assembly:
    """The text of an instruction, with its operands numbered as in the compiler, outputs first.

    An operand that is read and written is an output with an input tied to it.
    """

    def __init__(
        self, text: str, results: tuple[Kind, ...], operands: dict[str, Operand], is_pure: bool
    ):
        self.results = results
        self.operands = operands
        self.outputs: list[Kind] = list(results)
        constraints = [f"={kind.letter}" for kind in results]
        numbers = {f"result{i}": [i] for i in range(len(results))}
        numbers["result"] = list(range(len(results)))
        for name, operand in operands.items():
            if isinstance(operand, Fragment) and operand.is_written:
                first = len(self.outputs)
                numbers[name] = list(range(first, first + operand.size))
                self.outputs += [operand.kind] * operand.size
                constraints += [f"={operand.kind.letter}"] * operand.size
        self.inputs: list[Kind] = []
        for name, operand in operands.items():
            kind, count = (operand, 1) if isinstance(operand, Kind) else operand[:2]
            if isinstance(operand, Fragment) and not operand.is_read:
                continue
            first = len(constraints)
            self.inputs += [kind] * count
            if name in numbers:
                constraints += map(str, numbers[name])
            else:
                numbers[name] = list(range(first, first + count))
                constraints += [kind.letter] * count
        self.is_pure = is_pure
        if not is_pure:
            constraints.append("~{memory}")
        self.constraints = ",".join(constraints)
        self.text = re.sub(
            r"\$(\w+)", lambda found: ", ".join(f"${i}" for i in numbers[found[1]]), text
        )

    def call(self, builder: Any, values: Iterable[Any]) -> list[Any]:
        """Emit the instruction; return its outputs."""
        kinds = [kind.llvm for kind in self.outputs]
        single = kinds[0] if len(kinds) == 1 else ir.LiteralStructType(kinds)
        function = ir.FunctionType(
            single if kinds else ir.VoidType(), [kind.llvm for kind in self.inputs]
        )
        assembly = ir.InlineAsm(function, self.text, self.constraints, not self.is_pure)
        # Convergent: the compiler must not move it to where only some lanes of a warp go.
        attributes = ("convergent", "readnone") if self.is_pure else ("convergent",)
        value = builder.call(assembly, list(values), attrs=attributes)
        if len(kinds) < 2:
            return [value] * len(kinds)
        return [builder.extract_value(value, i) for i in range(len(kinds))]

    def argument_type(self, name: str, kind: Any) -> Any:
        """Return the type that an argument of a kernel is cast to; that of a fragment remains."""
        operand = self.operands[name]
        if isinstance(operand, Kind):
            return operand.numba
        return (
            types.UniTuple(operand.kind.numba, operand.size) if isinstance(operand, Tuple) else kind
        )


def _pointers(context: Any, builder: Any, array_type: Any, array: Any, count: int) -> list[Any]:
    data = context.make_array(array_type)(context, builder, array).data
    return [builder.gep(data, [ir.Constant(ir.IntType(64), i)]) for i in range(count)]


def instruction(
    text: str,
    returns: Kind | tuple[Kind, ...] = (),
    is_pure: bool = False,
    **operands: Operand,
) -> Callable[[Callable[..., Any]], Any]:
    """Make the decorated function, which has a docstring and no body, an instruction.

    Args:
        text: PTX.
        returns: Kinds of its results: ``$result`` in the text, or ``$result0``, … for several.
        is_pure: Whether it only computes.  Other instructions keep their order among each other, and loads
            and stores are not moved across them.
        operands: Kinds of the operands, by the names of the function's parameters in their order.
    """
    results = (returns,) if isinstance(returns, Kind) else returns
    assembly = _Assembly(text, results, operands, is_pure)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, places = [], []
        for operand, kind, value in zip(operands.values(), signature.args, args, strict=True):
            if isinstance(operand, Kind):
                values.append(value)
            elif isinstance(operand, Tuple):
                values += [builder.extract_value(value, i) for i in range(operand.size)]
            else:
                pointers = _pointers(context, builder, kind, value, operand.size)
                if operand.is_read:
                    values += [builder.load(pointer) for pointer in pointers]
                if operand.is_written:
                    places += pointers
        outputs = assembly.call(builder, values)
        for pointer, output in zip(places, outputs[len(results) :], strict=True):
            builder.store(output, pointer)
        if not results:
            return context.get_dummy_value()
        if isinstance(returns, Kind):
            return outputs[0]
        return context.make_tuple(builder, signature.return_type, outputs[: len(results)])

    def make(function: Callable[..., Any]) -> Any:
        signature = inspect.signature(function)
        function.ptx = text  # type: ignore[attr-defined]  # for who would do otherwise what it does

        @wraps(function)
        def define(_context: Any, *kinds: Any) -> Any:
            arguments = map(assembly.argument_type, operands, kinds)
            if not results:
                returned = types.void
            elif isinstance(returns, Kind):
                returned = returns.numba
            else:
                returned = types.Tuple([kind.numba for kind in returns])
            return returned(*arguments), generate

        # Numba asks for the parameters by name; the first is the compiler's.
        context = inspect.Parameter("_context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        define.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[context, *signature.parameters.values()]
        )
        return intrinsic(define)

    return make


def address_of(returns: Any, space: int) -> Callable[[Callable[..., Any]], Any]:
    """Make the decorated function, which takes an array and has no body, return the address of the array.

    ``space`` is the compiler's number of the address space; 3 is shared memory.
    """

    def make(function: Callable[..., Any]) -> Any:
        function.ptx = f"mov, from space {space};"  # type: ignore[attr-defined]  # what is seen of it

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            if space:
                data = builder.addrspacecast(data, data.type.pointee.as_pointer(space))
            return builder.ptrtoint(data, context.get_value_type(returns))

        @wraps(function)
        def define(_context: Any, array: Any) -> Any:
            return (returns(array), generate) if isinstance(array, types.Array) else None

        define.__signature__ = inspect.signature(define, follow_wrapped=False)  # type: ignore[attr-defined]
        return intrinsic(define)

    return make
