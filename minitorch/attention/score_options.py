"""The scores of composed attention: what each option makes of them, in tensor operations."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels import Problem, dropout_mask
from kernels.common.philox import keep_scale
from kernels.cuda.backend import is_device_array, to_host
from kernels.problem.option_values import SEEDS
from kernels.runtime.dtypes import acc_dtype, rounded
from kernels.scores.mods import ScoreMod, check_derivative, evaluate
from kernels.scores.visibility import is_visible

from ..autodiff import Context
from ..functions.base import Function
from ..functions.flash_attention import AttentionCall
from ..tensor_ops import TensorBackend
from ..tensors.factories import from_numpy, tensor

if TYPE_CHECKING:
    from ..tensor import Tensor

Bools = npt.NDArray[np.bool_]


def _within_bounds(seq_q: int, seq_k: int, lower: int, upper: int) -> Bools:
    return is_visible(np.arange(seq_q)[:, None], np.arange(seq_k), lower, upper)


class Visibility(NamedTuple):
    """Which scores count, as constants that broadcast to (…, heads, seq_q, seq_k); None where all do.

    Attributes:
        penalty: Added to the scores: 0, or minus infinity where a row does not see a column.
        scores: 1 where a row sees a column, else 0; None where the penalty alone does.
        rows: (…, seq_q, 1), 1 for a row that sees a column, else 0.
        cols: (…, seq_k, 1), 1 for a column that a row sees, else 0.
    """

    penalty: Tensor | None = None
    scores: Tensor | None = None
    rows: Tensor | None = None
    cols: Tensor | None = None


def visibility(q: Tensor, call: AttentionCall) -> Visibility:
    """Return what a call hides, on the backend of q."""
    problem = call.problem
    size = problem.seq_q, problem.seq_k
    others = problem.block_mask, problem.mask_mod
    if problem.mask == "bool" or any(option is not None for option in others):
        return _visibility(_seen(problem, call.mask), True, q.backend, q.dtype)
    if problem.lower <= 1 - size[0] and problem.upper >= size[1] - 1:
        return Visibility()
    bounds = problem.lower, problem.upper
    return visible_by_bounds(*size, *bounds, not problem.is_plain, q.backend, q.dtype)


@lru_cache(maxsize=2)
def visible_by_bounds(
    seq_q: int,
    seq_k: int,
    lower: int,
    upper: int,
    choose: bool,
    backend: TensorBackend,
    dtype: np.dtype[Any],
) -> Visibility:
    """Return what a causal mask or a window hides; kept.

    All layers of a model hide the same: it is built and brought to the device once, and not once a
    layer and step.  Two are kept, for training and for evaluation.

    Args:
        seq_q: Query rows.
        seq_k: Key columns.
        lower: See ``kernels.Problem``.
        upper: Likewise.
        choose: Options may make anything of a hidden score, even a NaN: ``scores`` is needed.
        backend: Of the constants.
        dtype: Likewise.
    """
    return _visibility(_within_bounds(seq_q, seq_k, lower, upper), choose, backend, dtype)


def _visibility(
    seen: Bools, choose: bool, backend: TensorBackend, dtype: np.dtype[Any]
) -> Visibility:
    def constant(which: Any) -> Tensor | None:
        return None if which.all() else tensor(which, backend, False, dtype)

    penalty = tensor(np.where(seen, 0.0, -np.inf), backend, False, dtype)
    rows, cols = (np.asarray(seen.any(axis=axis))[..., None] for axis in (-1, -2))
    return Visibility(penalty, constant(seen) if choose else None, constant(rows), constant(cols))


def _seen(problem: Problem, mask: Any) -> Bools:
    """Return which scores count by all options that hide, an array that broadcasts to the scores."""
    rows, cols = problem.seq_q, problem.seq_k
    seen = _within_bounds(rows, cols, problem.lower, problem.upper)  # (seq_q, seq_k)
    if problem.mask == "bool":
        seen = seen & (to_host(mask) if is_device_array(mask) else mask)
    if problem.block_mask is not None:
        blocks = problem.block_mask.visible(0, rows, 0, cols)  # (1 or heads, seq_q, seq_k)
        seen = seen & (blocks if problem.lead else blocks[0])
    if problem.mask_mod is not None:
        seen = seen & evaluate(problem.mask_mod, bool, *_places(problem))
    return seen


def _places(problem: Problem) -> tuple[Any, Any, Any, Any]:
    """Return batch, head, row and column of each score, as arrays that broadcast to all."""
    flat = np.arange(math.prod(problem.lead)).reshape(*problem.lead, 1, 1)
    row, col = np.arange(problem.seq_q)[:, None], np.arange(problem.seq_k)
    return flat // problem.heads, flat % problem.heads, row, col


def modified(scores: Tensor, call: AttentionCall, mask: Any) -> Tensor:
    """Return the scores after softcap, ``score_mod``, ALiBi and a floating mask.

    Args:
        scores: (…, heads, seq_q, seq_k), scale · q · k.
        call: The checked call.
        mask: The option ``attn_mask``; a floating one is a tensor.
    """
    problem = call.problem
    if problem.softcap:
        scores = (scores / problem.softcap).tanh() * problem.softcap
    if problem.score_mod is not None:
        scores = ModifiedScore.apply(scores, problem.score_mod, _places(problem))
    if problem.slopes:
        slopes = to_host(call.slopes) if is_device_array(call.slopes) else np.asarray(call.slopes)
        row, col = np.arange(problem.seq_q)[:, None], np.arange(problem.seq_k)
        distance = np.abs(row + problem.diagonal - col)  # (seq_q, seq_k)
        bias = slopes.reshape(*slopes.shape, 1, 1) if problem.lead else slopes  # (…, heads, 1, 1)
        scores = scores - tensor(bias * distance, scores.backend, False, scores.dtype)
    return scores + mask if problem.mask == "float" else scores


def kept_probabilities(problem: Problem, like: Tensor) -> Tensor:
    """Return what dropout multiplies the probabilities by, a constant (…, heads, seq_q, seq_k)."""
    keep = dropout_mask(problem.scores_shape, problem.dropout_p, problem.seed % SEEDS)
    return tensor(keep * keep_scale(problem.dropout_p), like.backend, False, like.dtype)


class Keep(Function):
    """Elements where a constant is 1, else 0: there neither a NaN nor a gradient gets through."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, keep: Tensor) -> Tensor:
        """Choose element by element; both broadcast."""
        ctx.save_for_backward(keep)
        # The gradient of relu is such a choice, which a product with 0 is not: 0 · NaN is NaN.
        return a.f.relu_back_zip(keep, a)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, None]:
        """Choose among the gradients."""
        (keep,) = ctx.saved_values
        return grad_output.f.relu_back_zip(keep, grad_output), None


class ModifiedScore(Function):
    """``score_mod`` of each score, run as Python on the host."""

    @staticmethod
    def forward(ctx: Context, scores: Tensor, mod: ScoreMod, places: Any) -> Tensor:
        """Call the function for each score and its place.

        Raises:
            ValueError: If there will be a gradient, and no derivative was given.
        """
        if not ctx.no_grad:
            check_derivative(mod)
        ctx.save_for_backward(scores, mod, places)
        array = scores.to(acc_dtype(scores.dtype)).to_numpy()
        out = evaluate(mod.function, array.dtype, array, *places)
        return from_numpy(rounded(out, scores.dtype), scores.backend)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, None, None]:
        """Multiply by the derivative, called likewise."""
        scores, mod, places = ctx.saved_values
        array, gradient = (t.to(acc_dtype(scores.dtype)).to_numpy() for t in (scores, grad_output))
        slope = evaluate(mod.derivative, array.dtype, array, *places)
        # The derivative at a score that nobody sees may be anything, and 0 · NaN is NaN.
        with np.errstate(invalid="ignore"):
            gradient = np.where(gradient == 0, gradient, gradient * slope)
        return from_numpy(rounded(gradient, scores.dtype), scores.backend), None, None
