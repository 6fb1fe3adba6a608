"""Compile ``score_mod`` and ``mask_mod`` for float32 kernels without promotion to float64.

Numba promotes like NumPy: an integer times a float32 is a float64, and so is the result of two branches of
these types.  A GPU computes float64 at a half or a 64th of the speed, and converts 64-bit integers slowly,
which would dominate the cost of a score.  Mods are therefore compiled with other typing rules: where numba
would promote to float64 without a float64 operand, integers become float32.

Integers have 64 bits, as in numba, so that no sum or product of indices overflows.  A comparison, quotient,
remainder or absolute value is emitted twice: in 32 bits, if the operands fit, and in 64.  Indices are
declared to be small, so that the compiler knows for most operands that they fit, keeps the first form, and
drops the upper half of the sums before.  For a product of two indices it would not know, so only the second
form is emitted.

Quotients and hyperbolic tangents of float32 come from ``device.branchless``: with the branches of CUDA's
own functions a tanh of score / cap took 33 instructions for each element instead of 18.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from copy import copy
from functools import partial, reduce
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from kernels.cuda.device.branchless import divide, tanh
from kernels.cuda.device.one_source import numbers_of_mods as numbers_of_mods
from kernels.cuda.ptx.emitted import CAN_EMIT, Emitted, captured_array
from kernels.cuda.ptx.inline import I32
from kernels.cuda.runtime.kernel import device_callable, device_function, scalar_type
from kernels.problem.question import Problem
from kernels.runtime.dtypes import FLOAT32
from kernels.runtime.targets import intrinsic
from kernels.runtime.types import int64, types
from kernels.scores.derivatives import kinds_of

# An intrinsic's first argument is the compiler's; callers do not pass it.
# pyright: reportCallIssue=false

#: Maximum number of rows and columns of a call with a mod.
MOST_PLACES = 1 << 26
#: Bit masks of an index, and of an index that may be up to a tile further.
FIRST_PLACE, _PLACE = MOST_PLACES - 1, 2 * MOST_PLACES - 1
#: Number of upper bits that a 32-bit number leaves unused in 64 bits.
_SPARE = 32
#: Comparisons of whole numbers → the symbols of the compiler.
_COMPARISONS = {
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==",
    operator.ne: "!=",
}  # fmt: skip
#: Operations that are emitted as in numba.
_COMBINATIONS = operator.add, operator.sub, operator.mul
_FLOAT, _WIDE, _WHOLE = types.float32, types.float64, types.int64


def check_places(problem: Problem) -> None:
    """Check that the indices of a call are within the range declared to the compiler.

    Raises:
        ValueError: If one is not.
    """
    places = max(problem.seq_q, problem.seq_k)
    if (problem.mask_mod or problem.score_mod) and places > MOST_PLACES:
        raise ValueError(
            f"on CUDA mask_mod and score_mod support at most {MOST_PLACES:,} rows and columns, got "
            f"{places:,}; split the call"
        )


def score_function(
    function: Callable[..., Any],
    dtype: np.dtype[Any],
    last: Any = types.none,
    is_read: bool = False,
) -> Any:
    """Return the device function of a score_mod, for scores of ``dtype``.

    It takes the numbers of the function before (score, batch, head, row, col).  ``last`` is numba's type of
    the last argument of the kernel, after col: None; float32 if the kernel passes row - col, which takes
    one instruction per element instead of three; or an array, the table that the function reads.  With
    ``is_read``, the function is one of ``derivatives.reads_of``.
    """
    plain, real = device_callable(function, dtype), scalar_type(dtype)
    has_numbers, has_table = bool(kinds_of(function)), isinstance(last, types.Array)

    @device_function
    def inner(numbers, score, batch, head, row, col, table):
        if has_numbers:
            if has_table:
                return plain(numbers, score, batch, head, row, col, table)
            return plain(numbers, score, batch, head, row, col)
        if has_table:
            return plain(score, batch, head, row, col, table)
        return plain(score, batch, head, row, col)

    if is_read:

        @device_function
        def found(numbers, score, batch, head, row, col, table):
            weight, i, j, k = inner(numbers, score, batch, head, row, col, table)
            return real(weight), int64(i), int64(j), int64(k)
    else:

        @device_function
        def found(numbers, score, batch, head, row, col, table):
            return real(inner(numbers, score, batch, head, row, col, table))

    if not _has_rules(function, dtype):
        return found

    def within(numbers, score, batch, head, row, col, last):
        row, col = row & _PLACE, col & _PLACE
        _record_distance(row, col, last)
        return found(numbers, score, batch & _PLACE, head & _PLACE, row, col, last)

    numbers, result = numbers_type(function, dtype), types.Tuple([_FLOAT, *[_WHOLE] * 3])
    signature = (result if is_read else _FLOAT)(numbers, _FLOAT, *[_WHOLE] * 4, last)
    emitted = Emitted(within, signature, _with_rules)

    @intrinsic
    def score_mod(context, numbers, score, batch, head, row, col, last):
        return emitted.signature, emitted.call

    score_mod.py_func = within
    return score_mod


def mask_function(function: Callable[..., Any], dtype: np.dtype[Any]) -> Any:
    """Return the device function of a mask_mod: of its numbers and (batch, head, row, col) to a bool."""
    inner = device_callable(function, dtype)
    if not kinds_of(function):
        plain = inner

        @device_function
        def inner(numbers, batch, head, row, col):
            return plain(batch, head, row, col)

    if not _has_rules(function, dtype):
        return inner

    def within(numbers, batch, head, row, col):
        return bool(inner(numbers, batch & _PLACE, head & _PLACE, row & _PLACE, col & _PLACE))

    numbers = numbers_type(function, dtype)
    emitted = Emitted(within, types.boolean(numbers, *[_WHOLE] * 4), _with_rules)

    @intrinsic
    def mask_mod(context, numbers, batch, head, row, col):
        return emitted.signature, emitted.call

    mask_mod.py_func = within
    return mask_mod


def numbers_type(template: Any, dtype: np.dtype[Any]) -> Any:
    """Return numba's type of the numbers that a template takes; those with a fraction are of ``dtype``."""
    real = scalar_type(dtype)
    return types.Tuple([types.int32 if kind is int else real for kind in kinds_of(template)])


