"""Attention as an operator of PyTorch: custom operators with fake kernels, autograd and vmap."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import kernels

#: Sets of options that no operator of PyTorch can take, such as functions; an operator takes their number.
_SETS: list[dict[str, Any]] = [{}]
_NUMBERS: dict[tuple[Any, ...], int] = {}


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
    """Compute attention on PyTorch tensors; PyTorch differentiates and compiles it.

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
        is_causal: Row ``row`` attends to columns up to ``row``.
        scale: Factor of the scores; 1/sqrt(head_dim) when None.
        enable_gqa: Let groups of adjacent query heads share one head of k and v.
        causal_offset: Shift of the diagonal of ``is_causal``, ``window_size`` and ``alibi_slopes``.
        window_size: (left, right): columns visible to each side of the diagonal, inclusive; -1 is unbounded.
        softcap: Scores become cap · tanh(score / cap); 0 turns it off.
        alibi_slopes: (heads,) or (batch, heads), constants.
        sink: (heads,), one logit per head, in the softmax's denominator only.  It receives a gradient.
        block_mask: A :class:`kernels.BlockMask`.
        mask_mod: ``(batch, head, row, col) -> bool``, a plain function that numba can compile, not
            operations on tensors.
        score_mod: ``(score, batch, head, row, col) -> score``, likewise; with its derivative, a pair.
        seed: Seed of the dropout mask; None draws one from PyTorch's generator of the CPU, so that
            ``torch.manual_seed`` determines it.
        precision: For float32, the lower precision that products may use; see :func:`kernels.make_problem`.
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
    _check_tensors(q=q, k=k, v=v, attn_mask=attn_mask, alibi_slopes=alibi_slopes, sink=sink)
    q, k, v, attn_mask = _in_autocast(q, k, v, attn_mask)
    if seed is not None:
        drawn = torch.tensor(seed if seed < 2**63 else seed - 2**64)
    else:
        drawn = torch.randint(2**63 - 1, ()) if dropout_p else None
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    left, right = (-1, -1) if window_size is None else window_size
    others = 0
    if not (block_mask is mask_mod is score_mod is precision is None and rung == "auto"):
        others = _number(block_mask, mask_mod, score_mod, precision, rung)
    out, lse = _forward(
        q, k, v, attn_mask, alibi_slopes, sink, drawn, dropout_p, is_causal, scale, enable_gqa,
        causal_offset, left, right, softcap, deterministic, others,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _check_tensors(**tensors: Any) -> None:
    """Check that operands are tensors on one device."""
    device = None
    for name, tensor in tensors.items():
        if tensor is None and name not in ("q", "k", "v"):
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} must be a torch.Tensor, got {type(tensor).__name__}; for other arrays call "
                "kernels.flash_attention_forward"
            )
        device = tensor.device if device is None else device
        if tensor.device != device:
            raise ValueError(
                f"q is on {device} and {name} on {tensor.device}; move all tensors to one device"
            )


def _in_autocast(*tensors: Any) -> Any:
    """Return tensors in the dtype of autocast where it is enabled."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [
        x.to(dtype) if x is not None and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    ]


@torch.compiler.assume_constant_result
def _number(
    block_mask: Any, mask_mod: Any, score_mod: Any, precision: str | None, rung: str
) -> int:
    """Return the number of a set of options, which is kept from now on."""
    score_mod = tuple(score_mod) if isinstance(score_mod, list) else score_mod
    own = block_mask, mask_mod, score_mod, precision, rung
    if own not in _NUMBERS:
        names = "block_mask", "mask_mod", "score_mod", "precision", "rung"
        _SETS.append(dict(zip(names, own, strict=True)))
        _NUMBERS[own] = len(_SETS) - 1
    return _NUMBERS[own]


def _options(
    attn_mask: Any, alibi_slopes: Any, sink: Any, seed: Any, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool, causal_offset: int, left: int, right: int, softcap: float,
    deterministic: bool, others: int,
) -> Any:  # fmt: skip
    """Return the options of the kernels for the arguments of the operator."""
    options = {
        "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa, "softcap": softcap,
        "deterministic": deterministic, **_SETS[others],
    }  # fmt: skip
    given = {"attn_mask": attn_mask, "alibi_slopes": alibi_slopes, "sink": sink}
    options.update({name: array for name, array in given.items() if array is not None})
    if dropout_p:
        options.update(dropout_p=dropout_p, seed=int(seed) % 2**64)
    if causal_offset:
        options["causal_offset"] = causal_offset
    if (left, right) != (-1, -1):
        options["window_size"] = left, right
    return options


@torch.library.custom_op("minitorch::flash_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, alibi_slopes: Tensor | None,
    sink: Tensor | None, seed: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool, causal_offset: int, left: int, right: int, softcap: float, deterministic: bool,
    others: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out and lse."""
    options = _options(
        attn_mask, alibi_slopes, sink, seed, dropout_p, is_causal, scale, enable_gqa, causal_offset,
        left, right, softcap, deterministic, others,
    )  # fmt: skip
    return kernels.flash_attention_forward(q, k, v, **options)


