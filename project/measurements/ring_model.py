"""The time of ring attention by the model of ``bench/ring_time.py``, from figures of a GPU and its link.

Without overlap, messages travel between the steps, as MPI's do on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.harness import Case, Measurement, Run
from bench.records import Record
from bench.ring_time import Machine, Work, hiding_rows, ring_time


def cases(run: Run) -> Iterator[Case]:
    work = Work(
        run.tokens, run.heads, run.key_heads, run.head_dim, run.itemsize, causal=not run.full_mask
    )
    machine = Machine(
        run.forward * 1e12, run.backward * 1e12, run.latency * 1e-6, run.bandwidth * 1e9, run.call * 1e-6,
        overlaps=not run.no_overlap,
    )  # fmt: skip
    run.note(hiding_rows=hiding_rows(work, machine), rows_of_a_rank=work.tokens / run.ranks)
    for way in ("forward", "backward"):
        yield {"pass": way}, partial(predicted, work, run.ranks, machine, way)


def predicted(work: Work, ranks: int, machine: Machine, way: str) -> Record:
    time = ring_time(work, ranks, machine, way)
    parts = {f"{name}_ms": 1e3 * value for name, value in time._asdict().items()}
    return {**parts, "exposed": time.exposed}


def table(record: Record) -> str:
    lines = [
        f"{row['pass']:8}  {row['total_ms']:.4g} ms: {row['compute_ms']:.4g} ms of compute, "
        f"{row['transfer_ms']:.4g} ms of transfer; waits for {row['exposed']:.1%} of the time"
        for row in record["rows"]
    ]
    hides = (
        f"a forward step hides its transfer if a rank has at least {record['hiding_rows']:,.0f} tokens; "
        f"here it has {record['rows_of_a_rank']:,.0f}"
    )
    return "\n".join([*lines, hides])


#: Of an attention and a GPU: the FLOP/s are rounded down from measurements of our kernels on an H200.
GPU = {"heads": 32, "key_heads": 8, "head_dim": 128, "forward": 600.0, "backward": 450.0}
MEASUREMENT = Measurement(
    "ring_model", "How long would ring attention take on these GPUs? (a formula, measures nothing)", cases,
    {"cpu": {"normal": {
        "ranks": 8, "tokens": 2**20, **GPU, "latency": 10.0, "bandwidth": 450.0, "call": 10.0,
        "itemsize": 2, "no_overlap": False, "full_mask": False}}},
    table=table, minutes={"cpu": 0.1}, paths=("project/bench/ring_time.py",),
)  # fmt: skip
