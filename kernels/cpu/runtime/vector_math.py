"""exp2, exp, log and tanh for compiled loops, in float32 and float64, in forms that LLVM vectorises.

A function of the C library takes its numbers one by one, and the loop that calls it is not vectorised.
These are a few multiply-adds and operations on the bits of a number, without a branch.  Each is written
once; :func:`make_functions` makes it for a dtype.  The module stands in for ``math``: names that it
does not define come from there.

Errors are less than one unit in the last place, for tanh less than 2.75, on processors that have a fused
multiply-add.  Infinities, NaN and subnormal numbers give the same results as in NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.extending import overload, register_jitable

from kernels.cpu.runtime import plain_python

#: Typed as Any, because an intrinsic is called without the compiler's context.
intrinsic: Any = extending.intrinsic


class FloatFormat(NamedTuple):
    """The constants with which exp, exp2, log and tanh are computed in one dtype."""

    real: Any  #: The dtype.
    whole: Any  #: The integer dtype of the same size.
    type: Any  #: Numba's type of ``real``.
    bits: int  #: Number of bits.
    mantissa: int  #: Number of stored bits of the significand.
    bias: int  #: Bias of the exponent.
    #: Powers of the series of an exponential, whose argument is at most ln(2) / 2.  The next one would
    #: add less than a tenth of a unit in the last place.
    terms: int
    #: Powers of the series of the logarithm, whose argument squared is at most 0.0295.
    log_terms: int
    ln2: float  #: The leading digits of ln 2, so few that a product with an exponent is exact.
    ln2_rest: float  #: The rest of ln 2.


FORMATS = (
    FloatFormat(
        np.float32, np.int32, types.float32, 32, 23, 127, 7, 4,
        float.fromhex("0x1.63p-1"), float.fromhex("-0x1.bd0105c610ca8p-13"),
    ),
    FloatFormat(
        np.float64, np.int64, types.float64, 64, 52, 1023, 13, 10,
        float.fromhex("0x1.62e42fee00000p-1"), float.fromhex("0x1.a39ef35793c76p-33"),
    ),
)  # fmt: skip


class Functions(NamedTuple):
    """The functions exp2, exp, log and tanh for one dtype; ``make_functions`` returns them."""

    exp2: Callable[[Any], Any]
    exp: Callable[[Any], Any]
    log: Callable[[Any], Any]
    tanh: Callable[[Any], Any]


@plain_python.intrinsic(plain_python.multiply_add)
def multiply_add(_context, x, y, z):
    """Return x y + z, rounded once where the processor can do that."""

    def generate(_cg_context, builder, _signature, args):
        return _multiply_add(builder, *args)

    return x(x, x, x), generate


def _multiply_add(builder: Any, *args: Any) -> Any:
    kind = args[0].type
    function_type = ir.FunctionType(kind, [kind] * 3)
    function = builder.module.declare_intrinsic("llvm.fmuladd", [kind], function_type)
    return builder.call(function, args)


def _polynomial(*factors: Any) -> Any:
    """Return an intrinsic: the sum of factors[k] x^k, by Horner's rule."""

    @intrinsic
    def polynomial(_context, x):
        def generate(_cg_context, builder, _signature, args):
            constants = [ir.Constant(args[0].type, float(factor)) for factor in factors]
            total = constants.pop()
            while constants:
                total = _multiply_add(builder, total, args[0], constants.pop())
            return total

        return x(x), generate

    return polynomial


def _bitcast(form: FloatFormat) -> tuple[Any, Any]:
    """Return intrinsics that read the bits of a float as an int, and back."""
    ir_float = ir.FloatType() if form.bits == 32 else ir.DoubleType()
    int_type = types.Integer.from_bitwidth(form.bits, signed=True)

    @intrinsic
    def to_bits(_context, x):
        def generate(_cg_context, builder, _signature, args):
            return builder.bitcast(args[0], ir.IntType(form.bits))

        return int_type(form.type), generate

    @intrinsic
    def from_bits(_context, x):
        def generate(_cg_context, builder, _signature, args):
            return builder.bitcast(args[0], ir_float)

        return form.type(int_type), generate

    return to_bits, from_bits


