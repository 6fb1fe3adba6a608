"""Attention as custom operators, for torch.compile and all else that records or changes operators."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from math import prod
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

import kernels
from kernels.array_call import attend
from kernels.cuda.attention.options.packed_tiles import sequences_of_call
from kernels.interop.libraries import NO_FORWARD_MODE, NO_NESTED
from kernels.interop.torch.eager import (
    CONSTANTS,
    array_gradients,
    eager_attention,
    wanted_of,
)
from kernels.interop.torch.edges import rows_of
from kernels.interop.torch.second_order import in_loop, with_arrays
from kernels.launch import Wanted
from kernels.problem.options import ARRAY_ORDER, DEFAULTS, OPTIONS, WITH_GRADIENT, field_of
from kernels.problem.packed_problem import PackedMaker, check_packed_options
from kernels.problem.question import problem_of
from kernels.runtime.dtypes import BFLOAT16

#: Sets of the options of :data:`CONSTANTS`; an operator takes the number of a set.
_SETS: list[dict[str, Any]] = [{}]
_KNOWN: dict[tuple[Any, ...], int] = {}
#: The options that are arguments of the operators, after arrays and the seed.
_NUMBERS = [name for name, option in OPTIONS.items() if option.schema not in ("", "Tensor?")]
#: The cumulative lengths of packed sequences; None where q, k and v are not packed.
_SUMS = "cu_seqlens_q", "cu_seqlens_k"
_SCHEMA = ", ".join(
    f"{OPTIONS[name].schema if name in OPTIONS else 'Tensor?'} {name}"
    for name in (*ARRAY_ORDER, "seed", *_SUMS, *_NUMBERS)
)
_SCHEMA += ", SymInt others"
#: The number of tensors among the arguments of the operators, with q, k, v and the seed.
_TENSORS = 4 + len(ARRAY_ORDER) + len(_SUMS)
#: The number of modes that receive every operator, such as those of fake tensors.
_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_PLAIN = (Tensor, torch.nn.Parameter, type(None))


#: CUDA graphs of torch.compile leave the operators out: the kernels run on the legacy default stream.
_TAGS = [getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name)]
_OPERATOR: Any = {"mutates_args": (), **({"tags": _TAGS} if _TAGS else {})}


def _is_constant(function: Any) -> Any:
    """Mark a function as ``torch.compiler.assume_constant_result`` does, which imports the compiler."""
    function._dynamo_marked_constant = True
    return function


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


def maker_of(sums: Sequence[Any]) -> Any:
    """Return the function that builds the problem of a call with cumulative lengths, or without any."""
    if not sums:
        return problem_of
    on_host = [x.cpu() if isinstance(x, Tensor) else x for x in sums if x is not None]
    return PackedMaker(*on_host, sequences_of_call) if on_host else problem_of


def compiled_attention(
    arrays: tuple[Any, ...], seed: int | None, options: dict[str, Any], sums: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse and what lse loses by rounding by the custom operator.

    ``arrays`` are q, k, v and the options that are arrays, as the kernels take them, ``sums`` the
    cumulative lengths of packed sequences, if any; a seed of None is drawn.
    """
    given = [x for x in arrays if x is not None]
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
            return eager_attention(*arrays, own, maker_of(sums))  # breaks the graph
        raise NotImplementedError(
            "flash_attention cannot be differentiated by torch.func within make_fx or torch.export; call "
            "torch.func outside of them, or use torch.autograd.grad"
        )
    others = 0
    if any(options.get(name, DEFAULTS[name]) is not DEFAULTS[name] for name in CONSTANTS):
        parts: list[Any] = []
        for name in CONSTANTS:
            value = options.get(name, DEFAULTS[name])
            for part in value if isinstance(value, (tuple, list)) else (value, None):
                parts += _parts(part)
        others = _number(*parts)
    numbers = [options.get(name, DEFAULTS[name]) for name in _NUMBERS]
    lengths = [torch.as_tensor(x, device=getattr(x, "device", "cpu")) for x in sums]
    lengths = lengths or [None] * len(_SUMS)
    return _forward(*arrays, drawn, *lengths, *numbers, others)


@_is_constant
def _is_differentiated() -> bool:
    """Tell whether torch.func differentiates the call, which PyTorch does not support for operators."""
    functorch = torch._C._functorch
    kinds = functorch.TransformType.Grad, functorch.TransformType.Jvp
    return any(level.key() in kinds for level in functorch.get_interpreter_stack() or ())


def _parts(mod: Any) -> tuple[Any, Any]:
    """Return an option, or a user function and the object it is bound to, with guards for torch.compile."""
    owner = None
    if isinstance(mod, MethodType):  # each access to a method makes a new object
        mod, owner = mod.__func__, mod.__self__
    if torch.compiler.is_compiling() and callable(mod):
        _guard(mod)
    return mod, owner


def _guard(value: Any) -> None:
    """Let torch.compile, which traces this, guard a user function, or a value that it captures.

    By itself it guards only the code of a function.  Globals and attributes are read in each call.
    """
    if isinstance(value, FunctionType):
        repr(value)  # a graph break if a compiled function captures a variable
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


@_is_constant
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


@_is_constant
def _number(*parts: Any) -> int:
    """Return the number of a set of options, which is kept from now on; four parts for each option."""
    if parts not in _KNOWN:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        values = [f if owner is None else MethodType(f, owner) for f, owner in pairs]
        options = zip(CONSTANTS, values[::2], values[1::2], strict=True)
        _SETS.append({name: x if y is None else (x, y) for name, x, y in options})
        _KNOWN[parts] = len(_SETS) - 1
    return _KNOWN[parts]


