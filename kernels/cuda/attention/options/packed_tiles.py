"""The tiles of packed sequences on the device, whose lengths may change with each replay of a graph."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kernels.cuda.device.memory import device_list
from kernels.cuda.runtime.recorder import active, computed
from kernels.problem.packed_sequences import Sequences, sequences_of


class RecordedSequences(Sequences):
    """Packed sequences whose cumulative lengths are inputs of a recorded call, compared by identity.

    A replay checks the lengths and lists the tiles again.
    """

    def __init__(self, *given: Any):
        super().__init__(*given)
        self._given = given
        self._lists: dict[tuple[int, bool], Any] = {}

    def __eq__(self, other: object) -> bool:
        """Tell whether both are the same object."""
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def listed(self, block: int, of_keys: bool) -> Any:
        """Return the tiles on the device, copied once in each call."""
        key = block, of_keys
        if key not in self._lists:
            given = self._given
            tiles = computed(lambda: Sequences(*given).tiles(*key, fixed=True), *given)
            self._lists[key] = device_list(tiles)
        return self._lists[key]


def sequences_of_call(
    cu_seqlens_q: Any, cu_seqlens_k: Any, total_q: int, total_k: int
) -> Sequences:
    """Return the bounds of packed sequences; see :func:`sequences_of`.

    In a call that is recorded for a graph, each replay determines them again if the cumulative lengths are
    inputs of the call or computed from inputs.
    """
    recording, sums = active(), (cu_seqlens_q, cu_seqlens_k)
    if recording is None or not any(map(recording.is_live, sums)):
        return sequences_of(*sums, total_q, total_k)
    key = RecordedSequences, *map(id, sums)
    if key not in recording.memo:
        recording.memo[key] = RecordedSequences(*sums, total_q, total_k)
    return recording.memo[key]


def device_tiles(sequences: Sequences, block: int, of_keys: bool, device: int) -> Any:
    """Return the tiles of packed sequences on the current device, (tiles, 6) int64."""
    if isinstance(sequences, RecordedSequences):
        return sequences.listed(block, of_keys)
    return _copied(sequences, block, of_keys, device)


@lru_cache(maxsize=64)
def _copied(sequences: Sequences, block: int, of_keys: bool, device: int) -> Any:
    return device_list(sequences.tiles(block, of_keys, fixed=True))
