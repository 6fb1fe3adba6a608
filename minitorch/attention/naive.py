"""Attention by the textbook, composed of tensor operations: the baseline of flash_attention."""

from __future__ import annotations

from typing import Any

from kernels import Problem, takes_attention_options
from kernels.problem.option_values import SEEDS
from kernels.problem.signature import by_name

from ..functions.flash_attention import attention_call
from ..nn import logsumexp, softmax
from ..tensor import Tensor
from .score_options import Keep, kept_probabilities, modified, visibility


@takes_attention_options
def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend by the textbook, composed of tensor operations; autodiff derives its gradient.

    The baseline of ``Tensor.flash_attention``: same parameters, same meaning, and scores and
    probabilities of size seq_q x seq_k in memory.  Mods run as Python, on the host.

    Args:
        q: (…, heads, seq_q, head_dim).
        k: (…, heads, seq_k, head_dim).
        v: (…, heads, seq_k, value_dim).
        args: Options by position; see ``kernels.make_problem``.
        options: Options by name.

    Returns:
        (…, heads, seq_q, value_dim); with ``return_lse`` a pair of it and lse (…, heads, seq_q).

    Source: FlashAttention, Algorithm 0.
    """
    options = by_name(args, options)
    call = attention_call(q, k, v, options)
    if q.dtype != call.problem.acc_dtype:
        return _attend_widened((q, k, v), call.problem, options)
    problem, shown = call.problem, visibility(q, call)
    if shown.rows is not None:
        q = Keep.apply(q, shown.rows)
    if problem.groups > 1:  # (…, key heads, groups or 1, seq, dim)
        q, k, v = (_split_heads(t, problem) for t in (q, k, v))
    if shown.cols is not None:
        cols = _split_heads(shown.cols, problem) if problem.groups > 1 else shown.cols
        k, v = Keep.apply(k, cols), Keep.apply(v, cols)
    order = (*range(k.dims - 2), k.dims - 1, k.dims - 2)
    scores = (q @ k.permute(*order)) * problem.scale  # (…, seq_q, seq_k)
    return_lse = bool(options.get("return_lse"))
    is_whole = return_lse or not problem.is_plain  # else leading dimensions may still broadcast
    grouped = *problem.grouped_lead, problem.seq_q, problem.seq_k
    if is_whole:
        whole = scores if scores.shape == grouped else scores + scores.zeros(grouped)
        scores = whole.view(*problem.scores_shape)  # (…, heads, seq_q, seq_k)
        scores = modified(scores, call, options.get("attn_mask"))
    if shown.scores is not None:
        scores = Keep.apply(scores, shown.scores)
    if shown.penalty is not None:
        scores = scores + shown.penalty
    probs = softmax(scores, scores.dims - 1)  # (…, seq_q, seq_k)
    if problem.dropout_p:
        probs = probs * kept_probabilities(problem, probs)
    out = (probs.view(*grouped) if is_whole else probs) @ v  # (…, seq_q, value_dim)
    out = out.view(*problem.out_shape) if problem.groups > 1 else out
    if shown.rows is not None:
        out = Keep.apply(out, shown.rows)
    if not return_lse:
        return out
    return out, logsumexp(scores, scores.dims - 1).view(*problem.lse_shape)


def _attend_widened(operands: tuple[Tensor, ...], problem: Problem, options: dict[str, Any]) -> Any:
    """Attend in the accumulator's dtype and round out once; lse stays as it is.

    Scores of 16 bits would overflow, or have three digits, before the softmax sees them.
    """
    mask, sums = options.get("attn_mask"), problem.acc_dtype
    if mask is not None and problem.mask == "float":
        options = {**options, "attn_mask": mask.to(sums)}
    seed = problem.seed % SEEDS  # what was drawn for this call
    result = naive_attention(*(t.to(sums) for t in operands), **{**options, "seed": seed})
    if not isinstance(result, tuple):
        return result.to(problem.dtype)
    return result[0].to(problem.dtype), result[1]


def _split_heads(t: Tensor, problem: Problem) -> Tensor:
    """Return (…, heads, seq, dim) as (…, key heads, groups, seq, dim), sizes of 1 where heads broadcast."""
    if t.dims < 3:
        return t
    *lead, heads, seq, dim = t.shape
    count = min(heads, problem.key_lead[-1])
    return t.contiguous().view(*lead, count, heads // count, seq, dim)
