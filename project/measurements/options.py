"""The cost of attention's options: time with an option divided by the time without it.

Time should follow work: a block-sparse pattern that visits a part s of the tiles should take s of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from bench.contestants import DIRECTIONS, packed_call, random_call
from bench.kit import Case, Figure, Measurement, Record, Run, ratio

from kernels import BlockMask

CACHE = 8192


class TimedPair(NamedTuple):
    """Two calls that are compared."""

    call: Any  # with the option
    other: Any  # without
    bound: float | None  # of the ratio of their times; None where there is none
    directions: tuple[str, ...] = DIRECTIONS  # that are timed


def pairs(run: Run) -> dict[str, Callable[[], TimedPair]]:
    """Return what is measured, by name; a pair takes its memory when it is called."""
    heads, n, sparse_n = run.heads, run.length, run.sparse_length
    call, rng = partial(random_call, run.device), np.random.default_rng(1)

    def plain(bound: float | None, **options: Any) -> Callable[[], TimedPair]:
        return lambda: TimedPair(call(heads, n, **options), call(heads, n), bound)

    def sparse(mask: BlockMask) -> Callable[[], TimedPair]:
        own = partial(call, run.sparse_heads, sparse_n)
        return lambda: TimedPair(own(block_mask=mask), own(), 1.2 * mask.density + 0.1)

    def parts() -> Any:
        calls = [call(heads, length, is_causal=True) for length in lengths]
        every = {way: lambda way=way: [getattr(one, way)() for one in calls] for way in DIRECTIONS}
        return SimpleNamespace(**every)

    patterns = {
        "butterfly": BlockMask.butterfly(sparse_n, sparse_n, 64),
        "local": BlockMask.local(sparse_n, sparse_n, 1024, 1024, 64),
        "bigbird": BlockMask.bigbird(sparse_n, sparse_n, 64),
        "strided": BlockMask.strided(sparse_n, sparse_n, 64),
    }
    lengths = [int(x) for x in rng.integers(n // 8, n, 8)]
    few, window = min(8, run.sparse_heads), Record(window_size=(512, 511))
    one_token = {"is_causal": True, "causal_offset": run.cache - 1}
    floating = rng.standard_normal((n, n), dtype=np.float32)
    return {
        "causal / dense": lambda: TimedPair(call(heads, 2 * n, is_causal=True), call(heads, 2 * n), 0.6),
        "boolean mask / plain": plain(1.5, attn_mask=rng.random((n, n)) < 0.9),
        "floating mask / plain": plain(None, attn_mask=floating),
        "dropout / plain": plain(1.5, dropout_p=0.1, seed=1),
        "ALiBi / plain": plain(None, alibi_slopes=2.0 ** -np.arange(1, heads + 1)),
        "softcap / plain": plain(None, softcap=30.0),
        **{f"{name}, density {x.density:.3f} / dense": sparse(x) for name, x in patterns.items()},
        "window of 1,024: 65,536 rows / 16,384 rows": lambda: TimedPair(
            call(few, 4 * sparse_n, **window), call(few, sparse_n, **window), 4.4
        ),
        "packed / the sum of its parts": lambda: TimedPair(
            packed_call(run.device, heads, lengths), parts(), 1.15
        ),
        "one token against a cache / computing all": lambda: TimedPair(
            call(heads, 1, run.cache, **one_token), call(heads, run.cache, is_causal=True), 1 / 50,
            DIRECTIONS[:1],
        ),
    }  # fmt: skip


def cases(run: Run) -> Iterator[Case]:
    run.note(sizes=run.chosen("heads", "length", "sparse_length", "sparse_heads"))
    for name, make in pairs(run).items():
        yield {"option": name}, partial(timed, run, make)


def timed(run: Run, make: Callable[[], TimedPair]) -> Record:
    pair = make()
    row: Record = {"bound": pair.bound}
    for way in pair.directions:
        times = run.timed({"call": getattr(pair.call, way), "other": getattr(pair.other, way)})
        row[way] = {
            "ms": 1e3 * median(times["call"]), "other_ms": 1e3 * median(times["other"]),
            "ratio": ratio(times["call"], times["other"])["median"], "pairs": len(times["call"]),
        }  # fmt: skip
    return row


def figures(record: Record) -> list[Figure]:
    return [
        Figure(f"{row['option']}, {way}", row[way]["ratio"], row["bound"], is_most=True)
        for row in record["rows"]
        for way in DIRECTIONS
        if way in row and row["bound"] is not None
    ]


MEASUREMENT = Measurement(
    "options", "What do the options of attention cost, relative to a call without them?", cases,
    {"cpu": {"normal": {"heads": 4, "length": 2048, "sparse_length": 16384, "sparse_heads": 1,
                        "cache": CACHE, "seconds": 6.0},
             "quick": {"length": 256, "sparse_length": 1024, "cache": 512, "seconds": 0.1}},
     "cuda": {"normal": {"heads": 64, "length": 4096, "sparse_length": 16384, "sparse_heads": 32,
                         "cache": CACHE, "seconds": 0.4},
              "quick": {"length": 512, "sparse_length": 4096}}},
    figures=figures, minutes={"cpu": 6, "cuda": 2}, paths=("kernels",),
)  # fmt: skip
