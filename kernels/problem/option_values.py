"""Checks of the values of the options of attention: shapes and ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from kernels.common.arguments import not_negative, number, short, whole
from kernels.problem.shapes import check_array
from kernels.runtime.dtypes import acc_dtype, is_floating
from kernels.sparsity.block_mask import BlockMask

#: Seeds are unsigned numbers of 64 bits.
SEEDS = 2**64
#: Limit of ``causal_offset`` with ALiBi and chunks.
MOST_OFFSET = 2**31
#: Bounds of ``softcap``: it and its inverse, times a score, must not overflow float32.
LEAST_CAP, MOST_CAP = 1e-30, 1e30
#: Maximum slope: times the longest distance it must not overflow float32.
MOST_SLOPE = 1e28


class Given(NamedTuple):
    """The properties of a call that the checks of its options use."""

    lead: tuple[int, ...]  #: Leading dimensions of the scores, heads included.
    seq_q: int  #: Query rows.
    seq_k: int  #: Key columns.
    head_dim: int  #: Size of a query and of a key.
    dtype: np.dtype[Any]  #: Dtype of q, k and v.
    options: Mapping[str, Any]  #: All options by name, of the right types but not checked.


def check_mask(mask: Any, given: Given) -> str:
    """Check ``attn_mask``; return "bool", "float", or "" if there is none."""
    if mask is None:
        return ""
    scores_shape, dtype = (*given.lead, given.seq_q, given.seq_k), given.dtype
    check_array("attn_mask", mask)
    is_bool, is_float = np.dtype(mask.dtype).kind == "b", is_floating(np.dtype(mask.dtype))
    if not (is_bool or is_float):
        raise TypeError(
            "attn_mask must be boolean (True keeps) or floating (added to the scores), got "
            f"{mask.dtype}; integers are ambiguous: write mask != 0"
        )
    if is_float and np.dtype(mask.dtype) not in (dtype, acc_dtype(dtype)):
        wider = "" if dtype == acc_dtype(dtype) else f" or {acc_dtype(dtype)}"
        raise TypeError(
            f"a floating attn_mask must have the dtype of q, {dtype}{wider}, got {mask.dtype}; convert it"
        )
    try:
        fits = np.broadcast_shapes(tuple(mask.shape), scores_shape) == scores_shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"attn_mask of shape {tuple(mask.shape)} does not broadcast to the scores' "
            f"{scores_shape}, (…, heads, seq_q, seq_k); a padding mask (batch, seq_k) is "
            "mask[:, None, None, :]"
        )
    return "bool" if is_bool else "float"


def check_numbers(name: str, array: Any, given: Given, axes: str, per_batch: bool) -> bool:
    """Check the shape of an array of numbers for each head, and return whether it is given.

    Arguments are those of ``options.numbers``.
    """
    if array is None:
        return False
    check_array(name, array)
    if not is_floating(np.dtype(array.dtype)):
        raise TypeError(f"{name} must be floating, got {array.dtype}; convert it")
    heads, sizes = given.lead[-1:] or (1,), {"q": given.seq_q, "k": given.seq_k}
    each = tuple([sizes[axis] for axis in axes])
    if tuple(array.shape) not in ((*heads, *each), (*(given.lead if per_batch else heads), *each)):
        what = {"": "query head", "q": "row", "k": "key", "qk": "score"}[axes]
        more = f", or {(*given.lead, *each)}, with a batch" if per_batch else ""
        raise ValueError(
            f"{name} must have shape {(*heads, *each)}, one number for each {what}{more}; got "
            f"{tuple(array.shape)}"
        )
    return True


def check_table(table: Any, given: Given) -> int:  # beyond module 5
    """Check ``score_table``; return its dimensions, 0 if there is none."""
    if table is None:
        return 0
    check_array("score_table", table)
    if not is_floating(np.dtype(table.dtype)) or not 1 <= len(table.shape) <= 3:
        raise ValueError(
            f"score_table must be floating, of 1 to 3 dimensions, got {table.dtype} of shape "
            f"{tuple(table.shape)}; convert or reshape it"
        )
    if given.options.get("score_mod") is None:
        raise ValueError("score_table is read by a score_mod, got none; pass one, or no table")
    return len(table.shape)


def check_slopes(slopes: Any) -> None:
    """Check the values of ``alibi_slopes`` on the host; those on a device would have to be waited for."""
    if isinstance(slopes, np.ndarray) and not (abs(slopes.astype(np.float64)) <= MOST_SLOPE).all():
        raise ValueError(
            f"alibi_slopes must be numbers from -{MOST_SLOPE} to {MOST_SLOPE}, got "
            f"{np.array2string(slopes, threshold=8)}; a slope is usually 2**-1 to 2**-8"
        )


def check_offset(offset: Any, given: Given) -> int:
    """Check that ``causal_offset`` has a diagonal, and ALiBi's distances from it are exact; return it."""
    offset, options = int(offset), given.options  # a narrow integer would wrap
    has_slopes = options.get("alibi_slopes") is not None
    shifted = ("window_size", "alibi_slopes", "chunk_size")
    if offset and not (
        options["is_causal"] or any(options.get(name) is not None for name in shifted)
    ):
        raise ValueError(
            f"causal_offset shifts the rows of is_causal, {', '.join(shifted[:-1])} and {shifted[-1]}, got "
            f"{offset} without any of them; set one, or leave the offset at 0"
        )
    if (has_slopes or options.get("chunk_size") is not None) and abs(offset) >= MOST_OFFSET:
        raise ValueError(
            "with alibi_slopes or chunk_size, causal_offset must be between -2**31 and 2**31, got "
            f"{offset}; in float32, all distances from a diagonal so far away are the same"
        )
    return offset