def numbers_for(numbers: tuple[Any, ...], dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """Return the numbers of a user function as a launch passes them, those with a fraction as ``dtype``."""
    return tuple([x if type(x) is int else dtype.type(x).item() for x in numbers])


@intrinsic
def _record_distance(context, row, col, distance):
    """Record the distance of a row and a column for the rules, if it is known."""

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        if signature.args[2] == _FLOAT:
            row, col, apart = values
            negative = builder.fsub(target.get_constant(_FLOAT, -0.0), apart)
            target.distances[row, col], target.distances[col, row] = apart, negative
        return target.get_dummy_value()

    return types.void(row, col, distance), emit


_record_distance.py_func = lambda row, col, distance: None


def _has_rules(function: Callable[..., Any], dtype: np.dtype[Any]) -> bool:
    return dtype == FLOAT32 and CAN_EMIT and isinstance(function, FunctionType)


class _Known(NamedTuple):
    """What is known of the values of a function that is being compiled.

    Attributes:
        signed: Absolute value → of what.
        differences: Difference of two places → as a float32.
        bounded: Not negative → whether it fits in 32 bits, and these.
        large: Products of two indices, and their sums.
        distances: Two places → their difference as a float32, from the kernel.
    """

    signed: dict[Any, Any]
    differences: dict[Any, Any]
    bounded: dict[Any, Any]
    large: set[Any]
    distances: dict[Any, Any]


class _Operation(NamedTuple):
    """An operation that is emitted by a rule: numba's target, what is known, and numba's own way."""

    target: Any
    known: _Known
    key: tuple[Any, ...]
    default: Callable[..., Any]


def _fits(known: _Known, builder: Any, value: Any, spare: int) -> Any:
    """Tell whether the upper ``spare`` bits of a number are unused; the compiler mostly knows."""
    if value in known.bounded:
        return known.bounded[value][0]
    bits = value.type(spare)
    return builder.icmp_signed("==", builder.ashr(builder.shl(value, bits), bits), value)


def _constant_of(value: Any) -> int:
    """Return a number that is a compile-time constant; 0 if it is not."""
    known = getattr(value, "constant", 0)
    return known if isinstance(known, int) else 0


def _half(known: _Known, builder: Any, value: Any) -> Any:
    if value in known.bounded:
        return known.bounded[value][1]
    return builder.trunc(value, I32.llvm)


def _narrowest(
    known: _Known, builder: Any, values: Any, small: Any, wide: Any, is_signed: bool = True
) -> Any:
    """Return the 32-bit result if the operands fit; else the 64-bit one, ``wide``.

    A result that is not signed needs no test as an index.
    """
    # A whole number as a result may need a bit more: the least number divided by -1.
    spare = _SPARE if small.type == wide.type else _SPARE + 1
    are_small = reduce(builder.and_, [_fits(known, builder, value, spare) for value in values])
    if small.type == wide.type:
        return builder.select(are_small, small, wide)
    extended = (builder.sext if is_signed else builder.zext)(small, wide.type)
    result = builder.select(are_small, extended, wide)
    if not is_signed:
        known.bounded[result] = are_small, small
    return result


def _converted(target: Any, known: _Known, builder: Any, value: Any) -> Any:
    """Return a whole number of 64 bits as a float32."""
    if value in known.differences:
        return known.differences[value]
    is_small = _fits(known, builder, value, _SPARE)
    small = target.cast(builder, _half(known, builder, value), types.int32, _FLOAT)
    return builder.select(is_small, small, target.cast(builder, value, _WHOLE, _FLOAT))


def _absolute(self: _Operation, builder: Any, values: Any, *args: Any) -> Any:
    (number,), known = values, self.known
    if number in known.large:
        return self.default(builder, values, *args)
    small = _half(known, builder, number)
    negative = builder.icmp_signed("<", small, small.type(0))
    small = builder.select(negative, builder.neg(small), small)
    result = _narrowest(known, builder, values, small, self.default(builder, values, *args), False)
    known.signed[result] = number
    return result


def _combined(self: _Operation, builder: Any, values: Any, *args: Any) -> Any:
    result, known = self.default(builder, values, *args), self.known
    distances = known.distances
    is_product = self.key[0] is operator.mul and not any(map(_constant_of, values))
    if is_product or known.large.intersection(values):
        known.large.add(result)
    if self.key[0] is operator.sub and tuple(values) in distances:
        known.differences[result] = distances[tuple(values)]
    return result


def _compared(self: _Operation, builder: Any, values: Any, *args: Any) -> Any:
    if self.known.large.intersection(values):
        return self.default(builder, values, *args)
    halves = [_half(self.known, builder, value) for value in values]
    small = builder.icmp_signed(_COMPARISONS[self.key[0]], *halves)
    return _narrowest(self.known, builder, values, small, self.default(builder, values, *args))


def _divided(self: _Operation, builder: Any, values: Any, *args: Any) -> Any:
    (number, divisor), known, is_mod = values, self.known, self.key[0] is operator.mod
    constant = _constant_of(divisor)
    # Python rounds quotients down, so that remainders have the sign of the divisor.
    is_signed = not is_mod or constant <= 0
    if constant > 0 and constant & (constant - 1) == 0:
        if is_mod:
            return builder.and_(number, number.type(constant - 1))
        return builder.ashr(number, number.type(constant.bit_length() - 1))
    if known.large.intersection(values):
        result = self.default(builder, values, *args)
        if not is_signed and constant < MOST_PLACES:
            fits = self.target.get_constant(types.boolean, True)
            known.bounded[result] = fits, _half(known, builder, result)
        return result
    narrow = self.target.get_function(self.key[0], types.int32(types.int32, types.int32))
    # The lower half of a divisor that is not 0 may be.
    own_half = _half(known, builder, divisor)
    fitting = builder.select(_fits(known, builder, divisor, _SPARE), own_half, own_half.type(1))
    small = narrow(builder, [_half(known, builder, number), fitting])
    wide = self.default(builder, values, *args)
    return _narrowest(known, builder, values, small, wide, is_signed)


def _without_branch(self: _Operation, builder: Any, values: Any, *args: Any) -> Any:
    numbers = _FLOAT(*[_FLOAT] * len(values))
    return _BRANCHLESS[self.key].call(self.target, builder, numbers, values)


#: Operation and types of its operands → the function in its place.
_BRANCHLESS = {
    (math.tanh, _FLOAT): Emitted(lambda x: tanh(x), _FLOAT(_FLOAT)),
    (operator.truediv, _FLOAT, _FLOAT): Emitted(lambda x, y: divide(x, y), _FLOAT(_FLOAT, _FLOAT)),
}
#: Operation and types of its operands → its rule.
_RULES: dict[tuple[Any, ...], Callable[..., Any]] = {
    **dict.fromkeys(_BRANCHLESS, _without_branch),
    (abs, _WHOLE): _absolute,
    **{(name, _WHOLE, _WHOLE): _combined for name in _COMBINATIONS},
    **{(test, _WHOLE, _WHOLE): _compared for test in _COMPARISONS},
    (operator.mod, _WHOLE, _WHOLE): _divided,
    (operator.floordiv, _WHOLE, _WHOLE): _divided,
}


def _with_rules(target: Any) -> Any:
    """Return numba's target context of a kernel with these rules."""
    patched, known = copy(target), _Known({}, {}, {}, set(), {})
    patched.typing_context = _typing_with_rules(target.typing_context)
    patched.distances = known.distances

    def cast(builder: Any, value: Any, kind: Any, wanted: Any) -> Any:
        if (kind, wanted) != (_WHOLE, _FLOAT):
            return target.cast(builder, value, kind, wanted)
        if value not in known.signed:
            return _converted(target, known, builder, value)
        # A GPU drops the sign of a float32 where it is used, and takes two instructions for an integer's.
        without_sign = target.get_function(math.fabs, _FLOAT(_FLOAT))
        return without_sign(builder, [_converted(target, known, builder, known.signed[value])])

    def get_function(function: Any, signature: Any, **options: Any) -> Any:
        default = type(target).get_function(patched, function, signature, **options)
        key = getattr(function, "typing_key", None), *signature.args
        rule = _RULES.get(key)
        return default if rule is None else partial(rule, _Operation(target, known, key, default))

    patched.cast, patched.get_function = cast, get_function
    patched.make_constant_array = partial(captured_array, target)
    return patched


def _typing_with_rules(typing: Any) -> Any:
    """Return numba's typing context of a kernel with these rules."""
    patched = copy(typing)

    def is_narrow(kind: Any) -> bool:
        return kind == _FLOAT or isinstance(kind, (types.Integer, types.Boolean))

    def resolve_function_type(function: Any, args: Any, kws: Any) -> Any:
        resolved = typing.resolve_function_type(function, args, kws)
        if resolved is None or _WIDE not in (resolved.return_type, *resolved.args):
            return resolved
        if not all(map(is_narrow, args)):  # an operand is a float64 itself
            return resolved
        other = typing.resolve_function_type(function, (_FLOAT,) * len(args), kws)
        is_wide = other is None or _WIDE in (other.return_type, *other.args)
        return resolved if is_wide else other

    def unify_pairs(first: Any, second: Any) -> Any:
        if _FLOAT in (first, second) and is_narrow(first) and is_narrow(second):
            return _FLOAT
        return typing.unify_pairs(first, second)

    def resolve_module_constants(module: Any, name: str) -> Any:
        is_constant = type(getattr(module.pymod, name)) is float  # pi
        return _FLOAT if is_constant else typing.resolve_module_constants(module, name)

    patched.resolve_function_type, patched.unify_pairs = resolve_function_type, unify_pairs
    patched.resolve_module_constants = resolve_module_constants
    return patched
