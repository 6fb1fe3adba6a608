"""The head of a language model fused with its loss: logits are stored for a chunk of rows at a time.

The full logits, rows times vocabulary, would be the largest tensor of a training step and would live until
the backward pass.
"""

from __future__ import annotations

from typing import Any

from kernels.runtime.dtypes import acc_dtype, is_floating

from ..autodiff import Context
from ..backends.operations import Operations
from ..functions.base import Function
from ..functions.kernel_arrays import dense, rounded
from ..functions.views import swap_last
from ..layers.indices import integer_array
from ..layers.linear_cross_entropy import check_linear_cross_entropy
from ..tensor import Tensor
from ..tensors.factories import ones
from .layers import stored

#: Approximate number of logits stored at a time, and the divisor of the number of rows of a chunk.
CHUNK, ROWS = 1 << 27, 128


class LinearCrossEntropy(Function):
    """The mean cross entropy of x @ weights + bias, one chunk of rows at a time.

    The gradients are computed in the forward pass, while a chunk's logits exist, and the backward pass
    multiplies them by the gradient of the loss, so that no product is computed twice.
    """

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weights: Tensor, bias: Tensor | None, targets: Any, rows: int
    ) -> Tensor:
        """Return (1,) for (n, width), (width, classes), (classes,) and n integers; ``rows`` of a chunk."""
        memory, count, sums = x.f.memory, x.shape[0], acc_dtype(x.dtype)
        array, ids = stored(x, "cross_entropy"), x.f.ops.kernels.place_ids(targets)
        unit = None if ctx.no_grad else dense(ones((min(rows, count),), x.backend, dtype=sums))
        dx = x.empty(x.shape, x.dtype)
        totals: tuple[Tensor | None, ...] = (None, None, None)
        for first in range(0, count, rows):
            stop = min(first + rows, count)
            # In 16 bits where the kernels support them, else widened from here on.
            part, own_dx = (x.wrap(memory.part(a, first, stop)) for a in (array, dx.array()))
            own_unit = None if unit is None else memory.part(unit, 0, stop - first)
            shares = _of_chunk(part, weights, bias, memory.part(ids, first, stop), own_unit, own_dx)
            totals = tuple(
                _added(total, share, sums) for total, share in zip(totals, shares, strict=True)
            )
        loss, *gradients = totals
        ctx.save_for_backward(dx, *gradients, count)
        assert loss is not None, "there is a row"
        return loss * (1.0 / count)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Any, ...]:
        """Return the gradients of x, weights and bias."""
        *gradients, count = ctx.saved_values
        scale = grad_output * (1.0 / count)  # (1,)
        return (*(g if g is None else g * scale for g in gradients), None, None)

    @staticmethod
    def composed(
        _: Context, x: Tensor, weights: Tensor, bias: Tensor | None, targets: Any, rows: int
    ) -> Tensor:
        """Apply the plain function, which stores all logits."""
        return Operations.plain["linear_cross_entropy"](x, weights, targets, bias)


def _of_chunk(
    part: Tensor, weights: Tensor, bias: Tensor | None, ids: Any, unit: Any, dx: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the sum of the losses of some rows, and the gradients of weights and bias; fill dx.

    Args:
        part: (rows, width).
        weights: (width, classes).
        bias: (classes,), or None.
        ids: (rows,), class indices, on the kernels' device.
        unit: (rows,), the gradient of each loss; None for no gradients.  It is 1 instead of 1 / n, which
            could underflow in float16.
        dx: (rows, width), the gradient of part, written.
    """
    ops, fused = part.f, part.f.ops.kernels
    logits = ops.matrix_multiply(part, weights)  # (rows, classes)
    if bias is not None:
        logits = ops.add_zip(logits, bias)
    losses, *kept = fused.cross_entropy(stored(logits, "cross_entropy"), ids)
    loss = ops.add_reduce(part.wrap(losses), 0)  # (1,)
    if unit is None:
        return loss, None, None
    dlogits = rounded(dx, fused.cross_entropy_backward(unit, ids, *kept, in_place=True))
    ops.loops.multiply_into(dx._tensor, dlogits._tensor, swap_last(weights)._tensor)
    dbias = None if bias is None else ops.add_reduce(dlogits, 0).view(*bias.shape)
    return loss, ops.matrix_multiply(swap_last(part), dlogits), dbias


def _added(total: Tensor | None, share: Tensor | None, dtype: Any) -> Tensor | None:
    """Return the sum of two partial gradients in a dtype."""
    if total is None or share is None:
        if share is None or share.dtype == dtype:
            return share
        return share.f.id_map(share, share.empty(share.shape, dtype))
    return share.f.add_zip(total, share)


def linear_cross_entropy(
    x: Tensor, weights: Tensor, targets: Any, bias: Tensor | None = None, rows: int | None = None
) -> Tensor:
    """Return the mean cross entropy of x @ weights + bias without keeping the logits."""
    check_linear_cross_entropy(x, weights, targets, bias)
    others = [t for t in (weights, bias) if t is not None]
    if not is_floating(x.dtype) or any(
        t.dtype != x.dtype or t.backend is not x.backend for t in others
    ):
        return Operations.plain["linear_cross_entropy"](x, weights, targets, bias)
    classes = weights.shape[1]
    if rows is None:
        rows = max(CHUNK // classes // ROWS, 1) * ROWS
    ids = integer_array(targets, classes, "targets")
    return LinearCrossEntropy.apply(x, weights, bias, ids, rows)
