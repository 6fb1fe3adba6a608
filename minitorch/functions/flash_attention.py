"""Attention as a differentiable function of tensors: one fused kernel forward, one pass backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kernels import Problem, launch
from kernels.array_call import check_on_host, with_arrays
from kernels.common.arguments import flag, is_number
from kernels.cuda.backend import address_of, row_major_copy
from kernels.known_calls import DESCRIBE, Glance, glance
from kernels.problem.float8 import check_float8_gradient
from kernels.problem.operands import PER_HEAD, Operands, in_order, make_operands
from kernels.problem.options import ARRAYS, Options
from kernels.problem.packed_problem import check_packed
from kernels.problem.question import problem_of
from kernels.scores.mods import check_derivative
from kernels.varlen import maker as packed_maker

from ..autodiff import Context
from ..backends import kernel_memory as kernel_memory  # which the operands need
from ..backends.tensor_protocol import TensorLike as Tensor
from ..tensor_data import TensorData
from .base import Function, check_tensor, is_tensor
from .dropout_seeds import dropout_seed
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
    make: Callable[[Any, Any, Any, Options], Problem] = problem_of,
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
    if not q.backend.kind is k.backend.kind is v.backend.kind:
        raise TypeError(
            "q, k and v must be on one backend, got "
            f"{', '.join(t.backend.kind.__name__ for t in (q, k, v))}; move them with "
            "Tensor.to(backend)"
        )
    given, arrays = options, dict[str, Any]()
    if not ARRAYS.isdisjoint(options):
        _check_slopes(options.get("alibi_slopes"))
        readable: Any = {name: _readable(option) for name, option in options.items()}
        options, arrays = with_arrays(readable)
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


def _check_slopes(slopes: Any) -> None:
    """Check that ALiBi's slopes require no gradient."""
    if is_tensor(slopes) and slopes.requires_grad():
        raise ValueError(
            "alibi_slopes are constants, but this tensor requires a gradient; pass its detach(), or "
            "for a learnable bias, pass a float attn_mask"
        )


def _check_places(problem: Problem, q: Any, arrays: dict[str, Any], given: Options) -> None:
    """Check that a call can read its options, and that those with a gradient are on the backend of q."""
    if problem.mask == "float":
        _check_backend("a floating attn_mask", given.get("attn_mask"), q)
    if is_tensor(sink := given.get("sink")):
        _check_backend("a sink that is a tensor", sink, q)
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


def _readable(option: Any) -> Any:
    """Return a tensor as the array that kernels read; anything else as it is."""
    return option.array() if is_tensor(option) else option


def attend_packed(q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, options: Options) -> Any:
    """Attend within packed sequences; see ``Tensor.flash_attention_varlen``."""
    views: list[Any] = []
    for name, operand in (("q", q), ("k", k), ("v", v)):
        check_packed(name, operand)
        # What is no tensor is refused where all operands are checked.
        views.append(Permute.apply(operand, (1, 0, 2)) if is_tensor(operand) else operand)
    make = packed_maker(cu_q, cu_k)
    several = "return_lse" in options and flag("return_lse", options["return_lse"])
    apply = FlashAttention.apply_several if several else FlashAttention.apply
    result = apply(*views, options.get("attn_mask"), options.get("sink"), options, make)
    if not isinstance(result, tuple):
        return Permute.apply(result, (1, 0, 2))  # (total_q, heads, value_dim)
    return Permute.apply(result[0], (1, 0, 2)), result[1]


#: What the forward pass returns.
_RESULTS = ("out", "lse", "lse_rest")


class _Kept(NamedTuple):
    """The data of a call that its backward pass needs.

    Attributes:
        target: The target on which it ran.
        problem: The checked call.
        q: The queries.
        data: On a device, the data of q, k, v, out, lse and its rest.
        operands: All arrays of the call, including these results; None if ``data`` has all of them.
    """

    target: Any
    problem: Problem
    q: Tensor
    data: tuple[TensorData, ...]
    operands: Operands | None

    def having(self, dout: Any, dlse: Any = None) -> Operands:
        """Return the operands of the backward pass."""
        operands = self.operands
        if operands is None:
            view = self.target.memory.view
            q, k, v, *results = (view(x._storage, x.shape, x.strides) for x in self.data)
            operands = Operands(q, k, v, **dict(zip(_RESULTS, results, strict=True)))
        return operands.having(dout=dout, dlse=dlse)


def _of_data(data: TensorData) -> tuple[Any, int]:
    return (data.shape, data.strides, data.dtype), address_of(data._storage)


DESCRIBE[TensorData] = _of_data


