"""The validated problem of an attention call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, make_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kernels.problem.chunks import within_chunks  # beyond module 5
from kernels.problem.option_values import Given
from kernels.problem.options import (
    DEFAULTS,
    OPTIONS,
    WITH_GRADIENT,
    Options,
    check_types,
    field_of,
)
from kernels.problem.packed_sequences import Sequences  # beyond module 5
from kernels.problem.shapes import check_array, check_dtypes, check_shapes
from kernels.problem.signature import by_name, takes_attention_options
from kernels.runtime.dtypes import acc_dtype
from kernels.scores.program import PLAIN, CacheForm, Features, features_of
from kernels.scores.templates import numbers_of  # beyond module 5

if TYPE_CHECKING:
    from typing_extensions import Unpack


class DropoutOrigin(NamedTuple):
    """The position of a call's scores in a larger attention, of which the call computes a part.

    Element (batch, head, row, col) of the call takes the dropout bit of batch_head
    ``batch * heads + head + batch_head``, row ``row + self.row`` and column ``col + self.col``.  For packed
    sequences ``batch`` is the index of the sequence.
    """

    heads: int  #: Number of query heads of the whole attention.
    batch_head: int = 0  #: Flat index, batch * heads + head, of the first head of the call.
    row: int = 0  #: First query row.
    col: int = 0  #: First key column.


#: The options with a field of ``Problem``, and a base with these; the others become bounds and groups.
_OF_PROBLEM = [name for name, option in OPTIONS.items() if option.field is not None]
#: The fields of the options that can receive gradients.
_LEARNT = [*map(field_of, WITH_GRADIENT)]
_OptionFields: Any = make_dataclass("_OptionFields", map(field_of, _OF_PROBLEM), frozen=True)


@dataclass(frozen=True, kw_only=True)
class Problem(_OptionFields):
    """A checked attention call, without its arrays.

    Most options have a field, which is what the check of the option returned, see
    :class:`kernels.problem.options.Options`: "" or False for an absent array.

    Attributes:
        lead: Leading dimensions of the result, heads included; those of q, k and v broadcast to it.
        seq_q: Query rows.
        seq_k: Key columns.
        head_dim: Size of a query and of a key.
        value_dim: Size of a value.
        dtype: Dtype of q, k, v and out, of their gradients, and of a floating mask and its gradient.
        lower: Columns before ``row + lower`` are masked; ``-seq_q`` if there is no bound.
        upper: Columns after ``row + upper`` are masked; ``seq_k`` if there is no bound.
        diagonal: ``causal_offset`` if there are slopes: ALiBi's distance is |row + diagonal - col|.
        groups: Number of adjacent query heads that share one head of k and v.
        origin: Offset in the dropout mask of the larger attention call that this is part of, or None.
        sequences: The bounds of packed sequences, or None.  In packed calls, rows and columns are counted
            from the start of their sequence, and its index replaces that of the batch.
        cache: The form of the cache from which CUDA kernels read k and v, or None.
        learns_table: Whether the kernels of a backward pass also compute the gradient of ``score_table``.
    """

    lead: tuple[int, ...]
    seq_q: int
    seq_k: int
    head_dim: int
    value_dim: int
    dtype: np.dtype[Any]
    lower: int
    upper: int
    diagonal: int
    groups: int
    # The values without these options, which the published parts of the course do not have.
    mask_mod = score_mod = None
    score_table = 0
    precision = "float32"
    origin: DropoutOrigin | None = None
    sequences: Sequences | None = None
    cache: CacheForm | None = None
    learns_table: bool = False

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
        other: Any = object.__new__(Problem)
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
        found = features_of(self)
        found = found.templates  # beyond module 5
        return found

    @property  # beyond module 5
    def numbers(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # beyond module 5
        """The numbers that ``mask_mod`` and ``score_mod`` capture, in the order of their templates."""
        score = self.score_mod
        return numbers_of(self.mask_mod), numbers_of(score.function if score else None)

    @cached_property
    def over_cap(self) -> float:
        """1 / softcap, or 0 without one."""
        return 1.0 / self.softcap if self.softcap else 0.0

    @cached_property
    def is_plain(self) -> bool:
        """Tell whether the call has no options but scale and causal or window bounds."""
        return self.features == PLAIN

    @cached_property
    def has_gradients(self) -> tuple[bool, ...]:
        """For each option of ``WITH_GRADIENT`` whether the call has one that can receive a gradient."""
        return tuple([getattr(self, field) not in (False, "", "bool") for field in _LEARNT])

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


@takes_attention_options
def make_problem(q: Any, k: Any, v: Any, *args: Any, **options: Unpack[Options]) -> Problem:
    """Check the operands and the options of an attention call.

    Args:
        q: Queries, (…, heads, seq_q, head_dim); any object with ``shape`` and ``dtype``.
        k: Keys, (…, heads, seq_k, head_dim), of the dtype of q.
        v: Values, (…, heads, seq_k, value_dim), of the dtype of q.
        args: Options by position.
        options: Options by name.

    Raises:
        TypeError: If an operand is not a floating-point array, the operands' dtypes differ, or an option
            has the wrong type.
        ValueError: If a shape or a value is invalid, or a precision is given for operands of another
            dtype.
    """
    return problem_of(q, k, v, by_name("make_problem", args, options))


def problem_of(
    q: Any, k: Any, v: Any, options: Options, find: Callable[[int, int], Sequences] | None = None
) -> Problem:
    """Return the problem of a call; see :func:`make_problem`.

    ``find`` returns the bounds of packed sequences from the rows and columns of all; None if none are
    packed.
    """
    dtype = check_dtypes(q, k, v)
    check_types(**options)
    every = {**DEFAULTS, **options}
    shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    lead, groups, seq_q, seq_k, head_dim, value_dim = check_shapes(
        *shapes, enable_gqa=bool(every["enable_gqa"])
    )
    given = Given(lead, seq_q, seq_k, head_dim, dtype, every)
    checked = {name: option.check(every[name], given) for name, option in OPTIONS.items()}
    offset, (left, right) = checked["causal_offset"], checked["window_size"]
    lower = offset - left if left >= 0 else -seq_q
    upper = offset + right if right >= 0 else seq_k
    if checked["is_causal"]:
        upper = min(upper, offset)
    found = {
        "lead": lead,
        "seq_q": seq_q,
        "seq_k": seq_k,
        "head_dim": head_dim,
        "value_dim": value_dim,
        "dtype": dtype,
        # Clipping here does not change the visible columns, and keeps kernels' integers small.
        "lower": min(max(lower, -seq_q), seq_k),
        "upper": min(max(upper, -seq_q), seq_k),
        "diagonal": offset if checked["alibi_slopes"] else 0,
        "groups": groups,
        "sequences": find(seq_q, seq_k) if find is not None else None,
        **{field_of(name): checked[name] for name in _OF_PROBLEM},
    }
    if (chunk := checked["chunk_size"]) is not None:  # beyond module 5
        found = within_chunks(chunk, offset, found)
    return Problem(**found)


def check_further_operands(
    problem: Problem, q: Any, k: Any, v: Any, given: Mapping[str, Any]
) -> None:
    """Check the operands of a pass besides those of the forward pass, by their names in ``Operands``.

    One of another shape than its array in the forward pass raises a ValueError, of another dtype a
    TypeError.
    """
    dtype, sums = problem.dtype, problem.acc_dtype
    known = {
        "dout": (problem.out_shape, dtype),
        "out": (problem.out_shape, dtype),
        "lse": (problem.lse_shape, sums),
        "dlse": (problem.lse_shape, sums),
        "q_tangent": (tuple(q.shape), dtype),  # beyond module 5
        "k_tangent": (tuple(k.shape), dtype),  # beyond module 5
        "v_tangent": (tuple(v.shape), dtype),  # beyond module 5
    }
    for name in known.keys() & given.keys():
        if given[name] is None and name not in ("dout", "out", "lse"):
            continue
        array, (shape, wanted) = given[name], known[name]
        check_array(name, array)
        if tuple(array.shape) != shape:
            raise ValueError(
                f"{name} must have the shape {shape} of the forward pass, got {tuple(array.shape)}"
            )
        if array.dtype != wanted:
            raise TypeError(
                f"{name} must be {wanted} where q, k and v are {dtype}, got {array.dtype}; convert it"
            )