@torch.library.custom_op("minitorch::flash_attention_backward", mutates_args=())
def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    attn_mask: Tensor | None, alibi_slopes: Tensor | None, sink: Tensor | None, seed: Tensor | None,
    dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool, causal_offset: int,
    left: int, right: int, softcap: float, deterministic: bool, others: int, mask_gradient: bool,
    sink_gradient: bool,
) -> list[Tensor]:  # fmt: skip
    """Return dq, dk and dv, and the gradients of the mask and of the sinks if wanted."""
    options = _options(
        attn_mask, alibi_slopes, sink, seed, dropout_p, is_causal, scale, enable_gqa, causal_offset,
        left, right, softcap, deterministic, others,
    )  # fmt: skip
    more = {"mask_gradient": mask_gradient, "sink_gradient": sink_gradient}
    gradients = kernels.flash_attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, **more, **options
    )
    return list(gradients)


def _like(operand: Tensor, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Return an empty tensor whose dimensions have the order in memory of an operand's, as results do."""
    steps = operand.stride()
    repeats = any(step == 0 and size != 1 for step, size in zip(steps, shape, strict=False))
    if len(steps) != len(shape) or repeats:
        return operand.new_empty(shape, dtype=dtype)
    order = sorted(range(len(shape)), key=lambda i: (steps[i], shape[i] != 1, -i), reverse=True)
    places = [order.index(i) for i in range(len(shape))]
    return operand.new_empty([shape[i] for i in order], dtype=dtype).permute(places)


@_forward.register_fake
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    enable_gqa = others[7]
    until = -3 if enable_gqa else -2
    batch = torch.broadcast_shapes(q.shape[:until], k.shape[:until], v.shape[:until])
    rows = *batch, *q.shape[until:-1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _like(q, (*rows, v.shape[-1]), q.dtype), q.new_empty(rows, dtype=dtype)


@_backward.register_fake
def _fake_backward(
    dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    attn_mask: Any, alibi_slopes: Any, sink: Any, *others: Any,
) -> list[Tensor]:  # fmt: skip
    *_, mask_gradient, sink_gradient = others
    found = [_like(x, x.shape, x.dtype) for x in (q, k, v)]
    if mask_gradient:
        found.append(_like(attn_mask, attn_mask.shape, attn_mask.dtype))
    if sink_gradient:
        found.append(sink.new_empty(sink.shape, dtype=lse.dtype))
    return found


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, attn_mask, alibi_slopes, sink, seed, *ctx.numbers = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, attn_mask, alibi_slopes, sink, seed)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, attn_mask, alibi_slopes, sink, seed = ctx.saved_tensors
    wanted = ctx.needs_input_grad[3], ctx.needs_input_grad[5]
    found = _backward(
        torch.zeros_like(out) if dout is None else dout, dlse, q, k, v, out, lse, attn_mask,
        alibi_slopes, sink, seed, *ctx.numbers, *wanted,
    )  # fmt: skip
    others = iter(found[3:])
    dmask, dsink = (next(others) if want else None for want in wanted)
    if dsink is not None:
        dsink = dsink.to(sink.dtype)
    return *found[:3], dmask, None, dsink, *[None] * (1 + len(ctx.numbers))


_forward.register_autograd(_differentiate, setup_context=_save)
