"""A call of :func:`minitorch.distributed.ring_attention`: its parts, and a check that all ranks make it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kernels.problem.options import Options

from .blocks import CallBlock, blocks
from .group import Group
from .local_attention import Part, part_of
from .sequence_parts import Segment, segments

#: Length of the description of a call that the ranks compare, in bytes.
DESCRIPTION = 1024
#: Length of a seed, in bytes.
SEED_BYTES = 8


class Call(NamedTuple):
    """A checked call of :func:`ring_attention`.

    Attributes:
        group: The ranks that share the sequence.
        layout: Which rows a rank holds.
        sums: Cumulative lengths of packed sequences; (0, seq) for one.
        packed: Whether the caller has packed them.
        heads: Number of query heads.
        options: Options of the whole attention; with dropout they include a seed.
        head: The first query head, if the call is for a share of the heads.
    """

    group: Group
    layout: str
    sums: tuple[int, ...]
    packed: bool
    heads: int
    options: Options
    head: int = 0

    @property
    def window(self) -> tuple[int, int]:
        """Columns that a row sees on either side of its own, -1 for all."""
        left, right = self.options.get("window_size") or (-1, -1)
        return left, 0 if self.options.get("is_causal") else right

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """Return the segments of the rows that a rank holds."""
        return segments(self.sums[-1], rank, self.group.size, self.layout, self.sums)

    @property
    def rows(self) -> list[range]:
        """The rows of each segment of this rank."""
        return [a.here for a in self.segments(self.group.rank)]

    def blocks(self, rank: int, owner: int) -> tuple[CallBlock, ...]:
        """Return the calls by which the segments of a rank attend to those of ``owner``."""
        keeps_places = bool(self.options.get("dropout_p"))
        return blocks(self.segments(rank), self.segments(owner), *self.window, keeps_places)

    def parts(self, owner: int) -> Iterator[tuple[CallBlock, Part]]:
        """Yield the calls by which this rank attends to the keys of ``owner``."""
        for block in self.blocks(self.group.rank, owner):
            found = block.pair
            yield block, self._part(found.row, found.col, found.sums, found.sequence)

    def counts_of_rows(self) -> list[int]:
        """Return how many calls each segment of this rank is in."""
        rank = self.group.rank
        calls = Counter(
            n
            for owner in range(self.group.size)
            for x in self.blocks(rank, owner)
            for n in x.queries
        )
        return [calls[n] for n in range(len(self.segments(rank)))]

    def counts_of_keys(self, rank: int, owner: int) -> list[int]:
        """Return the number of a rank's calls that each segment of the owner's keys is in."""
        calls = Counter(n for x in self.blocks(rank, owner) for n in x.keys)
        return [calls[n] for n in range(len(self.segments(owner)))]

    def has_sums(self, step: int) -> bool:
        """Tell whether the gradients that leave a rank after a step are unfinished sums.

        Args:
            step: Index of the rank on their route, 0 for the rank that owns the keys.
        """
        ranks = range(self.group.size)
        if step == 0:
            return any(max(self.counts_of_keys(x, x), default=0) > 1 for x in ranks)
        return step < ranks[-1]

    def part_of_all_keys(self, queries: Segment) -> tuple[Part, range]:
        """Return the call by which a segment attends to all keys that it sees, and their places."""
        stop = queries.place + queries.rows
        if queries.sums:
            return self._part(0, 0, queries.sums, queries.sequence), range(queries.begin, stop)
        part = self._part(queries.first, 0, (), queries.sequence)
        end = next(end for end in self.sums if end > queries.place)
        return part, range(queries.begin, stop if self.window[1] == 0 else end)

    def _part(self, row: int, col: int, sums: tuple[int, ...], sequence: int) -> Part:
        batch_head = sequence * self.heads + self.head
        sums = sums if self.packed else ()
        return part_of(self.options, row, col, sums, self.heads, batch_head)

    def part_of_own_heads(self) -> Part:
        """Return the call of the heads of this rank, on all rows."""
        first = self.group.rank * (self.heads // self.group.size)
        sums = self.sums if self.packed else ()
        return part_of(self.options, 0, 0, sums, self.heads, first)


def agreed(group: Group, text: str, seed: int) -> int:
    """Check that all ranks make the same call, and return the seed of rank 0.

    Args:
        group: The ranks.
        text: A description of the call.
        seed: The seed that this rank has drawn.

    Raises:
        ValueError: If a call differs; the message names the first rank whose call does.
    """
    own = np.zeros(DESCRIPTION, np.uint8)
    words = text.encode()[: DESCRIPTION - SEED_BYTES]
    own[: len(words)] = np.frombuffer(words, np.uint8)
    own[-SEED_BYTES:] = np.frombuffer(seed.to_bytes(SEED_BYTES, "little"), np.uint8)
    every = np.empty((group.size, DESCRIPTION), np.uint8)
    group.host.all_gather(own, every).wait()
    calls = [bytes(each[:-SEED_BYTES]).rstrip(b"\0").decode(errors="replace") for each in every]
    for rank, other in enumerate(calls):
        if other != calls[0]:
            raise ValueError(
                f"all ranks must make the same call of ring_attention: rank 0 has {calls[0]}; rank {rank} "
                f"has {other}; give every rank an equal part, and the same options"
            )
    return int.from_bytes(bytes(every[0, -SEED_BYTES:]), "little")
