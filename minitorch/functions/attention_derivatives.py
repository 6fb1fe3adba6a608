"""Derivatives of :class:`FlashAttention` by kernels: in forward mode, and of its gradients.

The scores are never stored.  The gradients of :class:`AttentionGradient` and of :class:`AttentionTangent`
are those of one function, :class:`SecondAttention`, because second derivatives are symmetric.  Derivatives
of a higher order are those of composed attention.

The functions have a last argument in common, ``call``: the context of the call of ``FlashAttention``, and
its arguments after q, k and v.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kernels import launch
from kernels.operand_types import read
from kernels.problem.operands import Operands

from ..autodiff import Context, History, wrap_tuple
from ..scalars.graphs import pull, push
from ..scalars.modes import recording
from .base import fitted
from .derivatives import chain, jvp, stand_in
from .flash_attention import FlashAttention, in_dtype
from .several import Several

_FORWARD, _BACKWARD = launch.Wanted(tangent=True), launch.Wanted(True, tangent=True)


def _run(call: Any, wanted: launch.Wanted, **more: Any) -> list[Any]:
    """Run a pass with further operands, tensors by name, and return its results."""
    target, problem, *saved = call[0].saved_values
    q = saved[0]
    kept = Operands(*saved).having(
        **{
            name: None
            if x is None
            else in_dtype(x, problem.acc_dtype if name == "dlse" else problem.dtype)
            for name, x in more.items()
        }
    )
    operands = Operands(*[None if x is None else read(x) for x in kept])
    results = launch.run(None, launch.TARGETS[target], problem, operands, wanted)
    return [q.wrap(x) for x in results]


def _composed(call: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Return out, and lse if the call returned it, of composed attention."""
    return wrap_tuple(FlashAttention.composed(call[0], *operands, *call[1]))[:2]


def _open(x: Any) -> Any:
    """Return a tensor that requires a gradient: x, or one of its data if it is a constant."""
    return x if x is None or x.history is not None else stand_in(x)


class _Attention(Several):
    """A derivative of attention, whose own derivative ``vjp`` gives by kernels."""

    vjp: Any

    @classmethod
    def backward(cls, ctx: Context, *grad_outputs: Any) -> tuple[Any, ...]:
        """Return the gradients of the arguments."""
        return cls.vjp(History(cls, ctx, ctx.saved_values), *grad_outputs)


