"""Differentiable functions of tensors: the value, the gradient, and the record of the inputs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial  # beyond module 5
from typing import Any

import numpy as np

from kernels.common.arguments import shown

from ..autodiff import Context, History, Variable, wrap_tuple
from ..backends.tensor_protocol import TensorLike as Tensor
from ..backends.writes import check_unwritten  # beyond module 5
from ..scalars.modes import (
    modes,
    writes,  # beyond module 5
)


def is_tensor(x: Any) -> bool:
    """Tell whether ``x`` is a tensor, without importing the Tensor class."""
    return hasattr(type(x), "_ensure_tensor")  # of the type: a module has every name, as None


def is_variable(x: Any) -> bool:
    """Tell whether ``x`` takes part in differentiation."""
    return hasattr(type(x), "accumulate_derivative")


def check_tensor(name: str, x: Any) -> None:
    """Check that an argument is a tensor.

    Raises:
        TypeError: If it is not; the message names the argument.
    """
    if not is_tensor(x):
        raise TypeError(f"{name} must be a tensor, got {not_a_tensor(x)}")


def not_a_tensor(x: Any) -> str:
    """Return, for an error message, the type of a value and how to make a tensor of it."""
    kind = type(x)
    if kind.__module__.startswith("torch") and hasattr(x, "detach"):  # beyond module 5
        return f"{kind.__module__}.{kind.__name__}; share its memory with minitorch.from_dlpack(x.detach())"
    return f"{kind.__name__}; convert it with minitorch.from_numpy or minitorch.tensor"


def as_int(x: Any) -> Any:
    """Return an option as an int; published code passes options as tensors of one element.

    A value of any other type is returned unchanged, and the caller checks it.
    """
    if is_tensor(x):
        x = x.item()
    elif isinstance(x, np.ndarray) and x.ndim == 0:
        x = x[()]
    return int(x) if isinstance(x, (float, np.floating)) and x.is_integer() else x


def as_ints(x: Any) -> tuple[int, ...]:
    """Return a list-like option as a tuple of ints; published code passes a tensor.

    Raises:
        TypeError: If an entry is not a number.
    """
    entries = x.to_numpy().reshape(-1) if is_tensor(x) else x
    entries = tuple(entries) if isinstance(entries, Iterable) else (entries,)
    # Whole floats too: published code passes a tensor, and tensors hold floats.
    if not {*map(type, entries)} <= {int} and not all(map(_is_whole, entries)):
        raise TypeError(
            f"sizes and dimensions are whole numbers given one by one, got {shown(entries)}; "
            "write view(2, 3) and permute(1, 0), or put a * before a tuple"
        )
    return tuple(map(int, entries))


def _is_whole(n: Any) -> bool:
    is_float = isinstance(n, (float, np.floating))
    return float(n).is_integer() if is_float else isinstance(n, (int, np.integer))


# -- functions -----------------------------------------------------------------------------------


class Function:
    """A differentiable function of tensors.

    A subclass defines two static methods and is never instantiated:

    - ``forward(ctx, *args) -> Tensor`` computes the value and saves in ``ctx`` what ``backward``
      needs; its tensor arguments carry no history.
    - ``backward(ctx, grad_output)`` returns a gradient for each argument of ``forward``: for a
      tensor argument a tensor, which may still have the broadcast shape, for any other argument None or
      0.0.

    Attributes:
        is_multilinear: Whether the result is linear in each tensor that requires a gradient, the others
            fixed, so that the gradient of each needs only the others.
        is_symmetric: Whether the Jacobian is symmetric, as that of every element-wise function of one
            tensor is, so that ``backward`` carries a tangent too.
        composed: ``composed(ctx, *args)`` returns what ``forward`` does, by functions that are
            differentiable twice; for a function whose passes are kernels.
        vjp: ``vjp(history, *grad_outputs)`` returns what ``backward`` does, by such functions, or
            NotImplemented.
        jvp: ``jvp(history, tangents)`` returns the tangent of the result, by such functions, or
            NotImplemented.
    """

    forward: Any
    backward: Any
    is_multilinear = False  # beyond module 5
    is_symmetric = False  # beyond module 5
    composed: Any = None  # beyond module 5
    vjp: Any = None  # beyond module 5
    jvp: Any = None  # beyond module 5

    @classmethod
    def _backward(cls, ctx: Context, *grad_outputs: Any) -> tuple[Any, ...]:
        return wrap_tuple(cls.backward(ctx, *grad_outputs))

    @classmethod
    def _prepared(cls, args: tuple[Any, ...]) -> tuple[Context, tuple[Any, ...]]:
        """Return the context of a call, and its arguments as ``forward`` takes them: without history."""
        needs_grad: list[bool] = []
        has_tensor = False
        for arg in args:
            history = getattr(arg, "history", args)  # ``args`` stands for none
            has_tensor = has_tensor or history is not args
            needs_grad.append(history is not args and history is not None)
        if not has_tensor:
            raise TypeError(
                f"{cls.__name__}.apply needs a tensor, got "
                f"{', '.join(type(arg).__name__ for arg in args) or 'nothing'}; make one with "
                "minitorch.tensor or minitorch.from_numpy"
            )
        if not modes.recording or True not in needs_grad:
            # Nothing will be recorded, so that the arguments may be what they are.
            ctx = Context.__new__(Context)  # the other attributes have their defaults
            ctx.no_grad, ctx.needs_input_grad = True, (False,) * len(args)
        else:
            ctx, own = Context(False, (), tuple(needs_grad)), [*args]
            for at, recorded in enumerate(needs_grad):
                if recorded and hasattr(args[at], "_tensor"):  # not a Scalar
                    own[at] = args[at]._new(args[at]._tensor)
            args = tuple(own)
        return ctx, args

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Compute the function and record in the result how it was computed.

        Args:
            *args: Tensors, at least one, and options that are not tensors.

        Returns:
            A new tensor; it has a history only if a tensor argument requires a gradient, and not within
            :class:`minitorch.no_grad`.

        Raises:
            TypeError: If no argument is a tensor.
        """
        ctx, own = cls._prepared(args)
        forward = cls.forward
        if modes.observer:  # beyond module 5
            forward = partial(modes.observer.forward, cls)
        value = forward(ctx, *own)
        # A tensor of its own: `value` may be saved in ctx, and a history on it would close a cycle
        # that keeps the whole graph in memory; or it may be an argument.
        if not ctx.no_grad:
            result = value._new(value._tensor)
            result.history = History(cls, ctx, args)
            return result
        for arg in args:
            if arg is value:
                return value.detach()
        return value


