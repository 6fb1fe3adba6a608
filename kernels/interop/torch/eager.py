"""Attention as a differentiable function that calls the kernels at once, without PyTorch's dispatcher."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kernels
from kernels.scores.mods import KEPT, with_kept_mods


def eager_attention(*args: Any) -> tuple[Tensor, Tensor]:
    """Return out and lse.

    Args:
        *args: q, k, v, attn_mask, alibi_slopes and sink, tensors or None, and the other options.
    """
    if torch._C._are_functorch_transforms_active():
        return _Transformed.apply(*args)  # type: ignore[return-value]
    return _Attention.apply(*args)  # type: ignore[return-value]


def with_arrays(options: dict[str, Any], *arrays: Tensor | None) -> Any:
    """Return the options of the kernels with attn_mask, alibi_slopes and sink where they are given."""
    given = zip(("attn_mask", "alibi_slopes", "sink"), arrays, strict=True)
    return {**options, **{name: array for name, array in given if array is not None}}


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, slopes: Any, sink: Any, options: dict[str, Any]
) -> Any:
    return kernels.flash_attention_forward(q, k, v, **with_arrays(options, mask, slopes, sink))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, options = inputs
    ctx.options = options if options.keys().isdisjoint(KEPT) else with_kept_mods(options)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


class _Attention(torch.autograd.Function):
    """The function outside torch.func."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        dout, dlse = gradients
        *_, out, _lse = saved = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3], ctx.needs_input_grad[5]
        dout = torch.zeros_like(out) if dout is None else dout
        args = dout, dlse, *saved, wanted, ctx.options
        if torch.is_grad_enabled():  # for a second derivative, or within torch.func
            dq, dk, dv, *others = _Gradient.apply(*args)  # type: ignore[misc]
        else:
            dq, dk, dv, *others = _Gradient.forward(*args)  # type: ignore[call-arg]
        dmask, dsink = (others.pop(0) if want else None for want in wanted)
        return dq, dk, dv, dmask, None, dsink, None


class _Transformed(_Attention):
    """The function within torch.func, which takes a form that costs more time."""

    forward = staticmethod(_forward)  # type: ignore[assignment]
    setup_context = staticmethod(_save)  # type: ignore[assignment]

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], *args: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        *tensors, options = args
        batched = _batched(info.batch_size, in_dims[:6], tensors, 3)
        return eager_attention(*batched, options), (0, 0)


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(
        dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, slopes: Any, sink: Any,
        out: Tensor, lse: Tensor, wanted: tuple[bool, bool], options: dict[str, Any],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        own = with_arrays(options, mask, slopes, sink)
        more = {"mask_gradient": wanted[0], "sink_gradient": wanted[1]}
        found = kernels.flash_attention_backward(dout, q, k, v, out, lse, dlse=dlse, **more, **own)
        if wanted[1]:
            return *found[:-1], found[-1].to(sink.dtype)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "flash_attention has no second derivative; compute it by scaled_dot_product_attention under "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], *args: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        dout, dlse, *tensors, out, lse, wanted, options = args
        if any(wanted):
            raise NotImplementedError(
                "vmap of flash_attention has no gradient of attn_mask or sink; detach it, or loop"
            )
        size = info.batch_size
        inner = _batched(size, in_dims[2:8], tensors, 3)
        dout, out, lse = _batched(size, (in_dims[0], *in_dims[8:10]), (dout, out, lse), 3)
        (dlse,) = _batched(size, in_dims[1:2], (dlse,), 1)
        found = _Gradient.apply(dout, dlse, *inner, out, lse, wanted, options)
        return found, (0,) * len(found)  # type: ignore[return-value, arg-type]


def _batched(size: int, in_dims: Any, tensors: Any, first: int) -> list[Any]:
    """Return tensors with the dimension of vmap in front.

    Args:
        size: Of the dimension.
        in_dims: Where it is in each tensor; None where it is not.
        tensors: Each a tensor or None; q first, if it is among them.
        first: How many of them get the dimension where they do not have it: not a mask, slopes and sinks.
    """
    found: list[Any] = []
    for number, (dim, x) in enumerate(zip(in_dims, tensors, strict=True)):
        if x is None or (dim is None and number >= first):
            found.append(x)
        elif dim is None:
            found.append(x.expand(size, *x.shape))
        elif number < first:
            found.append(x.movedim(dim, 0))
        elif number == first:  # a mask, which broadcasts from the right
            mask = x.movedim(dim, 0)
            missing = found[0].ndim - mask.ndim
            found.append(mask.reshape(size, *[1] * missing, *mask.shape[1:]))
        else:
            raise NotImplementedError(
                "vmap of flash_attention cannot map alibi_slopes or sink; loop over them"
            )
    return found
