"""Ring attention over the GPUs of one host, beside one GPU and PyTorch's context parallel.

    mpiexec -n 2 python project/bench_ring.py                  two GPUs, one process each
    mpiexec -n 2 python project/bench_ring.py --publish        also write docs/results/DEVICE/ring.json
    mpiexec -n 2 python project/bench_ring.py --plot FILE      also draw the TFLOP/s of each GPU by length

It needs ``pip install -e ".[mpi,nccl]"``.

Causal attention in bfloat16, its rows in zigzag parts.  Efficiency is the time of one GPU with the whole
sequence over the time of all of them and their number.  PyTorch's context parallel shares the sequence in
the same way; its time is that of its faster backend and exchange.  One GPU and all are measured in turn, by
events on the stream of each GPU; the slowest rank counts.  Gradients need not be reproducible.  Predicted
times are those of the model of ``project/bench/ring_time.py``, from the times of one GPU and of messages.
``--train`` takes one step of a small GPT whose context is shared by all GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

# isort: split
from bench.gpu_ranks import MPI, WORLD, OwnBatches, in_turn, show, slowest, start_torch, write

# isort: split
from bench.measuring import name_of
from bench.ring_tables import draw
from bench.ring_time import Machine, Work, ring_time
from common.command_line import COUNT, OneLineParser
from training.gpt_loop import train_step

import minitorch
from minitorch.distributed import (
    GradientAverage,
    positions,
    ring_attention,
    spread_sequence,
    world,
)
from minitorch.distributed.exchange import Shift
from minitorch.distributed.nccl_group import NcclGroup

BFLOAT16 = minitorch.bfloat16
PEERS = [(b, r) for b in ("FLASH_ATTENTION", "CUDNN_ATTENTION") for r in ("allgather", "alltoall")]
#: Numbers of a message that takes the latency only, and of one that takes the bandwidth.
SHORT, LONG = 64, 1 << 26
#: Layers and width of the GPT of ``--train``, and its vocabulary, of bytes.
LAYERS, WIDTH, VOCABULARY = 4, 768, 256


def parse_args() -> argparse.Namespace:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--lengths",
        nargs="*",
        type=COUNT,
        default=[32768, 65536, 131072],
        help="of the whole sequence",
    )
    parser.option("--heads", COUNT, 16, "of queries, keys and values")
    parser.option("--head-dim", COUNT, 128, "of all of them")
    parser.option("--rounds", COUNT, 5, "of which the median counts")
    add(
        "--train",
        type=COUNT,
        metavar="N",
        help="also take a training step with N tokens of context",
    )
    add("--no-torch", action="store_true", help="leave PyTorch out")
    add("--json", metavar="FILE", help="the record")
    add("--publish", action="store_true", help="write the record into docs/results")
    add("--plot", type=Path, metavar="FILE", help="a picture of the TFLOP/s by length")
    return parser.parse_args()


class Ours:
    """Attention of this library, on some rows of the sequence."""

    def __init__(self, arrays: Any, attend: Callable[..., Any]):
        self._attend = attend
        self.leaves = [
            minitorch.from_numpy(x, backend=minitorch.CudaBackend).to(BFLOAT16) for x in arrays
        ]
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


class Theirs:
    """PyTorch's attention inside its context parallel, which has cut the sequence."""

    def __init__(self, torch: Any, tensors: list[Any], backend: str):
        self._torch, self._backend = torch, getattr(torch.nn.attention.SDPBackend, backend)
        *self.leaves, self.dout = tensors

    def _attend(self) -> Any:
        with self._torch.nn.attention.sdpa_kernel(self._backend):
            return self._torch.nn.functional.scaled_dot_product_attention(
                *self.leaves, is_causal=True
            )

    def forward(self) -> None:
        """Compute without a graph."""
        with self._torch.no_grad():
            self._attend()

    def both(self) -> None:
        """Compute the result and the gradients."""
        for leaf in self.leaves:
            leaf.requires_grad_(True)
            leaf.grad = None
        self._attend().backward(self.dout)


@contextlib.contextmanager
def context_parallel(torch: Any, arrays: Any, backend: str, rotate: str) -> Iterator[Theirs]:
    """Yield PyTorch's attention on this rank's part of a sequence."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as cut
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotate)
    mesh = init_device_mesh("cuda", (WORLD.size,))
    tensors = [torch.tensor(x, device="cuda", dtype=torch.bfloat16) for x in arrays]
    with cut(mesh, buffers=tensors, buffer_seq_dims=[2] * 4, no_restore_buffers=set(tensors)):
        yield Theirs(torch, tensors, backend)


def fastest_peer(torch: Any, arrays: Any, rounds: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the times of the fastest of PyTorch's ways, and why others did not run."""
    best: dict[str, Any] = {}
    failed = {}
    for backend, rotate in PEERS:
        try:
            with context_parallel(torch, arrays, backend, rotate) as theirs:
                found = in_turn({"forward": theirs.forward, "both": theirs.both}, rounds)
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
    return WORLD.allreduce(found, op=MPI.MAX)


