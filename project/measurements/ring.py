"""Ring attention and data parallel training over the GPUs of one host, beside one GPU and PyTorch.

They need ``pip install -e ".[mpi,nccl]"``.  One GPU and all are measured in turn, by events on the
stream of each GPU; the slowest rank counts.  Efficiency is the time of one GPU over that of all and,
where they share the work, their number.  ``ring``: causal attention in bfloat16, its rows in zigzag
parts, whose gradients need not be reproducible; PyTorch's time is that of its faster backend and
exchange in context parallel; predicted times are those of the model of ``bench/ring_time.py``, from the
times of one GPU and of messages; the last row is a step of a small GPT whose context all GPUs share.
``data_parallel``: steps of GPT-2 small in bfloat16 with a batch on each GPU; ours are captured,
PyTorch's DDP is eager with fused attention and AdamW.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from bench.kit import Case, Measurement, Panel, Record, Run, curves, ready
from bench.measuring import slowest
from bench.ring_time import Machine, Work, ring_time
from bench.torch_attention import fused
from bench.training_contestants import OURS, THEIRS, OurGPT, Training, size_of
from training.gpt_loop import train_step

import minitorch
from kernels.traffic.formulas import attention_backward_flops, attention_flops
from minitorch.distributed import (
    GradientAverage,
    MPIGroup,
    positions,
    ring_attention,
    spread_sequence,
    world,
)
from minitorch.distributed.exchange import Shift
from minitorch.distributed.nccl_group import NcclGroup

PASSES = {"forward": "forward", "both": "forward and backward"}
PEERS = [(b, r) for b in ("FLASH_ATTENTION", "CUDNN_ATTENTION") for r in ("allgather", "alltoall")]
#: Numbers of a message that takes the latency only, and of one that takes the bandwidth.
SHORT, LONG = 64, 1 << 26
#: Layers and width of the GPT, and its vocabulary, of bytes.
LAYERS, WIDTH, VOCABULARY = 4, 768, 256


PRESET, PRECISION = "gpt2-small", "bfloat16"


# -- processes of mpiexec that have one GPU each -----------------------------------------------------------


class OwnBatches:
    """The ranks of ``train_step`` for batches that are already the part of this rank."""

    columns = staticmethod(np.ascontiguousarray)

    def __init__(self, average: GradientAverage):
        self.during_backward = average.during_backward

    def rows(self, array: Any, parts: int) -> Any:
        """Return all rows."""
        return array


def start_torch(group: MPIGroup) -> Any:
    """Return PyTorch with its process group over NCCL."""
    import torch
    import torch.distributed

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    os.environ |= {"RANK": str(group.rank), "WORLD_SIZE": str(group.size), "LOCAL_RANK": "0"}
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
    return torch


def in_turn(
    group: MPIGroup, steps: dict[str, Callable[[], Any]], rounds: int, repeats: int = 1
) -> dict[str, float]:
    """Return the median time of each step on the slowest rank; the first round, which compiles, aside."""
    times = [
        {name: slowest(group, step, "cuda", repeats) for name, step in steps.items()}
        for _ in range(rounds + 1)
    ]
    return {name: median(found[name] for found in times[1:]) for name in steps}


# -- ring attention ----------------------------------------------------------------------------------------


class Side:
    """Attention on some rows of the sequence: ours, or PyTorch's, whose library has the same names."""

    def __init__(self, library: Any, attend: Callable[..., Any], leaves: list[Any]):
        (*self.leaves, self.dout), self.library, self.attend = leaves, library, attend
        self.out: Any = None

    def forward(self) -> None:
        """Compute without a graph."""
        with self.library.no_grad():
            self.out = self.attend(*self.leaves)

    def both(self) -> None:
        """Compute the result and the gradients."""
        for leaf in self.leaves:
            leaf.requires_grad_(True)
            leaf.grad = None
        self.attend(*self.leaves).backward(self.dout)


def ours(arrays: Any, attend: Callable[..., Any]) -> Side:
    """Return attention of this library on arrays of the host."""
    gpu = minitorch.CudaBackend
    return Side(
        minitorch, attend, [minitorch.from_numpy(x, gpu).to(minitorch.bfloat16) for x in arrays]
    )


