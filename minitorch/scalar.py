"""Scalar, a number that records how it was computed, so that it can be differentiated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from numbers import Real
from typing import Any

from .autodiff import History, backpropagate, central_difference
from .scalar_functions import EQ, LT, Add, Exp, Inv, Log, Mul, Neg, ReLU, ScalarFunction, Sigmoid
from .scalars.derivatives import chain  # beyond module 5
from .scalars.graphs import pull  # beyond module 5

ScalarHistory = History

_ids = itertools.count(1)
_NEW_LEAF = ScalarHistory()


class Scalar:
    """A number in a graph of computations.

    Arithmetic on Scalars builds the graph, and `backward` traverses the graph to fill in the
    `derivative` of every leaf that the result was computed from. Because `==` is also a function in
    the graph, a Scalar cannot be hashed: use `unique_id` as a key.

    Args:
        v: The number.
        back: How it was computed. By default, the Scalar is a leaf; None makes it a constant.
        name: A name for drawing and debugging; by default the unique id.

    Attributes:
        data: The number, a float.
        history: How it was computed, or None for a constant.
        derivative: None until a backward pass reaches this leaf; later passes add to it.
        unique_id: A number that no other Scalar has.
        name: The name.
    """

    def __init__(
        self, v: float, back: ScalarHistory | None = _NEW_LEAF, name: str | None = None
    ) -> None:
        try:
            self.data = float(v)
        except (TypeError, ValueError, OverflowError):
            raise TypeError(
                f"a Scalar is a number that fits in a float, got {type(v).__name__}"
            ) from None
        # A history of its own: a default argument is one object that all leaves would share.
        self.history = ScalarHistory() if back is _NEW_LEAF else back
        self.derivative: float | None = None
        self.unique_id = next(_ids)
        self.name = str(self.unique_id) if name is None else name

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy, or what pickle restores, is another variable of the graph.
        vars(self).update(state, unique_id=next(_ids))

    def __repr__(self) -> str:
        return f"Scalar({self.data:f})"

    def __bool__(self) -> bool:
        return bool(self.data)

    # --- arithmetic: the other operand is a Scalar or a number ---------------------------------

    def __add__(self, b: ScalarLike) -> Scalar:
        # TASK 1.2: Apply Add.
        return Add.apply(self, b)
        # END TASK 1.2

    def __radd__(self, b: ScalarLike) -> Scalar:
        return Add.apply(b, self)

    def __mul__(self, b: ScalarLike) -> Scalar:
        return Mul.apply(self, b)

    def __rmul__(self, b: ScalarLike) -> Scalar:
        return Mul.apply(b, self)

    def __neg__(self) -> Scalar:
        # TASK 1.2: Apply Neg.
        return Neg.apply(self)
        # END TASK 1.2

    def __sub__(self, b: ScalarLike) -> Scalar:
        # TASK 1.2: a - b = a + (-b).
        # -b in Python, not Neg.apply(b): Neg of an int is an int, which apply refuses.
        return Add.apply(self, -b)
        # END TASK 1.2

    def __rsub__(self, b: ScalarLike) -> Scalar:
        return Add.apply(b, Neg.apply(self))

    def __truediv__(self, b: ScalarLike) -> Scalar:
        return Mul.apply(self, Inv.apply(b))

    def __rtruediv__(self, b: ScalarLike) -> Scalar:
        return Mul.apply(b, Inv.apply(self))

    # --- comparison: Scalars of 1.0 or 0.0, so that `if a > b` works ----------------------------

    def __lt__(self, b: ScalarLike) -> Scalar:
        # TASK 1.2: Apply LT.
        return LT.apply(self, b)
        # END TASK 1.2

    def __gt__(self, b: ScalarLike) -> Scalar:
        # TASK 1.2: a > b is b < a.
        return LT.apply(b, self)
        # END TASK 1.2

    def __eq__(self, b: object) -> Scalar:  # pyright: ignore[reportIncompatibleMethodOverride]
        # TASK 1.2: Apply EQ; return NotImplemented for other types than numbers.
        if not isinstance(b, (Scalar, Real)):
            return NotImplemented  # Python answers False, as for `scalar == None`
        return EQ.apply(self, b)
        # END TASK 1.2

    # --- functions ------------------------------------------------------------------------------

    def log(self) -> Scalar:
        """Compute the natural logarithm of this number plus 1e-6."""
        # TASK 1.2: Apply Log.
        return Log.apply(self)
        # END TASK 1.2

    def exp(self) -> Scalar:
        """Compute the exponential."""
        # TASK 1.2: Apply Exp.
        return Exp.apply(self)
        # END TASK 1.2

    def sigmoid(self) -> Scalar:
        """Compute 1 / (1 + e^-x)."""
        # TASK 1.2: Apply Sigmoid.
        return Sigmoid.apply(self)
        # END TASK 1.2

    def relu(self) -> Scalar:
        """Compute max(x, 0)."""
        # TASK 1.2: Apply ReLU.
        return ReLU.apply(self)
        # END TASK 1.2

    # --- differentiation: the interface `autodiff.Variable` -------------------------------------

    def requires_grad_(self, x: bool) -> None:
        """Make this Scalar a leaf, with an empty history, or a constant if x is False."""
        self.history = ScalarHistory() if x else None

    def is_leaf(self) -> bool:
        """Tell whether this Scalar was made by the user instead of by a function."""
        return self.history is not None and self.history.last_fn is None

    def is_constant(self) -> bool:
        """Tell whether this Scalar takes no part in differentiation."""
        return self.history is None

    @property
    def parents(self) -> tuple[Scalar, ...]:
        """The Scalars that this one was computed from; none for a leaf."""
        if self.history is None:
            raise ValueError(f"{self!r} is a constant, it has no history to look into")
        return self.history.inputs

    def accumulate_derivative(self, x: float) -> None:
        """Add x to the derivative of this leaf.

        Raises:
            AssertionError: If this is not a leaf; inner variables only pass derivatives on.
        """
        if not self.is_leaf():
            raise AssertionError(
                f"{self!r} is no leaf, so it keeps no derivative: only a Scalar that the user made "
                f"accumulates one"
            )
        self.derivative = x if self.derivative is None else self.derivative + x

    def chain_rule(self, d_output: float) -> list[tuple[Scalar, float]]:
        """Pair every input of the last function with its derivative.

        Args:
            d_output: The derivative of the final result with respect to this Scalar.

        Returns:
            One (input, derivative) pair for each input, including numbers that became leaves.

        Raises:
            AssertionError: If no function made this Scalar, or if the function's `backward` returns
                a number of derivatives that differs from that of its inputs.
        """
        # TASK 1.3: Ask history.last_fn._backward for the derivatives and pair them with history.inputs.
        history = self.history
        if history is None or history.last_fn is None:
            raise AssertionError(
                f"{self!r} was not computed by a function, so there is no chain rule to apply"
            )
        derivatives = history.last_fn._backward(history.ctx, d_output)
        if len(derivatives) != len(history.inputs):
            raise AssertionError(
                f"{history.last_fn.__name__}.backward returned {len(derivatives)} derivatives for "
                f"{len(history.inputs)} inputs: return one for each input of forward"
            )
        return list(zip(history.inputs, derivatives, strict=True))
        # END TASK 1.3

    def backward(
        self,
        d_output: float | None = None,
        create_graph: bool = False,  # beyond module 5
    ) -> None:
        """Fill in the derivatives of all leaves that this Scalar was computed from.

        Args:
            d_output: The derivative to start from, by default 1.0.
            create_graph: Record how the derivatives are computed, so that they are Scalars that can be
                differentiated again.
        """
        if create_graph:  # beyond module 5
            pull([self], [Scalar(1.0 if d_output is None else d_output, None)], chain=chain)
            return
        backpropagate(self, 1.0 if d_output is None else d_output)


ScalarLike = float | int | Scalar

# The only reference from the functions back to this class; see `ScalarFunction.scalar_type`.
ScalarFunction.scalar_type = Scalar


def derivative_check(f: Callable[..., Any], *scalars: Scalar) -> None:
    """Compare the derivatives from `backward` with numerical ones.

    Args:
        f: A function of the given Scalars, which returns a Scalar.
        *scalars: The point at which to check; all must be leaves, and their derivatives are reset.

    Raises:
        AssertionError: If a derivative differs by more than 0.01 plus 1% of the numerical one.
    """
    for x in scalars:
        x.derivative = None  # backward adds to what an earlier pass has left
    f(*scalars).backward()
    point = ", ".join(f"{x.data!r}" for x in scalars)
    for i, x in enumerate(scalars):
        expected = central_difference(f, *scalars, arg=i).data
        given = 0.0 if x.derivative is None else x.derivative  # None: f does not depend on x
        if not abs(given - expected) <= 1e-2 + 1e-2 * abs(expected):
            raise AssertionError(
                f"derivative of {getattr(f, '__name__', f)}({point}) in argument {i}: backward gives "
                f"{given!r}, central difference {expected!r}. Look at the backward of the functions "
                f"that it uses"
            )
