"""Strong and weak scaling of ring attention on this machine's cores, and a model that then predicts GPUs.

    python project/experiments/scaling.py            ranks of one thread each, as many as there are cores
    python project/experiments/scaling.py --quick    in small
    python project/experiments/ring_model.py --help  the model alone, with other figures

Attention of one head with a causal mask, forward and backward, is measured on 1, 2, 4, … ranks: at one
length, strong scaling, and with as many tokens a rank, weak scaling.  All worlds are measured in the same
rounds.  FLOP/s and the time of a call are fitted to the times of all worlds, alpha and beta to transfers
without compute; MPI moves long messages on a CPU within its calls only, so that transfer adds to compute.
With figures of GPUs and of their links, the same formulas predict when transfer hides under compute.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import (
    Experiment,
    Record,
    Report,
    Result,
    cell,
    colour_of,
    headline,
    legend,
    markdown,
    panels,
    run,
)

# isort: split
from bench.measuring import spread
from bench.ring_time import CALLS, Machine, Work, hiding_rows, ring_time
from ring_model import add_options

import minitorch
from minitorch.distributed import MPIGroup, ring_attention, world
from minitorch.distributed.exchange import Shift

HEAD_DIM = 64
#: A rank that had a core for this share of a round was undisturbed; so many rounds are kept in any case.
WHOLE, LEAST = 0.98, 3
DIRECTIONS = ("forward", "backward")
#: Seconds of an operation or of a byte that a fit gives at least.
LEAST_COST = 1e-18
#: Links of a GPU: alpha in seconds, beta in bytes/s in one direction.
#: Sources: the data sheets of the NVIDIA H200 (NVLink 4, 900 GB/s in both directions) and of ConnectX-7
#: (InfiniBand NDR, 400 Gb/s, one for each GPU); latencies of a message are assumed.
LINKS = {"NVLink": (10e-6, 450e9), "InfiniBand": (20e-6, 50e9)}
#: What is predicted; NVLink joins the GPUs of one machine, or of a rack.
GPUS, TOKENS = (8, 32, 128, 1024), tuple(2**i for i in range(16, 25, 2))
#: Seconds of a call of the kernels on a GPU beside its operations, assumed.
GPU_CALL = 10e-6


class Size(NamedTuple):
    """Of a run.

    Attributes:
        lengths: Of sequences, all of which are measured on all worlds.
        rounds: Of each step, of which those count in which no other program took a core.
    """

    lengths: tuple[int, ...]
    rounds: int


SIZES = {"cpu": {
    "quick": Size((512, 1024), 3),
    "normal": Size((4096, 8192, 16384), 25),
    "full": Size((4096, 8192, 16384, 32768), 25),
}}  # fmt: skip


def options(parser: Any) -> None:
    add_options(parser)
    parser.option("--ranks", int, os.cpu_count() or 1, "at most, of one thread each")


# -- on each rank ------------------------------------------------------------------------------------


def quietly(group: MPIGroup) -> None:
    """Wait for all ranks without using the core, which another rank measures."""
    request = group.communicator.Ibarrier()
    while not request.Test():
        time.sleep(0.002)


def call_of(group: MPIGroup, tokens: int) -> dict[str, Callable[[], Any]]:
    """Return the two passes of a call of ring attention by a rank."""
    random = np.random.default_rng(group.rank)
    shape = (1, 1, tokens // group.size, HEAD_DIM)
    q, k, v, dout = (
        minitorch.from_numpy(random.standard_normal(shape, np.float32), minitorch.FastBackend)
        for _ in range(4)
    )
    for leaf in (q, k, v):
        leaf.requires_grad_(True)
    kept: list[Any] = []

    def forward() -> None:
        kept[:] = [ring_attention(q, k, v, group, is_causal=True)]

    def backward() -> None:
        kept.pop().backward(dout)
        q.grad = k.grad = v.grad = None

    return {"forward": forward, "backward": backward}


def transfer_of(group: MPIGroup, tokens: int) -> Callable[[], Any]:
    """Return the transfer of a rank's keys and values to the next rank."""
    shape = (1, 1, tokens // group.size, HEAD_DIM)
    block = [minitorch.from_numpy(np.ones(shape, np.float32)) for _ in range(2)]
    return lambda: Shift(group, block).wait()


class Round(NamedTuple):
    """A step in one round.

    Attributes:
        seconds: Of the rank that takes longest.
        share: Of its time in which each rank had a core, the least of them; ranks wait actively.
    """

    seconds: float
    share: float


def timed(group: MPIGroup, step: Callable[[], Any]) -> Round:
    """Run a step on all ranks of a group."""
    group.barrier()
    start, used = time.perf_counter(), time.process_time()
    step()
    seconds = time.perf_counter() - start
    own = np.array([seconds, -(time.process_time() - used) / seconds])
    group.all_reduce(own, "max").wait()
    return Round(float(own[0]), -float(own[1]))


def undisturbed(rounds: list[Round]) -> list[Round]:
    """Return the rounds in which no other program took a core, or the least disturbed."""
    best = sorted(rounds, key=lambda x: -x.share)
    return [x for i, x in enumerate(best) if i < LEAST or x.share > WHOLE]


def child(lengths: list[int], rounds: int) -> None:
    """Measure every world on one of the ranks; rank 0 prints the rounds as JSON."""
    everyone = world()
    worlds = {n: everyone.split(int(everyone.rank < n)) for n in sizes(everyone.size)}
    steps: dict[tuple[int, int], dict[str, Callable[[], Any]]] = {}
    for n, group in worlds.items():
        if everyone.rank < n:
            for tokens in lengths:
                steps[n, tokens] = call_of(group, tokens)
                if n > 1:
                    steps[n, tokens]["transfer"] = transfer_of(group, tokens)
    times: dict[tuple[int, int, str], list[Round]] = {}
    for done in range(-1, rounds):  # the first round compiles
        for tokens in lengths:
            for n, group in worlds.items():
                for name, step in steps.get((n, tokens), {}).items():
                    found = timed(group, step)
                    if done >= 0:
                        times.setdefault((n, tokens, name), []).append(found)
                quietly(everyone)
    if everyone.rank == 0:
        print(json.dumps([[*key, undisturbed(value)] for key, value in times.items()]))


def sizes(most: int) -> Iterator[int]:
    """Yield the numbers of ranks that are measured, the powers of 2."""
    n = 1
    while n <= most:
        yield n
        n *= 2


# -- the fit -----------------------------------------------------------------------------------------


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
    """Return the machine that fits measured rows; see :func:`measure`."""
    moved: list[tuple[float, ...]] = []
    waited: list[float] = []
    for row in rows:
        if (n := row["ranks"]) > 1:
            size = row["tokens"] / n * HEAD_DIM * work_of(row).itemsize
            moved.append((2.0, 2.0 * size))
            waited.append(row["transfer"]["median"] * 1e-3)
    latency, per_byte = solved(moved, waited) if moved else (0.0, 0.0)
    machine = Machine(1.0, 1.0, latency, 1.0 / max(per_byte, LEAST_COST), overlaps=False)
    lines: list[tuple[float, ...]] = []
    seconds: list[float] = []
    for row in rows:
        work, n = work_of(row), row["ranks"]
        for way in DIRECTIONS:
            flops = work.flops(way) / n
            lines.append((*(flops if each == way else 0.0 for each in DIRECTIONS), n * CALLS))
            took = row[way]["median"] * 1e-3
            seconds.append(max(took - ring_time(work, n, machine, way).transfer, 0.01 * took))
    forward, backward, call = solved(lines, seconds)
    rates = (1.0 / max(x, LEAST_COST) for x in (forward, backward))
    return machine._replace(**dict(zip(DIRECTIONS, rates, strict=True)), call=call)


def work_of(row: Record) -> Work:
    """Return the attention of a row."""
    return Work(row["tokens"], 1, 1, HEAD_DIM, itemsize=4)


def measure(args: argparse.Namespace, report: Report) -> None:
    """Measure all worlds in one launch, fit the model, and predict GPUs."""
    size = SIZES[args.device][args.size]
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which(
        "mpiexec"
    )
    if mpiexec is None:
        sys.exit("there is no mpiexec; pip install 'minitorch-flash[mpi]'")
    command = [mpiexec, "-n", str(args.ranks), sys.executable, str(Path(__file__).resolve()), "--child",
               json.dumps(size)]  # fmt: skip
    one_thread = {"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env={**os.environ, **one_thread}, stdout=subprocess.PIPE, text=True, check=True
    )
    times: dict[tuple[int, int], Record] = {}
    shares: list[float] = []
    for n, tokens, name, rounds in json.loads(done.stdout):
        times.setdefault((n, tokens), {})[name] = spread([seconds for seconds, _ in rounds], 1e3)
        shares += [share for _, share in rounds if name in DIRECTIONS]
    if min(shares) < WHOLE:
        print(
            f"another program took up to {1 - min(shares):.0%} of a core; measure again",
            file=sys.stderr,
        )
    rows = [{"ranks": n, "tokens": tokens, **found} for (n, tokens), found in sorted(times.items())]
    machine = fitted(rows)
    report.note(
        timing="medians (with quartiles) of the rank that takes longest, over those of "
        f"{size.rounds} rounds in which no other program took a core",
        head_dim=HEAD_DIM, least_share=min(shares), machine=machine._asdict(), predicted=predicted(args),
    )  # fmt: skip
    for row in rows:
        model = {
            way: ring_time(work_of(row), row["ranks"], machine, way).total * 1e3
            for way in DIRECTIONS
        }
        took = sum(row[way]["median"] for way in DIRECTIONS)
        alone = sum(times[1, row["tokens"]][way]["median"] for way in DIRECTIONS)
        report.add(
            **row,
            model=model,
            error=sum(model.values()) / took - 1.0,
            efficiency=alone / (row["ranks"] * took),
        )


def predicted(args: argparse.Namespace) -> list[Record]:
    """Return what the model says of GPUs."""
    found = []
    for link, (latency, bandwidth) in LINKS.items():
        machine = Machine(args.forward * 1e12, args.backward * 1e12, latency, bandwidth, GPU_CALL)
        for tokens in TOKENS:
            work = Work(tokens, args.heads, args.key_heads, args.head_dim)
            for n in GPUS:
                ways = {way: ring_time(work, n, machine, way) for way in DIRECTIONS}
                total = sum(x.total for x in ways.values())
                found.append({
                    "link": link, "gpus": n, "tokens": tokens, "ms": total * 1e3,
                    "exposed": 1.0 - sum(x.compute for x in ways.values()) / total,
                    "hiding_rows": hiding_rows(work, machine),
                })  # fmt: skip
    return found


# -- what is shown -----------------------------------------------------------------------------------


def weak_rows(rows: list[Record]) -> Iterator[tuple[Record, float]]:
    """Yield rows with as many tokens a rank as one rank has, and the efficiency over that one."""
    alone = {row["tokens"]: row for row in rows if row["ranks"] == 1}
    for row in rows:
        n = row["ranks"]
        if n > 1 and (one := alone.get(row["tokens"] // n)):
            took, single = (sum(x[way]["median"] for way in DIRECTIONS) for x in (row, one))
            yield row, n * single / took  # a rank has n times the work of one alone


def table(record: Record) -> str:
    """Return what was measured beside the model, and what it predicts."""
    rows, machine = record["rows"], record["machine"]
    weak = {(row["ranks"], row["tokens"]): x for row, x in weak_rows(rows)}
    head = ["ranks", "tokens", "forward, ms", "forward, model", "backward, ms", "backward, model",
            "error of the model, both passes", "strong efficiency", "weak efficiency"]  # fmt: skip
    lines = [
        [
            row["ranks"], f"{row['tokens']:,}",
            *(cell(x) for way in DIRECTIONS for x in (row[way]["median"], row["model"][way])),
            f"{row['error']:+.1%}", f"{row['efficiency']:.1%}",
            f"{weak[key]:.1%}" if (key := (row["ranks"], row["tokens"])) in weak else "–",
        ]
        for row in rows
    ]  # fmt: skip
    rates = f"{machine['forward'] / 1e9:.3g} GFLOP/s per rank in the forward pass and "
    rates += f"{machine['backward'] / 1e9:.3g} in the backward pass"
    link = f"a latency of {machine['latency'] * 1e6:.3g} µs and a bandwidth of "
    link += f"{machine['bandwidth'] / 1e9:.3g} GB/s"
    cost = f"a fixed cost of {machine['call'] * 1e6:.3g} µs per call"
    fit = f"The fitted model has {rates}, {cost}, and messages with {link}."
    found = record["predicted"]
    by_place = {(x["link"], x["tokens"], x["gpus"]): x for x in found}
    gpus = sorted({x["gpus"] for x in found})
    head_of_gpus = ["link", "tokens", *(f"{n:,} GPUs" for n in gpus)]
    shares = [
        [link, f"{tokens:,}", *(_share(by_place[link, tokens, n]) for n in gpus)]
        for link, tokens in dict.fromkeys((x["link"], x["tokens"]) for x in found)
    ]
    rows_text = ", ".join(
        f"{rows:,.0f} ({link})"
        for link, rows in {x["link"]: x["hiding_rows"] for x in found}.items()
    )
    settings = record["settings"]
    gpu = (
        f"The next table is a prediction for GPUs with {settings['forward']:g} TFLOP/s forward and "
        f"{settings['backward']:g} backward, {settings['heads']} query heads and "
        f"{settings['key_heads']} key heads, head_dim {settings['head_dim']}, 16-bit operands and a causal "
        "mask. It shows the time of both passes, and the share of it in which a GPU waits. A forward "
        f"step hides its transfer if each GPU has at least {rows_text} tokens."
    )
    return "\n\n".join([markdown(head, lines), fit, gpu, markdown(head_of_gpus, shares)])


def _share(x: Record) -> str:
    time = f"{cell(x['ms'])} ms" if x["ms"] < 1e4 else f"{cell(x['ms'] * 1e-3)} s"
    return f"{time}, {x['exposed']:.0%}"


def draw(figure: Any, results: list[Result]) -> None:
    """Draw measured times beside the model, and the part of the time in which GPUs wait."""
    drawn = panels(figure, results, rows=2)
    for (measured, gpus), result in drawn:
        tokens, ranks = (sorted({row[key] for row in result.rows}) for key in ("tokens", "ranks"))
        for length in tokens:
            rows = [row for row in result.rows if row["tokens"] == length]
            colour = colour_of(length, tokens)
            took = [sum(row[way]["median"] for way in DIRECTIONS) for row in rows]
            model = [sum(row["model"].values()) for row in rows]
            measured.plot(ranks, took, "o", color=colour, label=f"{length:,} tokens")
            measured.plot(ranks, model, "-", color=colour, alpha=0.5)
        measured.plot([], [], "-", color="#666", label="model")
        measured.set(xscale="log", yscale="log", xlabel="ranks", ylabel="ms, forward + backward")
        measured.set_xticks(ranks, [str(n) for n in ranks], minor=False)
        measured.minorticks_off()
        found = result.record["predicted"]
        for link, style in zip(dict.fromkeys(x["link"] for x in found), ("-", "--"), strict=False):
            for n in (counts := sorted({x["gpus"] for x in found})):
                own = [x for x in found if x["gpus"] == n and x["link"] == link]
                gpus.plot(
                    [x["tokens"] for x in own], [x["exposed"] for x in own], style,
                    color=colour_of(n, counts), label=f"{n:,} GPUs, {link}",
                )  # fmt: skip
        gpus.set(
            xscale="log", xlabel="tokens", ylabel="part of the time that a GPU waits", ylim=(0, 1)
        )
        headline(measured, f"one head, head_dim {result.record['head_dim']}, causal, float32")
        sizes = "{heads} heads, {key_heads} of keys, head_dim {head_dim}".format(
            **result.record["settings"]
        )
        headline(gpus, f"predicted for GPUs: {sizes}, causal, 16 bits")
    legend(figure, [axes for pair, _ in drawn for axes in pair], columns=3)


CAPTION = (
    "Above: time of ring attention, forward and backward, on ranks of one thread each; points are "
    "measured, lines are the fitted model. Below: the share of the time in which a GPU waits for keys "
    "and values, as predicted by the model."
)
EXPERIMENT = Experiment(
    "scaling", __doc__, measure, table, draw, devices=("cpu",), options=options, caption=CAPTION
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*json.loads(sys.argv[2]))
        sys.exit()
    raise SystemExit(run(EXPERIMENT))
