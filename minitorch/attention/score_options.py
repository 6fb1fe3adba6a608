"""Apply the options of attention to the scores of composed attention, in tensor operations."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kernels import Problem, dropout_mask
from kernels.common.geometry import same
from kernels.common.philox import keep_scale
from kernels.cuda.backend import is_device_array, to_host
from kernels.problem.option_values import SEEDS
from kernels.problem.options import AXES, OPTION_ARRAYS
from kernels.runtime.dtypes import acc_dtype, rounded
from kernels.scores.mods import (  # beyond module 5
    ScoreMod,
    add_read_gradients,
    check_derivative,
    evaluate,
)
from kernels.scores.program import Place, ScoreTarget, features_of, make_score_program
from kernels.scores.visibility import distance, is_visible

from ..autodiff import Context
from ..functions.base import Function, is_tensor
from ..functions.flash_attention import AttentionCall
from ..nn import logsumexp
from ..operators import EPS
from ..tensor_ops import TensorBackend
from ..tensors.factories import from_numpy, tensor

if TYPE_CHECKING:
    from ..tensor import Tensor

Bools = npt.NDArray[np.bool_]


def masking_penalty(call: AttentionCall, like: Tensor) -> Tensor | None:
    """Return the mask to add to the scores: 0 where a score is visible, minus infinity where it is masked.

    Args:
        call: The checked call.
        like: A tensor of the same backend and dtype.

    Returns:
        A constant that broadcasts to (…, heads, seq_q, seq_k); None if nothing is masked.
    """
    problem, backend, dtype = call.problem, like.backend, like.dtype
    if problem.mask == "bool" or problem.block_mask is not None or problem.mask_mod is not None:
        return _penalty(_visible(call), backend, dtype)
    if problem.lower <= 1 - problem.seq_q and problem.upper >= problem.seq_k - 1:
        return None
    bounds = problem.lower, problem.upper
    return bounds_penalty(problem.seq_q, problem.seq_k, *bounds, backend, dtype)


@lru_cache(maxsize=2)
def bounds_penalty(
    seq_q: int, seq_k: int, lower: int, upper: int, backend: TensorBackend, dtype: np.dtype[Any]
) -> Tensor:
    """Return the cached penalty of a causal mask or a window, a constant (seq_q, seq_k).

    All layers of a model use the same mask, which is built and copied to the device once.  The cache has
    two entries, for training and for evaluation.
    """
    row, col = np.arange(seq_q)[:, None], np.arange(seq_k)
    return _penalty(is_visible(row, col, lower, upper), backend, dtype)


def _penalty(visible: Bools, backend: TensorBackend, dtype: np.dtype[Any]) -> Tensor:
    return tensor(np.where(visible, 0.0, -np.inf), backend, False, dtype)


def modified(scores: Tensor, call: AttentionCall, options: Any) -> Tensor:
    """Return the scores after softcap, ``score_mod``, ALiBi and a floating mask.

    Args:
        scores: (…, heads, seq_q, seq_k), scale · q · k.
        call: The checked call.
        options: All options by name; a floating ``attn_mask`` is a tensor.
    """
    program = make_score_program(features_of(call.problem), _tensor_target(call, scores, options))
    scores, *_ = program.modified(scores, _place(call.problem), call.problem)
    return scores


def _visible(call: AttentionCall) -> Bools:
    """Return which scores are visible, as an array that broadcasts to them."""
    program = make_score_program(features_of(call.problem), _tensor_target(call))
    return program.is_visible(_place(call.problem), call.problem)


def _place(problem: Problem) -> Place:
    """Return the place of each score, as arrays that broadcast to all."""
    row, col = np.arange(problem.seq_q)[:, None], np.arange(problem.seq_k)
    if not problem.lead:
        return Place(None, None, 0, 0, row, col)
    *batch, heads = problem.lead
    batches = np.arange(math.prod(batch)).reshape(*batch, 1, 1, 1)
    return Place(None, None, batches, np.arange(heads)[:, None, None], row, col)


def _tensor_target(call: AttentionCall, scores: Any = None, options: Any = None) -> ScoreTarget:
    """Return the target for tensors: scores are a tensor, and visibility is a NumPy array."""

    def by_mod(score: Tensor, place: Place, problem: Problem) -> Tensor:  # beyond module 5
        table = options["score_table"] if problem.score_table else None
        if table is not None and not is_tensor(table):
            table = constant(_on_host(call.arrays["score_table"]))
        return ModifiedScore.apply(score, table, problem.score_mod, place[2:], _visible(call))

    def constant(array: npt.NDArray[Any]) -> Tensor:
        return tensor(array, scores.backend, False, scores.dtype)

    def in_blocks(place: Place, problem: Problem) -> Bools:
        blocks: Any = problem.block_mask
        return blocks.shows(place.head if blocks.heads > 1 else 0, place.row, place.col)

    return ScoreTarget(
        compile=same,
        one=1.0,
        tanh=lambda score: score.tanh(),
        score_function=lambda function: by_mod,  # beyond module 5
        mask_function=lambda f: lambda place, _: evaluate(f, bool, *place[2:]),  # beyond module 5
        element=lambda name: lambda place, problem: numbers_of(call, name, scores, options),
        distance=lambda place, _: constant(distance(place.row, place.col, call.problem.diagonal)),
        bias=lambda place, problem: options["attn_mask"],
        in_mask=lambda place, _: _on_host(call.arrays["attn_mask"]),
        in_blocks=in_blocks,
        order=0,
    )


def numbers_of(call: AttentionCall, field: str, scores: Tensor, options: Any) -> Tensor:
    """Return an array of ``options.AXES`` as a tensor that broadcasts to the scores; arguments as below."""
    name, axes = OPTION_ARRAYS[field], AXES[field]
    array = options[name]
    if not (is_tensor(array) and array.requires_grad()):  # on any host backend, or on the device
        array = tensor(_on_host(call.arrays[name]), scores.backend, False, scores.dtype)
    shape = [*array.shape]
    if "k" not in axes:
        shape.append(1)
    if "q" not in axes:
        shape.insert(-1, 1)
    return array.to(scores.dtype).contiguous().view(*(shape if call.problem.lead else shape[1:]))


def row_end(
    call: AttentionCall, scores: Tensor, options: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Return the share of the keys in each row's softmax, and lse, each None if it is not needed.

    Args:
        call: The checked call.
        scores: (…, heads, seq_q, seq_k), after all options.
        options: All options by name.
    """
    has_lse = options.get("return_lse")
    if not (has_lse or call.problem.sink):
        return None, None
    lse = logsumexp(scores, scores.dims - 1)  # (…, seq_q, 1)
    if not call.problem.sink:
        return None, lse
    sink = numbers_of(call, "sink", scores, options)
    larger = (sink + (lse - sink).relu()).detach()  # so that exp does not overflow
    keys = (lse - larger).exp()
    total = keys + (sink - larger).exp()
    return keys / total, larger + (total - EPS).log() if has_lse else None  # log adds EPS


