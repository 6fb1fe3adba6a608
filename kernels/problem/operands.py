"""The arrays of one attention call, as one record from the caller to the kernel."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.problem.options import AXES, OPTION_ARRAYS
from kernels.problem.question import Problem
from kernels.runtime.dtypes import acc_dtype, is_floating
from kernels.runtime.memory import Memory

#: The fields of :class:`Operands`, with the shapes of the caller's arrays.
_FIELDS = (
    "q",  # (…, heads, seq_q, head_dim)
    "k",  # (…, heads, seq_k, head_dim)
    "v",  # (…, heads, seq_k, value_dim)
    # Boolean or floating, broadcasts to (…, heads, seq_q, seq_k).  For kernels it is (its own batches,
    # heads, seq_q, seq_k), with strides of 0, and a floating one has the dtype of lse.
    "mask",
    "mask_batch",  # for kernels, the index of the mask's batch for each, (batch,) int64, on the host
    *AXES,  # of the dtype of lse; for kernels (batch, heads, seq_q or 1, seq_k or 1)
    "score_table",  # what a score_mod reads, of the dtype of lse and any dimensions
    "out",  # (…, heads, seq_q, value_dim)
    "lse",  # (…, heads, seq_q), of the accumulator's dtype, float32 for fp16 and bf16
    "lse_rest",  # as lse: what lse loses by rounding, so that L = lse + lse_rest
    "dout",
    "dlse",  # or None for zeros
    "dq",  # of the broadcast shape of q
    "dk",  # of the broadcast shape of k, with a head for each head of q
    "dv",
    "dtable",  # of score_table, for a rung whose backward pass fills it; for kernels the sums
    # The tangents of a derivative along a direction, each of the shape and dtype of its array.
    "q_tangent",
    "k_tangent",
    "v_tangent",
    "out_tangent",
    "lse_tangent",
    "cache",  # the lengths and pages of a cache, for CUDA kernels, or None
)
#: The fields with a number for each row.
OF_ROWS = ("lse", "lse_rest", "dlse", "lse_tangent")
#: The fields with a row for each key.
OF_KEYS = ("k", "v", "dk", "dv", "k_tangent", "v_tangent")
#: The fields in the dtype of q.
IN_DTYPE = ("q", "k", "v", "out", "dout", "q_tangent", "k_tangent", "v_tangent", "out_tangent")


class Operands(namedtuple("Operands", _FIELDS, defaults=[None] * (len(_FIELDS) - 3))):
    """Operands and results of attention; missing ones are None.

    The caller's arrays have any leading dimensions.  :meth:`viewed` returns them in the form of the
    kernels: (batch, heads, seq, dim), lse and dlse without the last dimension.
    """

    def having(self, **arrays: Any) -> Operands:
        """Return the record with other arrays."""
        return self._replace(**arrays)

    def converted(self, memory: Memory, dtype: np.dtype[Any]) -> Operands:
        """Return the record with q, k, v, out and dout in a dtype, and a floating mask in that of sums.

        Tangents are converted like their arrays.

        A mask is added to scores, which are sums, and must not lose precision where q is narrowed.
        """
        arrays = {name: getattr(self, name) for name in IN_DTYPE}
        converted = {name: memory.convert(x, dtype) for name, x in arrays.items() if x is not None}
        if self.mask is not None and is_floating(self.mask.dtype):
            converted["mask"] = memory.convert(self.mask, acc_dtype(self.mask.dtype))
        return self.having(**converted)

    def forward_problem(self, problem: Problem) -> Problem:
        """Return the problem of the forward pass that a problem without sinks is the backward pass of."""
        return replace(problem, sink=self.sink is not None)

    def extra_logits(self, shape: tuple[int, ...] | None = None) -> Any:
        """Return the scores of an additional key whose value is 0; None without sinks.

        The shape is (batch, heads, rows), that of lse when None.
        """
        if self.sink is None:
            return None
        return np.broadcast_to(self.sink[..., 0], self.lse.shape if shape is None else shape)

    def with_rest(self, memory: Memory, problem: Problem) -> Operands:
        """Return the record of a backward pass, with zeros for a missing rest of lse."""
        if self.lse_rest is not None:
            return self
        zero, shape = memory.constant(np.zeros(1, problem.acc_dtype)), problem.lse_shape
        return self.having(lse_rest=memory.view(zero, shape, (0,) * len(shape)))

    def with_tangents(self, memory: Memory, problem: Problem) -> Operands:  # beyond module 5
        """Return the record with tangents of zero for those of q, k and v that are missing."""
        zero = memory.constant(np.zeros(1, problem.dtype))
        shapes = zip("qkv", (problem.q_shape, problem.k_shape, problem.v_shape), strict=True)
        zeros = {f"{x}_tangent": memory.view(zero, shape, (0,) * len(shape)) for x, shape in shapes}
        return self.having(**{x: zeros[x] for x in zeros if getattr(self, x) is None})

    def viewed(self, memory: Memory, problem: Problem) -> Operands:
        """Return the arrays in the form of the kernels, copied only if strides cannot describe them."""
        if memory.is_native and self._lies_so(problem):
            return self
        scores = problem.scores_shape[-2:]
        views = {
            name: view_of(memory, problem, name, array)
            for name, array in self._asdict().items()
            if array is not None and name not in ("mask", "mask_batch", "score_table", "dtable")
        }
        if self.mask is not None:
            own, views["mask_batch"] = own_mask(memory, problem, self.mask)
            views["mask"] = memory.four_dims(own, (own.shape[0], views["q"].shape[1], *scores))
        return self.having(**views)

    def _lies_so(self, problem: Problem) -> bool:
        """Tell whether all arrays have the four dimensions of the kernels already, as in most calls."""
        return (
            len(problem.lead) == 2
            and problem.groups == 1
            and self.mask is None
            and all(getattr(self, name) is None for name in AXES)
            and self.q.shape == problem.q_shape
            and self.k.shape == problem.k_shape
            and self.v.shape == problem.v_shape
        )


def make_operands(
    memory: Memory,
    problem: Problem,
    q: Any,
    k: Any,
    v: Any,
    arrays: Mapping[str, Any] | None = None,
) -> Operands:
    """Return the record of a call; option arrays, by name, may be on the host for a call on a device.

    The names in ``arrays`` that are not of arrays are ignored.
    """
    if not arrays:
        return Operands(q, k, v)
    found: dict[str, Any] = {}
    for name, option in OPTION_ARRAYS.items():
        array = arrays.get(option)
        if array is not None and name == "mask":
            array = memory.bring(array)
        elif array is not None:
            if isinstance(array, np.ndarray):
                array = memory.constant(array.astype(problem.acc_dtype, copy=False))
            array = memory.convert(array, problem.acc_dtype)
        found[name] = array
    return Operands(q, k, v, **found)


def own_mask(memory: Memory, problem: Problem, mask: Any) -> tuple[Any, npt.NDArray[np.int64]]:
    """View a mask, or its gradient, as (its own batches, heads or 1, seq_q or 1, seq_k or 1).

    Its leading dimensions may broadcast within the batch, such as one mask per batch if groups of
    query heads are separate entries of the batch.  No stride describes that, so there is also the
    index of its batch for each batch of the call.
    """
    lead = problem.grouped_lead
    if problem.groups > 1 and len(mask.shape) > 2:
        mask = memory.split_heads(mask, min(problem.key_lead[-1], tuple(mask.shape)[-3]))
    sizes = (*[1] * (len(lead) + 2 - len(mask.shape)), *mask.shape)[-max(len(lead) + 2, 3) :]
    batches = sizes[:-3]
    own = memory.four_dims(mask, sizes)
    numbers = np.arange(math.prod(batches)).reshape(batches)
    return own, np.broadcast_to(numbers, lead[:-1]).reshape(-1)


def view_of(memory: Memory, problem: Problem, name: str, array: Any) -> Any:
    """View an array that is not a mask in the form of the kernels; see :meth:`Operands.viewed`."""
    if name in OF_ROWS:
        if problem.groups == 1 and len(array.shape) == 3:
            return array  # as it is
        column = _four_dims(memory, problem, memory.expanded(array, len(array.shape)))
        return memory.rows(column)  # (batch, heads, seq_q)
    if (axes := AXES.get(name)) is not None:
        for axis, place in (("k", 0), ("q", 1)):  # (…, heads, seq_q or 1, seq_k or 1)
            if axis not in axes:
                array = memory.expanded(array, len(array.shape) - place)
        return _four_dims(memory, problem, array)
    if name in ("dk", "dv"):  # a gradient for each query head, groups apart already
        return memory.four_dims(array, tuple(array.shape))
    return _four_dims(memory, problem, array)


def _four_dims(memory: Memory, problem: Problem, array: Any) -> Any:
    """View (…, heads, seq, dim) as (batch, heads, seq, dim).

    If query heads share a head of k and v, each group becomes the heads of a separate entry of the batch,
    in which k and v repeat by a stride of 0.
    """
    if problem.groups > 1:
        array = memory.split_heads(array, problem.key_lead[-1])
    # Slopes have a dimension of heads even where nothing else has.
    lead = problem.grouped_lead or (1,) * (len(array.shape) - 2)
    return memory.four_dims(array, (*lead, *array.shape[-2:]))
