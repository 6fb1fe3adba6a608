"""Ring attention over the GPUs of one host, beside one GPU and PyTorch's context parallel.

It needs ``pip install -e ".[mpi,nccl]"``.  Causal attention in bfloat16, its rows in zigzag parts.
Efficiency is the time of one GPU with the whole sequence over the time of all of them and their number.
PyTorch's time is that of its faster backend and exchange.  One GPU and all are measured in turn, by
events on the stream of each GPU; the slowest rank counts.  Gradients need not be reproducible.
Predicted times are those of the model of ``bench/ring_time.py``, from the times of one GPU and of
messages.  The last row is a step of a small GPT whose context all GPUs share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from bench.gpu_ranks import OwnBatches, in_turn, most, slowest, start_torch
from bench.harness import Case, Measurement, Run
from bench.plots import Panel
from bench.records import Record
from bench.ring_time import Machine, Work, ring_time
from training.gpt_loop import train_step

import minitorch
from kernels.traffic.formulas import attention_backward_flops, attention_flops
from minitorch.distributed import GradientAverage, positions, ring_attention, spread_sequence, world
from minitorch.distributed.exchange import Shift
from minitorch.distributed.nccl_group import NcclGroup

PASSES = {"forward": "forward", "both": "forward and backward"}
PEERS = [(b, r) for b in ("FLASH_ATTENTION", "CUDNN_ATTENTION") for r in ("allgather", "alltoall")]
#: Numbers of a message that takes the latency only, and of one that takes the bandwidth.
SHORT, LONG = 64, 1 << 26
#: Layers and width of the GPT, and its vocabulary, of bytes.
LAYERS, WIDTH, VOCABULARY = 4, 768, 256


class Ours:
    """Attention of this library on some rows of the sequence."""

    def __init__(self, arrays: Any, attend: Callable[..., Any]):
        self._attend, gpu = attend, minitorch.CudaBackend
        self.leaves = [minitorch.from_numpy(x, gpu).to(minitorch.bfloat16) for x in arrays]
        self.out: Any = None

    def forward(self) -> None:
        """Compute without a graph."""
        with minitorch.no_grad():
            self.out = self._attend(*self.leaves[:3])

    def both(self) -> None:
        """Compute the result and the gradients."""
        for leaf in self.leaves[:3]:
            leaf.requires_grad_(True)
            leaf.grad = None
        self._attend(*self.leaves[:3]).backward(self.leaves[3])


def their_steps(torch: Any, tensors: list[Any], backend: str) -> dict[str, Callable[[], None]]:
    """Return the passes of PyTorch's attention inside its context parallel, which has cut the sequence."""
    *leaves, dout = tensors

    def attend() -> Any:
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)

    def forward() -> None:
        with torch.no_grad():
            attend()

    def both() -> None:
        for leaf in leaves:
            leaf.requires_grad_(True)
            leaf.grad = None
        attend().backward(dout)

    return {"forward": forward, "both": both}


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
    best, failed = Record(), Record()
    for backend, rotate in PEERS:
        try:
            with context_parallel(torch, ranks, arrays, rotate) as tensors:
                found = timed(their_steps(torch, tensors, backend))
        except Exception as error:  # a peer that cannot run is a row without figures
            failed[f"{backend}, {rotate}"] = f"{type(error).__name__}: {error!s:.200}"
            continue
        for name, value in found.items():
            if value < best.get(name, {"seconds": np.inf})["seconds"]:
                best[name] = {"seconds": value, "backend": backend, "rotate": rotate}
    return best, failed


def difference(whole: Ours, ring: Ours, rows: Any) -> float:
    """Return the largest difference of results and gradients, over the largest value of each."""
    found = 0.0
    ours = [(w.grad, r.grad) for w, r in zip(whole.leaves[:3], ring.leaves[:3], strict=True)]
    for one, part in [(whole.out, ring.out), *ours]:
        a = one.to_numpy().astype(np.float32)[..., rows, :]
        b = part.to_numpy().astype(np.float32)
        found = max(found, float(np.abs(a - b).max() / np.abs(a).max()))
    return found


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
    whole = Ours(arrays, lambda q, k, v: q.flash_attention(k, v, **options))
    parts = [np.ascontiguousarray(x[..., mine, :]) for x in arrays]
    ring = Ours(parts, lambda q, k, v: ring_attention(q, k, v, group, **options))
    sides = {"one": whole, "all": ring}
    steps = {f"{name}_{way}": getattr(x, way) for name, x in sides.items() for way in PASSES}
    row: Record = {"length": length, "heads": run.heads, "head_dim": run.head_dim}
    row |= {f"{name}_seconds": took for name, took in timed(steps).items()}
    for way, seconds in predicted(row, group.size, link).items():
        one, every = row[f"one_{way}_seconds"], row[f"all_{way}_seconds"]
        row |= {f"efficiency_{way}": one / every / group.size, f"predicted_{way}_seconds": seconds}
    row["difference"] = most(everyone, difference(whole, ring, mine))
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

    slowest(everyone, lambda: step(4096 * group.size))  # compiles
    took = slowest(everyone, lambda: step(tokens))
    return {"layers": LAYERS, "width": WIDTH, "step_seconds": took, "loss": losses[-1].item()}


def draw(record: Record) -> list[Panel]:
    """Show the TFLOP/s of each GPU by length, a panel for each pass."""
    rows, found = [row for row in record["rows"] if "length" in row], []
    call = f"causal, bfloat16, {rows[0]['heads']} heads, head_dim {rows[0]['head_dim']}"
    for way, name in PASSES.items():
        lines: Record = {}
        for row in rows:
            size = row["heads"], row["length"], row["length"], row["head_dim"]
            flops = attention_flops(*size, causal=True)
            flops += attention_backward_flops(*size, causal=True) if way == "both" else 0.0
            seconds = {"one GPU": row[f"one_{way}_seconds"]}
            seconds["ring attention"] = row[f"all_{way}_seconds"] * record["gpus"]
            if "context_parallel" in row:
                peer = row["context_parallel"][way]["seconds"]
                seconds["PyTorch's context parallel"] = peer * record["gpus"]
            for curve, took in seconds.items():
                lines.setdefault(curve, []).append((row["length"], flops / took / 1e12))
        title = f"{record['gpus']} GPUs, {call}\n{name}"
        found.append(
            Panel(title, "tokens of the whole sequence", "TFLOP/s of each GPU", lines, log="x")
        )
    return found


MEASUREMENT = Measurement(
    "ring", "How fast is ring attention over the GPUs of a host, beside PyTorch's context parallel?", cases,
    {"cuda": {"normal": {"ranks": 2, "lengths": (32768, 65536, 131072), "heads": 16, "head_dim": 128,
                         "rounds": 5, "train": 2**20, "no_torch": False},
              "quick": {"lengths": (2048,), "rounds": 1, "train": 8192}}},
    draw=draw, minutes={"cuda": 5}, with_ranks=True,
)  # fmt: skip
