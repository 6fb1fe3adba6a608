"""Attention as an operator of PyTorch that autograd, autocast, torch.compile and torch.func know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.interop.torch.custom_operators import compiled_attention, draw_seed, is_traced
from kernels.interop.torch.eager import eager_attention
from kernels.problem.options import ARRAY_ORDER, WITH_GRADIENT
from kernels.problem.signature import by_name, takes_attention_options

_OPERANDS = ("q", "k", "v", *ARRAY_ORDER)


@takes_attention_options
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *args: Any, deterministic: bool | None = None, **options: Any
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
        args: Options by position.
        mask_mod: ``(batch, head, row, col) -> bool``, a plain function that numba can compile, not
            operations on tensors.
        seed: Seed of the dropout mask; None draws one from PyTorch's generator of the CPU, so that
            ``torch.manual_seed`` determines it.
        deterministic: Make gradients bitwise reproducible; None follows
            ``torch.are_deterministic_algorithms_enabled()``.
        options: Options by name.  An additive ``attn_mask`` and sinks receive gradients if they
            require them.

    Returns:
        out (batch, heads, seq_q, value_dim), whose dimensions have the same order in memory as those of q;
        with ``return_lse``, a pair of out and lse, which is differentiable.

    Raises:
        TypeError: If an operand is not a tensor, dtypes differ, or an option has the wrong type.
        ValueError: If tensors are on different devices, or a shape or a value is invalid.
    """
    options = {**by_name("flash_attention", args, options)}
    arrays: Any = q, k, v, *[options.pop(name, None) for name in ARRAY_ORDER]
    return_lse, seed = options.pop("return_lse", False), options.pop("seed", None)
    _check_tensors(arrays)
    kind = q.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        arrays = *_in_autocast(kind, *arrays[:4]), *arrays[4:]
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    options["deterministic"] = deterministic
    if kind == "meta" or is_traced(arrays):
        out, lse, _ = compiled_attention(arrays, seed, options)
    else:
        if options.get("dropout_p") or seed is not None:
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
        name = _OPERANDS[number]
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} must be a torch.Tensor, got {type(tensor).__name__}; for other arrays call "
                "kernels.flash_attention_forward"
            )
        if tensor.device != device:
            raise ValueError(
                f"q is on {device} and {name} on {tensor.device}; move all tensors to one device"
            )
        if (
            number > 2
            and name not in WITH_GRADIENT
            and tensor.requires_grad
            and torch.is_grad_enabled()
        ):
            raise ValueError(
                f"{name} are constants, but this tensor requires a gradient; pass its detach(), or for a "
                "learnable bias, pass a float attn_mask"
            )


def _in_autocast(device: str, *tensors: Any) -> list[Any]:
    """Return tensors in the dtype of autocast, which is enabled; masks of booleans stay."""
    dtype = torch.get_autocast_dtype(device)
    return [
        x.to(dtype) if x is not None and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    ]
