"""Attention as a differentiable function of tensors: one fused kernel forward, one pass backward."""

from __future__ import annotations

from operator import and_
from typing import Any, NamedTuple, cast

import numpy as np

from kernels import Problem, launch
from kernels.array_call import Make, check_on_host, with_arrays
from kernels.bound_calls import find  # beyond module 5
from kernels.common.arguments import flag, is_number
from kernels.cuda.backend import row_major_copy
from kernels.operand_types import DESCRIBE, READ, read
from kernels.problem.float8 import check_float8_gradient  # beyond module 5
from kernels.problem.operands import Operands, make_operands
from kernels.problem.options import ARRAYS, OPTION_ARRAYS, WITH_GRADIENT, Options
from kernels.problem.packed_problem import check_packed  # beyond module 5
from kernels.problem.question import problem_of
from kernels.scores.mods import check_derivative  # beyond module 5
from kernels.varlen import PackedMaker, sequences_of_call  # beyond module 5

from ..autodiff import Context
from ..backends import kernel_memory as kernel_memory  # which the operands need
from ..backends.tensor_protocol import TensorLike as Tensor
from .base import check_tensor, is_tensor
from .dropout_seeds import dropout_seed
from .several import Several
from .views import Permute


class AttentionCall(NamedTuple):
    """A checked call on tensors.

    Attributes:
        problem: The checked options of the call; with dropout they include a seed.
        arrays: The array options by name, each on the device of q, on the host, or None.
    """

    problem: Problem
    arrays: dict[str, Any]


def attention_call(
    q: Any,
    k: Any,
    v: Any,
    options: Options,
    make: Make = problem_of,
) -> AttentionCall:
    """Check the operands and options of attention on tensors; see ``kernels.make_problem``.

    Args:
        q: (…, heads, seq_q, head_dim).
        k: (…, heads, seq_k, head_dim).
        v: (…, heads, seq_k, value_dim).
        options: The options by name.  Without a seed, dropout takes one from Python's ``random``, which
            ``manual_seed`` sets.
        make: The function that builds the problem.

    Raises:
        TypeError: If an operand is not a tensor or not on the backend of q, the call cannot read a mask or
            slopes on their device, or the problem cannot be built.
    """
    for name, operand in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, operand)
    _describe(q)
    if not q.backend.kind is k.backend.kind is v.backend.kind:
        raise TypeError(
            "q, k and v must be on one backend, got "
            f"{', '.join(t.backend.kind.__name__ for t in (q, k, v))}; move them with "
            "Tensor.to(backend)"
        )
    given, arrays = options, dict[str, Any]()
    if not ARRAYS.isdisjoint(options):
        _check_slopes(options.get("alibi_slopes"))  # beyond module 5
        options, arrays = with_arrays(_readable_options(options))
    rate = options.get("dropout_p")
    if drawn := is_number(rate) and rate and options.get("seed") is None:
        options = {**options, "seed": 0}
    problem = make(q, k, v, options)
    launch.check_rung(problem)
    if drawn:
        problem = problem.with_seed(dropout_seed())
    if arrays:
        _check_places(problem, q, arrays, given)
    return AttentionCall(problem, arrays)


def _check_slopes(slopes: Any) -> None:  # beyond module 5
    """Check that ALiBi's slopes require no gradient."""
    if is_tensor(slopes) and slopes.requires_grad():
        raise ValueError(
            "alibi_slopes are constants, but this tensor requires a gradient; pass its detach(), or "
            "for a learnable bias, pass a score_mod with a score_table, or a float attn_mask"
        )


def _check_places(problem: Problem, q: Any, arrays: dict[str, Any], given: Options) -> None:
    """Check that a call can read its options, and that those with a gradient are on the backend of q."""
    for name, has_gradient in zip(WITH_GRADIENT, problem.has_gradients, strict=True):
        option = dict(given).get(name)
        if has_gradient and (name == "attn_mask" or is_tensor(option)):
            kind = "a floating attn_mask" if name == "attn_mask" else f"a {name} that is a tensor"
            _check_backend(kind, option, q)
    if not q.backend.cuda:
        check_on_host(arrays)


