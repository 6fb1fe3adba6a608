"""Expressions that a user of the app types: read as a tree, and never run as code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from minitorch import Scalar
from minitorch.scalar_functions import ScalarFunction

#: What an expression may call.
METHODS = ("exp", "log", "relu", "sigmoid", "sum", "mean")
#: Those that take a dimension.
REDUCTIONS = ("sum", "mean")
#: Characters of an expression at most.
LONGEST = 1000
#: What the signs mean.
SIGNS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def power(exponent: float) -> type[ScalarFunction]:
    """Return the function that raises a Scalar to a constant power."""

    class Power(ScalarFunction):
        @staticmethod
        def forward(ctx: Any, x: float) -> float:
            ctx.save_for_backward(x)
            return math.pow(x, exponent)

        @staticmethod
        def backward(ctx: Any, d_output: float) -> float:
            (x,) = ctx.saved_values
            return d_output * exponent * math.pow(x, exponent - 1.0) if exponent else 0.0

    Power.__name__ = f"Power {exponent:g}"
    return Power


def evaluate(text: str, variables: dict[str, Any]) -> Any:
    """Return the value of an expression of + - * / **, the variables and METHODS; no code of it is run."""
    if len(text) > LONGEST:
        raise ValueError(
            f"it has {len(text):,} characters, {LONGEST:,} are the most; write a shorter one"
        )
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, variables)
    except SyntaxError as error:
        raise ValueError(f"{text!r} is no expression: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError("it is too deep; write a shorter one") from None


def _value(node: ast.expr, variables: dict[str, Any]) -> Any:
    """Return the value of a part of an expression; raise ValueError for what is not known here."""
    match node:
        case ast.Constant(value=(int() | float()) as number) if not isinstance(number, bool):
            return float(number)
        case ast.Name() if node.id in variables:
            return variables[node.id]
        case ast.BinOp() if type(node.op) in SIGNS:
            return SIGNS[type(node.op)](_value(node.left, variables), _value(node.right, variables))
        case ast.BinOp(op=ast.Pow()):
            return _raised(_value(node.left, variables), _value(node.right, variables))
        case ast.UnaryOp() if type(node.op) in SIGNS:
            return SIGNS[type(node.op)](_value(node.operand, variables))
        case ast.Call(func=ast.Attribute(value=inner, attr=name), keywords=[]) if name in METHODS:
            if len(node.args) > (name in REDUCTIONS):
                raise ValueError(
                    f"{name} takes {'one dimension' if name in REDUCTIONS else 'no argument'}"
                )
            owner = _value(inner, variables)
            if not hasattr(owner, name):
                kind = "a Scalar" if isinstance(owner, Scalar) else "a number without a variable"
                raise ValueError(f"{kind} has no {name}")
            return getattr(owner, name)(*(_whole(arg) for arg in node.args))
    text = ast.unparse(node)
    match node:
        case ast.Name():
            raise ValueError(f"{text} is not known here; {', '.join(variables)} are")
        case ast.Constant():
            raise ValueError(f"{text} is no number")
        case ast.Call() if not isinstance(node.func, ast.Attribute):
            raise ValueError(f"{text}: functions are methods here, as in x.exp()")
    raise ValueError(f"{text} is not known here; + - * / ** and {', '.join(METHODS)} are")


def _raised(base: Any, exponent: Any) -> Any:
    """Return a power; a Scalar takes a number as exponent."""
    if isinstance(exponent, Scalar):
        raise ValueError("the exponent must be a number, as in x ** 2")
    if isinstance(base, Scalar):
        return power(exponent).apply(base)
    if isinstance(base, float) and isinstance(exponent, float):
        return math.pow(base, exponent)
    return base**exponent


def _whole(node: ast.expr) -> int:
    """Return an argument of a method, which is the number of a dimension."""
    try:
        found = ast.literal_eval(node)
    except ValueError:
        found = None
    if type(found) is not int:
        raise ValueError(
            f"a dimension must be a whole number, as in x.sum(0), got {ast.unparse(node)}"
        )
    return found