def link_of(group: NcclGroup, rounds: int) -> tuple[float, float]:
    """Return latency, seconds, and bandwidth, bytes/s, of messages round the ring."""
    blocks = {
        name: minitorch.zeros((count,), minitorch.CudaBackend)
        for name, count in (("short", SHORT), ("long", LONG))
    }

    def step(block: minitorch.Tensor) -> Callable[[], Any]:
        return lambda: Shift(group, [block]).wait()

    took = in_turn({name: step(block) for name, block in blocks.items()}, rounds)
    size = (LONG - SHORT) * blocks["long"].dtype.itemsize
    return took["short"], size / (took["long"] - took["short"])


def predicted(row: dict[str, Any], ranks: int, link: tuple[float, float]) -> dict[str, float]:
    """Return the seconds that the model says of all GPUs, given those of one."""
    work = Work(row["length"], row["heads"], row["heads"], row["head_dim"])
    forward = row["one_forward_seconds"]
    backward = row["one_both_seconds"] - forward
    machine = Machine(work.flops("forward") / forward, work.flops("backward") / backward, *link)
    ways = {way: ring_time(work, ranks, machine, way).total for way in ("forward", "backward")}
    return {"forward": ways["forward"], "both": sum(ways.values())}


def measure(
    group: NcclGroup, length: int, args: argparse.Namespace, torch: Any, link: tuple[float, float]
) -> dict[str, Any]:
    """Measure one length."""
    shape = (1, args.heads, length, args.head_dim)
    random = np.random.default_rng(length)
    arrays = [random.standard_normal(shape, np.float32) for _ in range(4)]
    rows = positions(length, group)
    options: dict[str, Any] = {"is_causal": True, "deterministic": False}
    whole = Ours(arrays, lambda q, k, v: q.flash_attention(k, v, **options))
    ring = Ours(
        [np.ascontiguousarray(x[..., rows, :]) for x in arrays],
        lambda q, k, v: ring_attention(q, k, v, group, **options),
    )
    row: dict[str, Any] = {"length": length, "heads": args.heads, "head_dim": args.head_dim}
    steps = {
        f"{name}_{part}": getattr(each, part)
        for name, each in (("one", whole), ("all", ring))
        for part in ("forward", "both")
    }
    row |= {f"{name}_seconds": took for name, took in in_turn(steps, args.rounds).items()}
    for part, seconds in predicted(row, group.size, link).items():
        row[f"efficiency_{part}"] = (
            row[f"one_{part}_seconds"] / row[f"all_{part}_seconds"] / group.size
        )
        row[f"predicted_{part}_seconds"] = seconds
    row["difference"] = difference(whole, ring, rows)
    del whole, ring
    if torch is not None:
        row["context_parallel"], row["context_parallel_failed"] = fastest_peer(
            torch, arrays, args.rounds
        )
        for part, found in row["context_parallel"].items():
            row[f"beside_torch_{part}"] = found["seconds"] / row[f"all_{part}_seconds"]
    return row


def training_step(group: NcclGroup, tokens: int) -> dict[str, Any]:
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

    slowest(lambda: step(4096 * group.size))  # compiles
    took = slowest(lambda: step(tokens))
    return {
        "train": tokens, "layers": LAYERS, "width": WIDTH, "step_seconds": took,
        "loss": losses[-1].item(),
    }  # fmt: skip


def main() -> None:
    args = parse_args()
    group = NcclGroup(world())
    torch = None if args.no_torch else start_torch()
    rows = []
    link = link_of(group, args.rounds)
    for length in args.lengths:
        rows.append(measure(group, length, args, torch, link))
        rows[-1] |= {"latency": link[0], "bandwidth": link[1]}
        show(rows[-1])
        write("bench_ring", args, rows)
    if args.train:
        rows.append(training_step(group, args.train))
        show(rows[-1])
        write("bench_ring", args, rows)
    if args.plot and WORLD.rank == 0:
        draw({"rows": rows, "gpus": WORLD.size, "device": name_of("cuda")}, args.plot)


if __name__ == "__main__":
    main()
