"""Layers as functions: pooling, softmax, losses, dropout, and attention composed of tensor operations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernels.common.arguments import shown, whole

from . import operators
from .backends.operations import operation  # beyond module 5
from .fast_ops import FastOps
from .functions.base import as_int, check_tensor
from .layers.checks import check_rate, checked_targets
from .layers.indices import integer_array
from .tensor import Tensor
from .tensor_functions import Max
from .tensor_ops import normalize_dim
from .tensors.factories import from_numpy, rand, tensor

#: Maximum over a dimension, on the fast backend; the published course has this name for :func:`max`.
max_reduce = FastOps.reduce(operators.max, -1e9)


# -- pooling -----------------------------------------------------------------------------------


def tile(input: Tensor, kernel: tuple[int, int]) -> tuple[Tensor, int, int]:
    """Cut an image into tiles, and lay out the elements of each tile along the last dimension.

    Args:
        input: (batch, channel, height, width).
        kernel: (tile height, tile width); they divide height and width.

    Returns:
        A tensor (batch, channel, new_height, new_width, tile height * tile width), new_height, new_width.

    Raises:
        TypeError: If the input is not a tensor, or the kernel not a pair of whole numbers.
        ValueError: If a side of the kernel is below 1, or the input does not have four dimensions.
        AssertionError: If the tiles do not divide it.
    """
    check_tensor("input", input)
    if input.dims != 4:
        raise ValueError(
            f"an image is (batch, channel, height, width), got shape {input.shape}; add what is missing "
            "with view"
        )
    batch, channel, height, width = input.shape
    if not isinstance(kernel, (tuple, list)) or len(kernel) != 2:
        raise TypeError(
            f"kernel must be (tile height, tile width), got {shown(kernel)}; pass a pair such as (2, 2)"
        )
    kh, kw = (whole("a side of the kernel", side, 1) for side in kernel)
    if height % kh or width % kw:
        raise AssertionError(
            f"tiles of {kernel} must divide the image's {(height, width)}; pad or crop it"
        )
    # TASK 4.3: Split height and width by view, bring the two tile dimensions last by permute.
    new_h, new_w = height // kh, width // kw
    split = input.contiguous().view(batch, channel, new_h, kh, new_w, kw)
    rows = split.permute(0, 1, 2, 4, 3, 5).contiguous()
    return rows.view(batch, channel, new_h, new_w, kh * kw), new_h, new_w
    # END TASK 4.3


def avgpool2d(input: Tensor, kernel: tuple[int, int]) -> Tensor:
    """Average each tile of (batch, channel, height, width)."""
    # TASK 4.3: The mean of each tile's row.
    tiles, new_h, new_w = tile(input, kernel)
    return tiles.mean(4).view(*input.shape[:2], new_h, new_w)
    # END TASK 4.3


def maxpool2d(input: Tensor, kernel: tuple[int, int]) -> Tensor:
    """Take the maximum of each tile of (batch, channel, height, width)."""
    tiles, new_h, new_w = tile(input, kernel)
    # TASK 4.4: As avgpool2d, with max.
    return max(tiles, 4).view(*input.shape[:2], new_h, new_w)
    # END TASK 4.4


def max(input: Tensor, dim: Any) -> Tensor:
    """Return the maximum over ``dim``, which is kept with size 1."""
    check_tensor("input", input)
    # TASK 4.4: Apply Max; normalize_dim and as_int make dim a number from the left.
    return Max.apply(input, normalize_dim(as_int(dim), input.shape))
    # END TASK 4.4


def argmax(input: Tensor, dim: Any) -> Tensor:
    """Return 1 at every maximum along ``dim`` and 0 elsewhere; NaN is the largest."""
    check_tensor("input", input)
    # TASK 4.4: Compare with the maximum, of the tensor without its history; NaN is unequal to itself.
    plain = input.detach()
    return (plain == max(plain, dim)) + (plain != plain)
    # END TASK 4.4


# -- softmax and losses ------------------------------------------------------------------------


def _shift(input: Tensor, dim: int) -> Tensor:
    """Return the maximum along ``dim`` as a constant; a finite number even for a row of -inf."""
    # -inf - (-inf) would be NaN.  A shift cancels in the result, so any finite number will do.
    return input.f.shift_reduce(input.detach(), dim)


@operation  # beyond module 5
def softmax(input: Tensor, dim: int) -> Tensor:
    """Return softmax over ``dim``; a row of -inf gives 0."""
    check_tensor("input", input)
    # TASK 4.4: Subtract _shift first, so that exp does not overflow; a row of -inf gives zeros.
    dim = normalize_dim(as_int(dim), input.shape)
    exponentials = (input - _shift(input, dim)).exp()
    total = exponentials.sum(dim)
    return exponentials / (total + (total.detach() == 0.0))
    # END TASK 4.4


def _log_total(shifted: Tensor, dim: int) -> Tensor:
    """Return the logarithm of the sum of exponentials of scores from which their maximum was subtracted."""
    total = shifted.exp().sum(dim)
    # The sum is at least 1, because the largest exponent is 0, so the EPS of log is not needed.  Only a
    # row of -inf sums to 0: replacing it by 1 gives a finite logarithm and no gradient.
    return (total + (total.detach() == 0.0) - operators.EPS).log()


def logsumexp(input: Tensor, dim: int) -> Tensor:
    """Return the logarithm of the sum of exponentials over ``dim``, which is kept with size 1."""
    check_tensor("input", input)
    dim = normalize_dim(as_int(dim), input.shape)
    # Not the shift again: the result for a row of -inf is -inf.
    return _log_total(input - _shift(input, dim), dim) + max(input.detach(), dim)


def logsoftmax(input: Tensor, dim: int) -> Tensor:
    """Return the logarithm of softmax over ``dim``; a row of -inf gives -inf."""
    check_tensor("input", input)
    # TASK 4.4: x - shift - log of the sum of exponentials; never the log of a softmax.
    dim = normalize_dim(as_int(dim), input.shape)
    shifted = input - _shift(input, dim)
    return shifted - _log_total(shifted, dim)
    # END TASK 4.4


def one_hot(input: Tensor, num_classes: int) -> Tensor:
    """Return one-hot rows: 1 at each index and 0 elsewhere.

    Args:
        input: Indices, any shape.
        num_classes: Length of the new last dimension.

    Returns:
        (*input.shape, num_classes), a constant.

    Raises:
        TypeError: If the input is not a tensor, or a value is not a whole number.
        ValueError: If ``num_classes`` is below 1, or an index is out of range.
    """
    check_tensor("input", input)
    num_classes = whole("num_classes", num_classes, 1)
    ids = integer_array(input, num_classes, "class indices")
    # Compare on the backend of the result, so that only the indices are copied there.
    classes = tensor(np.arange(num_classes), input.backend, False)  # (num_classes,)
    return tensor(ids[..., None], input.backend, False) == classes  # (*input.shape, num_classes)


@operation  # beyond module 5
def softmax_loss(logits: Tensor, target: Any) -> Tensor:
    """Return the cross entropy of each row.

    Args:
        logits: (rows, classes).
        target: (rows,) class indices, a tensor or an array.

    Returns:
        (rows,), not reduced.

    Raises:
        ValueError: If the shapes do not fit or a target is not a class.
    """
    ids = checked_targets(logits, target)
    rows, classes = logits.shape
    # Adding minus infinity masks the other classes; multiplying by 0 would turn a logit of -inf to NaN.
    hidden = np.where(np.eye(classes, dtype=bool)[ids], 0.0, -np.inf).astype(logits.dtype)
    chosen = max(logsoftmax(logits, 1) + from_numpy(hidden, logits.backend), 1)
    return -chosen.view(rows)


@operation  # beyond module 5
def GELU(input: Tensor) -> Tensor:
    """Return GELU in its tanh form."""
    check_tensor("input", input)
    inner = (input + input * input * input * 0.044715) * math.sqrt(2.0 / math.pi)
    return input * 0.5 * (inner.tanh() + 1.0)


def silu(input: Tensor) -> Tensor:  # beyond module 5
    """Return x · sigmoid(x).

    Source: Elfwing, Uchibe and Doya (2018), Sigmoid-weighted linear units.
    """
    check_tensor("input", input)
    return input * input.sigmoid()


@operation  # beyond module 5
def dropout(input: Tensor, rate: float, ignore: bool = False) -> Tensor:
    """Set each element to 0 with probability ``rate``, and leave the remaining elements unchanged.

    Args:
        input: A tensor of any shape.
        rate: A probability, from 0 (nothing changes) to 1 (all elements become 0).
        ignore: Return the input unchanged.

    Raises:
        TypeError: If the input is not a tensor, or the rate not a number.
        ValueError: If the rate is not a probability.
    """
    check_tensor("input", input)
    # TASK 4.4: Multiply by rand > rate; check_rate says whether there is anything to do.
    if not check_rate(rate, ignore):
        return input
    noise = rand(input.shape, input.backend, False, input.dtype)  # as published
    return input * (noise > rate)
    # END TASK 4.4
