"""Attention as custom operators, for torch.compile and all else that records or changes operators."""

from collections.abc import Sequence
from functools import partial
from math import prod
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

import kernels
from kernels.array_call import attend
from kernels.interop.libraries import NO_FORWARD_MODE, NO_NESTED
from kernels.interop.torch.eager import eager_attention, in_loop, with_arrays
from kernels.launch import Wanted
from kernels.runtime.dtypes import BFLOAT16

#: Sets of options that no operator of PyTorch can take, such as functions; an operator takes their number.
_SETS: list[dict[str, Any]] = [{}]
_NUMBERS: dict[tuple[Any, ...], int] = {}
#: The number of modes that receive every operator, such as those of fake tensors.
_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_PLAIN = (Tensor, torch.nn.Parameter, type(None))


#: CUDA graphs of torch.compile leave the operators out: the kernels run on the legacy default stream.
_TAGS = [getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name)]
_OPTIONS: Any = {"mutates_args": (), **({"tags": _TAGS} if _TAGS else {})}


def is_traced(tensors: tuple[Any, ...]) -> bool:
    """Tell whether a call has to be an operator of PyTorch, which takes longer than calling the kernels."""
    if torch.compiler.is_compiling() or _modes():
        return True
    for tensor in tensors:  # noqa: SIM110 - any() takes longer
        if type(tensor) not in _PLAIN:
            return True
    return False


def draw_seed() -> Tensor:
    """Return a seed of dropout from PyTorch's generator of the CPU, whatever its default device is."""
    return torch.randint(2**63 - 1, (), device="cpu")


