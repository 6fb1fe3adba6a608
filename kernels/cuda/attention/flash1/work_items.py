"""What a block of flash1 works on: one head of one sequence, as if there were no other."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from kernels.cuda.attention.options.extras import make_extras
from kernels.cuda.attention.options.score_functions import Extras, Features
from kernels.cuda.runtime.arrays import to_device
from kernels.cuda.runtime.kernel import device_function
from kernels.problem.operands import Operands
from kernels.problem.packed_sequences import Tile
from kernels.problem.question import Problem

#: Stands among probabilities for what its row does not see: no probability is negative.
HIDDEN = -1.0


@device_function
def _whole(array, first, length):
    return array


@device_function
def _part(array, first, length):
    return array[:, :, first : first + length]


def part_of(features: Features) -> Any:
    """Return ``(array, first, length)``: the rows of the block's sequence, as an array of their own."""
    return _part if features.packed else _whole


def grid_and_extras(
    problem: Problem, operands: Operands, tile: tuple[int, int]
) -> tuple[int, Extras]:
    """Return how many blocks a kernel has, a head of a sequence each, and its last argument."""
    batch, heads = operands.q.shape[:2]
    extras = make_extras(problem, operands, *tile, by_keys=True)
    sequences = problem.sequences
    if sequences is None:
        return batch * heads, extras
    return sequences.count * batch * heads, extras._replace(tiles=_sequences(sequences))


@lru_cache(maxsize=64)
def _sequences(sequences: Any) -> Any:
    """Return packed sequences on the device, as tiles of which each is a whole one, empty ones too."""
    first_q, first_k = sequences.cu_seqlens_q[:-1], sequences.cu_seqlens_k[:-1]
    numbers, start = np.arange(sequences.count), np.zeros(sequences.count)
    seq_q, seq_k = sequences.lengths
    columns = Tile(numbers, first_q, seq_q, first_k, seq_k, start)
    return to_device(np.stack(columns, axis=1).astype(np.int64))  # (count, 6)
