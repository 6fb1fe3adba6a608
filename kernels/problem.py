"""The validated question: shapes, options, and every check and error text of attention."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.checks import check_array, check_types

FLOAT_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
MAX_HEAD_DIM = 256

#: The environment variable that names the rung of a whole run, wherever a call says "auto".
RUNG_VARIABLE = "MINITORCH_RUNG"


@dataclass(frozen=True)
class Problem:
    """One attention call, checked.

    Attributes:
        lead: Leading dimensions of the result, heads included; those of q, k and v broadcast to it.
        seq_q: Query rows.
        seq_k: Key columns.
        head_dim: Size of a query and of a key.
        value_dim: Size of a value.
        dtype: Dtype of q, k, v and out.
        scale: Multiplies the scores, once.
        diagonal: Row ``row`` sees column ``col`` when ``col <= row + diagonal``.  ``seq_k`` when
            there is no causal mask: then every row sees every column.
        rung: Name of the kernel asked for, or "auto".
        deterministic: The gradients must be equal bit for bit from run to run.
        groups: Query heads, neighbours, that share one head of k and v.
    """

    lead: tuple[int, ...]
    seq_q: int
    seq_k: int
    head_dim: int
    value_dim: int
    dtype: np.dtype[Any]
    scale: float
    diagonal: int
    rung: str = "auto"
    deterministic: bool = True
    groups: int = 1

    @property
    def key_lead(self) -> tuple[int, ...]:
        """Leading dimensions of k and v after broadcasting: fewer heads where several share one."""
        return (*self.lead[:-1], self.lead[-1] // self.groups) if self.groups > 1 else self.lead

    @property
    def grouped_lead(self) -> tuple[int, ...]:
        """Leading dimensions with the heads in groups, (…, key heads, groups): all operands broadcast."""
        return (*self.key_lead, self.groups) if self.groups > 1 else self.lead

    @property
    def q_shape(self) -> tuple[int, ...]:
        """Shape of q after broadcasting: (…, heads, seq_q, head_dim)."""
        return (*self.lead, self.seq_q, self.head_dim)

    @property
    def k_shape(self) -> tuple[int, ...]:
        """Shape of k after broadcasting: (…, key heads, seq_k, head_dim)."""
        return (*self.key_lead, self.seq_k, self.head_dim)

    @property
    def v_shape(self) -> tuple[int, ...]:
        """Shape of v after broadcasting: (…, key heads, seq_k, value_dim)."""
        return (*self.key_lead, self.seq_k, self.value_dim)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of out: (…, heads, seq_q, value_dim)."""
        return (*self.lead, self.seq_q, self.value_dim)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of lse: (…, heads, seq_q)."""
        return (*self.lead, self.seq_q)


def make_problem(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_offset: int = 0,
    window_size: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    block_mask: Any = None,
    mask_mod: Callable[..., Any] | None = None,
    score_mod: Callable[..., Any] | None = None,
    seed: int | None = None,
    precision: str | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    rung: str = "auto",
) -> Problem:
    """Check the operands and the options of one attention call.

    Args:
        q: (…, heads, seq_q, head_dim); anything with ``shape`` and ``dtype``.
        k: (…, heads, seq_k, head_dim).
        v: (…, heads, seq_k, value_dim).
        attn_mask: Boolean (True keeps) or additive, broadcastable to (…, heads, seq_q, seq_k).
        dropout_p: Probability of dropping a probability, in [0, 1).
        is_causal: Row ``row`` sees columns up to ``row`` (top-left aligned, as in PyTorch).
        scale: Multiplies the scores; 1/sqrt(head_dim) when None.
        enable_gqa: Let several query heads, neighbours, share a head of k and v: the heads of q are a
            multiple of theirs.
        causal_offset: With ``is_causal``, row ``row`` sees columns up to ``row + causal_offset``;
            seq_k - seq_q aligns the diagonal bottom-right.
        window_size: (left, right) columns around the diagonal, -1 unbounded.
        softcap: cap * tanh(score / cap) when positive.
        alibi_slopes: (heads,) or (batch, heads).
        block_mask: A block-sparse pattern.
        mask_mod: ``(batch, head, row, col) -> bool``.
        score_mod: ``(score, batch, head, row, col) -> score``.
        seed: Of the dropout bits.
        precision: Of the products.
        deterministic: Gradients equal bit for bit from run to run; False lets a kernel add them in any
            order where that is faster.
        return_lse: Also return lse.
        rung: Name of the kernel, or "auto": what the environment variable ``MINITORCH_RUNG`` names,
            and without it the fastest that can run the call.

    Returns:
        The problem.

    Raises:
        TypeError: For operands that are no floating arrays or differ in dtype, or an option of the
            wrong type.
        ValueError: For shapes or values that do not fit.
        NotImplementedError: For a valid option that this version does not have yet.
    """
    dtype = _check_dtypes(q, k, v)
    check_types(
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        causal_offset=causal_offset,
        window_size=window_size,
        softcap=softcap,
        mask_mod=mask_mod,
        score_mod=score_mod,
        seed=seed,
        precision=precision,
        deterministic=deterministic,
        return_lse=return_lse,
        rung=rung,
    )
    lead, groups, seq_q, seq_k, head_dim, value_dim = _check_shapes(
        *(tuple(operand.shape) for operand in (q, k, v)), enable_gqa=bool(enable_gqa)
    )
    if causal_offset and not is_causal:
        raise ValueError(
            f"causal_offset shifts the causal diagonal, got {causal_offset} without is_causal=True; "
            "set it, or leave the offset at 0"
        )
    _check_mask(attn_mask, (*lead, seq_q, seq_k))
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(
            f"dropout_p must be a probability in [0, 1), got {dropout_p!r}; 0 turns dropout off"
        )
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim)
    elif not math.isfinite(scale) or scale == 0.0:
        raise ValueError(
            f"scale must be finite and not zero, got {scale}; None gives 1/sqrt(head_dim)"
        )
    _refuse_what_is_missing(
        attn_mask=attn_mask is not None,
        dropout_p=dropout_p != 0.0,
        window_size=window_size is not None,
        softcap=softcap != 0.0,
        alibi_slopes=alibi_slopes is not None,
        block_mask=block_mask is not None,
        mask_mod=mask_mod is not None,
        score_mod=score_mod is not None,
        seed=seed is not None,
        precision=precision is not None,
        return_lse=bool(return_lse),
    )
    return Problem(
        lead=lead,
        seq_q=seq_q,
        seq_k=seq_k,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        scale=float(scale),
        # Beyond these no offset changes what a row sees, and a kernel's integers have an end.
        diagonal=min(max(int(causal_offset), -seq_q), seq_k) if is_causal else seq_k,
        rung=_rung_of_run() if rung == "auto" else rung,
        deterministic=bool(deterministic),
        groups=groups,
    )


def check_gradient_operands(problem: Problem, dout: Any, out: Any, lse: Any) -> None:
    """Check what the backward pass takes beside q, k and v.

    Raises:
        ValueError: If dout, out or lse has another shape than the forward pass returned.
        TypeError: If one of them is no array, or has another dtype than q.
    """
    for name, array, shape in (
        ("dout", dout, problem.out_shape),
        ("out", out, problem.out_shape),
        ("lse", lse, problem.lse_shape),
    ):
        check_array(name, array)
        if tuple(array.shape) != shape:
            raise ValueError(
                f"{name} must have the shape {shape} of the forward pass, got {tuple(array.shape)}"
            )
        if array.dtype != problem.dtype:
            raise TypeError(
                f"{name} must be {problem.dtype} as q, k and v are, got {array.dtype}; convert it"
            )


def _rung_of_run() -> str:
    return os.environ.get(RUNG_VARIABLE) or "auto"


def unknown_rung(rung: str, names: Sequence[str]) -> ValueError:
    """Return the error for a rung that no target has."""
    return ValueError(
        f"no rung is named {rung!r}{_source(rung)}; the rungs are {', '.join(map(repr, names))}, and "
        "'auto' takes the fastest that can run the call"
    )


def unusable_rung(rung: str, why: str, target: str, usable: Sequence[str]) -> ValueError:
    """Return the error for a rung that cannot run a call.

    Args:
        rung: What was asked for.
        why: The reason.
        target: Where the operands are.
        usable: The rungs of the target that can.
    """
    way_out = (
        f"use 'auto' or one of {', '.join(map(repr, usable))}"
        if usable
        else f"no rung of the {target} target can; use smaller heads, or none of the options named"
    )
    return ValueError(f"rung {rung!r}{_source(rung)} cannot run this call: {why}; {way_out}")


def _source(rung: str) -> str:
    return f" (from {RUNG_VARIABLE})" if rung == _rung_of_run() != "auto" else ""


def _check_dtypes(q: Any, k: Any, v: Any) -> np.dtype[Any]:
    for name, operand in (("q", q), ("k", k), ("v", v)):
        check_array(name, operand)
        if np.dtype(operand.dtype) not in FLOAT_DTYPES:
            raise TypeError(
                f"attention needs float32 or float64, got {name} of {operand.dtype}; convert it "
                "with .astype(numpy.float32) or Tensor.to(numpy.float32)"
            )
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}; convert them "
            "to one"
        )
    return np.dtype(q.dtype)


def _check_shapes(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], *, enable_gqa: bool
) -> tuple[tuple[int, ...], int, int, int, int, int]:
    shapes = f"q {tuple(q)}, k {tuple(k)}, v {tuple(v)}"
    if min(len(q), len(k), len(v)) < 2:
        raise ValueError(
            "attention needs (…, heads, seq, head_dim) or (seq, head_dim), two dimensions or "
            f"more; got {shapes}"
        )
    if q[-1] != k[-1]:
        raise ValueError(
            f"q and k must have the same head_dim (their last size), got {q[-1]} and {k[-1]} in "
            f"{shapes}"
        )
    if k[-2] != v[-2]:
        raise ValueError(
            f"k and v must have the same length (their last size but one), got {k[-2]} and {v[-2]} "
            f"in {shapes}"
        )
    if q[-2] < 1 or k[-2] < 1:
        raise ValueError(
            f"sequences must hold at least one row, got {shapes}; leave the call out for an empty one"
        )
    for name, size in (("head_dim", q[-1]), ("value dim", v[-1])):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name} must be from 1 to {MAX_HEAD_DIM}, got {size} in {shapes}; use more heads "
                "of a smaller size"
            )
    groups = _check_groups(q, k, v, shapes) if enable_gqa else 1
    last = -3 if groups > 1 else -2
    try:
        lead = np.broadcast_shapes(tuple(q[:last]), tuple(k[:last]), tuple(v[:last]))
    except ValueError:
        raise ValueError(
            "the leading dimensions (batch and heads) of q, k and v must be equal or broadcast, "
            f"got {shapes}; repeat the smaller ones"
            + ("" if enable_gqa else ", or let query heads share them with enable_gqa=True")
        ) from None
    lead = (*lead, *q[last:-2])
    if 0 in lead:
        raise ValueError(f"batch and heads must not be empty, got {shapes}")
    return lead, groups, int(q[-2]), int(k[-2]), int(q[-1]), int(v[-1])


def _check_groups(q: Sequence[int], k: Sequence[int], v: Sequence[int], shapes: str) -> int:
    """Return how many query heads share a head of k and v."""
    if min(len(q), len(k), len(v)) < 3:
        raise ValueError(
            f"enable_gqa needs heads: (…, heads, seq, head_dim), three dimensions or more; got {shapes}"
        )
    if k[-3] != v[-3] or k[-3] < 1 or q[-3] % k[-3]:
        raise ValueError(
            "with enable_gqa k and v have the same number of heads, and q a multiple of it; got "
            f"{q[-3]}, {k[-3]} and {v[-3]} heads in {shapes}; repeat the heads of k and v"
        )
    return q[-3] // k[-3]


def _check_mask(mask: Any, scores_shape: tuple[int, ...]) -> None:
    if mask is None:
        return
    check_array("attn_mask", mask)
    if np.dtype(mask.dtype).kind not in "bf":
        raise TypeError(
            "attn_mask must be boolean (True keeps) or floating (added to the scores), got "
            f"{mask.dtype}; integers are ambiguous, write mask != 0"
        )
    try:
        fits = np.broadcast_shapes(tuple(mask.shape), scores_shape) == scores_shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"attn_mask of shape {tuple(mask.shape)} does not broadcast to the scores' "
            f"{scores_shape}, (…, heads, seq_q, seq_k)"
        )


def _refuse_what_is_missing(**asked: bool) -> None:
    missing = [name for name, wanted in asked.items() if wanted]
    if missing:
        raise NotImplementedError(
            f"flash_attention does not have {', '.join(missing)} yet; it has is_causal, causal_offset, "
            "scale, enable_gqa and unequal lengths"
        )
