"""Cross entropy with PyTorch's options, composed of the course's losses."""

from __future__ import annotations

from typing import Any

from kernels.common.arguments import as_host_array, number, one_of, shape_of, short, whole
from kernels.runtime.dtypes import acc_dtype

from ..backends.memory import memories
from ..functions.base import check_tensor, is_tensor
from ..functions.indexing import constant_like
from ..nn import logsoftmax, softmax_loss
from ..tensor import Tensor


def cross_entropy(
    logits: Tensor,
    target: Any,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross entropy of logits and class indices.

    Args:
        logits: (classes,), (rows, classes) or (rows, classes, …).
        target: Class indices, a tensor or an array of the shape of the logits without the classes.
        ignore_index: Rows with this target do not count, neither in the sum nor in the mean.
        reduction: "mean", "sum" or "none".
        label_smoothing: Part of the target distribution, from 0 to 1, that is spread over all classes.

    Returns:
        Shape (1,), or for "none" the shape of the target, with 0 where the target is ``ignore_index``;
        float32 for 16-bit logits.  The mean of no targets is NaN.

    Raises:
        TypeError: If the logits are not a tensor, or the targets not whole numbers.
        ValueError: If the shapes do not fit, a target is not a class, or an option is out of range.

    Source: Szegedy et al., Rethinking the Inception architecture (2016), section 7, for smoothing.
    """
    check_tensor("logits", logits)
    one_of("reduction", reduction, ("mean", "sum", "none"))
    ignore_index = whole("ignore_index", ignore_index)
    if not 0.0 <= number("label_smoothing", label_smoothing) <= 1.0:
        raise ValueError(f"label_smoothing must be from 0 to 1, got {short(label_smoothing)}")
    shape, own = shape_of("target", target), logits.shape
    places = min(logits.dims - 1, 1)  # of the classes
    if not own or shape != own[:places] + own[places + 1 :]:
        raise ValueError(
            f"cross_entropy needs logits (rows, classes, …) and targets (rows, …), got {own} and {shape}"
        )
    order = (i for i in range(logits.dims) if i != places)
    rows = logits.permute(*order, places).reshape(-1, own[places])
    given = target.to_numpy() if is_tensor(target) else as_host_array("target", target)

    def classes() -> Any:
        ids = given.reshape(-1).copy()
        ids[ids == ignore_index] = 0
        return ids

    def weights() -> Any:
        return (given.reshape(-1) != ignore_index).astype(wide)

    wide = acc_dtype(rows.dtype)
    kept = constant_like(logits, memories.computed(weights, given))
    loss = softmax_loss(rows, memories.computed(classes, given)).to(wide)
    if label_smoothing:
        uniform = -logsoftmax(rows, 1).mean(1).view(rows.shape[0]).to(wide)
        loss = loss * (1.0 - label_smoothing) + uniform * label_smoothing
    loss = loss.where(kept, 0.0)
    if reduction == "none":
        return loss.view(*shape)
    return loss.sum() / kept.sum() if reduction == "mean" else loss.sum()