def compiled_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, alibi_slopes: Tensor | None,
    sink: Tensor | None, seed: int | None, options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return out, lse and what lse loses by rounding by the custom operator.

    Args:
        q: (…, heads, seq_q, head_dim).
        k: (…, heads, seq_k, head_dim).
        v: (…, heads, seq_k, value_dim).
        attn_mask: As the kernels take it.
        alibi_slopes: Likewise.
        sink: Likewise.
        seed: Of dropout; drawn where None.
        options: The other options of the kernels.
    """
    given = [x for x in (q, k, v, attn_mask, sink) if x is not None]
    if any(x.is_nested for x in given):
        raise TypeError(NO_NESTED)
    # A custom operator would give the results a tangent of zeros.
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in given
    ):
        raise NotImplementedError(NO_FORWARD_MODE)
    drawn = None
    if seed is not None:
        drawn = torch.tensor(seed if seed < 2**63 else seed - 2**64, device="cpu")
    elif options.get("dropout_p"):
        drawn = draw_seed()
    if torch._C._are_functorch_transforms_active() and _is_differentiated():
        if torch.compiler.is_dynamo_compiling():
            own = options if drawn is None else {**options, "seed": drawn}
            return eager_attention(q, k, v, attn_mask, alibi_slopes, sink, own)  # breaks the graph
        raise NotImplementedError(
            "flash_attention cannot be differentiated by torch.func within make_fx or torch.export; call "
            "torch.func outside of them, or use torch.autograd.grad"
        )
    left, right = options.get("window_size") or (-1, -1)
    others = 0
    if "rung" in options:
        mods = options["score_mod"]
        mods = tuple(mods) if isinstance(mods, (tuple, list)) else (mods, None)
        parts = [part for mod in (options["mask_mod"], *mods) for part in _parts(mod)]
        others = _number(options["block_mask"], options["precision"], options["rung"], *parts)
    return _forward(
        q, k, v, attn_mask, alibi_slopes, sink, drawn, options.get("dropout_p", 0.0),
        options["is_causal"], options.get("scale"), options.get("enable_gqa", False),
        options.get("causal_offset", 0), left, right, options.get("softcap", 0.0),
        options["deterministic"], others,
    )  # fmt: skip


@torch.compiler.assume_constant_result
def _is_differentiated() -> bool:
    """Tell whether torch.func differentiates the call, which PyTorch does not support for operators."""
    functorch = torch._C._functorch
    kinds = functorch.TransformType.Grad, functorch.TransformType.Jvp
    return any(level.key() in kinds for level in functorch.get_interpreter_stack() or ())


def _parts(mod: Any) -> tuple[Any, Any]:
    """Return a user function and the object it is bound to or None, with guards for torch.compile."""
    owner = None
    if isinstance(mod, MethodType):  # each access to a method makes a new object
        mod, owner = mod.__func__, mod.__self__
    if torch.compiler.is_compiling():
        _guard(mod)
    return mod, owner


def _guard(value: Any) -> None:
    """Let torch.compile, which traces this, guard the values that a user function captures.

    By itself it guards only the code of a function.  Globals and attributes are read in each call.

    Args:
        value: A user function, or a captured value.
    """
    if isinstance(value, FunctionType):
        repr(value)  # a graph break if a compiled function captures what is no constant
        try:
            cells = value.__closure__ or ()
        except AttributeError:  # a function of the compiled code, before PyTorch 2.14
            if not _captures_constants(value):
                torch._dynamo.graph_break()
            return
        for cell in cells:
            _guard(cell.cell_contents)
        _guard(value.__defaults__)
        _guard(value.__kwdefaults__)
    elif isinstance(value, partial):
        for part in (value.func, value.args, value.keywords):
            _guard(part)
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _guard(item)
    elif isinstance(value, (int, float, str)):
        hash(value)  # makes a number a constant of the graph
    elif value is not None:
        id(value)


@torch.compiler.assume_constant_result
def _captures_constants(function: FunctionType) -> bool:
    """Tell whether a function of compiled code captures only values that torch.compile has guarded."""
    stack = [cell.cell_contents for cell in function.__closure__ or ()]
    stack += [function.__defaults__, *(function.__kwdefaults__ or {}).values()]
    while stack:
        value = stack.pop()
        if isinstance(value, tuple):
            stack += value
        elif not isinstance(value, (int, float, str, type(None))):
            return False
    return True


@torch.compiler.assume_constant_result
def _number(block_mask: Any, precision: Any, rung: Any, *parts: Any) -> int:
    """Return the number of a set of options, which is kept from now on."""
    own = block_mask, precision, rung, *parts
    if own not in _NUMBERS:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        mask_mod, *score_mod = (f if owner is None else MethodType(f, owner) for f, owner in pairs)
        _SETS.append(
            {
                "block_mask": block_mask,
                "precision": precision,
                "rung": rung,
                "mask_mod": mask_mod,
                "score_mod": None if score_mod == [None, None] else tuple(score_mod),
            }
        )
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
    options = with_arrays(options, attn_mask, alibi_slopes, sink)
    if dropout_p:
        options.update(dropout_p=dropout_p, seed=int(seed) % 2**64)
    if causal_offset:
        options["causal_offset"] = causal_offset
    if (left, right) != (-1, -1):
        options["window_size"] = left, right
    return options


@torch.library.custom_op("minitorch::flash_attention", **_OPTIONS)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, alibi_slopes: Tensor | None,
    sink: Tensor | None, seed: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool, causal_offset: int, left: int, right: int, softcap: float, deterministic: bool,
    others: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return out, lse and what lse loses by rounding."""
    options = _options(
        attn_mask, alibi_slopes, sink, seed, dropout_p, is_causal, scale, enable_gqa, causal_offset,
        left, right, softcap, deterministic, others,
    )  # fmt: skip
    return attend((q, k, v), options, None)  # type: ignore[return-value]


@torch.library.custom_op("minitorch::flash_attention_backward", **_OPTIONS)
def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    rest: Tensor, attn_mask: Tensor | None, alibi_slopes: Tensor | None, sink: Tensor | None,
    seed: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool,
    causal_offset: int, left: int, right: int, softcap: float, deterministic: bool, others: int,
    mask_gradient: bool, sink_gradient: bool,
) -> list[Tensor]:  # fmt: skip
    """Return dq, dk and dv, and the gradients of the mask and of the sinks if wanted."""
    options = _options(
        attn_mask, alibi_slopes, sink, seed, dropout_p, is_causal, scale, enable_gqa, causal_offset,
        left, right, softcap, deterministic, others,
    )  # fmt: skip
    results, wanted = (out, lse, rest, dout, dlse), Wanted(True, mask_gradient, sink_gradient)
    return list(attend((q, k, v), options, None, wanted, results))


