"""Attention as an operator of PyTorch that autograd, autocast, torch.compile and torch.func know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from kernels.interop.torch.custom_operators import (
    compiled_attention,
    draw_seed,
    is_traced,
    maker_of,
)
from kernels.interop.torch.eager import eager_attention
from kernels.interop.torch.edges import (
    as_kernels_take,
    cut,
    is_empty,
    operands_of,
    rows_of,
    without_empty,
)
from kernels.interop.torch.flex_masks import block_mask_from_flex
from kernels.interop.torch.second_order import without_dynamo
from kernels.problem.options import ARRAY_ORDER, WITH_GRADIENT, Options
from kernels.problem.packed_problem import check_packed
from kernels.problem.signature import by_name, takes_attention_options

_OPERANDS = ("q", "k", "v", *ARRAY_ORDER)


@takes_attention_options
def flash_attention(
    q: Any = None,
    k: Any = None,
    v: Any = None,
    *args: Any,
    deterministic: bool | None = None,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    **options: Any,
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
        query: PyTorch's name of q.
        key: PyTorch's name of k.
        value: PyTorch's name of v.
        options: Options by name.  An additive ``attn_mask`` and sinks receive gradients if they
            require them.

    Returns:
        out (batch, heads, seq_q, value_dim), whose dimensions have the same order in memory as those of q;
        with ``return_lse``, a pair of out and lse, which is differentiable.

    Raises:
        TypeError: If an operand is not a tensor, dtypes differ, or an option has the wrong type.
        ValueError: If tensors are on different devices, or a shape or a value is invalid.
    """
    operands: Any = q, k, v
    if not (query is key is value is None):
        operands = operands_of(operands, (query, key, value))
    own = by_name("flash_attention", args, options)
    if has_torch_function(operands):
        if not all(isinstance(x, Tensor) for x in operands):  # proxies of torch.fx
            given = {**own, "deterministic": deterministic}
            return handle_torch_function(flash_attention, operands, *operands, **given)
        if any(x.layout is torch.jagged for x in operands):
            return without_dynamo(_attend_nested, operands, own, deterministic)
    return _attend(operands, own, deterministic)


@takes_attention_options
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *args: Any,
    deterministic: bool | None = None,
    **options: Any,
) -> Any:
    """Compute attention within each of several packed sequences, with support for autograd.

    A batch without padding is one call: rows and columns count from the start of their sequence.

    Args:
        q: Queries of all sequences, (total_q, heads, head_dim), as in :func:`flash_attention`.
        k: Keys of all sequences, (total_k, heads, head_dim), of the dtype and on the device of q.
        v: Values of all sequences, (total_k, heads, value_dim), of the dtype and on the device of q.
        cu_seqlens_q: Cumulative query lengths, (count + 1,) integers starting at 0: sequence i has the rows
            from ``cu_seqlens_q[i]`` up to, but excluding, ``cu_seqlens_q[i + 1]``.  Lengths on a GPU are
            copied to the host in every call, which waits for it.
        cu_seqlens_k: Cumulative key lengths, (count + 1,) integers starting at 0.
        args: Options by position.
        seed: Seed of the dropout mask; None draws one from PyTorch's generator of the CPU.
        deterministic: Make gradients bitwise reproducible; None follows
            ``torch.are_deterministic_algorithms_enabled()``.
        options: Options by name; ``attn_mask`` and ``block_mask`` must be None.  Sinks receive gradients if
            they require them.

    Returns:
        out (total_q, heads, value_dim); with ``return_lse``, a pair of out and lse, (heads, total_q), which
        is differentiable.

    Raises:
        TypeError: If an operand is not a tensor, dtypes differ, or an option has the wrong type.
        ValueError: If tensors are on different devices, or a shape or a value is invalid.
    """
    own = by_name("flash_attention_varlen", args, options)
    return _attend_packed((q, k, v), (cu_seqlens_q, cu_seqlens_k), own, deterministic)


def _attend_packed(packed: Any, sums: Any, own: Options, deterministic: bool | None) -> Any:
    for name, operand in zip("qkv", packed, strict=True):
        check_packed(name, operand)
    operands = tuple([x.transpose(0, 1) for x in packed])
    found = _attend(operands, own, deterministic, sums)
    if own.get("return_lse"):
        return found[0].transpose(0, 1), found[1]
    return found.transpose(0, 1)


def _attend_nested(nested: Any, own: Options, deterministic: bool | None) -> Any:
    """Compute attention of jagged tensors (batch, heads, ragged seq, dim), which are packed sequences."""
    for name, x in zip("qkv", nested, strict=True):
        if x.layout is not torch.jagged or x.ndim != 4 or x._ragged_idx != 2:
            raise TypeError(
                "of nested tensors, attention takes q, k and v of (batch, heads, ragged seq, dim) in the "
                f"layout torch.jagged, got {name} of {tuple(x.shape)}; transpose a tensor "
                "of (batch, ragged seq, heads, dim) by x.transpose(1, 2)"
            )
        if x.lengths() is not None:
            raise ValueError(f"{name} is a jagged tensor with holes; call x.contiguous() first")
    ends_q, ends_k, ends_v = (x.offsets() for x in nested)
    if not torch.equal(ends_k, ends_v):
        raise ValueError(
            "k and v must have the same lengths; pass jagged tensors with equal offsets()"
        )
    packed = tuple([x.transpose(1, 2).values() for x in nested])  # (total, heads, dim)
    found = _attend_packed(packed, (ends_q, ends_k), own, deterministic)
    out, *lse = found if own.get("return_lse") else (found,)
    results = [
        torch.nested.nested_tensor_from_jagged(x, ends_q).transpose(1, 2)
        for x in (out, *[x.T for x in lse])
    ]
    return tuple(results) if lse else results[0]


def _attend(
    operands: tuple[Any, ...], given: Options, deterministic: Any, sums: tuple[Any, ...] = ()
) -> Any:
    """Compute attention; ``sums`` are the cumulative lengths of packed sequences, if any."""
    options: dict[str, Any] = {**given}
    arrays: Any = *operands, *[options.pop(name, None) for name in ARRAY_ORDER]
    return_lse, seed = options.pop("return_lse", False), options.pop("seed", None)
    _check_tensors(arrays)
    # Reading the type of a device takes six times as long.
    kind = "cpu" if arrays[0].is_cpu else arrays[0].device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        arrays = *_in_autocast(kind, *arrays[:4]), *arrays[4:]
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    options["deterministic"] = deterministic
    if hasattr(options.get("block_mask"), "kv_num_blocks"):  # of FlexAttention
        options["block_mask"] = without_dynamo(block_mask_from_flex, options["block_mask"])
    arrays = as_kernels_take(arrays, options)
    rows: Any = None
    if not sums and is_empty(*arrays[:3]):
        rows, dim = rows_of(*arrays[:3], options), arrays[2].shape[-1]
        arrays = without_empty(arrays)
    if kind == "meta" or is_traced(arrays):
        out, *found = compiled_attention(arrays, seed, options, sums)
    else:
        if options.get("dropout_p") or seed is not None:
            if seed is None:
                drawn = draw_seed()
                # Within torch.func a tensor, which vmap may give one value for each index.
                seed = drawn if torch._C._are_functorch_transforms_active() else int(drawn)
            options["seed"] = seed
        count = 2 if return_lse else 1
        out, *found = eager_attention(*arrays, options, maker_of(sums), count=count)
    results = (out, found[0]) if return_lse else (out,)
    if rows is not None:
        results = cut(results, rows, dim)
    return results if return_lse else results[0]


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
