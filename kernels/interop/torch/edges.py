"""Calls that ``scaled_dot_product_attention`` takes and the kernels do not, as calls of the kernels."""

from __future__ import annotations

from math import inf, lcm
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

#: The parameters of ``scaled_dot_product_attention``, by ours.
NAMES = {"q": "query", "k": "key", "v": "value"}


def operands_of(given: tuple[Any, ...], named: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return q, k and v, each given by our name or by PyTorch's; one given twice raises a TypeError."""
    for (ours, theirs), one, other in zip(NAMES.items(), given, named, strict=True):
        if one is not None and other is not None:
            raise TypeError(
                f"flash_attention got {ours} twice, as {ours} and as {theirs}; give it once"
            )
    return tuple([x if other is None else other for x, other in zip(given, named, strict=True)])


def rows_of(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    """Return the shape of lse, (…, heads, seq_q), for q, k and v of any leading dimensions."""
    until = -3 if options.get("enable_gqa") else -2
    lead = torch.broadcast_shapes(q.shape[:until], k.shape[:until], v.shape[:until])
    return *lead, *q.shape[until:-1]


def as_kernels_take(arrays: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Return q, k, v and the options that are arrays in a form that the kernels take.

    ``options`` are the others, which change, too.
    """
    q, k, v, mask, *others = arrays
    if _is(options.get("scale"), 0):
        q, options["scale"] = q * 0, 1.0  # all scores are 0, and so are the gradients of q and k
    if _is(options.get("dropout_p"), 1):
        v, options["dropout_p"] = v * 0, 0.0  # nothing is kept
    if options.get("enable_gqa") and min(k.ndim, v.ndim) > 2 and k.shape[-3] != v.shape[-3]:
        heads = lcm(k.shape[-3], v.shape[-3])
        k, v = (x.repeat_interleave(heads // x.shape[-3], -3) if heads else x for x in (k, v))
    if mask is not None and mask.dtype == torch.float32 and q.dtype == torch.float64:
        mask = mask.double()
    return q, k, v, mask, *others


def _is(option: Any, number: int) -> bool:
    """Tell whether an option is a number; one of a wrong type is left to the checks of the kernels."""
    return type(option) in (int, float) and option == number


def is_empty(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Tell whether a dimension is 0; a call that is wrong anyway is left to the checks of the kernels."""
    if q.numel() and k.numel() and v.numel():
        return False
    return min(q.ndim, k.ndim, v.ndim) > 1 and (q.shape[-1], v.shape[-2]) == (
        k.shape[-1],
        k.shape[-2],
    )


def without_empty(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arrays with a size of 1 in the place of each of 0, whose keys a mask hides."""
    q, k, v, mask, *others = (x if x is None else _padded(x) for x in arrays)
    if not arrays[1].shape[-2]:
        every = torch.ones(1, dtype=torch.bool, device=q.device)
        mask = every if mask is None else mask
        mask = mask.masked_fill(every, -inf if mask.is_floating_point() else False)
    return q, k, v, mask, *others


def _padded(array: Tensor) -> Tensor:
    return pad(array, [n for size in reversed(array.shape) for n in (0, int(size == 0))])


def cut(results: tuple[Tensor, ...], rows: tuple[Any, ...], dim: Any) -> tuple[Tensor, ...]:
    """Return out of :func:`without_empty`, and lse if it is given, without what was added.

    ``rows`` is the shape of lse, and ``dim`` the last dimension of out.
    """
    shapes = (*rows, dim), rows
    return tuple([x[tuple(map(slice, s))] for x, s in zip(results, shapes, strict=False)])
