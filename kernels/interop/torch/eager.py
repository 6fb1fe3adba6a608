"""Attention as a differentiable function that calls the kernels at once, without PyTorch's dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kernels import array_call
from kernels.interop.torch.second_order import (
    TENSORS,
    Gradient,
    Tangent,
    in_loop,
    refuse_options,
    save,
    with_arrays,
    without_dynamo,
)
from kernels.launch import Wanted
from kernels.problem.options import ARRAY_ORDER, OPTIONS, WITH_GRADIENT

#: The options that no operator of PyTorch can take, such as functions.
CONSTANTS = [name for name, option in OPTIONS.items() if not option.schema and name != "return_lse"]


def eager_attention(*args: Any, count: int | None = None) -> tuple[Tensor, ...]:
    """Return out, lse and what lse loses by rounding, which is a constant.

    The arguments are q, k, v and the options that are arrays, tensors or None, the other options, and the
    function that builds the problem of them.  If nothing is differentiated, only the first ``count``
    results are returned.
    """
    if torch._C._are_functorch_transforms_active():
        return without_dynamo(_Transformed.apply, *args)
    if _is_recorded(args[:TENSORS]):
        return _Attention.apply(*args)  # type: ignore[return-value]
    return _computed(args, count)


def _is_recorded(tensors: Sequence[Tensor | None]) -> bool:
    """Tell whether PyTorch records the call, or takes its derivative in forward mode."""
    if forward_ad._current_level >= 0 or torch._C._is_tracing():  # by torch.jit.trace
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:  # any() takes longer
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def wanted_of(needs_input_grad: Sequence[bool]) -> list[bool]:
    """Return for each option with a gradient whether it is needed; arrays follow q, k and v."""
    return [needs_input_grad[3 + ARRAY_ORDER.index(name)] for name in WITH_GRADIENT]


def array_gradients(
    wanted: Sequence[bool], found: Sequence[Tensor], arrays: Sequence[Any]
) -> list[Any]:
    """Return the gradients of the options that are arrays, in their dtypes; None for all others."""
    gradients, named = iter(found), dict(zip(WITH_GRADIENT, wanted, strict=True))
    return [
        next(gradients).to(array.dtype) if named.get(name) else None
        for name, array in zip(ARRAY_ORDER, arrays, strict=True)
    ]


def _forward(*inputs: Any) -> Any:
    return _computed(inputs)


def _computed(inputs: Sequence[Any], count: int | None = None) -> Any:
    q, k, v, *arrays, options, make = inputs
    own = with_arrays(options, arrays)
    return array_call.attend((q, k, v), own, None, make=make, count=count)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(output[2])
    save(ctx, inputs, output)
    ctx.save_for_forward(*inputs[:TENSORS])


class _Attention(torch.autograd.Function):
    """The function outside torch.func."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        dout, dlse, _ = gradients
        *_, out, _lse, _rest = saved = ctx.saved_tensors
        wanted = wanted_of(ctx.needs_input_grad)
        dout = torch.zeros_like(out) if dout is None else dout
        args = dout, dlse, *saved, wanted, ctx.options, ctx.make
        in_func = torch._C._are_functorch_transforms_active()
        if in_func or torch.is_grad_enabled():  # for a second derivative
            dq, dk, dv, *others = without_dynamo(Gradient.apply, *args)
        else:
            try:
                dq, dk, dv, *others = Gradient.forward(*args)  # type: ignore[call-arg]
            except RuntimeError as error:
                if any(
                    "Batched" in repr(torch._C._dispatch_keys(x)) for x in args[:2] if x is not None
                ):
                    raise NotImplementedError(
                        "flash_attention has no gradients for is_grads_batched=True, or for jacobian with "
                        "vectorize=True; map torch.autograd.grad or torch.func.vjp by torch.func.vmap"
                    ) from error
                raise
        return dq, dk, dv, *array_gradients(wanted, others, saved[3:TENSORS]), None, None

    @staticmethod
    def jvp(ctx: Any, *given: Any) -> Any:
        refuse_options(given[3:])
        inputs = *given[:3], *ctx.saved_tensors[:TENSORS], ctx.options, ctx.make
        out_tangent, lse_tangent, *_ = without_dynamo(Tangent.apply, *inputs)
        return out_tangent, lse_tangent, None


class FlashAttention2(torch.autograd.Function):
    """Attention with the interface of courses: ``FlashAttention2.apply(q, k, v, is_causal)``.

    q, k and v are (..., seq, dim), with any number of leading dimensions, such as (batch, seq, dim) without
    heads.  Of the results, the backward pass gets out and one lse, whose shape is that of q without its
    last dimension; see :func:`kernels.flash_attention_backward` for large scores.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Any:  # type: ignore[override]
        """Return out, of the shape of q with v's last dimension."""
        out, lse, _ = array_call.attend((q, k, v), {"is_causal": is_causal}, None)
        ctx.is_causal = is_causal
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        """Return dq, dk and dv, of the shapes of q, k and v."""
        *operands, out, lse = ctx.saved_tensors
        options, results = {"is_causal": ctx.is_causal}, (out, lse, None, dout, None)
        return *array_call.attend(tuple(operands), options, None, Wanted(True), results), None


class _Transformed(_Attention):
    """The function within torch.func, which takes a form that costs more time."""

    forward = staticmethod(_forward)  # type: ignore[assignment]
    setup_context = staticmethod(_save)  # type: ignore[assignment]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return in_loop(eager_attention, info, in_dims, args)