class FlashAttention(Function):
    """Attention in one kernel: nothing of size seq_q x seq_k is ever stored."""

    minus_infinity_in = (1,)  # the lse of a row that sees no key

    @staticmethod
    def forward(
        ctx: Context,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        sink: Any,
        options: Options,
        make: Callable[[Any, Any, Any, Options], Problem] = problem_of,
    ) -> Any:
        """Check the call, compute out and lse, and keep them for the backward pass.

        Args:
            ctx: Stores the target (CPU or GPU), the problem, q, and all arrays of the call.
            q: (…, heads, seq_q, head_dim).
            k: (…, heads, seq_k, head_dim).
            v: (…, heads, seq_k, value_dim).
            mask: The option ``attn_mask``.
            sink: The option ``sink``.
            options: All options by name.
            make: The function that builds the problem.

        Returns:
            out (…, heads, seq_q, value_dim); with ``return_lse`` also lse (…, heads, seq_q), float32 for
            16-bit operands, and its rest.

        Raises:
            ValueError: If the call is invalid; if gradients are recorded, also for a ``score_mod`` without
                its derivative and for float8 products.
        """
        target, operands = launch.TARGETS[q.backend.target], None
        seen = _glance(q, k, v, options) if make is problem_of else None
        if seen is not None and seen.plan is not None:
            problem = seen.plan.problem
            if problem.dropout_p:
                drawn = dropout_seed() if options.get("seed") is None else seen.seed
                problem = problem.with_seed(drawn)
            again = seen.plan.repeat.storages(seen.starts, problem.seed)
            out, lse, rest = (q.on(*result) for result in again)
        else:
            if mask is not None or sink is not None:  # without their history
                options = {**options, "attn_mask": mask, "sink": sink}
            call = attention_call(q, k, v, options, make)
            problem = call.problem
            if not ctx.no_grad:
                check_derivative(problem.score_mod)
                check_float8_gradient(problem)
            own = q.array(), k.array(), v.array()
            operands = make_operands(target.memory, problem, *own, *in_order(call.arrays))
            plan = launch.plan_of(target, problem, operands)
            results = plan.run(problem, operands)
            if seen is not None:
                seen.learn(plan, operands)
            operands = operands.having(**dict(zip(_RESULTS, results, strict=True)))
            if call.arrays and not ctx.no_grad:
                operands = _with_copies(operands, call.arrays, options)
            out, lse, rest = map(q.wrap, results)
        if not ctx.no_grad:
            data = (q, k, v, out, lse, rest) if q.backend.cuda else ()
            ctx.save_for_backward(
                *_Kept(target, problem, q, tuple([x._tensor for x in data]), operands)
            )
        return (out, lse, rest) if options.get("return_lse") else out

    @staticmethod
    def backward(
        ctx: Context,
        grad_output: Tensor | None,
        grad_lse: Tensor | None = None,
        grad_rest: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Recompute the probabilities tile by tile and return dq, dk, dv, dmask and dsink.

        The rest of lse is a constant, as the error of a rounding is.
        """
        kept = _Kept(*ctx.saved_values)
        problem, q = kept.problem, kept.q
        dout = q.zeros(problem.out_shape) if grad_output is None else grad_output
        given = [_in_dtype(dout, q.dtype)]
        if grad_lse is not None:
            given.append(_in_dtype(grad_lse, problem.acc_dtype))
        is_plain = bool(kept.data) and not (problem.mask or problem.slopes or problem.sink)
        seen = None
        if is_plain and problem.score_mod is None and problem.mask_mod is None:
            data = *kept.data, *[x._tensor for x in given]
            seen = glance(data, {}, "gradients", problem.unseeded)
        if seen is not None and seen.plan is not None:
            again = seen.plan.repeat.storages(seen.starts, problem.seed)
            results: list[Any] = [q.on(*result) for result in again]
        else:
            operands = kept.having(*[x.array() for x in given])
            wanted = launch.Wanted(
                True,
                ctx.needs_input_grad[3] and problem.mask == "float",
                problem.sink and ctx.needs_input_grad[4],
            )
            plan = launch.plan_of(kept.target, problem, operands, wanted=wanted)
            gradients = plan.run(problem, operands)
            if seen is not None:
                seen.learn(plan, operands)
            results = [None if array is None else q.wrap(array) for array in gradients]
        return (*results, *[None] * (len(ctx.needs_input_grad) - len(results)))


def _with_copies(operands: Operands, arrays: dict[str, Any], options: Options) -> Operands:
    """Copy options that are arrays of the caller's, who may refill them before the backward pass.

    Writes into tensors are noticed there, so that these are not copied.
    """
    given: Any = options
    for field, name in {"mask": "attn_mask", **PER_HEAD}.items():
        array = getattr(operands, field)
        if array is not None and array is arrays.get(name) and not is_tensor(given[name]):
            operands = operands.having(**{field: _copy(array)})
    return operands


def _copy(array: Any) -> Any:
    """Return a copy of an array, without the repetitions of a broadcast dimension."""
    if not isinstance(array, np.ndarray):
        return row_major_copy(array)
    once = tuple(slice(None if step else 1) for step in array.strides)
    return array[once].copy()


def _glance(q: Any, k: Any, v: Any, options: Options) -> Glance | None:
    """Describe a call on a device by the layouts of its operands; None if it has to run in full."""
    backend = q.backend
    if not (backend.cuda and is_tensor(k) and is_tensor(v)):
        return None
    if not (backend is k.backend is v.backend):
        return None
    return glance((q._tensor, k._tensor, v._tensor), options, backend)


def _in_dtype(t: Tensor, dtype: Any) -> Tensor:
    """Return a gradient in the dtype of its result; a later operation may have widened it."""
    return t if t.dtype == dtype else t.f.id_map(t, t.empty(t.shape, dtype))
