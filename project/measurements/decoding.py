"""Decoding from a cache on a GPU, as a share of the speed at which memory is copied, beside PyTorch.

Decoding reads every key and value once, and nothing else should count.  A copy reads and writes each byte;
its speed is that of both.  64 query heads share 8 key heads; the last query sees all keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

from bench.kit import Case, Measurement, Record, Run, markdown
from bench.torch_attention import fused

import kernels

HEADS, KEY_HEADS, DIM = 64, 8, 128
#: Bytes of the copy, of which half are read.
COPIED = 8 << 30
#: Cycles that a device is kept busy before a reading, while the host launches.
HELD = 4_000_000
PYTORCH = {"flash": "FLASH_ATTENTION", "cuDNN": "CUDNN_ATTENTION"}


def cases(run: Run) -> Iterator[Case]:
    torch = run.torch
    read = torch.empty(COPIED // 8, device="cuda")
    written = torch.empty_like(read)
    (copy,) = timed(run, {"copy": partial(written.copy_, read)}).values()
    del read, written
    run.note(copy_bytes_per_second=COPIED / median(copy))
    for (batch, keys), queries in itertools.product(run.caches, run.queries):
        key = {"batch": batch, "keys": keys, "queries": queries}
        yield key, partial(decode, run, batch, keys, queries, COPIED / median(copy))


def timed(run: Run, steps: Any) -> dict[str, list[float]]:
    """Return the seconds of each step in every round, with the device busy while the host launches."""

    def hold(repeats: int) -> None:
        run.torch.cuda._sleep(HELD * repeats)

    found: dict[str, list[float]] = run.timed(steps, least=9, shortest=0.0, hold=hold)
    return found


def decode(run: Run, batch: int, keys: int, queries: int, copied: float) -> Record:
    """Time the contestants of one case."""
    torch = run.torch
    new = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q = new(batch, HEADS, queries, DIM)
    k, v = (new(batch, KEY_HEADS, keys, DIM) for _ in range(2))
    cached = partial(kernels.flash_attention_with_cache, is_causal=True)
    steps: dict[str, Any] = {
        "ours": partial(cached, q, k, v),
        "batch-invariant": partial(cached, q, k, v, batch_invariant=True),
    }
    lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
    for size in run.pages:
        order = torch.randperm(batch * keys // size, device="cuda", dtype=torch.int32)
        pools = [x.view(batch, KEY_HEADS, -1, size, DIM).transpose(1, 2) for x in (k, v)]
        pools = [x.reshape(-1, KEY_HEADS, size, DIM)[order.argsort()] for x in pools]
        more = {"cache_seqlens": lengths, "block_table": order.view(batch, -1)}
        steps[f"pages of {size}"] = partial(cached, q, *pools, **more)
    lower_right = import_module("torch.nn.attention.bias").causal_lower_right(queries, keys)
    mask = lower_right if queries > 1 else None
    options = {"attn_mask": mask, "enable_gqa": True}
    steps |= {name: partial(fused(torch, by), q, k, v, **options) for name, by in PYTORCH.items()}
    times = {name: median(found) for name, found in timed(run, steps).items()}
    size = k.element_size() * (k.numel() + v.numel())
    return {
        "us": {name: 1e6 * time for name, time in times.items()},
        "share": {name: size / time / copied for name, time in times.items()},
    }


def table(record: Record) -> str:
    rows = record["rows"]
    head = ["share of a copy's speed: batch, keys, queries", *rows[0]["share"]]
    lines = [
        [
            f"{row['batch']} x {row['keys']:,}, {row['queries']}",
            *(f"{x:.2f}" for x in row["share"].values()),
        ]
        for row in rows
    ]
    return markdown(head, lines)


MEASUREMENT = Measurement(
    "decoding", "How near to the speed of memory is decoding from a cache?", cases,
    {"cuda": {"normal": {"caches": ((32, 8192), (1, 131072), (8, 4096)), "queries": (1, 4, 8, 16),
                         "pages": (16, 64)},
              "quick": {"caches": ((2, 1024),), "queries": (2,), "pages": (16,)}}},
    table=table, minutes={"cuda": 2},
)  # fmt: skip
