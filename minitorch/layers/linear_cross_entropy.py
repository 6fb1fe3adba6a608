"""The head of a language model and its loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels.common.arguments import shape_of
from kernels.runtime.dtypes import acc_dtype, is_floating

from ..backends.operations import operation  # beyond module 5
from ..functions.base import check_tensor
from ..nn import softmax_loss
from .linear import linear

if TYPE_CHECKING:
    from ..tensor import Tensor


def check_linear_cross_entropy(
    x: Tensor, weights: Tensor, targets: Any, bias: Tensor | None
) -> None:
    """Check the arguments of :func:`linear_cross_entropy`.

    Raises:
        TypeError: If an operand is not a tensor.
        ValueError: If the shapes do not fit.
    """
    for name, t in (
        ("x", x),
        ("weights", weights),
        *((("bias", bias),) if bias is not None else ()),
    ):
        check_tensor(name, t)
    classes, ids = weights.shape[-1:], shape_of("targets", targets)
    fits = x.dims == weights.dims == 2 and x.shape[1] == weights.shape[0] and x.size > 0
    if not fits or ids != x.shape[:1] or (bias is not None and bias.shape != classes):
        own = None if bias is None else bias.shape
        raise ValueError(
            "linear_cross_entropy needs x (n, width), weights (width, classes), targets (n,) and bias "
            f"(classes,) or None, got {x.shape}, {weights.shape}, {ids} and {own}"
        )


@operation  # beyond module 5
def linear_cross_entropy(
    x: Tensor, weights: Tensor, targets: Any, bias: Tensor | None = None, rows: int | None = None
) -> Tensor:
    """Return the mean cross entropy of x @ weights + bias.

    Args:
        x: (n, width), at least one row.
        weights: (width, classes), with any strides, such as a permuted embedding table.
        targets: (n,), class indices, a tensor or an array.
        bias: (classes,), or None.
        rows: Number of rows whose logits are stored at a time; None stores about 2²⁷ logits. This
            number changes the result only by rounding.

    Returns:
        (1,), float32 for fp16 and bf16 operands.

    Raises:
        TypeError: If an operand is not a tensor, or a target is not an integer.
        ValueError: If the shapes do not fit, or a target is not a class.
    """
    check_linear_cross_entropy(x, weights, targets, bias)
    logits = linear(x, weights, bias)
    if is_floating(logits.dtype):  # only the logits have 16 bits
        logits = logits.to(acc_dtype(logits.dtype))
    return softmax_loss(logits, targets).mean()