def _check_backend(name: str, option: Any, q: Any) -> None:
    """Check that an option is a tensor on the backend of q."""
    if not (is_tensor(option) and option.backend.kind is q.backend.kind):
        kind = option.backend.kind.__name__ if is_tensor(option) else type(option).__name__
        raise TypeError(
            f"{name} must be a tensor on the backend of q, {q.backend.kind.__name__}, got "
            f"{kind}; make one with minitorch.from_numpy, or move it with Tensor.to(backend)"
        )


def _readable_options(options: Options) -> Options:
    """Return options with arrays in the place of tensors."""
    return cast("Options", {name: _readable(option) for name, option in options.items()})


def _readable(option: Any) -> Any:
    """Return a tensor as the array that kernels read; anything else as it is."""
    return option.array() if is_tensor(option) else option


def attend_packed(  # beyond module 5
    q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, options: Options
) -> Any:
    """Attend within packed sequences; see ``Tensor.flash_attention_varlen``."""
    views: list[Any] = []
    for name, operand in (("q", q), ("k", k), ("v", v)):
        check_packed(name, operand)
        # Other types are refused where all operands are checked.
        views.append(Permute.apply(operand, (1, 0, 2)) if is_tensor(operand) else operand)
    make = PackedMaker(cu_q, cu_k, sequences_of_call)
    several = "return_lse" in options and flag("return_lse", options["return_lse"])
    apply = FlashAttention.apply_several if several else FlashAttention.apply
    result = apply(*views, *map(dict(options).get, WITH_GRADIENT), options, make)
    if not isinstance(result, tuple):
        return Permute.apply(result, (1, 0, 2))  # (total_q, heads, value_dim)
    return Permute.apply(result[0], (1, 0, 2)), result[1]


#: Number of options that may require gradients.
_LEARNT = len(WITH_GRADIENT)
#: What the forward pass returns.
_RESULTS = ("out", "lse", "lse_rest")


def _describe(t: Any) -> None:
    """Let calls be looked up by tensors of this type, if it is one."""
    if is_tensor(t):
        READ[type(t)] = _readable
        DESCRIBE[type(t)] = _of_tensor  # beyond module 5


def _of_tensor(t: Tensor) -> tuple[Any, Any]:  # beyond module 5
    """Return the layout of a tensor, and its storage; see ``operand_types.DESCRIBE``."""
    data = t._tensor
    return (data.shape, data.strides, data.dtype, t.backend), data._storage


