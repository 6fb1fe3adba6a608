"""Which options each method supports, and the checks of operands that all methods share."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kernels.common.arguments import as_host_array
from kernels.cuda.backend import computed
from kernels.problem.options import check_types
from kernels.runtime.dtypes import acc_dtype, is_floating

from ...functions.base import check_tensor, is_tensor
from ...functions.indexing import constant_like, table_like
from ...tensor import Tensor

#: Options of attention that each method supports in addition to ``key_mask``, which all of them support.
SUPPORTED = {
    "linformer": {"dropout_p", "scale"},
    "linear": {"is_causal"},
    "performer": {"is_causal", "scale"},
    "local": {"attn_mask", "dropout_p", "is_causal", "scale"},
    "reformer": {"dropout_p", "is_causal", "scale"},
    "smyrf": {"dropout_p", "scale"},
    "block_sparse": {"attn_mask", "dropout_p", "is_causal", "scale"},
}
#: Methods that compute attention exactly, and support every option.
EXACT = ("flash", "naive")


class Masked(NamedTuple):
    """The options of a call that mask or drop something, which every method accepts."""

    attn_mask: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None


def check_options(method: str, options: Masked) -> None:
    """Check that a method supports the options of a call.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If it does not; the message names the methods that do.
    """
    check_types(dropout_p=options.dropout_p, is_causal=options.is_causal, scale=options.scale)
    used = {
        "attn_mask": options.attn_mask is not None,
        "dropout_p": bool(options.dropout_p),
        "is_causal": bool(options.is_causal),
        "scale": options.scale is not None,
    }
    for name in sorted(name for name, given in used.items() if given):
        if name not in SUPPORTED[method]:
            able = [other for other, names in SUPPORTED.items() if name in names]
            hint = "; to hide whole keys, pass key_mask" if name == "attn_mask" else ""
            raise ValueError(
                f"{method} attention does not support {name}; {', '.join((*able, *EXACT))} do{hint}"
            )


def check_operands(method: str, q: Any, k: Any, v: Any) -> None:
    """Check that q, k and v are tensors that a method can attend with.

    Args:
        method: Its name, for error texts.
        q: (…, heads, seq_q, head_dim).
        k: (…, heads, seq_k, head_dim).
        v: (…, heads, seq_k, value_dim).

    Raises:
        TypeError: If one is not a floating-point tensor, or they differ in backend or dtype.
        ValueError: If the shapes do not fit.
    """
    for name, operand in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, operand)
    kinds = [(t.backend.kind.__name__, str(t.dtype)) for t in (q, k, v)]
    if not kinds[0] == kinds[1] == kinds[2] or not is_floating(q.dtype):
        raise TypeError(
            f"q, k and v must be of one floating dtype on one backend, got {kinds}; convert them with "
            "Tensor.to"
        )
    fits = min(t.dims for t in (q, k, v)) >= 3 and (
        q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
        and q.shape[-1] == k.shape[-1]
        and k.shape[-2] == v.shape[-2]
        and min(*q.shape, *k.shape, *v.shape) > 0
    )
    if not fits:
        raise ValueError(
            f"{method} attention needs q (…, heads, seq_q, head_dim), k (…, heads, seq_k, head_dim) and v "
            f"(…, heads, seq_k, value_dim) with equal leading dimensions and no size of 0, got {q.shape}, "
            f"{k.shape} and {v.shape}; repeat the heads of k and v if q has more"
        )


def key_mask_array(key_mask: Any, k: Tensor) -> Any:
    """Return a key mask as an array of booleans.

    Args:
        key_mask: (…, seq_k), a tensor or an array; 0 or False masks a key for every query and head.
        k: (…, heads, seq_k, head_dim).

    Raises:
        ValueError: If the shape is not that of k without heads and head_dim, or 1 in place of a size, or
            a number is neither 0 nor 1.
    """
    array = key_mask.to_numpy() if is_tensor(key_mask) else as_host_array("key_mask", key_mask)
    wanted = (*k.shape[:-3], k.shape[-2])
    fits = array.ndim == len(wanted) and array.shape[-1] == wanted[-1]
    if not fits or any(a not in (1, b) for a, b in zip(array.shape, wanted, strict=True)):
        raise ValueError(
            f"key_mask must have shape {wanted}, or 1 in place of a leading size, got {array.shape}: it "
            "hides whole keys, for every head"
        )
    if array.dtype != bool and not np.all((array == 0) | (array == 1)):
        raise ValueError(
            "key_mask must hold booleans, or 0 for a hidden key and 1 for a visible one, got other "
            "numbers; for a mask that is added to scores, pass mask == 0"
        )
    # The replay of a captured step computes it again, if the mask is one of its inputs.
    return computed(lambda: array != 0, key_mask)


def one_mask(attn_mask: Any, key_mask: Any, k: Tensor) -> Any:
    """Return the mask of a call as ``attn_mask``, of which a key mask is (…, 1, 1, seq_k); or None.

    Raises:
        ValueError: If both are given.
    """
    if key_mask is None:
        return attn_mask
    if attn_mask is not None:
        raise ValueError("pass key_mask or attn_mask, not both; combine them with &")
    return key_mask_array(key_mask, k)[..., None, None, :]


def kept_keys(key_mask: Any, k: Tensor, dtype: np.dtype[Any] | None = None) -> Tensor | None:
    """Return a key mask as a factor of keys, (…, 1, seq_k, 1): 1 for a visible key, 0 for a masked one.

    Its dtype is that of sums unless ``dtype`` is given.
    """
    if key_mask is None:
        return None
    own = dtype or acc_dtype(k.dtype)
    array = computed(  # again by the replay of a captured step, if the mask is one of its inputs
        lambda: key_mask_array(key_mask, k)[..., None, :, None].astype(own), key_mask
    )
    return constant_like(k, array)


def key_penalty(key_mask: Any, k: Tensor) -> Tensor:
    """Return a key mask as an addend of scores, (…, 1, 1, seq_k): 0 for a visible key, else -inf."""
    dtype = acc_dtype(k.dtype)
    array = computed(
        lambda: np.where(key_mask_array(key_mask, k), 0.0, -np.inf)[..., None, None, :].astype(
            dtype
        ),
        key_mask,
    )
    return constant_like(k, array).to(k.dtype)


def widened(t: Tensor) -> Tensor:
    """Return a tensor in the dtype that sums are computed in: float32 for 16 bits."""
    return t.to(acc_dtype(t.dtype))


def shared_constant(like: Tensor, array: Any, dtype: np.dtype[Any] | None = None) -> Tensor:
    """Return a small array in a dtype, or that of sums; calls with equal numbers share it on a device."""
    return table_like(like, np.asarray(array, dtype or acc_dtype(like.dtype)))


def check_same_length(method: str, q: Tensor, k: Tensor, is_causal: bool = True) -> None:
    """Check that causal attention has as many queries as keys.

    Raises:
        ValueError: If not.
    """
    if is_causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"causal {method} attention needs as many queries as keys, got {q.shape[-2]} and "
            f"{k.shape[-2]}; local, block_sparse, flash and naive take other lengths"
        )
