"""Strong and weak scaling of ring attention on this machine's cores, and a model that predicts GPUs.

Attention of one head with a causal mask, forward and backward, is measured on 1, 2, 4, … ranks of one
thread each: at one length, strong scaling, and with as many tokens a rank, weak scaling.  All worlds are
measured in the same rounds.  FLOP/s and the time of a call are fitted to the times of all worlds, alpha and
beta to transfers without compute; MPI moves long messages on a CPU within its calls only, so that transfer
adds to compute.  With figures of GPUs and of their links, the same formulas predict when transfer hides
under compute.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from bench.kit import Case, Measurement, Panel, Record, Run, cell, curves, markdown, spread
from bench.measuring import slowest
from bench.ring_time import CALLS, Machine, Work, hiding_rows, ring_time

import minitorch
from minitorch.distributed import MPIGroup, ring_attention, world
from minitorch.distributed.exchange import Shift

HEAD_DIM, WAYS = 64, ("forward", "backward")
LEAST_COST = 1e-18
#: Links of a GPU: alpha in seconds, beta in bytes/s in one direction.
#: Sources: the data sheets of the NVIDIA H200 (NVLink 4, 900 GB/s in both directions) and of ConnectX-7
#: (InfiniBand NDR, 400 Gb/s, one for each GPU); latencies of a message are assumed.
LINKS = {"NVLink": (10e-6, 450e9), "InfiniBand": (20e-6, 50e9)}
#: GPUs and tokens of the predictions; seconds of a call beside its operations, assumed.
GPUS, TOKENS, GPU_CALL = (8, 32, 128, 1024), tuple(2**i for i in range(16, 25, 2)), 10e-6
#: Of an attention and a GPU: the TFLOP/s are rounded down from measurements of our kernels on an H200.
GPU = {"heads": 32, "key_heads": 8, "head_dim": 128, "forward": 600.0, "backward": 450.0}


# -- on each rank ----------------------------------------------------------------------------------------


def call_of(group: MPIGroup, tokens: int) -> dict[str, Callable[[], Any]]:
    """Return the two passes of a rank's call of ring attention, and the transfer of its keys and values."""
    random, shape = np.random.default_rng(group.rank), (1, 1, tokens // group.size, HEAD_DIM)
    arrays = [random.standard_normal(shape, np.float32) for _ in range(4)]
    q, k, v, dout = (minitorch.from_numpy(array, minitorch.FastBackend) for array in arrays)
    for leaf in (q, k, v):
        leaf.requires_grad_(True)
    kept: list[Any] = []

    def forward() -> None:
        kept[:] = [ring_attention(q, k, v, group, is_causal=True)]

    def backward() -> None:
        kept.pop().backward(dout)
        q.grad = k.grad = v.grad = None

    steps: dict[str, Callable[[], Any]] = {"forward": forward, "backward": backward}
    if group.size > 1:
        block = [minitorch.from_numpy(np.ones(shape, np.float32)) for _ in range(2)]
        steps["transfer"] = lambda: Shift(group, block).wait()
    return steps


def measured(everyone: MPIGroup, run: Run) -> dict[tuple[int, int], Record]:
    """Measure every world; return milliseconds on the slowest rank, by ranks and tokens."""
    sizes = [2**i for i in range(everyone.size.bit_length()) if 2**i <= everyone.size]
    worlds = {n: everyone.split(int(everyone.rank < n)) for n in sizes}
    times: dict[tuple[int, int], dict[str, list[float]]] = {}
    steps = {
        (n, tokens): call_of(group, tokens)
        for n, group in worlds.items() if everyone.rank < n
        for tokens in run.lengths
    }  # fmt: skip
    for done in range(-1, run.rounds):  # the first round compiles
        for n, tokens in itertools.product(sizes, run.lengths):
            for name, step in steps.get((n, tokens), {}).items():
                seconds = slowest(worlds[n], step, "cpu")
                if done >= 0:
                    times.setdefault((n, tokens), {}).setdefault(name, []).append(seconds)
            # Without using the core, on which another rank measures.
            request = everyone.communicator.Ibarrier()
            while not request.Test():
                time.sleep(0.002)
    return {key: {n: spread(x, 1e3) for n, x in own.items()} for key, own in sorted(times.items())}


# -- the fit ---------------------------------------------------------------------------------------------


def solved(lines: list[tuple[float, ...]], seconds: list[float]) -> list[float]:
    """Return the factors of the best fit by relative error; none is below 0."""
    weights = 1.0 / np.array(seconds)
    matrix = np.array(lines) * weights[:, None]
    scales = np.abs(matrix).max(axis=0)
    matrix /= scales
    kept = [*range(matrix.shape[1])]
    while True:
        found = np.linalg.lstsq(matrix[:, kept], np.ones(len(seconds)), rcond=None)[0]
        if (found >= 0).all():
            factors = np.zeros(matrix.shape[1])
            factors[kept] = found
            return (factors / scales).tolist()
        kept.pop(int(found.argmin()))


def fitted(rows: list[Record]) -> Machine:
    """Return the machine that fits measured rows."""
    moved, waited, lines, seconds = [], [], [], []
    for row in (row for row in rows if row["ranks"] > 1):
        size = row["tokens"] / row["ranks"] * HEAD_DIM * work_of(row).itemsize
        moved.append((2.0, 2.0 * size))
        waited.append(row["transfer"]["median"] * 1e-3)
    latency, per_byte = solved(moved, waited) if moved else (0.0, 0.0)
    machine = Machine(1.0, 1.0, latency, 1.0 / max(per_byte, LEAST_COST), overlaps=False)
    for row in rows:
        work, n = work_of(row), row["ranks"]
        for way in WAYS:
            flops, took = work.flops(way) / n, row[way]["median"] * 1e-3
            lines.append((*(flops if each == way else 0.0 for each in WAYS), n * CALLS))
            seconds.append(max(took - ring_time(work, n, machine, way).transfer, 0.01 * took))
    forward, backward, call = solved(lines, seconds)
    rates = (1.0 / max(x, LEAST_COST) for x in (forward, backward))
    return machine._replace(**dict(zip(WAYS, rates, strict=True)), call=call)


def work_of(row: Record) -> Work:
    """Return the attention of a row."""
    return Work(row["tokens"], 1, 1, HEAD_DIM, itemsize=4)


def cases(run: Run) -> Iterator[Case]:
    """Measure all worlds, fit the model, and predict GPUs."""
    everyone = world()
    times = measured(everyone, run)
    rows = [{"ranks": n, "tokens": tokens, **found} for (n, tokens), found in times.items()]
    if everyone.rank:
        return
    machine = fitted(rows)
    run.note(
        timing="medians (with quartiles) of the rank that takes longest", head_dim=HEAD_DIM,
        machine=machine._asdict(), predicted=predicted(run),
    )  # fmt: skip
    for row in rows:
        model = {
            way: ring_time(work_of(row), row["ranks"], machine, way).total * 1e3 for way in WAYS
        }
        took, one = (
            sum(each[way]["median"] for way in WAYS) for each in (row, times[1, row["tokens"]])
        )
        error = sum(model.values()) / took - 1.0
        yield row, {"model": model, "error": error, "efficiency": one / (row["ranks"] * took)}


def predicted(run: Run) -> list[Record]:
    """Return the times of GPUs by the model."""
    found = []
    for link, (latency, bandwidth) in LINKS.items():
        machine = Machine(run.forward * 1e12, run.backward * 1e12, latency, bandwidth, GPU_CALL)
        for tokens in TOKENS:
            work = Work(tokens, run.heads, run.key_heads, run.head_dim)
            for n in GPUS:
                ways = [ring_time(work, n, machine, way) for way in WAYS]
                total = sum(x.total for x in ways)
                found.append({
                    "link": link, "gpus": n, "tokens": tokens, "ms": total * 1e3,
                    "exposed": 1.0 - sum(x.compute for x in ways) / total,
                    "hiding_rows": hiding_rows(work, machine),
                })  # fmt: skip
    return found


# -- what is shown ---------------------------------------------------------------------------------------


def table(record: Record) -> str:
    rows, machine, found = record["rows"], record["machine"], record["predicted"]
    alone = {
        row["tokens"]: sum(row[w]["median"] for w in WAYS) for row in rows if row["ranks"] == 1
    }

    def weak(row: Record) -> str:  # one rank with as many tokens has an n-th of the work
        n, took = row["ranks"], sum(row[way]["median"] for way in WAYS)
        one = alone.get(row["tokens"] // n) if n > 1 else None
        return f"{n * one / took:.1%}" if one else "–"

    head = ["ranks", "tokens", "forward, ms", "forward, model", "backward, ms", "backward, model",
            "error of the model, both passes", "strong efficiency", "weak efficiency"]  # fmt: skip
    lines = [
        [row["ranks"], f"{row['tokens']:,}",
         *(cell(x) for way in WAYS for x in (row[way]["median"], row["model"][way])),
         f"{row['error']:+.1%}", f"{row['efficiency']:.1%}", weak(row)]
        for row in rows
    ]  # fmt: skip
    fit = (
        f"The fitted model has {machine['forward'] / 1e9:.3g} GFLOP/s per rank in the forward pass and "
        f"{machine['backward'] / 1e9:.3g} in the backward pass, a fixed cost of "
        f"{machine['call'] * 1e6:.3g} µs per call, and messages with a latency of "
        f"{machine['latency'] * 1e6:.3g} µs and a bandwidth of {machine['bandwidth'] / 1e9:.3g} GB/s."
    )
    gpus = sorted({x["gpus"] for x in found})
    by_place: dict[Any, dict[int, str]] = {}
    for x in found:
        ms = f"{cell(x['ms'])} ms" if x["ms"] < 1e4 else f"{cell(x['ms'] * 1e-3)} s"
        by_place.setdefault((x["link"], x["tokens"]), {})[x["gpus"]] = f"{ms}, {x['exposed']:.0%}"
    shares = [[link, f"{n:,}", *map(own.get, gpus)] for (link, n), own in by_place.items()]
    least = {x["link"]: x["hiding_rows"] for x in found}
    settings = record["settings"]
    gpu = (
        f"The next table is a prediction for GPUs with {settings['forward']:g} TFLOP/s forward and "
        f"{settings['backward']:g} backward, {settings['heads']} query heads and "
        f"{settings['key_heads']} key heads, head_dim {settings['head_dim']}, 16-bit operands and a causal "
        "mask. It shows the time of both passes, and the share of it in which a GPU waits. A forward "
        f"step hides its transfer if each GPU has at least "
        f"{', '.join(f'{rows:,.0f} ({link})' for link, rows in least.items())} tokens."
    )
    head_of_gpus = ["link", "tokens", *(f"{n:,} GPUs" for n in gpus)]
    return "\n\n".join([markdown(head, lines), fit, gpu, markdown(head_of_gpus, shares)])


def draw(record: Record) -> list[Panel]:
    """Show measured times beside the model, and the part of the time in which GPUs wait."""
    times = curves(
        (f"{row['tokens']:,} tokens{kind}", row["ranks"], ms)
        for row in record["rows"]
        for kind, ms in (
            ("", sum(row[way]["median"] for way in WAYS)), (", model", sum(row["model"].values())),
        )
    )  # fmt: skip
    waits = curves(
        (f"{x['gpus']:,} GPUs, {x['link']}", x["tokens"], x["exposed"]) for x in record["predicted"]
    )
    sizes = "{heads} heads, {key_heads} of keys, head_dim {head_dim}".format(**record["settings"])
    return [
        Panel(f"one head, head_dim {record['head_dim']}, causal, float32", "ranks",
              "ms, forward + backward", times, log="xy"),
        Panel(f"predicted for GPUs: {sizes}, causal, 16 bits", "tokens",
              "part of the time that a GPU waits", waits, log="x"),
    ]  # fmt: skip


MEASUREMENT = Measurement(
    "scaling", "How does ring attention scale over cores, and by the same model over GPUs?", cases,
    {"cpu": {"quick": {"lengths": (512, 1024), "rounds": 3},
             "normal": {"lengths": (4096, 8192, 16384), "rounds": 25, "ranks": 0, **GPU}}},
    table=table, draw=draw, minutes={"cpu": 2}, paths=("kernels", "minitorch/distributed"),
    caption="Above: time of ring attention, forward and backward, on ranks of one thread each; dashed "
    "lines are the fitted model. Below: the share of the time in which a GPU waits for keys "
    "and values, as predicted by the model.", with_ranks=True,
)  # fmt: skip
