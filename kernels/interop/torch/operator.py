"""Attention as an operator of PyTorch that autograd, autocast, torch.compile and torch.func know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import kernels
from kernels.interop.torch.custom_operators import compiled_attention, draw_seed, is_traced
from kernels.interop.torch.eager import eager_attention


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_offset: int = 0,
    window_size: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    block_mask: kernels.BlockMask | None = None,
    mask_mod: Callable[..., Any] | None = None,
    score_mod: Any = None,
    seed: int | None = None,
    precision: str | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    rung: str = "auto",
) -> Any:
    """Compute attention on PyTorch tensors, with support for autograd and ``torch.compile``.

    The parameters are those of ``torch.nn.functional.scaled_dot_product_attention``, and the options of
    :func:`kernels.make_problem`.  Under ``torch.autocast``, q, k, v and a float mask are converted to its
    dtype, as for that function.

    Args:
        q: Queries, (batch, heads, seq_q, head_dim), float16, bfloat16, float32 or float64, on the CPU or a
            CUDA device, with any strides.
        k: Keys, (batch, heads, seq_k, head_dim), of the dtype and on the device of q.
        v: Values, (batch, heads, seq_k, value_dim), of the dtype and on the device of q.
        attn_mask: A boolean mask (True keeps), or an additive mask of the dtype of q; it broadcasts to
            (batch, heads, seq_q, seq_k).  An additive mask receives a gradient if it requires one.
        dropout_p: Probability of dropping an attention weight, in [0, 1).
        is_causal: Query i attends to keys 0 to i.
        scale: Factor of the scores; 1/sqrt(head_dim) when None.
        enable_gqa: Let groups of adjacent query heads share one head of k and v.
        causal_offset: Shift of the diagonal of ``is_causal``, ``window_size`` and ``alibi_slopes``.
        window_size: (left, right): columns visible to each side of the diagonal, inclusive; -1: unbounded.
        softcap: Scores become cap · tanh(score / cap); 0 turns it off.
        alibi_slopes: (heads,) or (batch, heads), constants that must not require a gradient.
        sink: (heads,), one logit per head, in the softmax's denominator only.  It receives a gradient.
        block_mask: A :class:`kernels.BlockMask`.
        mask_mod: ``(batch, head, row, col) -> bool``, a plain function that numba can compile, not
            operations on tensors.
        score_mod: ``(score, batch, head, row, col) -> score``, a plain function like ``mask_mod``.  For
            gradients, pass a pair of the function and its derivative.
        seed: Seed of the dropout mask; None draws one from PyTorch's generator of the CPU, so that
            ``torch.manual_seed`` determines it.
        precision: A lower precision of products; see :func:`kernels.make_problem`.
        deterministic: Make gradients bitwise reproducible; None follows
            ``torch.are_deterministic_algorithms_enabled()``.
        return_lse: Also return lse, (batch, heads, seq_q), which is differentiable.
        rung: Name of the kernel, or "auto".

    Returns:
        out (batch, heads, seq_q, value_dim), whose dimensions have the same order in memory as those of q;
        with ``return_lse``, a pair of out and lse.

    Raises:
        TypeError: If an operand is not a tensor, dtypes differ, or an option has the wrong type.
        ValueError: If tensors are on different devices, or a shape or a value is invalid.
    """
    arrays: Any = q, k, v, attn_mask, alibi_slopes, sink
    _check_tensors(arrays)
    kind = q.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        arrays = *_in_autocast(kind, *arrays[:4]), alibi_slopes, sink
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    options: dict[str, Any] = {"is_causal": is_causal, "deterministic": deterministic}
    # Few options make the look-up of a known call short.
    if scale is not None:
        options["scale"] = scale
    if enable_gqa:
        options["enable_gqa"] = enable_gqa
    if dropout_p or softcap or causal_offset or window_size is not None:
        options.update(
            dropout_p=dropout_p,
            softcap=softcap,
            causal_offset=causal_offset,
            window_size=window_size,
        )
    if not (block_mask is mask_mod is score_mod is precision is None and rung == "auto"):
        options.update(
            block_mask=block_mask,
            mask_mod=mask_mod,
            score_mod=score_mod,
            precision=precision,
            rung=rung,
        )
    if kind == "meta" or is_traced(arrays):
        out, lse, _ = compiled_attention(*arrays, seed, options)
    else:
        if dropout_p or seed is not None:
            if seed is None:
                drawn = draw_seed()
                # Within torch.func a tensor, which vmap may give one value for each index.
                seed = drawn if torch._C._are_functorch_transforms_active() else int(drawn)
            options["seed"] = seed
        out, lse, _ = eager_attention(*arrays, options)
    return (out, lse) if return_lse else out


def _check_tensors(tensors: tuple[Any, ...]) -> None:
    """Check that operands are tensors on one device."""
    device = getattr(tensors[0], "device", None)
    for number, tensor in enumerate(tensors):
        if tensor is None and number > 2:
            continue
        name = ("q", "k", "v", "attn_mask", "alibi_slopes", "sink")[number]
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} must be a torch.Tensor, got {type(tensor).__name__}; for other arrays call "
                "kernels.flash_attention_forward"
            )
        if tensor.device != device:
            raise ValueError(
                f"q is on {device} and {name} on {tensor.device}; move all tensors to one device"
            )
    if tensors[4] is not None and tensors[4].requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "alibi_slopes are constants, but this tensor requires a gradient; pass its detach(), or for a "
            "learnable bias, pass a float attn_mask"
        )


def _in_autocast(device: str, *tensors: Any) -> list[Any]:
    """Return tensors in the dtype of autocast, which is enabled; masks of booleans stay."""
    dtype = torch.get_autocast_dtype(device)
    return [
        x.to(dtype) if x is not None and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    ]