@contextlib.contextmanager
def context_parallel(torch: Any, ranks: int, arrays: Any, rotate: str) -> Iterator[list[Any]]:
    """Yield this rank's part of a sequence within PyTorch's context parallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as cut
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotate)
    mesh = init_device_mesh("cuda", (ranks,))
    tensors = [torch.tensor(x, device="cuda", dtype=torch.bfloat16) for x in arrays]
    with cut(mesh, buffers=tensors, buffer_seq_dims=[2] * 4, no_restore_buffers=set(tensors)):
        yield tensors


def fastest_peer(torch: Any, ranks: int, arrays: Any, timed: Any) -> tuple[Record, Record]:
    """Return the times of the fastest of PyTorch's ways, and why others did not run."""

    def took(backend: str, rotate: str) -> Record:
        attend = partial(fused(torch, backend), is_causal=True)
        with context_parallel(torch, ranks, arrays, rotate) as tensors:
            side = Side(torch, attend, tensors)
            return timed({way: getattr(side, way) for way in PASSES})

    # A peer that cannot run is a row without figures.
    found, failed = ready({peer: partial(took, *peer) for peer in PEERS}, Exception)
    best: Record = {}
    for way in PASSES if found else ():
        backend, rotate = min(found, key=lambda peer: found[peer][way])
        best[way] = {"seconds": found[backend, rotate][way], "backend": backend, "rotate": rotate}
    return best, {", ".join(peer): text for peer, text in failed.items()}


def link_of(group: Any, timed: Any) -> tuple[float, float]:
    """Return latency, seconds, and bandwidth, bytes/s, of messages round the ring."""
    sizes = {"short": SHORT, "long": LONG}
    blocks = {name: minitorch.zeros((n,), minitorch.CudaBackend) for name, n in sizes.items()}
    took = timed({n: lambda x=x: Shift(group, [x]).wait() for n, x in blocks.items()})
    size = (LONG - SHORT) * blocks["long"].dtype.itemsize
    return took["short"], size / (took["long"] - took["short"])


def predicted(row: Record, ranks: int, link: tuple[float, float]) -> dict[str, float]:
    """Return the seconds of all GPUs by the model, given those of one."""
    work = Work(row["length"], row["heads"], row["heads"], row["head_dim"])
    forward = row["one_forward_seconds"]
    backward = row["one_both_seconds"] - forward
    machine = Machine(work.flops("forward") / forward, work.flops("backward") / backward, *link)
    ways = {way: ring_time(work, ranks, machine, way).total for way in ("forward", "backward")}
    return {"forward": ways["forward"], "both": sum(ways.values())}


def cases(run: Run) -> Iterator[Case]:
    everyone = world()
    group = NcclGroup(everyone)
    run.note(gpus=group.size)
    torch = None if run.no_torch else start_torch(everyone)
    timed = partial(in_turn, everyone, rounds=run.rounds)
    link = link_of(group, timed)
    for length in run.lengths:
        yield (
            {"length": length},
            partial(measured, run, everyone, group, length, torch, link, timed),
        )
    if run.train:
        yield {"train": run.train}, partial(training_step, everyone, group, run.train)


def measured(
    run: Run, everyone: Any, group: Any, length: int, torch: Any, link: Any, timed: Any
) -> Record:
    shape, random = (1, run.heads, length, run.head_dim), np.random.default_rng(length)
    arrays = [random.standard_normal(shape, np.float32) for _ in range(4)]
    options: Record = {"is_causal": True, "deterministic": False}
    mine = positions(length, group)
    whole = ours(arrays, lambda q, k, v: q.flash_attention(k, v, **options))
    parts = [np.ascontiguousarray(x[..., mine, :]) for x in arrays]
    ring = ours(parts, lambda q, k, v: ring_attention(q, k, v, group, **options))
    sides = {"one": whole, "all": ring}
    steps = {f"{name}_{way}": getattr(x, way) for name, x in sides.items() for way in PASSES}
    row: Record = {"length": length, "heads": run.heads, "head_dim": run.head_dim}
    row |= {f"{name}_seconds": took for name, took in timed(steps).items()}
    for way, took in predicted(row, group.size, link).items():
        one, every = row[f"one_{way}_seconds"], row[f"all_{way}_seconds"]
        row |= {f"efficiency_{way}": one / every / group.size, f"predicted_{way}_seconds": took}
    del whole, ring, sides, steps
    if torch is not None:
        best, failed = fastest_peer(torch, group.size, arrays, timed)
        row |= {"context_parallel": best, "context_parallel_failed": failed}
        for way, found in best.items():
            row[f"beside_torch_{way}"] = found["seconds"] / row[f"all_{way}_seconds"]
    return row | {"latency": link[0], "bandwidth": link[1]}


