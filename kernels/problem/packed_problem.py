"""Check calls on packed sequences and make their problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kernels.common.arguments import as_host_array
from kernels.problem.options import OPTIONS, Options
from kernels.problem.packed_sequences import Sequences, sequences_of
from kernels.problem.question import Problem, problem_of
from kernels.problem.shapes import check_array


class PackedMaker:
    """A function that checks a call on packed sequences and returns its problem.

    The cumulative lengths are (count + 1,), starting at 0; ``find`` returns the bounds of the
    sequences.
    """

    def __init__(
        self,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        find: Callable[[Any, Any, int, int], Sequences] = sequences_of,
    ):
        self._sums, self._find = (cu_seqlens_q, cu_seqlens_k), find

    @property
    def key(self) -> Any:
        """The lengths by value, by which a call is looked up."""
        own = [as_host_array("the cumulative lengths", sums) for sums in self._sums]
        return tuple([(sums.dtype, sums.shape, sums.tobytes()) for sums in own])

    def __call__(self, q: Any, k: Any, v: Any, options: Options) -> Problem:
        """Check a call on views (heads, total, dim) of q, k and v.

        Raises:
            TypeError: See :func:`kernels.make_problem`, and :class:`.packed_sequences.Sequences`.
            ValueError: Also for ``attn_mask`` or ``block_mask``.
        """
        check_packed_options(options)
        return problem_of(q, k, v, options, partial(self._find, *self._sums))


def check_packed_options(options: Mapping[str, Any]) -> None:
    """Check that packed sequences support the options of a call; otherwise raise a ValueError."""
    for name, option in OPTIONS.items():
        if not option.is_packed and options.get(name) is not None:
            raise ValueError(
                f"flash_attention_varlen does not support {name}, which has one shape for all "
                "sequences; use is_causal, window_size or mask_mod(sequence, head, row, col) instead"
            )


def check_packed(name: str, operand: Any) -> None:
    """Check that an operand is an array (total, heads, dim); otherwise raise a TypeError or ValueError."""
    check_array(name, operand)
    if len(operand.shape) != 3:
        raise ValueError(
            f"flash_attention_varlen needs {name} of shape (total, heads, dim), with all sequences packed "
            f"along the first dimension; got {tuple(operand.shape)}"
        )