def _like(operand: Tensor, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Return an empty tensor whose dimensions have the order in memory of an operand's, as results do."""
    steps = operand.stride()
    repeats = any(step == 0 and size != 1 for step, size in zip(steps, shape, strict=False))
    if len(steps) != len(shape) or repeats:
        return operand.new_empty(shape, dtype=dtype)
    order = sorted(
        range(len(shape)), key=lambda i: (steps[i], bool(shape[i] != 1), -i), reverse=True
    )
    places = [order.index(i) for i in range(len(shape))]
    return operand.new_empty([shape[i] for i in order], dtype=dtype).permute(places)


def _check(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
    """Check a call on tensors without memory, as the kernels do, where its sizes are known."""

    def shown(x: Any) -> Any:
        name = str(x.dtype).removeprefix("torch.")
        dtype = BFLOAT16 if name == "bfloat16" else np.dtype(name)
        return np.broadcast_to(np.zeros((), dtype), tuple(x.shape))

    tensors = [q, k, v, *(x for x in options.values() if isinstance(x, Tensor))]
    if all(type(size) is int for x in tensors for size in x.shape):
        own = {name: shown(x) if isinstance(x, Tensor) else x for name, x in options.items()}
        kernels.make_problem(shown(q), shown(k), shown(v), **own)


@_forward.register_fake
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    _check(q, k, v, _options(*others[:3], 0, *others[4:]))
    enable_gqa = others[7]
    until = -3 if enable_gqa else -2
    batch = torch.broadcast_shapes(q.shape[:until], k.shape[:until], v.shape[:until])
    rows = *batch, *q.shape[until:-1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse, rest = (q.new_empty(rows, dtype=dtype) for _ in range(2))
    return _like(q, (*rows, v.shape[-1]), q.dtype), lse, rest


@_backward.register_fake
def _fake_backward(
    dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    rest: Tensor, attn_mask: Any, alibi_slopes: Any, sink: Any, *others: Any,
) -> list[Tensor]:  # fmt: skip
    *_, mask_gradient, sink_gradient = others
    found = [_like(x, x.shape, x.dtype) for x in (q, k, v)]
    if mask_gradient:
        found.append(_like(attn_mask, attn_mask.shape, attn_mask.dtype))
    if sink_gradient:
        found.append(sink.new_empty(sink.shape, dtype=lse.dtype))
    return found


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, attn_mask, alibi_slopes, sink, seed, *ctx.numbers = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, attn_mask, alibi_slopes, sink, seed)


def _differentiate(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, drest: Tensor | None
) -> tuple[Any, ...]:
    q, k, v, out, lse, rest, attn_mask, alibi_slopes, sink, seed = ctx.saved_tensors
    wanted = ctx.needs_input_grad[3], ctx.needs_input_grad[5]
    found = _backward(
        torch.zeros_like(out) if dout is None else dout, dlse, q, k, v, out, lse, rest,
        attn_mask, alibi_slopes, sink, seed, *ctx.numbers, *wanted,
    )  # fmt: skip
    others = iter(found[3:])
    dmask, dsink = (next(others) if want else None for want in wanted)
    if dsink is not None:
        dsink = dsink.to(sink.dtype)
    return *found[:3], dmask, None, dsink, *[None] * (1 + len(ctx.numbers))


_forward.register_autograd(_differentiate, setup_context=_save)
_forward.register_vmap(lambda info, in_dims, *args: in_loop(_forward, info, in_dims, args))
_backward.register_vmap(lambda info, in_dims, *args: in_loop(_backward, info, in_dims, args))


@register_flop_formula(torch.ops.minitorch.flash_attention)
def _flop(q: Any, k: Any, v: Any, *others: Any, out_shape: Any, **kwargs: Any) -> int:
    """Count two matrix products without regard to masks, as PyTorch does for its own attention."""
    return 2 * prod(out_shape[1]) * k[-2] * (q[-1] + v[-1])


@register_flop_formula(torch.ops.minitorch.flash_attention_backward)
def _backward_flop(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *others: Any, **kwargs: Any
) -> int:
    return 2 * prod(lse) * k[-2] * (3 * q[-1] + 2 * v[-1])