def training_step(everyone: Any, group: Any, tokens: int) -> Record:
    """Take a step of a GPT whose sequence is spread over the GPUs, after one on a short sequence."""
    minitorch.manual_seed(0)
    model = minitorch.DecoderLM(
        VOCABULARY, WIDTH, WIDTH // 64, tokens, p_dropout=0.0, n_layer=LAYERS, recompute=True,
        backend=minitorch.CudaBackend, precision="bfloat16",
    )  # fmt: skip
    spread_sequence(model, group)
    ranks: Any = OwnBatches(GradientAverage(model.parameters(), group))
    optimizer = minitorch.AdamW(model.parameters(), lr=1e-4)
    random, losses = np.random.default_rng(0), []

    def step(count: int) -> None:
        ids = random.integers(0, VOCABULARY, (1, count + 1))
        mine = positions(count, group)
        parts = ids[:, :-1][:, mine], ids[:, 1:][:, mine]
        losses.append(train_step(model, optimizer, *parts, ranks=ranks))

    slowest(everyone, lambda: step(4096 * group.size), "cuda")  # compiles
    took = slowest(everyone, lambda: step(tokens), "cuda")
    return {"layers": LAYERS, "width": WIDTH, "step_seconds": took, "loss": losses[-1].item()}


def draw(record: Record) -> list[Panel]:
    """Show the TFLOP/s of each GPU by length, a panel for each pass."""
    rows, found, gpus = [r for r in record["rows"] if "length" in r], [], record["gpus"]
    call = f"causal, bfloat16, {rows[0]['heads']} heads, head_dim {rows[0]['head_dim']}"
    for way, name in PASSES.items():

        def rates(row: Record, way: str = way) -> Iterator[tuple[str, int, float]]:
            size = row["heads"], row["length"], row["length"], row["head_dim"]
            flops = attention_flops(*size, causal=True)
            flops += attention_backward_flops(*size, causal=True) if way == "both" else 0.0
            yield "one GPU", row["length"], flops / row[f"one_{way}_seconds"] / 1e12
            yield "ring attention", row["length"], flops / row[f"all_{way}_seconds"] / gpus / 1e12
            if peer := row.get("context_parallel"):
                rate = flops / peer[way]["seconds"] / gpus / 1e12
                yield "PyTorch's context parallel", row["length"], rate

        lines = curves(point for row in rows for point in rates(row))
        title, x = f"{gpus} GPUs, {call}\n{name}", "tokens of the whole sequence"
        found.append(Panel(title, x, "TFLOP/s of each GPU", lines, log="x"))
    return found


# -- data parallel training --------------------------------------------------------------------------------


def data_parallel(run: Run) -> Iterator[Case]:
    yield {"preset": PRESET, "precision": PRECISION}, partial(data_parallel_row, run)


def data_parallel_row(run: Run) -> Record:
    everyone, size = world(), size_of(PRESET, quick=run.is_quick)
    group = NcclGroup(everyone)
    run.note(gpus=group.size)
    one = Training(OURS, size, "cuda", PRECISION, capture=minitorch.graph_step)
    every = Training(OURS, size, "cuda", PRECISION)
    model: Any = every.model
    ranks = OwnBatches(GradientAverage(model.parameters(), group))
    every.gpt = OurGPT(model, size.lr, minitorch.graph_step, ranks=ranks)
    steps = {"one": one.timed_step(), "all": every.timed_step()}
    if not run.no_torch:
        start_torch(everyone)
        one, every = (Training(THEIRS, size, "cuda", PRECISION) for _ in range(2))
        every.gpt.share_with_all_ranks()
        steps |= {"torch_one": one.timed_step(), "torch_all": every.timed_step()}
    took = in_turn(everyone, steps, run.rounds, run.steps)
    row: Record = {
        "context": size.context, "batch_per_gpu": size.batch,
        **{f"{name}_seconds": seconds for name, seconds in took.items()},
        "tokens_per_second": group.size * size.tokens / took["all"],
        "efficiency": took["one"] / took["all"],
    }  # fmt: skip
    if "torch_all" in took:
        row["torch_efficiency"] = took["torch_one"] / took["torch_all"]
        row["beside_torch"] = took["torch_all"] / took["all"]
    return row


MEASUREMENTS = (
    Measurement(
        "ring", "How fast is ring attention over the GPUs of a host, beside PyTorch's context parallel?",
        cases,
        {"cuda": {"normal": {"ranks": 2, "lengths": (32768, 65536, 131072), "heads": 16, "head_dim": 128,
                             "rounds": 5, "train": 2**20, "no_torch": False},
                  "quick": {"lengths": (2048,), "rounds": 1, "train": 8192}}},
        draw=draw, minutes={"cuda": 5}, with_ranks=True,
    ),
    Measurement(
        "data_parallel", "How well does data parallel training scale over GPUs, beside PyTorch's DDP?",
        data_parallel,
        {"cuda": {"normal": {"ranks": 2, "rounds": 9, "steps": 5, "no_torch": False},
                  "quick": {"rounds": 1, "steps": 1}}},
        minutes={"cuda": 3}, with_ranks=True,
    ),
)  # fmt: skip
