"""Derivatives of every order of scalars: a function's own code, run again on Scalars instead of numbers.

``forward`` and ``backward`` call :mod:`minitorch.operators` and Python's arithmetic.  Here they run with an
operator of Scalars in the place of each operator of numbers, so that the derivative is recorded too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

from .. import operators
from ..autodiff import Context, History, wrap_tuple
from ..operators import EPS
from ..scalar_functions import ScalarFunction

#: Each operator in terms of the operators and methods that Scalars and tensors share.
RECORDED: dict[str, Callable[..., Any]] = {
    "id": lambda x: x,
    "neg": lambda x: -x,
    "inv": lambda x: 1.0 / x,
    "exp": lambda x: x.exp(),
    "log": lambda x: x.log(),
    "relu": lambda x: x.relu(),
    "sigmoid": lambda x: x.sigmoid(),
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "lt": lambda x, y: x < y,
    "eq": lambda x, y: x == y,
    "inv_back": lambda x, d: -d / (x * x),
    "log_back": lambda x, d: d / (x + EPS),
    "relu_back": lambda x, d: d * (x > 0.0),
}


class _Operators:
    """Stands for :mod:`minitorch.operators`, with operators of Scalars and numbers."""

    def __getattr__(self, name: str) -> Any:
        plain = getattr(operators, name)
        if name not in RECORDED:
            return plain

        def operator(*args: Any) -> Any:
            has_scalar = any(isinstance(x, ScalarFunction.scalar_type) for x in args)
            return (RECORDED[name] if has_scalar else plain)(*args)

        return operator


_OPERATORS = _Operators()


def _on_scalars(function: Any) -> Callable[..., Any]:
    """Return a function that reads operators of Scalars wherever it names those of numbers."""
    plain = getattr(function, "__func__", function)
    stands_for: dict[Any, Any] = {
        id(getattr(operators, n)): getattr(_OPERATORS, n) for n in RECORDED
    }
    stands_for[id(operators)] = _OPERATORS
    names = {name: stands_for.get(id(x), x) for name, x in plain.__globals__.items()}
    code = plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__
    changed = FunctionType(*code)
    return changed if plain is function else changed.__get__(function.__self__)


def vjp(history: History, d_output: Any) -> tuple[Any, ...]:
    """Return the gradient of each input as a Scalar that records how it was computed.

    Args:
        history: How the variable was computed.
        d_output: The gradient of the variable, a Scalar or a number.

    Raises:
        RuntimeError: If the function computes with anything but operators and arithmetic.
    """
    function, ctx, scalar = history.last_fn, Context(), ScalarFunction.scalar_type
    try:
        _on_scalars(function.forward)(ctx, *history.inputs)
        gradients = wrap_tuple(_on_scalars(function.backward)(ctx, d_output))
    except TypeError as error:
        raise RuntimeError(
            f"{function.__name__} is not differentiable twice: its forward and its backward must compute "
            f"by minitorch.operators and by + - * / of numbers, which Scalars replace, but {error}; write "
            "them so, or compose the function of others"
        ) from error
    return tuple(g if isinstance(g, scalar) else scalar(g, None) for g in gradients)


def chain(variable: Any, d_output: Any) -> Iterable[tuple[Any, Any]]:
    """Pair each input of a Scalar with its gradient, a Scalar with a history of its own."""
    history = variable.history
    return zip(history.inputs, vjp(history, d_output), strict=True)


def jvp(history: History, tangents: tuple[Any, ...]) -> Any:
    """Return the tangent of a function's result, given those of its inputs, None for one that is fixed."""
    slopes = vjp(history, 1.0)
    terms = [slope * t for slope, t in zip(slopes, tangents, strict=True) if t is not None]
    return sum(terms[1:], terms[0])


class Same(ScalarFunction):
    """f(a) = a, which joins a variable to its stand-in."""

    @staticmethod
    def forward(ctx: Context, a: float) -> float:
        """Return the number."""
        return operators.id(a)

    @staticmethod
    def backward(ctx: Context, d_output: float) -> float:
        """Return the derivative."""
        return d_output
