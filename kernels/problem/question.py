"""The validated problem of an attention call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from kernels.problem.argument_types import check_array, check_types
from kernels.problem.option_values import (
    check_block_mask,
    check_dropout,
    check_mask,
    check_offset,
    check_precision,
    check_scale,
    check_sink,
    check_slopes,
    check_softcap,
    check_window,
)
from kernels.problem.options import ARRAYS, Options
from kernels.problem.origin import Origin
from kernels.problem.packed_sequences import Sequences
from kernels.problem.rungs import rung_of_run
from kernels.problem.shapes import check_dtypes, check_shapes
from kernels.runtime.dtypes import acc_dtype
from kernels.scores.mods import ScoreMod, as_mask_mod, as_score_mod
from kernels.scores.program import PLAIN, Features, features_of
from kernels.sparsity.block_mask import BlockMask


@dataclass(frozen=True)
class Problem:
    """A checked attention call, without its arrays.

    A score is scale · q · k, modified by softcap, ``score_mod``, ALiBi and a floating mask, in this order.
    Masked scores are minus infinity.

    Attributes:
        lead: Leading dimensions of the result, heads included; those of q, k and v broadcast to it.
        seq_q: Query rows.
        seq_k: Key columns.
        head_dim: Size of a query and of a key.
        value_dim: Size of a value.
        dtype: Dtype of q, k, v and out, of their gradients, and of a floating mask and its gradient.
        scale: Factor of the scores.
        lower: Columns before ``row + lower`` are masked; ``-seq_q`` if there is no bound.
        upper: Columns after ``row + upper`` are masked; ``seq_k`` if there is no bound.
        diagonal: ``causal_offset`` if there are slopes: ALiBi's distance is |row + diagonal - col|.
        rung: Name of the requested kernel, or "auto".
        precision: Name of the format in which products may be computed: that of ``dtype``, unless the call
            permits a lower one, such as "tf32", or requests float8 products.
        deterministic: Whether gradients must be bitwise reproducible.
        groups: Number of adjacent query heads that share one head of k and v.
        softcap: Scores become cap · tanh(score / cap); 0 turns it off.
        mask: "bool" or "float" for a call with ``attn_mask``, else "".
        slopes: Whether the call has ALiBi slopes.
        sink: Whether the call has sinks.
        dropout_p: Probability of dropping an attention weight.
        seed: Seed of the dropout mask, as a signed 64-bit integer.
        origin: Offset in the dropout mask of the larger attention call that this is part of, or None.
        block_mask: A block-sparse pattern, or None.
        mask_mod: ``(batch, head, row, col) -> bool``, or None.
        score_mod: The user's function that modifies a score, with its derivative, or None.
        sequences: The bounds of packed sequences, or None.  In packed calls, rows and columns are counted
            from the start of their sequence, and its index replaces that of the batch.
    """

    lead: tuple[int, ...]
    seq_q: int
    seq_k: int
    head_dim: int
    value_dim: int
    dtype: np.dtype[Any]
    scale: float
    lower: int
    upper: int
    diagonal: int = 0
    rung: str = "auto"
    precision: str = "float32"
    deterministic: bool = True
    groups: int = 1
    softcap: float = 0.0
    mask: str = ""
    slopes: bool = False
    sink: bool = False
    dropout_p: float = 0.0
    seed: int = 0
    origin: Origin | None = None
    block_mask: BlockMask | None = None
    mask_mod: Callable[..., Any] | None = None
    score_mod: ScoreMod | None = None
    sequences: Sequences | None = None

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        """Return the cached hash of all fields: calls are looked up by their problem."""
        return self._hash

    def with_seed(self, seed: int) -> Problem:
        """Return the same problem with another seed, as in each step of training.

        Cached properties are kept, except those that contain a seed.
        """
        other = object.__new__(Problem)
        vars(other).update(vars(self), seed=seed, unseeded=self.unseeded)
        for name in ("_hash", "sinkless"):
            vars(other).pop(name, None)
        return other

    @cached_property
    def unseeded(self) -> Problem:
        """The problem with a seed of 0, the key of everything that does not depend on the seed."""
        return replace(self, seed=0) if self.seed else self

    @cached_property
    def sinkless(self) -> Problem:
        """The problem without sinks, for the gradients of q, k and v, where out and lse include them."""
        return replace(self, sink=False) if self.sink else self

    # The following properties are used in every call of a problem, and cached.
    @cached_property
    def acc_dtype(self) -> np.dtype[Any]:
        """Dtype of sums, lse, its gradient and slopes: float32 for fp16 and bf16 operands."""
        return acc_dtype(self.dtype)

    @cached_property
    def heads(self) -> int:
        """Number of query heads; the flat index of (batch, head) is batch · heads + head."""
        return self.lead[-1] if self.lead else 1

    @cached_property
    def features(self) -> Features:
        """The set of options of the call, without their values."""
        return features_of(self)

    @cached_property
    def over_cap(self) -> float:
        """1 / softcap, or 0 without one."""
        return 1.0 / self.softcap if self.softcap else 0.0

    @cached_property
    def is_plain(self) -> bool:
        """Tell whether the call has no options but scale and causal or window bounds."""
        return self.features == PLAIN

    @property
    def bend_count(self) -> int:
        """Number of options among softcap, ALiBi and a floating mask, which modify a score."""
        return (self.softcap > 0.0) + self.slopes + (self.mask == "float")

    @cached_property
    def key_lead(self) -> tuple[int, ...]:
        """Leading dimensions of k and v after broadcasting: fewer heads where several share one."""
        return (*self.lead[:-1], self.lead[-1] // self.groups) if self.groups > 1 else self.lead

    @cached_property
    def grouped_lead(self) -> tuple[int, ...]:
        """Leading dimensions with the heads in groups, (…, key heads, groups): all operands broadcast."""
        return (*self.key_lead, self.groups) if self.groups > 1 else self.lead

    @cached_property
    def q_shape(self) -> tuple[int, ...]:
        """Shape of q after broadcasting: (…, heads, seq_q, head_dim)."""
        return (*self.lead, self.seq_q, self.head_dim)

    @cached_property
    def k_shape(self) -> tuple[int, ...]:
        """Shape of k after broadcasting: (…, key heads, seq_k, head_dim)."""
        return (*self.key_lead, self.seq_k, self.head_dim)

    @cached_property
    def v_shape(self) -> tuple[int, ...]:
        """Shape of v after broadcasting: (…, key heads, seq_k, value_dim)."""
        return (*self.key_lead, self.seq_k, self.value_dim)

    @cached_property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of out: (…, heads, seq_q, value_dim)."""
        return (*self.lead, self.seq_q, self.value_dim)

    @cached_property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of lse: (…, heads, seq_q)."""
        return (*self.lead, self.seq_q)

    @cached_property
    def scores_shape(self) -> tuple[int, ...]:
        """Shape of the scores, which a mask broadcasts to: (…, heads, seq_q, seq_k)."""
        return (*self.lead, self.seq_q, self.seq_k)


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
    sink: Any = None,
    block_mask: Any = None,
    mask_mod: Callable[..., Any] | None = None,
    score_mod: Callable[..., Any] | None = None,
    seed: int | None = None,
    precision: str | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    rung: str = "auto",
) -> Problem:
    """Check the operands and the options of an attention call.

    Args:
        q: Queries, (…, heads, seq_q, head_dim); any object with ``shape`` and ``dtype``.
        k: Keys, (…, heads, seq_k, head_dim), of the dtype of q.
        v: Values, (…, heads, seq_k, value_dim), of the dtype of q.
        attn_mask: A boolean mask (True keeps), or an additive mask of the dtype of q; it broadcasts to
            (…, heads, seq_q, seq_k) and may have any strides.  Must be None for packed sequences.
        dropout_p: Probability of dropping an attention weight, in [0, 1), rounded to a multiple of 2⁻¹⁶.
            The remaining weights are divided by 1 - dropout_p.
        is_causal: Query i attends to keys 0 to i (top-left aligned, as in PyTorch).
        scale: Factor of the scores; 1/sqrt(head_dim) when None.
        enable_gqa: Let groups of adjacent query heads share one head of k and v; the number of query heads
            must be a multiple of the number of heads of k and v.
        causal_offset: Shift of the diagonal: with ``is_causal``, query ``row`` attends to columns up to
            ``row + causal_offset``; seq_k - seq_q aligns it bottom-right.
        window_size: (left, right): query ``row`` attends to columns from ``row + causal_offset - left`` to
            ``row + causal_offset + right``, both inclusive; -1 is unbounded.
        softcap: Scores become cap · tanh(score / cap); 0 turns it off.
        alibi_slopes: (heads,) or (batch, heads): slope · |row + causal_offset - col| is subtracted from
            each score.  The slopes are constants and receive no gradient.
        sink: (heads,), one logit per head, which enters the softmax as the score of an additional key
            whose value is zero: P = exp(S) / (exp(sink) + rowsum exp(S)).  lse includes it.
        block_mask: A :class:`kernels.BlockMask`; tiles that it masks are skipped.  Must be None for packed
            sequences.
        mask_mod: ``(batch, head, row, col) -> bool``, True keeps; a function that numba can compile.
        score_mod: ``(score, batch, head, row, col) -> score``, applied after scale and softcap.  For
            gradients, pass a pair of the function and its derivative with respect to the score, which
            takes the same arguments.
        seed: Seed of the dropout mask, from 0 to 2⁶⁴ - 1; a seed gives the same mask on every device.
            Dropout on arrays requires one; on tensors the default is drawn from the generator of
            ``minitorch.manual_seed``.
        precision: For float32 operands, a lower precision that matrix products may use where a rung is
            faster with it: "tf32" (11 bits of significand), "bfloat16" or "float16".  Sums stay in float32.
            None selects "float32", as do rungs without such products.  In "float32", tensor cores compute
            each product as a sum of several float16 products.  For fp16 and bf16 operands,
            "float8_e4m3" rounds q, k, v and the probabilities to 4 bits of significand.  It supports only
            the forward pass and few options; the suffixes "+hadamard", "+blocks" and "+blocks+hadamard"
            reduce the error.
        deterministic: Make gradients bitwise reproducible; False lets a kernel add them in any order
            where that is faster.
        return_lse: Also return lse, on tensors; a forward call on arrays always returns it.
        rung: Name of the kernel.  "auto" selects the one that the environment variable ``MINITORCH_RUNG``
            names or, if it is unset, the fastest one that can run the call.

    Returns:
        The problem.

    Raises:
        TypeError: If an operand is not a floating-point array, the operands' dtypes differ, or an option
            has the wrong type.
        ValueError: If a shape or a value is invalid, or a precision is given for operands of another
            dtype.
    """
    return problem_of(
        q,
        k,
        v,
        Options(
            attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
            enable_gqa=enable_gqa, causal_offset=causal_offset, window_size=window_size,
            softcap=softcap, alibi_slopes=alibi_slopes, sink=sink, block_mask=block_mask,
            mask_mod=mask_mod, score_mod=score_mod, seed=seed, precision=precision,
            deterministic=deterministic, return_lse=return_lse, rung=rung,
        ),
    )  # fmt: skip


#: The options of a call that names none.
_DEFAULTS = {
    name: parameter.default
    for name, parameter in [*inspect.signature(make_problem).parameters.items()][3:]
}


def problem_of(q: Any, k: Any, v: Any, options: Options) -> Problem:
    """Return the problem of a call; see :func:`make_problem`, which has the defaults of the options."""
    dtype = check_dtypes(q, k, v)
    o = SimpleNamespace(**{**_DEFAULTS, **options})
    check_types(**{name: value for name, value in options.items() if name not in ARRAYS})
    shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    lead, groups, seq_q, seq_k, head_dim, value_dim = check_shapes(
        *shapes, enable_gqa=bool(o.enable_gqa)
    )
    offset = int(o.causal_offset)  # a narrow integer would wrap
    if offset and not (o.is_causal or o.window_size is not None or o.alibi_slopes is not None):
        raise ValueError(
            f"causal_offset shifts the diagonal of is_causal, window_size and alibi_slopes, got "
            f"{offset} without any of them; set one, or leave the offset at 0"
        )
    mask = check_mask(o.attn_mask, (*lead, seq_q, seq_k), dtype)
    check_slopes(o.alibi_slopes, lead)
    check_offset(offset, o.alibi_slopes)
    check_sink(o.sink, lead)
    left, right = check_window(o.window_size)
    check_block_mask(o.block_mask, lead, seq_q, seq_k)
    mask_mod = as_mask_mod(o.mask_mod)
    # Before the rate is converted to float, for which it may be too large.
    seed = check_dropout(o.dropout_p, o.seed)
    lower = offset - left if left >= 0 else -seq_q
    upper = offset + right if right >= 0 else seq_k
    if o.is_causal:
        upper = min(upper, offset)
    return Problem(
        lead=lead,
        seq_q=seq_q,
        seq_k=seq_k,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        scale=check_scale(o.scale, head_dim),
        # Clipping here does not change the visible columns, and keeps kernels' integers small.
        lower=min(max(lower, -seq_q), seq_k),
        upper=min(max(upper, -seq_q), seq_k),
        diagonal=0 if o.alibi_slopes is None else offset,
        rung=rung_of_run() if o.rung == "auto" else o.rung,
        precision=check_precision(o.precision, dtype),
        deterministic=bool(o.deterministic),
        groups=groups,
        softcap=check_softcap(o.softcap),
        mask=mask,
        slopes=o.alibi_slopes is not None,
        sink=o.sink is not None,
        dropout_p=float(o.dropout_p),
        seed=seed,
        block_mask=o.block_mask,
        mask_mod=mask_mod,
        score_mod=as_score_mod(o.score_mod),
    )


def check_gradient_operands(
    problem: Problem, dout: Any, out: Any, lse: Any, dlse: Any = None
) -> None:
    """Check the further operands of the backward pass.

    Raises:
        ValueError: If one does not have the shape that the forward pass returned.
        TypeError: If one is not an array of the dtype that the forward pass returned.
    """
    dtype, sums = problem.dtype, problem.acc_dtype
    for name, array, shape, wanted in (
        ("dout", dout, problem.out_shape, dtype),
        ("out", out, problem.out_shape, dtype),
        ("lse", lse, problem.lse_shape, sums),
        *([] if dlse is None else [("dlse", dlse, problem.lse_shape, sums)]),
    ):
        check_array(name, array)
        if tuple(array.shape) != shape:
            raise ValueError(
                f"{name} must have the shape {shape} of the forward pass, got {tuple(array.shape)}"
            )
        if array.dtype != wanted:
            raise TypeError(
                f"{name} must be {wanted} where q, k and v are {dtype}, got {array.dtype}; convert it"
            )
