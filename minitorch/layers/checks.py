"""Checks of the arguments of layers and losses."""

from __future__ import annotations

from typing import Any

from kernels.common.arguments import flag, number, shape_of, short

from ..functions.base import check_tensor
from ..tensor import Tensor
from ..tensor_ops import TensorBackend
from .indices import integer_array


def checked_targets(logits: Tensor, target: Any) -> Any:
    """Return the targets of :func:`softmax_loss` as an integer array, (rows,).

    Raises:
        ValueError: If the shapes do not fit or a target is not a class.
    """
    check_tensor("logits", logits)
    shape = shape_of("targets", target)
    if logits.dims != 2 or shape != logits.shape[:1]:
        raise ValueError(
            f"softmax_loss needs logits (rows, classes) and targets (rows,), got {logits.shape} and "
            f"{shape}; flatten the leading dimensions with view"
        )
    return integer_array(target, logits.shape[1], "targets")


def check_rate(rate: float, ignore: bool) -> bool:
    """Check the arguments of :func:`dropout`, and tell whether it has anything to do.

    Raises:
        TypeError: If the rate is not a number.
        ValueError: If the rate is not a probability.
    """
    if not 0.0 <= number("rate", rate) <= 1.0:
        raise ValueError(
            f"rate must be a probability from 0 to 1, got {short(rate)}; 0 turns dropout off"
        )
    return not flag("ignore", ignore) and rate != 0.0


def check_hidden(x: Any, width: int) -> None:
    """Check that the input of attention is a tensor (batch, seq, width).

    Raises:
        TypeError: If it is not a tensor.
        ValueError: If it has another shape.
    """
    check_tensor("input", x)
    if x.dims != 3 or x.shape[2] != width:
        raise ValueError(
            f"attention needs (batch, seq, {width}), got shape {x.shape}; change it with view"
        )


def switch(name: str, value: Any) -> bool:
    """Check that an option that precedes the backend of a layer is True or False, and return it.

    Raises:
        TypeError: If it is neither.
    """
    if isinstance(value, TensorBackend):
        raise TypeError(
            f"{name} must be True or False, got the backend {value}; pass a backend by name: backend=..."
        )
    return flag(name, value)


def check_ids(model: Any, idx: Any, start: int = 0) -> int:
    """Return the number of tokens of each text that a language model shall read, after ``start`` others.

    Raises:
        ValueError: If the ids do not have two dimensions, or exceed the context.
    """
    shape = shape_of("token ids", idx)
    if len(shape) != 2:
        raise ValueError(
            f"a language model needs ids of shape (batch, seq), got {shape}; pass one text as "
            "numpy.array([ids])"
        )
    if 0 in shape:
        raise ValueError(f"a language model needs at least one token, got ids of shape {shape}")
    if start + shape[1] > model.n_positions:
        before = f" after the {start} in the cache" if start else ""
        raise ValueError(
            f"the context holds {model.n_positions} tokens, got {shape[1]}{before}; pass the last ones"
        )
    return shape[1]
