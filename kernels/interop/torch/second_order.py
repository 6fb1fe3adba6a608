"""The gradients and the tangents of attention as functions that PyTorch differentiates once more.

The gradients of :class:`Gradient` and of :class:`Tangent` are those of one function, :class:`Second`: the
gradient of the backward pass is a tangent of it, since second derivatives are symmetric.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from kernels import array_call
from kernels.launch import Wanted
from kernels.problem.options import ARRAY_ORDER, WITH_GRADIENT
from kernels.scores.mods import KEPT, with_kept_mods

#: Number of tensors that a call may have: q, k, v and the options that are arrays.
TENSORS = 3 + len(ARRAY_ORDER)
#: Where the table of a ``score_mod`` is, from the last tensor of a call.
_TABLE = ARRAY_ORDER.index("score_table") - len(ARRAY_ORDER)
_FIRST, _SECOND = Wanted(tangent=True), Wanted(True, tangent=True)


def without_dynamo(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that torch.compile shall not trace, which it tries to within torch.func.

    It tries to after a break of the graph, too, where ``is_compiling`` is false.
    """
    traces = torch.compiler.is_compiling() or "torch._dynamo" in sys.modules
    return _untraced(function, *args) if traces else function(*args)


# Unlike torch.compiler.disable, this imports the compiler, which takes seconds, only when it is called.
@torch._disable_dynamo
def _untraced(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def with_arrays(options: dict[str, Any], arrays: Sequence[Tensor | None]) -> Any:
    """Return the options of the kernels with those that are arrays, in the order of ``ARRAY_ORDER``."""
    given = zip(ARRAY_ORDER, arrays, strict=True)
    own = {**options, **{name: array for name, array in given if array is not None}}
    if isinstance(own.get("seed"), Tensor):  # drawn within torch.func
        own["seed"] = int(own["seed"])
    return own


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the tensors of a call, then results, options and the function that builds its problem."""
    *tensors, options, ctx.make = inputs
    table = tensors[_TABLE]
    ctx.options = options if KEPT.isdisjoint(options) else with_kept_mods(options, table)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def refuse_options(derivatives: Sequence[Any], names: Sequence[str] = ARRAY_ORDER) -> None:
    """Raise an error if one of the options that are arrays has a derivative, which is not None or False."""
    for name, derivative in zip(names, derivatives, strict=False):
        if derivative is not None and derivative is not False:
            raise NotImplementedError(
                f"attention has second derivatives and tangents of q, k and v, but not of {name}; pass its "
                "detach(), or call scaled_dot_product_attention under "
                "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
            )


class Gradient(torch.autograd.Function):
    """The backward pass: dq, dk, dv and the wanted gradients of options."""

    @staticmethod
    def forward(dout: Tensor, dlse: Any, *tensors: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Return the gradients; ``tensors`` ends in out, lse, its rest, what is wanted, and the call."""
        q, k, v, *arrays, out, lse, rest, wanted, options, make = tensors
        results = out, lse, rest, dout, dlse
        own = with_arrays(options, arrays)
        return array_call.attend((q, k, v), own, None, Wanted(True, *wanted), results, make)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save what the second derivative needs: all but the results of the forward pass."""
        *tensors, ctx.wanted, options, make = inputs
        ctx.results = tensors[2 + TENSORS :]
        save(ctx, (*tensors[: 2 + TENSORS], options, make), ())
        ctx.save_for_forward(*tensors[: 2 + TENSORS])

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        """Return the gradients of dout and dlse, then of q, k and v."""
        dout, dlse, *tensors = ctx.saved_tensors
        learnt = [name for name, wanted in zip(WITH_GRADIENT, ctx.wanted, strict=True) if wanted]
        refuse_options(tangents[3:], learnt)
        refuse_options(ctx.needs_input_grad[5:])
        *gradients, of_dout, of_dlse = without_dynamo(
            Second.apply, *tangents[:3], dout, dlse, *tensors, ctx.options, ctx.make
        )
        others = [None] * (len(ARRAY_ORDER) + 6)
        return of_dout, None if dlse is None else of_dlse, *gradients, *others

    @staticmethod
    def jvp(ctx: Any, *given: Any) -> Any:
        """Return the tangents of the gradients."""
        dout_tangent, dlse_tangent, *tangents = given
        refuse_options(tangents[3:])
        dout, dlse, *tensors = ctx.saved_tensors
        call = *tensors, ctx.options, ctx.make
        found = without_dynamo(Second.apply, *tangents[:3], dout, dlse, *call)[:3]
        if dout_tangent is not None or dlse_tangent is not None:
            more = torch.zeros_like(dout) if dout_tangent is None else dout_tangent
            linear = Gradient.apply(
                more, dlse_tangent, *tensors, *ctx.results, ctx.wanted, *call[-2:]
            )
            found = [x + y for x, y in zip(found, linear, strict=False)]
        return (*found, *[None] * sum(ctx.wanted))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        """Compute the gradients for each index."""
        return in_loop(Gradient.apply, info, in_dims, args)


class Tangent(torch.autograd.Function):
    """The tangents of out and lse, and the constants out, lse and its rest."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Return them; the inputs are the tangents of q, k and v, then those of attention."""
        q_tangent, k_tangent, v_tangent, q, k, v, *arrays, options, make = inputs
        own, tangents = with_arrays(options, arrays), (q_tangent, k_tangent, v_tangent)
        out, lse, rest, *found = array_call.attend((q, k, v), own, None, _FIRST, tangents, make)
        return *found, out, lse, rest

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save the inputs and the results that are constants."""
        ctx.mark_non_differentiable(*output[2:])
        save(ctx, inputs, output[2:])

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        """Return the gradients of the tangents, then of q, k and v."""
        *saved, out, lse, rest = ctx.saved_tensors
        tangents, tensors, call = saved[:3], saved[3:], (ctx.options, ctx.make)
        dout = torch.zeros_like(out) if dout is None else dout
        wanted = [False] * len(WITH_GRADIENT)
        linear = without_dynamo(Gradient.apply, dout, dlse, *tensors, out, lse, rest, wanted, *call)
        given = [
            g if needed else None for g, needed in zip(linear, ctx.needs_input_grad, strict=False)
        ]
        refuse_options(ctx.needs_input_grad[6:])
        second = without_dynamo(Second.apply, *tangents, dout, dlse, *tensors, *call)[:3]
        return (*given, *second, *[None] * (len(ARRAY_ORDER) + 2))

    @staticmethod
    def jvp(ctx: Any, *given: Any) -> Any:
        """Refuse a tangent of tangents."""
        raise NotImplementedError(_NO_MORE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        """Compute the tangents for each index."""
        return in_loop(Tangent.apply, info, in_dims, args)


_NO_MORE = (
    "flash_attention has first and second derivatives, in forward mode first ones alone and those of a "
    "gradient; for higher orders call scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
)


class Second(torch.autograd.Function):
    """The tangents of dq, dk and dv along those of q, k and v, then the tangents of out and lse."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Return them; the inputs are the tangents, dout, dlse, then those of attention."""
        q_tangent, k_tangent, v_tangent, dout, dlse, q, k, v, *arrays, options, make = inputs
        further = dout, dlse, q_tangent, k_tangent, v_tangent
        return array_call.attend(
            (q, k, v), with_arrays(options, arrays), None, _SECOND, further, make
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save nothing: there is no third derivative."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Refuse a third derivative."""
        raise NotImplementedError(_NO_MORE)

    @staticmethod
    def jvp(ctx: Any, *given: Any) -> Any:
        """Refuse a third derivative."""
        raise NotImplementedError(_NO_MORE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        """Compute the tangents for each index."""
        return in_loop(Second.apply, info, in_dims, args)


def in_loop(function: Callable[..., Any], info: Any, in_dims: Any, args: Any) -> Any:
    """Return the stacked results of a function for each index of the dimension of vmap, and where it is.

    The function returns several tensors; ``info`` has the size of the dimension, and ``in_dims``
    where it is in each tensor of ``args``, or None.
    """
    (leaves, spec), (dims, _) = tree_flatten(args), tree_flatten(in_dims)
    results = []
    for index in range(info.batch_size):
        own = [
            x if dim is None else x.select(dim, index) for dim, x in zip(dims, leaves, strict=True)
        ]
        results.append(function(*tree_unflatten(own, spec)))
    stacked = type(results[0])(map(torch.stack, zip(*results, strict=True)))
    return stacked, type(stacked)([0] * len(stacked))