def check_softcap(softcap: float, given: Given) -> float:
    """Check that ``softcap`` is off or a positive bound that scores can be divided by; return it."""
    cap = number("softcap", softcap)
    if cap != 0.0 and not LEAST_CAP <= cap <= MOST_CAP:
        raise ValueError(
            f"softcap must be positive, from {LEAST_CAP} to {MOST_CAP}, or 0 to turn it off, got "
            f"{short(softcap)}"
        )
    return cap


def check_scale(scale: float | None, given: Given) -> float:
    """Check that ``scale`` is None or a finite number other than 0; return the factor of the scores."""
    factor = 1.0 / math.sqrt(given.head_dim) if scale is None else number("scale", scale)
    if not 0.0 < abs(factor) < math.inf:
        raise ValueError(
            f"scale must be finite and not zero, got {short(scale)}; None gives 1/sqrt(head_dim)"
        )
    return factor


def check_window(window: Any, given: Given) -> tuple[int, int]:
    """Check ``window_size``; return (left, right), -1 where it is unbounded."""
    left, right = (-1, -1) if window is None else map(int, window)
    if left < -1 or right < -1:
        raise ValueError(
            f"window_size must be (left, right), each 0 or more columns, or -1 for no bound; got "
            f"{(left, right)}"
        )
    return left, right


def check_chunk(chunk: Any, given: Given) -> int | None:  # beyond module 5
    """Check ``chunk_size``; return it, or None.  A larger one than all positions is one chunk, too."""
    return None if chunk is None else min(whole("chunk_size", chunk, 1), 2 * MOST_OFFSET)


def check_dropout(dropout_p: float, seed: int | None) -> int:
    """Check ``dropout_p`` and ``seed``; return the seed as a signed number of 64 bits."""
    not_negative("dropout_p", dropout_p, 1.0, "; 0 turns dropout off")
    if seed is None:
        if dropout_p > 0.0:
            raise ValueError(
                f"dropout_p={dropout_p} needs a seed, so that the backward pass drops the same entries; "
                "pass seed=, a whole number"
            )
        return 0
    return check_seed(seed)


def check_seed(seed: int) -> int:
    """Check ``seed``; return it as a signed number of 64 bits."""
    seed = int(seed)
    if not 0 <= seed < SEEDS:
        raise ValueError(f"seed must be from 0 to 2**64 - 1, got {short(seed)}; use seed % 2**64")
    return seed - SEEDS if seed >= SEEDS // 2 else seed


def check_block_mask(mask: BlockMask | None, given: Given) -> BlockMask | None:
    """Check that ``block_mask`` fits the lengths and the heads; return it."""
    if mask is None:
        return None
    lead, seq_q, seq_k = given.lead, given.seq_q, given.seq_k
    heads = lead[-1] if lead else 1
    if (mask.seq_q, mask.seq_k) != (seq_q, seq_k):
        raise ValueError(
            f"block_mask is for {mask.seq_q} rows and {mask.seq_k} columns, but the call has {seq_q} and "
            f"{seq_k}; build it with these lengths"
        )
    if mask.heads not in (1, heads):
        raise ValueError(
            f"block_mask has {mask.heads} heads, but the call has {heads}; build it with one pattern for "
            "all heads, or one for each"
        )
    return mask
