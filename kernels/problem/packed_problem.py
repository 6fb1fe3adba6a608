"""Check calls on packed sequences and make their problem."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

from kernels.problem.argument_types import check_array
from kernels.problem.options import Options
from kernels.problem.packed_sequences import Sequences, sequences_of
from kernels.problem.question import Problem, problem_of


def make_packed_problem(
    q: Any,
    k: Any,
    v: Any,
    options: Options,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    find: Callable[[Any, Any, int, int], Sequences] = sequences_of,
) -> Problem:
    """Check a call on packed sequences.

    Args:
        q: (heads, total_q, head_dim), a view.
        k: (heads, total_k, head_dim).
        v: (heads, total_k, value_dim).
        options: Options by name.
        cu_seqlens_q: Cumulative query lengths, (count + 1,), starting at 0.
        cu_seqlens_k: Cumulative key lengths, (count + 1,), starting at 0.
        find: Returns the bounds of the sequences.

    Raises:
        TypeError: See :func:`kernels.make_problem`, and
            :class:`kernels.problem.packed_sequences.Sequences`.
        ValueError: Also for ``attn_mask`` or ``block_mask``.
    """
    for name in ("attn_mask", "block_mask"):
        if options.get(name) is not None:
            raise ValueError(
                f"flash_attention_varlen does not support {name}, which has one shape for all sequences; "
                "use is_causal, window_size or mask_mod(sequence, head, row, col) instead"
            )
    problem = problem_of(q, k, v, options)
    sequences = find(cu_seqlens_q, cu_seqlens_k, problem.seq_q, problem.seq_k)
    with suppress(TypeError):  # an option that cannot be hashed
        return _packed(problem, sequences)
    return replace(problem, sequences=sequences)


@lru_cache(maxsize=256)
def _packed(problem: Problem, sequences: Sequences) -> Problem:
    return replace(problem, sequences=sequences)


def check_packed(name: str, operand: Any) -> None:
    """Check that an operand has the three dimensions (total, heads, dim).

    Raises:
        TypeError: If it is not an array.
        ValueError: If it does not have three dimensions.
    """
    check_array(name, operand)
    if len(operand.shape) != 3:
        raise ValueError(
            f"flash_attention_varlen needs {name} of shape (total, heads, dim), with all sequences packed "
            f"along the first dimension; got {tuple(operand.shape)}"
        )
