"""Checks of the values of the options of attention: shapes and ranges."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernels.common.arguments import not_negative, number, short
from kernels.problem.argument_types import check_array
from kernels.problem.float8 import FLOAT8
from kernels.runtime.dtypes import FLOAT32, NAMES, is_floating, is_half
from kernels.sparsity.block_mask import BlockMask

#: Seeds are unsigned numbers of 64 bits.
SEEDS = 2**64
#: Limit of ``causal_offset`` with ALiBi.
MOST_OFFSET = 2**31
#: Bounds of ``softcap``: it and its inverse, times a score, must not overflow float32.
LEAST_CAP, MOST_CAP = 1e-30, 1e30
#: Maximum slope: times the longest distance it must not overflow float32.
MOST_SLOPE = 1e28
#: The values of ``precision`` for float32 operands; those for 16 bits are ``FLOAT8``.
PRECISIONS = ("float32", "tf32", "bfloat16", "float16")


def check_mask(mask: Any, scores_shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
    """Check ``attn_mask``; return "bool", "float", or "" if there is none."""
    if mask is None:
        return ""
    check_array("attn_mask", mask)
    is_bool, is_float = np.dtype(mask.dtype).kind == "b", is_floating(np.dtype(mask.dtype))
    if not (is_bool or is_float):
        raise TypeError(
            "attn_mask must be boolean (True keeps) or floating (added to the scores), got "
            f"{mask.dtype}; integers are ambiguous: write mask != 0"
        )
    if is_float and mask.dtype != dtype:
        raise TypeError(
            f"a floating attn_mask must have the dtype of q, {dtype}, got {mask.dtype}; convert it"
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


def check_slopes(slopes: Any, lead: tuple[int, ...]) -> None:
    """Check ``alibi_slopes`` against the leading dimensions (…, heads) of the scores."""
    if slopes is None:
        return
    check_array("alibi_slopes", slopes)
    if not is_floating(np.dtype(slopes.dtype)):
        raise TypeError(f"alibi_slopes must be floating, got {slopes.dtype}; convert them")
    heads = lead[-1:] or (1,)
    if tuple(slopes.shape) not in (heads, lead):
        raise ValueError(
            f"alibi_slopes must have shape {heads}, one for each head, or {lead}, one for each "
            f"(batch, head); got {tuple(slopes.shape)}"
        )
    # Values on a device are not checked, as that would wait for it.
    if isinstance(slopes, np.ndarray) and not (abs(slopes.astype(np.float64)) <= MOST_SLOPE).all():
        raise ValueError(
            f"alibi_slopes must be numbers from -{MOST_SLOPE} to {MOST_SLOPE}, got "
            f"{np.array2string(slopes, threshold=8)}; a slope is usually 2**-1 to 2**-8"
        )


def check_sink(sink: Any, lead: tuple[int, ...]) -> None:
    """Check ``sink`` against the leading dimensions (…, heads) of the scores."""
    if sink is None:
        return
    check_array("sink", sink)
    if not is_floating(np.dtype(sink.dtype)):
        raise TypeError(f"sink must be floating, got {sink.dtype}; convert it")
    heads = lead[-1:] or (1,)
    if tuple(sink.shape) != heads:
        raise ValueError(
            f"sink must have shape {heads}, a logit for each query head; got {tuple(sink.shape)}"
        )


def check_offset(offset: int, slopes: Any) -> None:
    """Check that ALiBi's distances from the shifted diagonal are exact."""
    if slopes is not None and abs(offset) >= MOST_OFFSET:
        raise ValueError(
            f"with alibi_slopes, causal_offset must be between -2**31 and 2**31, got {offset}; in float32, "
            "all distances from a diagonal so far away are the same"
        )


def check_softcap(softcap: float) -> float:
    """Check that ``softcap`` is off or a positive bound that scores can be divided by; return it."""
    cap = number("softcap", softcap)
    if cap != 0.0 and not LEAST_CAP <= cap <= MOST_CAP:
        raise ValueError(
            f"softcap must be positive, from {LEAST_CAP} to {MOST_CAP}, or 0 to turn it off, got "
            f"{short(softcap)}"
        )
    return cap


def check_precision(precision: str | None, dtype: np.dtype[Any]) -> str:
    """Check ``precision``; return the name of the format in which products may be computed."""
    if precision is None:
        return NAMES[dtype]
    if precision not in PRECISIONS and precision not in FLOAT8:
        names = ", ".join(map(repr, (*PRECISIONS, *FLOAT8)))
        raise ValueError(
            f"precision must be one of {names}, or None for that of the dtype; got {precision!r}"
        )
    if precision in FLOAT8:
        if not is_half(dtype):
            raise ValueError(
                f"precision={precision!r} is for operands of 16 bits, got {dtype}; convert them to "
                "float16 or bfloat16"
            )
        return precision
    if dtype != FLOAT32:
        raise ValueError(
            f"precision={precision!r} is an option for float32 operands, got {dtype}, which is not "
            "rounded; leave it at None, or convert the operands to float32"
        )
    return precision


def check_scale(scale: float | None, head_dim: int) -> float:
    """Check that ``scale`` is None or a finite number other than 0; return the factor of the scores."""
    factor = 1.0 / math.sqrt(head_dim) if scale is None else number("scale", scale)
    if not 0.0 < abs(factor) < math.inf:
        raise ValueError(
            f"scale must be finite and not zero, got {short(scale)}; None gives 1/sqrt(head_dim)"
        )
    return factor


def check_window(window: Any) -> tuple[int, int]:
    """Check ``window_size``; return (left, right), -1 where it is unbounded."""
    left, right = (-1, -1) if window is None else map(int, window)
    if left < -1 or right < -1:
        raise ValueError(
            f"window_size must be (left, right), each 0 or more columns, or -1 for no bound; got "
            f"{(left, right)}"
        )
    return left, right


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


def check_block_mask(mask: BlockMask | None, lead: tuple[int, ...], seq_q: int, seq_k: int) -> None:
    """Check that ``block_mask`` fits these lengths and heads."""
    if mask is None:
        return
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
