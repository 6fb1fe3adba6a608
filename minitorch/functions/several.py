"""Differentiable functions of tensors with several results."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import count
from typing import Any

from ..autodiff import Context, History, Variable
from ..backends.tensor_protocol import TensorLike as Tensor
from ..scalars.modes import modes
from .base import Function, chain_rule, is_variable


class Several(Function):
    """A function whose ``forward`` returns a tuple of tensors.

    ``backward(ctx, *grad_outputs)`` is called once, with the gradient of each result, or None for a result
    that nothing depends on.

    Attributes:
        minus_infinity_in: The indices of the results in which minus infinity is a valid value; see
            :class:`minitorch.detect_anomaly`.
    """

    minus_infinity_in: tuple[int, ...] = ()

    @classmethod
    def apply_several(cls, *args: Any) -> tuple[Any, ...]:
        """Apply the function like :meth:`apply`, and return all of its results."""
        ctx, own = cls._prepared(args)
        checks = modes.observer
        forward = partial(checks.forward, cls) if checks else cls.forward
        results = tuple(value.detach() for value in forward(ctx, *own))
        if not ctx.no_grad:
            joint = Joint(History(cls, ctx, args))
            for index, result in enumerate(results):
                place = Context(saved_values=(index, len(results)))
                result.history = History(_Result, place, (joint,))
        return results


class Joint:
    """The variable that stands for all results of one function: each of them is computed from it.

    Args:
        history: How the results were computed.
    """

    dtype: Any = None  # of a gradient, too, which is the parts of several
    _ids = count(-1, -1)  # tensors count upwards

    def __init__(self, history: History):
        self.history = history
        self.unique_id = next(self._ids)

    @property
    def parents(self) -> Iterable[Variable]:
        """The tensors that the results were computed from."""
        return [arg for arg in self.history.inputs if is_variable(arg)]

    def requires_grad(self) -> bool:
        """Return True: without a gradient there is no such variable."""
        return True

    def is_leaf(self) -> bool:
        """Return False: a function made it."""
        return False

    def is_constant(self) -> bool:
        """Return False; see :meth:`requires_grad`."""
        return False

    def accumulate_derivative(self, x: Any) -> None:
        """Never called, because only a leaf collects its derivative."""
        raise AssertionError("only a leaf collects its gradient")

    def expand(self, other: Any) -> Any:
        """Return a gradient unchanged: each of its parts has the shape of its result."""
        return other

    def _ensure_tensor(self, b: Any) -> Any:
        return b

    def chain_rule(self, d_output: Any) -> Iterable[tuple[Variable, Any]]:
        """Pair each input with its gradient, given those of the results."""
        return chain_rule(self.history, *d_output.parts)


class Parts:
    """The derivative of a :class:`Joint`: a gradient for each result, None for zeros.

    Args:
        parts: The gradients.
    """

    dtype = None

    def __init__(self, parts: Iterable[Any]):
        self.parts = tuple(parts)

    def __add__(self, other: Parts) -> Parts:
        pairs = zip(self.parts, other.parts, strict=True)
        return Parts(b if a is None else a if b is None else a + b for a, b in pairs)


class _Result(Function):
    """One result of a function of several; it is made by :meth:`Several.apply_several`."""

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Parts:
        """Put the gradient at the result's place."""
        index, total = ctx.saved_values
        return Parts(grad_output if place == index else None for place in range(total))

    @classmethod  # beyond module 5
    def vjp(cls, history: History, grad_output: Any) -> tuple[Parts]:  # beyond module 5
        """Do the same."""
        return (cls.backward(history.ctx or Context(), grad_output),)

    @staticmethod  # beyond module 5
    def jvp(history: History, tangents: tuple[Any, ...]) -> Any:  # beyond module 5
        """Pick the tangent of the result."""
        return tangents[0][(history.ctx or Context()).saved_values[0]]