def _on_host(array: Any) -> npt.NDArray[Any]:
    return to_host(array) if is_device_array(array) else np.asarray(array)


def kept_probabilities(problem: Problem, like: Tensor) -> Tensor:
    """Return the factors by which dropout multiplies the probabilities, (…, heads, seq_q, seq_k)."""
    keep = dropout_mask(problem.scores_shape, problem.dropout_p, problem.seed % SEEDS)
    return tensor(keep * keep_scale(problem.dropout_p), like.backend, False, like.dtype)


class ModifiedScore(Function):  # beyond module 5
    """Apply ``score_mod`` to each visible score, as Python on the host; masked scores become 0."""

    @staticmethod
    def forward(
        ctx: Context, scores: Tensor, table: Any, mod: ScoreMod, places: Any, seen: Bools
    ) -> Tensor:
        """Call the function for each score, its indices and the table, if there is one.

        Raises:
            ValueError: If gradients are recorded and the function has no derivative.
        """
        if not ctx.no_grad:
            check_derivative(mod)
        ctx.save_for_backward(scores, table, mod, places)
        sums = acc_dtype(scores.dtype)
        array, own = (None if t is None else t.to(sums).to_numpy() for t in (scores, table))
        # A masked score may be modified to NaN, to which the penalty cannot be added.
        out = np.where(seen, evaluate(mod.function, sums, array, *places, table=own), 0.0)
        return from_numpy(rounded(out, scores.dtype), scores.backend)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply the gradient by the derivative of the function, and sum the gradient of a table."""
        scores, table, mod, places = ctx.saved_values
        sums = acc_dtype(scores.dtype)
        array, gradient = (t.to(sums).to_numpy() for t in (scores, grad_output))
        own = dtable = None
        if table is not None:
            own, total = table.to(sums).to_numpy(), np.zeros(table.shape)
            add_read_gradients(mod, gradient, array, places, own, total)
            dtable = from_numpy(rounded(total, table.dtype), scores.backend)
        slope = evaluate(mod.derivative, sums, array, *places, table=own)
        # The derivative at a masked score may be infinite, and 0 times infinity is NaN.
        gradient = gradient * np.where(gradient == 0, 0.0, slope)
        dscores = from_numpy(rounded(gradient, scores.dtype), scores.backend)
        return dscores, dtable, None, None, None
