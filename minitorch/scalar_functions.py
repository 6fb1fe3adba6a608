"""The functions of scalars: each is a class that computes a value and its derivative."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any, ClassVar

from . import operators
from .autodiff import Context, History, wrap_tuple
from .scalars.modes import modes  # beyond module 5


def unwrap_tuple(x: tuple[Any, ...]) -> Any:
    """Turn a tuple of one into its value; leave a longer one alone."""
    return x[0] if len(x) == 1 else x


class ScalarFunction:
    """A differentiable function of numbers.

    A subclass defines two static methods and is never instantiated:

    - `forward(ctx, *numbers) -> float` computes the value and saves in `ctx` what `backward` needs;
    - `backward(ctx, d_output)` returns d_output times the derivative with respect to each input, as a
      float if there is one input and as a tuple if there are more.
    """

    forward: ClassVar[Callable[..., float]]
    backward: ClassVar[Callable[..., float | tuple[float, ...]]]

    # The class that `apply` wraps numbers and results in. `scalar.py` sets it right after it
    # defines Scalar: the operators of Scalar call the functions below, so that file imports this
    # one, and an import in the other direction would close a cycle.
    scalar_type: ClassVar[type[Any]]

    @classmethod
    def _forward(cls, ctx: Context, *inputs: float) -> float:
        if modes.observer:  # beyond module 5
            return modes.observer.forward(cls, ctx, *inputs)
        return cls.forward(ctx, *inputs)

    @classmethod
    def _backward(cls, ctx: Context, d_output: float) -> tuple[float, ...]:
        derivatives = wrap_tuple(cls.backward(ctx, d_output))
        if modes.observer:  # beyond module 5
            given = d_output, *ctx.saved_values
            modes.observer.check_gradients(cls, ctx, enumerate(derivatives), given)
        return derivatives

    @classmethod
    def apply(cls, *vals: Any) -> Any:
        """Compute the function and record in the result how it was computed.

        Args:
            *vals: Scalars or plain numbers. A plain number becomes a new leaf of the graph;
                `forward` receives the number itself.

        Returns:
            A new Scalar whose history names this function and its inputs.

        Raises:
            TypeError: If an input is neither a Scalar nor a number.
            AssertionError: If `forward` returns something other than a float.
        """
        scalar = cls.scalar_type
        inputs, numbers = [], []
        for val in vals:
            if isinstance(val, scalar):
                inputs.append(val)
                numbers.append(val.data)
            elif isinstance(val, Real):
                inputs.append(scalar(val))
                numbers.append(val)
            else:
                raise TypeError(
                    f"{cls.__name__} was applied to a value of type {type(val).__name__}; it takes "
                    f"Scalars and numbers: convert the value with float() first"
                )

        ctx = Context(no_grad=False)
        value = cls._forward(ctx, *numbers)
        if not isinstance(value, float):
            raise AssertionError(
                f"{cls.__name__}.forward returned {value!r} of type {type(value).__name__}, expected a "
                f"float: return a float, or apply it to floats (5.0 instead of 5)"
            )
        return scalar(value, History(cls, ctx, tuple(inputs)))


class Add(ScalarFunction):
    """f(a, b) = a + b."""

    @staticmethod
    def forward(ctx: Context, a: float, b: float) -> float:
        return operators.add(a, b)

    @staticmethod
    def backward(ctx: Context, d_output: float) -> tuple[float, float]:
        return d_output, d_output


class Log(ScalarFunction):
    """f(a) = log(a + EPS)."""

    @staticmethod
    def forward(ctx: Context, a: float) -> float:
        ctx.save_for_backward(a)
        return operators.log(a)

    @staticmethod
    def backward(ctx: Context, d_output: float) -> float:
        (a,) = ctx.saved_values
        return operators.log_back(a, d_output)


class Mul(ScalarFunction):
    """f(a, b) = a * b."""

    @staticmethod
    def forward(ctx: Context, a: float, b: float) -> float:
        # TASK 1.2: Save both factors: backward needs them.
        ctx.save_for_backward(a, b)
        return operators.mul(a, b)
        # END TASK 1.2

    @staticmethod
    def backward(ctx: Context, d_output: float) -> tuple[float, float]:
        # TASK 1.4: How fast does a b grow with a, and how fast with b? Return two numbers.
        a, b = ctx.saved_values
        return d_output * b, d_output * a
        # END TASK 1.4


class Inv(ScalarFunction):
    """f(a) = 1 / a."""

    @staticmethod
    def forward(ctx: Context, a: float) -> float:
        # TASK 1.2: Save a; use operators.inv.
        ctx.save_for_backward(a)
        return operators.inv(a)
        # END TASK 1.2

    @staticmethod
    def backward(ctx: Context, d_output: float) -> float:
        # TASK 1.4: There is an operator for this product: inv_back.
        (a,) = ctx.saved_values
        return operators.inv_back(a, d_output)
        # END TASK 1.4


class Neg(ScalarFunction):
    """f(a) = -a."""

    @staticmethod
    def forward(ctx: Context, a: float) -> float:
        # TASK 1.2: Use operators.neg.
        return operators.neg(a)
        # END TASK 1.2

    @staticmethod
    def backward(ctx: Context, d_output: float) -> float:
        # TASK 1.4: How fast does -a grow with a?
        return operators.neg(d_output)
        # END TASK 1.4


class Sigmoid(ScalarFunction):
    """f(a) = 1 / (1 + e^-a)."""

    @staticmethod
    def forward(ctx: Context, a: float) -> float:
        # TASK 1.2: Save the result: the slope is a function of it alone.
        out = operators.sigmoid(a)
        ctx.save_for_backward(out)
        return out
        # END TASK 1.2

    @staticmethod
    def backward(ctx: Context, d_output: float) -> float:
        # TASK 1.4: Derive 1 / (1 + e^-a), and write it in terms of the saved result.
        (out,) = ctx.saved_values
        return d_output * out * (1.0 - out)
        # END TASK 1.4


class ReLU(ScalarFunction):
    """f(a) = a where a is positive, else 0."""

    @staticmethod
    def forward(ctx: Context, a: float) -> float:
        # TASK 1.2: Save a; use operators.relu.
        ctx.save_for_backward(a)
        return operators.relu(a)
        # END TASK 1.2

    @staticmethod
    def backward(ctx: Context, d_output: float) -> float:
        # TASK 1.4: There is an operator for this product: relu_back.
        (a,) = ctx.saved_values
        return operators.relu_back(a, d_output)
        # END TASK 1.4


class Exp(ScalarFunction):
    """f(a) = e^a."""

    @staticmethod
    def forward(ctx: Context, a: float) -> float:
        # TASK 1.2: Save the result: e^a is its own slope.
        out = operators.exp(a)
        ctx.save_for_backward(out)
        return out
        # END TASK 1.2

    @staticmethod
    def backward(ctx: Context, d_output: float) -> float:
        # TASK 1.4: Which function is its own derivative?
        (out,) = ctx.saved_values
        return d_output * out
        # END TASK 1.4


class LT(ScalarFunction):
    """f(a, b) = 1 if a < b, else 0."""

    @staticmethod
    def forward(ctx: Context, a: float, b: float) -> float:
        # TASK 1.2: Use operators.lt.
        return operators.lt(a, b)
        # END TASK 1.2

    @staticmethod
    def backward(ctx: Context, d_output: float) -> tuple[float, float]:
        # TASK 1.4: A step is flat: two zeros, as floats.
        return 0.0, 0.0
        # END TASK 1.4


class EQ(ScalarFunction):
    """f(a, b) = 1 if a = b, else 0."""

    @staticmethod
    def forward(ctx: Context, a: float, b: float) -> float:
        # TASK 1.2: Use operators.eq.
        return operators.eq(a, b)
        # END TASK 1.2

    @staticmethod
    def backward(ctx: Context, d_output: float) -> tuple[float, float]:
        # TASK 1.4: Zero almost everywhere: two zeros, as floats.
        return 0.0, 0.0
        # END TASK 1.4