class FlashAttention(Several):
    """Attention in one kernel: nothing of size seq_q x seq_k is ever stored."""

    minus_infinity_in = (1,)  # the lse of a row that sees no key

    @staticmethod
    def forward(
        ctx: Context,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *others: Any,
    ) -> Any:
        """Look up the call; if it is new, check it, pick a kernel, and keep how it runs.

        Args:
            ctx: Stores the name of the target (CPU or GPU), the problem, and all arrays of the call.
            q: (…, heads, seq_q, head_dim).
            k: (…, heads, seq_k, head_dim).
            v: (…, heads, seq_k, value_dim).
            *others: First the options that may require gradients, in the order of ``WITH_GRADIENT``.  Then
                a dictionary of all options by name.  Last the function that builds the problem; it may be
                missing, and ``problem_of`` is used instead.

        Returns:
            out (…, heads, seq_q, value_dim).  With ``return_lse`` also lse (…, heads, seq_q), float32 for
            16-bit operands, and the rounding error of lse.

        Raises:
            ValueError: If the call is invalid; if gradients are recorded, also for a ``score_mod`` that
                has no derivative and for float8 products.
        """
        options: Any = others[_LEARNT]
        make: Make = others[-1] if len(others) > _LEARNT + 1 else problem_of
        if not ARRAYS.isdisjoint(options):  # without their history
            options = {**options, **dict(zip(WITH_GRADIENT, others, strict=False))}
        if type(q) not in READ:
            _describe(q)
        found = problem = results = operands = None
        target = q.backend.target
        if getattr(options.get("alibi_slopes"), "history", None) is None:  # beyond module 5
            found = find((q, k, v), options, target, ctx.no_grad, make=make)
        if found is not None and found.call is not None:  # beyond module 5
            problem, seed = found.call.problem, found.seed
            if problem.dropout_p:
                seed = dropout_seed() if options.get("seed") is None else seed
                problem = problem.with_seed(seed)
            if found.call.reads_given:
                results = found.call.repeat.arrays(found.starts, seed, found.arrays)
        if problem is None:
            problem = attention_call(q, k, v, options, make).problem
            if not ctx.no_grad:  # beyond module 5
                check_derivative(problem.score_mod)
                check_float8_gradient(problem)
        if results is None:
            place = launch.TARGETS[target]
            _, given = with_arrays(_readable_options(options))
            own = q.array(), k.array(), v.array()
            operands = make_operands(place.memory, problem, *own, given)
            results = launch.run(found, place, problem, operands)
        out = q.wrap(results[0])
        if not ctx.no_grad:
            saved = Operands(q, k, v, **dict(zip(_RESULTS, results, strict=True)))
            if not ARRAYS.isdisjoint(options):
                saved = _with_options(saved, operands, options)
            ctx.save_for_backward(target, problem, *saved)
        return (out, q.wrap(results[1]), q.wrap(results[2])) if options.get("return_lse") else out

    @staticmethod
    def backward(
        ctx: Context,
        grad_output: Tensor | None,
        grad_lse: Tensor | None = None,
        grad_rest: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Recompute the probabilities tile by tile, and return dq, dk, dv and the gradients of options.

        The rounding error of lse is treated as a constant, so ``grad_rest`` has no effect.
        """
        target, problem, *saved = ctx.saved_values
        q, needs_grad = saved[0], ctx.needs_input_grad
        dout = q.zeros(problem.out_shape) if grad_output is None else grad_output
        dlse = None if grad_lse is None else in_dtype(grad_lse, problem.acc_dtype)
        kept = Operands(*saved).having(dout=in_dtype(dout, problem.dtype), dlse=dlse)
        wanted = launch.Wanted(True, *map(and_, needs_grad[3:], problem.has_gradients))
        none = [None] * (len(needs_grad) - 3)
        found = known = results = None
        given = [x for x in kept if x is not None]
        found = find(given, {}, target, problem.unseeded, wanted)  # beyond module 5
        known = found and found.call  # beyond module 5
        if found is not None and known is not None and known.reads_given:  # beyond module 5
            if not found.on_host and not any(wanted[1:]):
                repeat = known.repeat  # to storages, which takes less time than to arrays
                made = repeat.arrays(found.starts, problem.seed, flat=True)
                made = [q.on(x, *part[:2]) for x, part in zip(made, repeat.parts, strict=True)]
                return (*made, *none)
            results = known.repeat.arrays(found.starts, problem.seed, found.arrays)
        if results is None:
            operands = Operands(*[None if x is None else read(x) for x in kept])
            results = launch.run(found, launch.TARGETS[target], problem, operands, wanted)
        gradients = [None if x is None else q.wrap(x) for x in results]
        return (*gradients, *none[len(gradients) - 3 :])


def _with_options(saved: Operands, operands: Operands | None, options: Options) -> Operands:
    """Return saved arrays with the options that are arrays, as the call read them.

    Arrays of the caller's are copied, who may refill them before the backward pass.  Writes into tensors
    are noticed there, so that these are not copied.

    Args:
        saved: The other arrays.
        operands: The operands of the call; None if it read the options as they are.
        options: All options by name.
    """
    given: Any = options
    for field, name in OPTION_ARRAYS.items():
        if (option := given.get(name)) is not None:
            own = read(option)
            array = own if operands is None else getattr(operands, field)
            is_callers = array is own and not is_tensor(option)
            saved = saved.having(**{field: _copy(array) if is_callers else array})
    return saved


def _copy(array: Any) -> Any:
    """Return a copy of an array, which repeats along the dimensions that were broadcast."""
    if not isinstance(array, np.ndarray):
        return row_major_copy(array)
    once = tuple(slice(None if step else 1) for step in array.strides)
    return np.broadcast_to(array[once].copy(), array.shape)


def in_dtype(t: Tensor, dtype: Any) -> Tensor:
    """Convert the gradient of a result to the result's dtype; a later operation may have widened it."""
    return t if t.dtype == dtype else t.f.id_map(t, t.empty(t.shape, dtype))
