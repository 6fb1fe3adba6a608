"""What a differentiable function of tensors is: a value, a gradient, and a record of its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .autodiff import Context, History

if TYPE_CHECKING:
    from .tensor import Tensor


def wrap_tuple(x: Any) -> tuple[Any, ...]:
    """Turn a single value into a tuple of one; leave a tuple alone."""
    return x if isinstance(x, tuple) else (x,)


def is_tensor(x: Any) -> bool:
    """Tell whether ``x`` takes part in differentiation, without importing the Tensor class."""
    return hasattr(x, "history")


def as_int(x: Any) -> int:
    """Return an option as an int; published code passes options as tensors of one element."""
    return int(x.item()) if is_tensor(x) else int(x)


def as_ints(x: Any) -> tuple[int, ...]:
    """Return a list-like option as a tuple of ints; published code passes a tensor.

    Raises:
        TypeError: If an entry is no number.
    """
    entries = x.to_numpy().reshape(-1) if is_tensor(x) else x
    try:
        return tuple(int(i) for i in entries)
    except TypeError:
        raise TypeError(
            f"sizes and dimensions are whole numbers given one by one, got {tuple(entries)!r}; "
            "write view(2, 3) and permute(1, 0), or put a * before a tuple"
        ) from None


class Function:
    """A differentiable function of tensors.

    A subclass defines two static methods and is never instantiated:

    - ``forward(ctx, *args) -> Tensor`` computes the value and saves in ``ctx`` what ``backward``
      needs; its tensor arguments carry no history.
    - ``backward(ctx, grad_output)`` returns a gradient for each argument of ``forward``: a tensor
      for a tensor, which may still have the broadcast shape, and None (or 0.0) for an option.
    """

    forward: Any
    backward: Any

    @classmethod
    def _forward(cls, ctx: Context, *args: Any) -> Tensor:
        return cls.forward(ctx, *args)

    @classmethod
    def _backward(cls, ctx: Context, grad_output: Tensor) -> tuple[Any, ...]:
        return wrap_tuple(cls.backward(ctx, grad_output))

    @classmethod
    def apply(cls, *args: Any) -> Tensor:
        """Compute the function and record in the result how it was computed.

        Args:
            *args: Tensors, and options that are no tensors; at least one tensor.

        Returns:
            A new tensor; it has a history only if a tensor argument requires a gradient.

        Raises:
            TypeError: If no argument is a tensor.
        """
        tensors = [arg for arg in args if is_tensor(arg)]
        if not tensors:
            raise TypeError(
                f"{cls.__name__}.apply needs a tensor, got "
                f"{', '.join(type(arg).__name__ for arg in args) or 'nothing'}; make one with "
                "minitorch.tensor or minitorch.from_numpy"
            )
        need_grad = any(t.requires_grad() for t in tensors)
        ctx = Context(no_grad=not need_grad)
        value = cls._forward(ctx, *(arg.detach() if is_tensor(arg) else arg for arg in args))
        # A tensor of its own: `value` may be saved in ctx, and a history on it would close a cycle
        # that keeps the whole graph in memory.
        result = value.detach()
        if need_grad:
            result.history = History(cls, ctx, args)
        return result
