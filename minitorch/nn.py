"""Layers as functions: pooling, softmax, losses, dropout, and attention composed of tensor operations."""

from __future__ import annotations

import math
import random
from functools import lru_cache
from typing import Any

import numpy as np

from kernels import takes_attention_options
from kernels.masks import is_visible

from . import operators
from .factories import from_numpy, rand, tensor
from .fast_ops import FastOps
from .function import as_int, is_tensor
from .fused_functions import CrossEntropy, Gelu, SeededDropout, Softmax
from .tensor import Tensor
from .tensor_functions import Max, attention_problem
from .tensor_ops import TensorBackend, normalize_dim

#: The published fold behind :func:`max`, on the fast backend.
max_reduce = FastOps.reduce(operators.max, -1e9)


# -- pooling -----------------------------------------------------------------------------------


def tile(input: Tensor, kernel: tuple[int, int]) -> tuple[Tensor, int, int]:
    """Cut an image into tiles, each in a row of its own.

    Args:
        input: (batch, channel, height, width).
        kernel: (tile height, tile width); they divide height and width.

    Returns:
        (batch, channel, new_height, new_width, tile height * tile width), new_height, new_width.
    """
    assert input.dims == 4, (
        f"an image is (batch, channel, height, width), got shape {input.shape}; add what is missing "
        "with view"
    )
    batch, channel, height, width = input.shape
    kh, kw = kernel
    assert height % kh == 0 and width % kw == 0, (
        f"tiles of {kernel} must divide the image's {(height, width)}; pad or crop it"
    )
    new_h, new_w = height // kh, width // kw
    split = input.contiguous().view(batch, channel, new_h, kh, new_w, kw)
    rows = split.permute(0, 1, 2, 4, 3, 5).contiguous()
    return rows.view(batch, channel, new_h, new_w, kh * kw), new_h, new_w


def avgpool2d(input: Tensor, kernel: tuple[int, int]) -> Tensor:
    """Average each tile of (batch, channel, height, width)."""
    tiles, new_h, new_w = tile(input, kernel)
    return tiles.mean(4).view(*input.shape[:2], new_h, new_w)


def maxpool2d(input: Tensor, kernel: tuple[int, int]) -> Tensor:
    """Take the maximum of each tile of (batch, channel, height, width)."""
    tiles, new_h, new_w = tile(input, kernel)
    return max(tiles, 4).view(*input.shape[:2], new_h, new_w)


def max(input: Tensor, dim: Any) -> Tensor:
    """Take the maximum over ``dim``, which stays with size 1."""
    return Max.apply(input, normalize_dim(as_int(dim), input.shape))


def argmax(input: Tensor, dim: Any) -> Tensor:
    """Mark the maxima along ``dim``: 1 at each (all of them on a tie), 0 elsewhere."""
    plain = input.detach()
    return plain == max(plain, dim)


# -- softmax and losses ------------------------------------------------------------------------


def _has_fused(input: Tensor, dim: int) -> bool:
    return input.f.fused is not None and input.dtype.kind == "f" and dim == input.dims - 1


def _shift(input: Tensor, dim: int) -> Tensor:
    """Return the maximum along ``dim`` as a constant; a finite number even for a row of -inf."""
    # -inf - (-inf) would be NaN.  A shift cancels in the result, so any finite number will do.
    return input.f.shift_reduce(input.detach(), dim)


def composed_softmax(input: Tensor, dim: int) -> Tensor:
    """Return softmax over ``dim``, composed of tensor operations; 0 in a row of -inf."""
    dim = normalize_dim(dim, input.shape)
    exponentials = (input - _shift(input, dim)).exp()
    total = exponentials.sum(dim)
    return exponentials / (total + (total.detach() == 0.0))


def softmax(input: Tensor, dim: int) -> Tensor:
    """Return softmax over ``dim``: fused where the backend has it, else composed."""
    dim = normalize_dim(as_int(dim), input.shape)
    return Softmax.apply(input) if _has_fused(input, dim) else composed_softmax(input, dim)


