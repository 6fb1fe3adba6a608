"""Derivatives of every order of functions of tensors: gradients that record, and tangents.

A function is differentiated in one of four ways; the first that it has counts:

- by a rule of its own, ``vjp(history, *grad_outputs)`` or ``jvp(history, tangents)``;
- by ``composed(ctx, *args)``, the same function composed of others, if its passes are kernels;
- by linearity, if it ``is_multilinear``: :class:`Adjoint` runs its two passes as they are;
- by running its ``forward`` and ``backward`` again on traced tensors (see :mod:`.tracing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

from ..autodiff import Context, History, Variable, wrap_tuple
from ..backends.writes import check_unwritten, check_unwritten_values
from ..scalars.graphs import pull, push
from ..scalars.modes import is_recording, recording, writes
from .base import Function, fitted, is_variable
from .several import Joint, Parts
from .tracing import Trace
from .views import To

# -- functions that derivatives are made of --------------------------------------------------------


class Fitted(Function):
    """A tensor brought to the shape of another: repeated, or summed where that was broadcast."""

    is_multilinear = True

    @staticmethod
    def forward(ctx: Context, a: Any, like: Any) -> Any:
        """Repeat or sum; ``like`` is a constant."""
        return like.expand(a)

    @staticmethod
    def backward(ctx: Context, grad_output: Any) -> tuple[Any, None]:
        """Return the gradient, which the chain rule brings to the shape of its argument."""
        return grad_output, None

    @classmethod
    def vjp(cls, history: History, grad_output: Any) -> tuple[Any, None]:
        """Do the same."""
        return grad_output, None


class Adjoint(Function):
    """The gradient of a multilinear function in one argument, which is linear in that of its result.

    For y = F(a, b) and the gradient g of y, that of a is the Fᵀ(g, b) with <u, Fᵀ(g, b)> = <g, F(u, b)> for
    every u.  So its own gradients, given u, are F(u, b) for g, and for b that of F at (u, b).
    """

    @staticmethod
    def forward(
        ctx: Context, grad: Any, function: Any, place: int, own: Context | None, *args: Any
    ) -> Any:
        """Return the gradient of one argument.

        Args:
            ctx: Keeps the arguments.
            grad: The gradient of the result.
            function: A multilinear function.
            place: The position of the argument, which is a constant here.
            own: The context that ``function.forward`` filled; None to fill one.
            *args: The arguments of the function.
        """
        ctx.save_for_backward(grad, function, place, own, *args)
        if own is None:
            function.forward(own := Context(), *args)
        own = replace(own, needs_input_grad=tuple(i == place for i in range(len(args))))
        return fitted(args[place], wrap_tuple(function.backward(own, grad))[place])

    @classmethod
    def backward(cls, ctx: Context, grad_output: Any) -> tuple[Any, ...]:
        """Return the gradients of ``grad`` and of the other arguments."""
        return cls._gradients(ctx, ctx.saved_values, grad_output)

    @classmethod
    def vjp(cls, history: History, grad_output: Any) -> tuple[Any, ...]:
        """Do the same, of variables."""
        return cls._gradients(history.ctx or Context(), history.inputs, grad_output)

    @classmethod
    def _gradients(cls, ctx: Context, inputs: Sequence[Any], u: Any) -> tuple[Any, ...]:
        grad, function, place, _, *args = inputs
        args[place] = u.contiguous()  # a view of any other layout would fail
        of_grad = function.apply(*args) if ctx.needs_input_grad[0] else None
        own = None if of_grad is None or of_grad.history is None else of_grad.history.ctx
        of_args = (
            Adjoint.apply(grad, function, i, own, *_at(args, i, args[i].detach()))
            if needs
            else None
            for i, needs in enumerate(ctx.needs_input_grad[4:])
        )
        return of_grad, None, None, None, *of_args

    @classmethod
    def jvp(cls, history: History, tangents: tuple[Any, ...]) -> Any:
        """Move one argument after the other."""
        grad, function, place, own, *args = history.inputs
        terms = [
            cls.apply(grad, function, place, None, *_at(args, i, t.contiguous()))
            for i, t in enumerate(tangents[4:]) if t is not None
        ]  # fmt: skip
        if tangents[0] is not None:
            terms.append(cls.apply(tangents[0], function, place, own, *args))
        return reduce(add, terms)


def _at(args: Sequence[Any], place: int, x: Any) -> list[Any]:
    """Return arguments with another one in a place."""
    return [*args[:place], x, *args[place + 1 :]]


# -- gradients -----------------------------------------------------------------------------------


def chain_rule(history: History, *d_outputs: Any) -> list[tuple[Variable, Any]]:
    """Pair each input that requires a gradient with that gradient, which records how it was computed.

    Args:
        history: History of the function's result.
        *d_outputs: The gradient of each result.

    Raises:
        RuntimeError: If the function is not differentiable twice, or an input or a value that it saved has
            been written to since.
    """
    function, ctx = history.last_fn, history.ctx or Context()
    if 0 != ctx.saved_at != writes.count:
        check_unwritten(history)
        if not function.is_multilinear:  # then it runs again
            check_unwritten_values(function.__name__, history.inputs, ctx.saved_at)
    gradients = _vjp(history, *d_outputs)
    return [
        (x, recorded_fit(x, gradient))
        for x, gradient in zip(history.inputs, gradients, strict=True)
        if is_variable(x) and x.requires_grad()
    ]


def chain(variable: Any, d_output: Any) -> list[tuple[Variable, Any]]:
    """Pair each input of a variable with its gradient; see :func:`chain_rule`."""
    parts = d_output.parts if isinstance(d_output, Parts) else (d_output,)
    return chain_rule(variable.history, *parts)


def _vjp(history: History, *d_outputs: Any) -> tuple[Any, ...]:
    """Return the gradients of the arguments of a function, as functions of them and of ``d_outputs``."""
    function, ctx, inputs = history.last_fn, history.ctx or Context(), history.inputs
    if function.vjp is not None:
        gradients = function.vjp(history, *d_outputs)
        if gradients is not NotImplemented:
            return gradients  # type: ignore[no-any-return]
    if function.composed is not None:
        with _stand_ins(inputs) as own:
            results = wrap_tuple(function.composed(ctx, *own))
            used = [(r, d) for r, d in zip(results, d_outputs, strict=False) if d is not None]
            targets = [x for x in own if _is_open(x)]
            found = iter(pull(*map(list, zip(*used, strict=True)), targets, chain))  # type: ignore[arg-type]
        return tuple(next(found) if _is_open(x) else None for x in inputs)
    if function.is_multilinear:
        return tuple(
            Adjoint.apply(*d_outputs, function, i, ctx, *_at(inputs, i, x.detach()))
            if needs
            else None
            for i, (x, needs) in enumerate(zip(inputs, ctx.needs_input_grad, strict=True))
        )
    if getattr(function, "checks_itself", False):
        raise RuntimeError(
            f"{function.__name__} has first derivatives only: it computes its gradients by backward passes "
            "of its own; compose the result of other functions"
        )
    trace = Trace(function, ctx.needs_input_grad)
    trace.run(function.forward, *inputs)
    return trace.run(function.backward, *d_outputs)


def recorded_fit(x: Any, gradient: Any) -> Any:
    """Return a gradient in the backend, shape and dtype of its argument, by functions that record."""
    if isinstance(x, Joint):
        return gradient
    gradient = x._ensure_tensor(0.0 if gradient is None else gradient)
    if gradient.shape != x.shape:
        gradient = Fitted.apply(gradient, x.detach())
    return gradient if gradient.dtype == x.dtype else To.apply(gradient, x.backend, x.dtype)


# -- stand-ins -----------------------------------------------------------------------------------


def stand_in(x: Any) -> Any:
    """Return a leaf with the data of a tensor."""
    leaf = x.detach()
    leaf.requires_grad_(True)
    return leaf


def join(leaf: Any, x: Any) -> None:
    """Make a stand-in what it stands for: computed from the tensor, or a constant if that is one."""
    is_open = x.history is not None
    ctx = Context(False, (), (True, False))
    leaf.history = History(Fitted, ctx, (x, x.detach())) if is_open else None


class _stand_ins:
    """Leaves in the place of variables, joined to them when the context ends."""

    def __init__(self, inputs: Sequence[Any]):
        self.inputs, self.own = inputs, [stand_in(x) if _is_open(x) else x for x in inputs]
        self.recording = recording()

    def __enter__(self) -> list[Any]:
        self.recording.__enter__()
        return self.own

    def __exit__(self, *_: object) -> None:
        self.recording.__exit__()
        for leaf, x in zip(self.own, self.inputs, strict=True):
            if leaf is not x:
                join(leaf, x)


def _is_open(x: Any) -> bool:
    """Tell whether an argument is a tensor that requires a gradient."""
    return getattr(x, "history", None) is not None


# -- tangents ------------------------------------------------------------------------------------


def jvp(history: History, tangents: tuple[Any, ...]) -> Any:
    """Return the tangent of a function's result.

    Args:
        history: How the result was computed.
        tangents: The tangent of each argument, None for one that does not move.

    Returns:
        A tensor of the shape of the result; of a function with several results, a tuple of them.
    """
    function, ctx, inputs = history.last_fn, history.ctx or Context(), history.inputs
    if function.jvp is not None:
        tangent = function.jvp(history, tangents)
        if tangent is not NotImplemented:
            return tangent
    if function.is_symmetric:
        return (_vjp(history, *tangents) if is_recording() else function._backward(ctx, *tangents))[
            0
        ]
    if function.composed is not None:
        with _stand_ins(inputs) as own:
            results = function.composed(ctx, *own)
        pairs = zip(own, tangents, strict=True)
        moved = {x.unique_id: t for x, t in pairs if t is not None}
        found = push(wrap_tuple(results), moved, jvp)
        return tuple(found) if isinstance(results, tuple) else found[0]
    moving = [(i, t) for i, t in enumerate(tangents) if t is not None]
    if function.is_multilinear:
        return reduce(add, (function.apply(*_at(inputs, i, t.contiguous())) for i, t in moving))
    # The gradients are linear in u, the gradient of the result, and the tangent is the transpose of that.
    create_graph = is_recording()
    with recording():
        trace = Trace(function, ctx.needs_input_grad)
        us = [stand_in(result.zeros()) for result in trace.run(function.forward, *inputs)]
        gradients = trace.run(function.backward, *us)
        used = [(recorded_fit(inputs[i], gradients[i]), t) for i, t in moving]
    used = [(gradient, t) for gradient, t in used if _is_open(gradient)]
    found = pull([g for g, _ in used], [t for _, t in used], us, chain if create_graph else None)
    found = [
        u.zeros() if tangent is None else tangent for u, tangent in zip(us, found, strict=True)
    ]
    return tuple(found) if len(us) > 1 else found[0]