def make_functions(form: FloatFormat) -> Functions:
    """Return the functions for one dtype.

    An argument is clamped by ``bound if x < bound else x``, not by ``max``: a NaN must stay one.
    Exponents are int32 on the way: processors convert these to and from vectors of either dtype.
    """
    real, whole = form.real, form.whole
    to_bits, from_bits = _bitcast(form)
    zero, half, one, two = (real(number) for number in (0.0, 0.5, 1.0, 2.0))
    log2_e, ln2, ln2_rest = real(1.0 / math.log(2.0)), real(form.ln2), real(form.ln2_rest)
    mantissa, bias = whole(form.mantissa), whole(form.bias)

    # e^r = Σ r^k / k!, |r| <= ln(2) / 2; 2^f is the same of r = f ln 2.
    # e^r - 1 = r + r² Σ r^(k-2) / k!: what tanh takes.
    orders = range(form.terms + 1)
    series = [real(1.0 / math.factorial(k)) for k in orders]
    exp2_series = _polynomial(*(real(math.log(2.0) ** k / math.factorial(k)) for k in orders))
    exp_series, bend_series = _polynomial(*series), _polynomial(*series[2:])

    @register_jitable
    def power_of_2(exponent):
        return from_bits(whole((whole(exponent) + bias) << mantissa))

    lowest = real(1.0 - form.bias)

    def exp2(x):
        """Return 2^x for x <= bias - 1, 0 below the normal numbers (minus infinity included)."""
        y = lowest if x < lowest else x
        n = np.rint(y)
        p = exp2_series(y - n)
        # Adding to the exponent field multiplies by a power of two.
        value = from_bits(whole(to_bits(p) + (whole(np.int32(n)) << mantissa)))
        return zero if x < lowest else value

    # From there on e^x is infinite, and up to here 0.
    exp_highest = real((form.bias + 2) * math.log(2.0))
    exp_lowest = real(-(form.bias + form.mantissa + 1) * math.log(2.0))

    def exp(x):
        """Return e^x = 2^n e^r, r = x - n ln 2."""
        y = exp_lowest if x < exp_lowest else x
        y = exp_highest if y > exp_highest else y
        n = np.floor(multiply_add(y, log2_e, half))
        r = multiply_add(n, -ln2_rest, multiply_add(n, -ln2, y))
        # In two steps: 2^n may be none of the normal numbers where e^x is one, and the reverse.
        step = np.int32(np.int32(n) >> 1)
        return exp_series(r) * power_of_2(step) * power_of_2(np.int32(n) - step)

    tanh_clamp, tanh_tiny = real(40.0), real(2.0 ** -(form.mantissa // 2 + 1))

    def tanh(x):
        """Return e / (e + 2), e = exp(2x) - 1, which is precise near 0 too; the sign is added last."""
        y = abs(x + x)
        y = tanh_clamp if y > tanh_clamp else y
        n = np.floor(multiply_add(y, log2_e, half))
        r = multiply_add(n, -ln2_rest, multiply_add(n, -ln2, y))
        power = power_of_2(np.int32(n))
        # e = 2^n (e^r - 1) + (2^n - 1), and e^r - 1 has no 1 to round away against.
        e = multiply_add(power, multiply_add(r * r, bend_series(r), r), power - one)
        value = e / (e + two)
        value = value if x > zero else -value
        return x if abs(x) < tanh_tiny else value

    return Functions(exp2, exp, _make_log(form, to_bits, from_bits), tanh)


def _make_log(form: FloatFormat, to_bits: Any, from_bits: Any) -> Callable[[Any], Any]:
    """Return the natural logarithm for one dtype; see :func:`make_functions`."""
    real, whole, mantissa = form.real, form.whole, form.whole(form.mantissa)
    zero, half, one, two, infinity = (real(number) for number in (0.0, 0.5, 1.0, 2.0, math.inf))
    ln2, ln2_rest = real(form.ln2), real(form.ln2_rest)
    # log(1 + f) = 2s + s R, s = f / (2 + f), R = Σ 2 s^2k / (2k + 1), and 2s = f - s f.
    log_series = _polynomial(*(real(2.0 / (2 * k + 1)) for k in range(1, form.log_terms + 1)))
    smallest, raised = np.finfo(real).smallest_normal, form.mantissa + 1
    raise_, raised_by = real(2.0**raised), real(raised)
    root_half = whole(np.array(math.sqrt(0.5), real).view(whole))

    def log(x):
        """Return n ln 2 and the logarithm of 1 + f, where x = 2^n (1 + f).

        Source: the split of 2s that keeps the error below a unit is that of Sun's fdlibm, e_log.c.
        """
        is_small = x < smallest
        y = x * raise_ if is_small else x
        bits = to_bits(y)
        exponent = np.int32(whole(bits - root_half) >> mantissa)
        f = from_bits(whole(bits - (whole(exponent) << mantissa))) - one
        n = real(exponent) - (raised_by if is_small else zero)
        s = f / (f + two)
        square, half_square = s * s, half * f * f
        rest = multiply_add(s, multiply_add(square, log_series(square), half_square), n * ln2_rest)
        value = multiply_add(n, ln2, f - (half_square - rest))
        value = value if x < infinity else x  # infinity, or NaN
        value = value if x != zero else -infinity
        return value if not x < zero else real(math.nan)

    return log


FUNCTIONS = tuple(make_functions(form) for form in FORMATS)


def _of_its_dtype(name: str, plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that compiled code replaces by the one for its argument's dtype."""

    def function(x: Any) -> Any:
        return plain(x)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Return {name}(x); in compiled code in the dtype of x."
    single, double = (getattr(functions, name) for functions in FUNCTIONS)
    #: The implementations that the overload substitutes; a kernel's fingerprint includes them.
    function.implementations = single, double  # type: ignore[attr-defined]

    # None of the caller's freedoms: where sums may be reordered, what is subtracted twice is not.
    @overload(function, jit_options={"fastmath": False})
    def _in_compiled_code(x):
        return single if x == types.float32 else double

    return function


#: 2^x for x <= 0 or slightly above; 0 for results below the normal numbers, undefined for overflow.
exp2 = _of_its_dtype("exp2", lambda x: 2.0**x)
exp = _of_its_dtype("exp", math.exp)
log = _of_its_dtype("log", math.log)
tanh = _of_its_dtype("tanh", math.tanh)


def __getattr__(name: str) -> Any:
    return getattr(math, name)
