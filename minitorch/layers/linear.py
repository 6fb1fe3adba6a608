"""The linear layer as a function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.common.arguments import flag

from ..backends.operations import operation  # beyond module 5
from ..functions.base import check_tensor
from ..nn import GELU

if TYPE_CHECKING:
    from ..tensor import Tensor


def check_linear(x: Tensor, weights: Tensor, bias: Tensor | None, has_gelu: bool) -> None:
    """Check the arguments of :func:`linear`.

    Raises:
        TypeError: If the input or the weights are not tensors.
        ValueError: If the input has no dimension, or the bias does not fit the weights.
    """
    for name, t in (("input", x), ("weights", weights), ("bias", bias)):
        if t is not None or name != "bias":
            check_tensor(name, t)
    flag("has_gelu", has_gelu)
    if x.dims == 0:
        raise ValueError(
            "a linear layer needs rows (…, in_size), got shape (); add a dimension with view"
        )
    cols = weights.shape[-1:]
    if bias is not None and bias.shape != cols:
        raise ValueError(
            f"weights of shape {weights.shape} need a bias of shape {cols}, got {bias.shape}"
        )


@operation  # beyond module 5
def linear(
    x: Tensor, weights: Tensor, bias: Tensor | None = None, has_gelu: bool = False
) -> Tensor:
    """Return x @ weights + bias, optionally followed by GELU.

    Args:
        x: Input, (…, in_size).
        weights: (in_size, out_size).
        bias: (out_size,), or None.
        has_gelu: Apply GELU in its tanh form.

    Returns:
        (…, out_size).

    Raises:
        TypeError: If the input or the weights are not tensors.
        ValueError: If the input has no dimension, or the bias does not fit the weights.
        AssertionError: If the weights do not fit x, as in ``x @ weights``.
    """
    check_linear(x, weights, bias, has_gelu)
    rows = x
    if x.dims != 2:  # one product of two matrices, which the gradient of the weights requires
        rows = x.contiguous().view(x.size // x.shape[-1], x.shape[-1])
    out = rows @ weights
    if bias is not None:
        out = out + bias
    if has_gelu:
        out = GELU(out)
    return out if x.dims == 2 else out.view(*x.shape[:-1], weights.shape[-1])