class AttentionGradient(_Attention):
    """The gradients of q, k and v."""

    @staticmethod
    def forward(ctx: Context, dout: Any, dlse: Any, q: Any, k: Any, v: Any, call: Any) -> Any:
        """Run the backward pass.

        Args:
            ctx: Keeps the arguments.
            dout: Gradient of out, or None.
            dlse: Gradient of lse, or None.
            q: Queries.
            k: Keys.
            v: Values.
            call: See the module.
        """
        ctx.save_for_backward(dout, dlse, q, k, v, call)
        found = FlashAttention.backward(call[0], dout, dlse)[:3]
        return tuple(map(fitted, (q, k, v), found))

    @classmethod
    def vjp(cls, history: History, *tangents: Any) -> tuple[Any, ...]:
        """Return the gradients of dout, dlse, q, k and v."""
        dout, dlse, *rest = history.inputs
        dout = _zeros_like_out(rest) if dout is None else dout
        *found, of_dout, of_dlse = SecondAttention.apply_several(*tangents, dout, dlse, *rest)
        return of_dout, None if dlse is None else of_dlse, *found, None

    @classmethod
    def jvp(cls, history: History, tangents: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the tangents of the gradients, which are linear in dout and dlse."""
        dout, dlse, *rest = history.inputs
        found: list[Any] = []
        if any(t is not None for t in tangents[2:5]):
            dout = _zeros_like_out(rest) if dout is None else dout
            found.append(SecondAttention.apply_several(*tangents[2:5], dout, dlse, *rest)[:3])
        if any(t is not None for t in tangents[:2]):
            found.append(cls.apply_several(*tangents[:2], *rest))
        return tuple(x[0] if len(x) == 1 else x[0] + x[1] for x in zip(*found, strict=True))


class AttentionTangent(_Attention):
    """The tangents of out and lse."""

    @staticmethod
    def forward(ctx: Context, *args: Any) -> tuple[Any, ...]:
        """Run the forward pass with tangents of q, k and v, or None; q, k, v and ``call`` follow them."""
        ctx.save_for_backward(*args)
        *tangents, _q, _k, _v, call = args
        names = "q_tangent", "k_tangent", "v_tangent"
        return tuple(_run(call, _FORWARD, **dict(zip(names, tangents, strict=True)))[3:])

    @classmethod
    def vjp(cls, history: History, *grad_outputs: Any) -> tuple[Any, ...]:
        """Return the gradients of the tangents, and of q, k and v."""
        *tangents, q, k, v, call = history.inputs
        dout, dlse = grad_outputs
        rest = q, k, v, call
        linear = AttentionGradient.apply_several(dout, dlse, *rest)
        dout = _zeros_like_out(rest) if dout is None else dout
        second = SecondAttention.apply_several(*tangents, dout, dlse, *rest)[:3]
        return (
            *[None if t is None else x for t, x in zip(tangents, linear, strict=True)],
            *second,
            None,
        )

    @staticmethod
    def composed(_: Context, *args: Any) -> tuple[Any, ...]:
        """Push the tangents through composed attention."""
        *tangents, q, k, v, call = args
        with recording():
            own = [*map(_open, (q, k, v))]
            results = _composed(call, own)
            pairs = zip(own, tangents, strict=True)
            found = push(results, {x.unique_id: t for x, t in pairs if t is not None}, jvp)
        # Nothing depends on the tangent of an lse that the call has not returned.
        return (*found, own[0].zeros(call[0].saved_values[1].lse_shape))[:2]


class SecondAttention(_Attention):
    """The tangents of dq, dk and dv, and of out and lse.

    They are also the gradients of q, k, v, dout and dlse, given those of dq, dk and dv.
    """

    @staticmethod
    def forward(ctx: Context, *args: Any) -> tuple[Any, ...]:
        """Run both passes with tangents of q, k and v, or None; dout, dlse, q, k, v and ``call`` follow."""
        ctx.save_for_backward(*args)
        q_tangent, k_tangent, v_tangent, dout, dlse, q, k, v, call = args
        *found, of_dout, of_dlse = _run(
            call, _BACKWARD, dout=dout, dlse=dlse, q_tangent=q_tangent, k_tangent=k_tangent,
            v_tangent=v_tangent,
        )  # fmt: skip
        return *map(fitted, (q, k, v), found), of_dout, of_dlse

    @staticmethod
    def composed(_: Context, *args: Any) -> tuple[Any, ...]:
        """Differentiate the gradients of composed attention."""
        *tangents, dout, dlse, q, k, v, call = args
        with recording():
            own = [*map(_open, (q, k, v, dout, dlse))]
            results = _composed(call, own[:3])
            pairs = [(y, g) for y, g in zip(results, own[3:], strict=False) if g is not None]
            gradients = pull([y for y, _ in pairs], [g for _, g in pairs], own[:3], chain)
            pairs = [(x, t) for x, t in zip(gradients, tangents, strict=True) if t is not None]
            targets = [x for x in own if x is not None]
            found = pull([x for x, _ in pairs], [t for _, t in pairs], targets, chain)
        like = (*own[:4], own[0].zeros(call[0].saved_values[1].lse_shape))
        found += [None] * (5 - len(found))
        return tuple(x.zeros() if g is None else g for x, g in zip(like, found, strict=True))

    @classmethod
    def backward(cls, ctx: Context, *grad_outputs: Any) -> tuple[Any, ...]:
        """Return the gradients of the arguments, of composed attention."""
        with recording():
            own = [stand_in(x) if hasattr(x, "history") else x for x in ctx.saved_values]
            results = cls.composed(ctx, *own)
            pairs = [(y, g) for y, g in zip(results, grad_outputs, strict=True) if g is not None]
            targets = [x for x in own if hasattr(x, "history")]
            found = iter(pull([y for y, _ in pairs], [g for _, g in pairs], targets))
        return tuple(next(found) if hasattr(x, "history") else None for x in own)


SecondAttention.vjp = None


def _zeros_like_out(rest: Sequence[Any]) -> Any:
    """Return zeros of the shape of out, given q, k, v and ``call``."""
    return rest[0].zeros(rest[-1][0].saved_values[1].out_shape)


def _has_kernels(history: History) -> bool:
    """Tell whether attention has derivatives by kernels here: no option learns, and a rung has them."""
    ctx = history.ctx or Context()
    target, problem = ctx.saved_values[:2]
    try:
        launch.TARGETS[target].pick(problem, None, True)
    except ValueError:
        return False
    return not any(ctx.needs_input_grad[3:])


def _vjp(history: History, dout: Any, dlse: Any = None, rest: Any = None) -> Any:
    """Return the gradients of attention's arguments, or NotImplemented if no kernel computes them."""
    if not _has_kernels(history):
        return NotImplemented
    q, k, v, *others = history.inputs
    found = AttentionGradient.apply_several(dout, dlse, q, k, v, (history.ctx, others))
    return *found, *[None] * len(others)


def _jvp(history: History, tangents: tuple[Any, ...]) -> Any:
    """Return the tangents of attention's results, or NotImplemented if no kernel computes them."""
    if not _has_kernels(history) or any(t is not None for t in tangents[3:]):
        return NotImplemented
    q, k, v, *others = history.inputs
    found = AttentionTangent.apply_several(*tangents[:3], q, k, v, (history.ctx, others))
    returned = dict(others[-1] if isinstance(others[-1], dict) else others[-2]).get("return_lse")
    return (*found, None) if returned else found[0]


FlashAttention.vjp, FlashAttention.jvp = staticmethod(_vjp), staticmethod(_jvp)