def chain_rule(history: History, *d_outputs: Any) -> list[tuple[Variable, Any]]:
    """Pair each input of a function that requires a gradient with that gradient.

    Args:
        history: History of the function's result.
        *d_outputs: The gradient of each result.

    Raises:
        RuntimeError: If a value that the function saved has been written to since.
    """
    if history.last_fn is None or history.ctx is None:
        raise AssertionError("the chain rule needs a tensor that a function made")
    if 0 != history.ctx.saved_at != writes.count:  # beyond module 5
        check_unwritten(history)
    gradients = history.last_fn._backward(history.ctx, *d_outputs)
    if len(gradients) != len(history.inputs):
        raise AssertionError(
            f"{history.last_fn.__name__}.backward returned {len(gradients)} gradients for "
            f"{len(history.inputs)} arguments; return one for each"
        )
    pairs = [
        (arg, fitted(arg, gradient))
        for arg, gradient in zip(history.inputs, gradients, strict=True)
        if is_variable(arg) and arg.requires_grad()
    ]
    if modes.observer:  # beyond module 5
        modes.observer.check_chain(history, d_outputs, pairs)
    return pairs


def fitted(arg: Tensor, gradient: Any) -> Tensor:
    """Return a gradient as a tensor of its argument's backend, shape and dtype."""
    fitted = arg.expand(arg._ensure_tensor(0.0 if gradient is None else gradient))
    return fitted if fitted.dtype == arg.dtype else fitted._converted(arg.backend, arg.dtype)
