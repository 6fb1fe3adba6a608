"""Check that all ranks of a training run execute the same program with the same options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from .group import Group


def check_same(group: Group, facts: Mapping[str, Any]) -> None:
    """Check that all ranks have the same facts, such as versions and options; every rank calls it.

    Args:
        group: The ranks.
        facts: Values by name; they are compared as text.

    Raises:
        ValueError: If a fact differs.  Every rank raises the same error, which names the first rank that
            differs from rank 0, and both values.
    """
    text = json.dumps({name: str(value) for name, value in facts.items()}).encode()
    lengths = np.empty((group.size, 1), np.int64)
    group.host.all_gather(np.array([len(text)], np.int64), lengths).wait()
    own = np.zeros(int(lengths.max()), np.uint8)
    own[: len(text)] = np.frombuffer(text, np.uint8)
    every = np.empty((group.size, len(own)), np.uint8)
    group.host.all_gather(own, every).wait()
    found = [json.loads(bytes(row[: int(n[0])])) for row, n in zip(every, lengths, strict=True)]
    for rank, other in enumerate(found):
        for name in found[0] | other:
            first, second = (each.get(name, "missing") for each in (found[0], other))
            if first != second:
                raise ValueError(
                    f"all ranks must be the same program with the same options: {name} is {first:.200} on "
                    f"rank 0 and {second:.200} on rank {rank}; start every rank with one environment and "
                    "one command line"
                )