def _call(*args: Any) -> tuple[Any, Sequence[Any]]:
    """Return the options of the kernels for the arguments of the operator after q, k and v, and lengths."""
    count = len(ARRAY_ORDER)
    seed, *sums, others = args[count], *args[count + 1 : count + 3], args[-1]
    given = zip(_NUMBERS, args[count + 3 : -1], strict=True)
    options = {name: number for name, number in given if number != DEFAULTS[name]}
    if options.get("dropout_p"):
        options["seed"] = int(seed) % 2**64
    if "window_size" in options:
        options["window_size"] = tuple(options["window_size"])
    return with_arrays({**options, **_SETS[others]}, args[:count]), sums


@torch.library.custom_op(
    "minitorch::flash_attention",
    schema=f"(Tensor q, Tensor k, Tensor v, {_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    **_OPERATOR,
)
def _forward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse and what lse loses by rounding."""
    options, sums = _call(*others)
    return attend((q, k, v), options, None, make=maker_of(sums))  # type: ignore[return-value]


@torch.library.custom_op(
    "minitorch::flash_attention_backward",
    schema="(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor rest, "
    f"{_SCHEMA}, {', '.join(f'bool {field_of(name)}_gradient' for name in WITH_GRADIENT)}) -> Tensor[]",
    **_OPERATOR,
)
def _backward(dout: Tensor, dlse: Tensor | None, *others: Any) -> list[Tensor]:
    """Return dq, dk and dv, and the gradients of options that are wanted."""
    q, k, v, out, lse, rest, *arguments = others
    end = len(arguments) - len(WITH_GRADIENT)
    (options, sums), wanted = _call(*arguments[:end]), Wanted(True, *arguments[end:])
    results = out, lse, rest, dout, dlse
    return list(attend((q, k, v), options, None, wanted, results, maker_of(sums)))


def _like(operand: Tensor, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Return an empty tensor whose dimensions have the order in memory of an operand's, as results do."""
    steps = operand.stride()
    repeats = any(step == 0 and size != 1 for step, size in zip(steps, shape, strict=False))
    if len(steps) != len(shape) or repeats or operand.is_contiguous():
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
    count = len(ARRAY_ORDER)
    options, sums = _call(*others[:count], 0, *others[count + 1 :])
    if sums[0] is not None:
        check_packed_options(options)
    _check(q, k, v, options)
    rows = rows_of(q, k, v, options)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse, rest = (q.new_empty(rows, dtype=dtype) for _ in range(2))
    return _like(q, (*rows, v.shape[-1]), q.dtype), lse, rest


@_backward.register_fake
def _fake_backward(dout: Tensor, dlse: Any, *others: Any) -> list[Tensor]:
    q, k, v, _, lse, _, *arguments = others
    found = [_like(x, x.shape, x.dtype) for x in (q, k, v)]
    arrays = dict(zip(ARRAY_ORDER, arguments, strict=False))
    for name, is_wanted in zip(WITH_GRADIENT, arguments[-len(WITH_GRADIENT) :], strict=True):
        if is_wanted:
            array = arrays[name]
            dtype = array.dtype if name == "attn_mask" else lse.dtype
            found.append(_like(array, array.shape, dtype))
    return found


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.numbers = inputs[_TENSORS:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:_TENSORS])


def _differentiate(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, drest: Tensor | None
) -> tuple[Any, ...]:
    saved, wanted = ctx.saved_tensors, wanted_of(ctx.needs_input_grad)
    dout = torch.zeros_like(saved[3]) if dout is None else dout
    found = _backward(dout, dlse, *saved, *ctx.numbers, *wanted)
    others = array_gradients(wanted, found[3:], saved[6 : 6 + len(ARRAY_ORDER)])
    return *found[:3], *others, *[None] * (1 + len(_SUMS) + len(ctx.numbers))


_forward.register_autograd(_differentiate, setup_context=_save)
_forward.register_vmap(lambda info, in_dims, *args: in_loop(_forward, info, in_dims, args))
_backward.register_vmap(lambda info, in_dims, *args: in_loop(_backward, info, in_dims, args))


def _flop(q: Any, k: Any, v: Any, *others: Any, out_shape: Any, **kwargs: Any) -> int:
    """Count two matrix products without regard to masks, as PyTorch does for its own attention."""
    return 2 * prod(out_shape[1]) * k[-2] * (q[-1] + v[-1])


def _backward_flop(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *others: Any, **kwargs: Any
) -> int:
    return 2 * prod(lse) * k[-2] * (3 * q[-1] + 2 * v[-1])


def _count_flop(counter: Any) -> None:
    """Register the formulas with PyTorch's module that counts operations."""
    counter.register_flop_formula(torch.ops.minitorch.flash_attention)(_flop)
    counter.register_flop_formula(torch.ops.minitorch.flash_attention_backward)(_backward_flop)


def _when_imported(name: str, action: Callable[[Any], None]) -> None:
    """Call an action with a module: now if it has been imported, otherwise after its import."""
    if name in sys.modules:
        action(sys.modules[name])
        return

    class Finder:
        @staticmethod
        def find_spec(fullname: str, path: Any, target: Any = None) -> Any:
            if fullname != name:
                return None
            sys.meta_path.remove(Finder)
            spec: Any = find_spec(name)
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                action(module)

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder)


# The module imports Triton where it is installed, a fifth of the time to import this package.
_when_imported("torch.utils.flop_counter", _count_flop)
