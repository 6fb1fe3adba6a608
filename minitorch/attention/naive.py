"""Textbook attention, composed of tensor operations: the baseline of flash_attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kernels import Problem, takes_attention_options
from kernels.problem.option_values import SEEDS
from kernels.problem.options import WITH_GRADIENT, Options
from kernels.problem.signature import by_name

from ..functions import attention_derivatives as attention_derivatives  # beyond module 5
from ..functions.base import is_tensor
from ..functions.flash_attention import (
    FlashAttention,  # beyond module 5
    attention_call,
)
from ..nn import softmax
from ..tensor import Tensor
from ..tensors.factories import tensor
from .score_options import kept_probabilities, masking_penalty, modified, row_end

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes_attention_options
def naive_attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Unpack[Options]) -> Any:
    """Compute attention by the textbook formula, composed of differentiable tensor operations.

    This is the baseline of ``Tensor.flash_attention`` and has the same parameters.  It stores scores and
    probabilities, each seq_q x seq_k, and runs ``mask_mod`` and ``score_mod`` as Python on the host.

    Args:
        q: Queries, (…, heads, seq_q, head_dim).
        k: Keys, (…, heads, seq_k, head_dim).
        v: Values, (…, heads, seq_k, value_dim).
        args: Options by position: attn_mask, dropout_p, is_causal, scale and enable_gqa.
        options: Options by name; ``kernels.make_problem`` describes each.

    Returns:
        (…, heads, seq_q, value_dim); with ``return_lse`` a pair of it and lse (…, heads, seq_q).

    Source: FlashAttention, Algorithm 0.
    """
    options = by_name("naive_attention", args, options)
    call = attention_call(q, k, v, options)
    problem = call.problem
    if q.dtype != problem.acc_dtype:
        return _attend_widened((q, k, v), problem, options)
    if problem.groups > 1:
        k, v = (_repeat_heads(t, problem.groups) for t in (k, v))
    scores = (q @ _transpose(k)) * problem.scale  # (…, seq_q, seq_k)
    scores = modified(scores, call, options)
    penalty = masking_penalty(call, scores)
    if penalty is not None:
        scores = scores + penalty
    probs = softmax(scores, scores.dims - 1)  # (…, seq_q, seq_k)
    if problem.dropout_p:
        probs = probs * kept_probabilities(problem, probs)
    out = probs @ v  # (…, seq_q, value_dim)
    share, lse = row_end(call, scores, options)
    out = out if share is None else out * share
    return out if lse is None else (out, _as_lse(lse, problem))


def taped_derivative(score_mod: Callable[..., Any]) -> Callable[..., float]:
    """Return the derivative of a ``score_mod`` by backpropagation, as a function of the same arguments.

    Pass both, ``score_mod=(function, derivative)``, to :func:`naive_attention`, which calls them in Python.

    Args:
        score_mod: A function of (score, batch, head, row, col) that uses operators and methods of tensors.
    """

    def derivative(score: float, *place: int) -> float:
        # TASK 5.14: Call score_mod with a tensor of one number, go backward from its result.
        x: Any = tensor([score], requires_grad=True)
        score_mod(x, *place).backward()
        return x.grad.item()
        # END TASK 5.14

    return derivative


def _transpose(t: Tensor) -> Tensor:
    """Return (…, dim, seq) for (…, seq, dim)."""
    return t.permute(*range(t.dims - 2), t.dims - 1, t.dims - 2)


def _repeat_heads(t: Tensor, groups: int) -> Tensor:
    """Return keys or values with each head repeated for the query heads that share it."""
    *lead, heads, seq, dim = t.shape
    repeated = t.contiguous().view(*lead, heads, 1, seq, dim) + t.zeros((groups, 1, 1))
    return repeated.view(*lead, heads * groups, seq, dim)


def _as_lse(lse: Tensor, problem: Problem) -> Tensor:
    """Return lse as (…, heads, seq_q), repeated where q and k both broadcast to v."""
    lse = lse.contiguous().view(*lse.shape[:-1])
    return lse if lse.shape == problem.lse_shape else lse + lse.zeros(problem.lse_shape)


def _attend_widened(operands: tuple[Tensor, ...], problem: Problem, options: Options) -> Any:
    """Attend in the accumulator's dtype and round out once; lse stays as it is.

    Scores in 16 bits would overflow, or lose all but three digits, before the softmax.
    """
    every, sums = dict[str, Any](options), problem.acc_dtype
    for name, has_gradient in zip(WITH_GRADIENT, problem.has_gradients, strict=True):
        if has_gradient and is_tensor(every[name]):
            every[name] = every[name].to(sums)
    every["seed"] = problem.seed % SEEDS  # the seed drawn for this call
    result = naive_attention(*(t.to(sums) for t in operands), **every)
    if not isinstance(result, tuple):
        return result.to(problem.dtype)
    return result[0].to(problem.dtype), result[1]


def composed_attention(ctx: Any, q: Tensor, *others: Any) -> Any:  # beyond module 5
    """Repeat a call of :class:`FlashAttention` by :func:`naive_attention`.

    This serves derivatives that no kernel computes.

    Args:
        ctx: The context of the call, which has the seed of its dropout.
        q: Queries.
        *others: Keys, values, and the other arguments of ``FlashAttention.forward``.

    Raises:
        RuntimeError: For packed sequences.
    """
    k, v, *learnt = others
    options, *make = learnt[len(WITH_GRADIENT) :]
    if make:
        raise RuntimeError(
            "attention within packed sequences has first and second derivatives only; call flash_attention "
            "for each sequence"
        )
    every = {
        **options,
        **{n: x for n, x in zip(WITH_GRADIENT, learnt, strict=False) if x is not None},
    }
    if options.get("dropout_p"):
        every["seed"] = ctx.saved_values[1].seed % SEEDS
    return naive_attention(q, k, v, **every)


FlashAttention.composed = staticmethod(composed_attention)  # beyond module 5