def _log_total(shifted: Tensor, dim: int) -> Tensor:
    """Return the logarithm of the sum of exponentials of what :func:`_shift` was taken from."""
    total = shifted.exp().sum(dim)
    # 1 at least, for the largest of them is 0; so it needs no EPS, which log adds against log(0).
    # Only a row of -inf sums up to 0: 1 in its place gives a finite logarithm and no gradient.
    return (total + (total.detach() == 0.0) - operators.EPS).log()


def logsumexp(input: Tensor, dim: int) -> Tensor:
    """Return the logarithm of the sum of exponentials over ``dim``, which stays with size 1."""
    dim = normalize_dim(as_int(dim), input.shape)
    # Not the shift again: a row of -inf sums up to -inf.
    return _log_total(input - _shift(input, dim), dim) + max(input.detach(), dim)


def logsoftmax(input: Tensor, dim: int) -> Tensor:
    """Return the logarithm of softmax over ``dim``; -inf in a row of -inf."""
    dim = normalize_dim(as_int(dim), input.shape)
    shifted = input - _shift(input, dim)
    return shifted - _log_total(shifted, dim)


def integer_array(ids: Any, limit: int, name: str) -> Any:
    """Return indices as an integer array.

    Args:
        ids: A tensor or array of whole numbers.
        limit: One more than the largest index allowed.
        name: For the error text.

    Raises:
        TypeError: If they are no whole numbers.
        ValueError: If one is below 0 or not below ``limit``.
    """
    array = ids.to_numpy() if is_tensor(ids) else np.asarray(ids)
    whole = array.astype(np.int64)
    if not np.array_equal(whole, array):
        raise TypeError(f"{name} must be whole numbers, got {array.dtype} with fractions")
    if whole.size and not (whole.min() >= 0 and whole.max() < limit):
        raise ValueError(
            f"{name} must be from 0 to {limit - 1}, got {whole.min()} to {whole.max()}"
        )
    return whole


def one_hot(input: Tensor, num_classes: int) -> Tensor:
    """Return 1 at each index and 0 elsewhere.

    Args:
        input: Indices, any shape.
        num_classes: Length of the new last dimension.

    Returns:
        (*input.shape, num_classes), a constant.
    """
    ids = integer_array(input, num_classes, "class indices")
    # The comparison runs where the result shall be: only indices travel there.
    classes = tensor(np.arange(num_classes), input.backend)  # (num_classes,)
    return tensor(ids[..., None], input.backend) == classes  # (*input.shape, num_classes)


def composed_softmax_loss(logits: Tensor, target: Any) -> Tensor:
    """Return the cross entropy of each row, composed of tensor operations."""
    rows, classes = logits.shape
    ids = integer_array(target, classes, "targets")
    # Adding minus infinity hides the other classes; times 0, a logit of -inf would become NaN.
    hidden = np.where(np.eye(classes, dtype=bool)[ids], 0.0, -np.inf).astype(logits.dtype)
    chosen = max(logsoftmax(logits, 1) + from_numpy(hidden, logits.backend), 1)
    return -chosen.view(rows)


def softmax_loss(logits: Tensor, target: Any) -> Tensor:
    """Return the cross entropy of each row: fused where the backend has it, else composed.

    Args:
        logits: (rows, classes).
        target: (rows,) class indices, a tensor or an array.

    Returns:
        (rows,), not reduced.

    Raises:
        ValueError: If the shapes do not fit or a target is no class.
    """
    if logits.dims != 2 or np.shape(target) != logits.shape[:1]:
        raise ValueError(
            f"softmax_loss needs logits (rows, classes) and targets (rows,), got {logits.shape} and "
            f"{np.shape(target)}; flatten the leading dimensions with view"
        )
    if not _has_fused(logits, 1):
        return composed_softmax_loss(logits, target)
    return CrossEntropy.apply(logits, integer_array(target, logits.shape[1], "targets"))


def composed_gelu(input: Tensor) -> Tensor:
    """Return GELU in its tanh form, composed of tensor operations."""
    inner = (input + input * input * input * 0.044715) * math.sqrt(2.0 / math.pi)
    return input * 0.5 * (inner.tanh() + 1.0)


def GELU(input: Tensor) -> Tensor:
    """Return GELU in its tanh form: fused where the backend has it, else composed."""
    fused = input.f.fused is not None and input.dtype.kind == "f"
    return Gelu.apply(input) if fused else composed_gelu(input)


def dropout(input: Tensor, rate: float, ignore: bool = False) -> Tensor:
    """Set each element to 0 with probability ``rate``; the others keep their value.

    Args:
        input: Any shape.
        rate: From 0 (nothing changes) to 1 (everything is 0).
        ignore: Return the input unchanged.

    Raises:
        ValueError: If the rate is no probability.
    """
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"rate is a probability from 0 to 1, got {rate}")
    if ignore or rate == 0.0:
        return input
    if input.backend.cuda:
        return device_dropout(input, rate, 1.0)
    noise = rand(input.shape, input.backend, dtype=input.dtype)  # as published
    return input * (noise > rate)


def device_dropout(input: Tensor, rate: float, scale: float) -> Tensor:
    """Drop with noise that is drawn on the device; ``manual_seed`` decides it too.

    Args:
        input: Any shape, on the CUDA backend.
        rate: Probability of 0.
        scale: Of what is kept.
    """
    x = (
        input if input.dtype.kind == "f" else input * 1.0
    )  # integers become floating, as on the host
    return SeededDropout.apply(x, random.getrandbits(63), rate, scale)


# -- attention ---------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def hidden_scores(
    seq_q: int, seq_k: int, diagonal: int, backend: TensorBackend, dtype: np.dtype[Any]
) -> Tensor:
    """Return (seq_q, seq_k), 0 where a row sees a column and minus infinity where not; kept.

    All layers of a model add the same one: it is built and brought to the device once, and not once a
    layer and step.  Two are kept, for training and for evaluation.
    """
    rows, cols = np.arange(seq_q)[:, None], np.arange(seq_k)
    hidden = np.where(is_visible(rows, cols, diagonal), 0.0, -np.inf)
    return tensor(hidden, backend, dtype=dtype)  # (seq_q, seq_k)


@takes_attention_options
def naive_attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
    """Attend by the textbook, composed of tensor operations; autodiff derives its gradient.

    The baseline of ``Tensor.flash_attention``: same parameters, same meaning, and scores and
    probabilities of size seq_q x seq_k in memory.

    Args:
        q: (…, heads, seq_q, head_dim).
        k: (…, heads, seq_k, head_dim).
        v: (…, heads, seq_k, value_dim).
        args: Options by position; see ``kernels.make_problem``.
        options: Options by name.

    Returns:
        (…, heads, seq_q, value_dim).

    Source: FlashAttention, Algorithm 0.
    """
    problem = attention_problem(q, k, v, *args, **options)
    if problem.groups > 1:  # (…, key heads, groups or 1, seq, dim)
        q, k, v = (_split_heads(t, problem.key_lead[-1]) for t in (q, k, v))
    order = (*range(k.dims - 2), k.dims - 1, k.dims - 2)
    scores = (q @ k.permute(*order)) * problem.scale  # (…, seq_q, seq_k)
    if problem.diagonal < problem.seq_k - 1:  # else every row sees every column
        shape = problem.seq_q, problem.seq_k
        scores = scores + hidden_scores(*shape, problem.diagonal, q.backend, q.dtype)
    out = softmax(scores, scores.dims - 1) @ v  # (…, seq_q, value_dim)
    return out.view(*problem.out_shape) if problem.groups > 1 else out


def _split_heads(t: Tensor, count: int) -> Tensor:
    """Return (…, heads, seq, dim) as (…, count, heads / count, seq, dim)."""
    *lead, heads, seq, dim = t.shape
    return t.contiguous().view(*lead, count, heads // count, seq, dim)
