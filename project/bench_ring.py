"""Ring attention over the GPUs of one host, beside one GPU and PyTorch's context parallel.

    mpiexec -n 2 python project/bench_ring.py                  two GPUs, one process each
    mpiexec -n 2 python project/bench_ring.py --publish        also write docs/results/DEVICE/ring.json

It needs ``pip install -e ".[mpi,nccl]"``.

Causal attention in bfloat16, its rows in zigzag parts.  Efficiency is the time of one GPU with the whole
sequence over the time of all of them and their number.  PyTorch's context parallel shares the sequence in
the same way; its time is that of its faster backend and exchange.  One GPU and all are measured in turn, by
events on the stream of each GPU; the slowest rank counts.  Gradients need not be reproducible.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
#: Each process sees one GPU, which CUDA must know before it starts.
LOCAL = WORLD.Split_type(MPI.COMM_TYPE_SHARED).rank
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get(
    "CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7"
).split(",")[LOCAL]

from bench.measuring import command_line, name_of, seconds, slug_of, write_record  # noqa: E402

import minitorch  # noqa: E402
from minitorch.distributed import positions, ring_attention, world  # noqa: E402
from minitorch.distributed.nccl_group import NcclGroup  # noqa: E402

Step = Callable[[], Any]
BFLOAT16 = minitorch.bfloat16
PEERS = [(b, r) for b in ("FLASH_ATTENTION", "CUDNN_ATTENTION") for r in ("allgather", "alltoall")]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lengths", nargs="+", type=int, default=[65536, 131072], help="of the whole sequence")
    add("--heads", type=int, default=16)
    add("--head-dim", type=int, default=128)
    add("--rounds", type=int, default=5)
    add("--no-torch", action="store_true", help="leave PyTorch out")
    add("--json", metavar="FILE", help="the record")
    add("--publish", action="store_true", help="write the record into docs/results")
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


def slowest(step: Step, device: str = "cuda") -> float:
    """Return the time of a step on the slowest rank; all of them take it."""
    WORLD.Barrier()
    return WORLD.allreduce(seconds(step, device), op=MPI.MAX)


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


def start_torch() -> Any:
    """Return PyTorch with its process group over NCCL."""
    import torch
    import torch.distributed

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    os.environ |= {"RANK": str(WORLD.rank), "WORLD_SIZE": str(WORLD.size), "LOCAL_RANK": "0"}
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
    return torch


def fastest_peer(torch: Any, arrays: Any, rounds: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the times of the fastest of PyTorch's ways, and why others did not run."""
    best: dict[str, Any] = {}
    failed = {}
    for backend, rotate in PEERS:
        try:
            with context_parallel(torch, arrays, backend, rotate) as theirs:
                found = {}
                for name, step in (("forward", theirs.forward), ("both", theirs.both)):
                    step()
                    found[name] = median(slowest(step) for _ in range(rounds))
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


def measure(group: NcclGroup, length: int, args: argparse.Namespace, torch: Any) -> dict[str, Any]:
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
    times: dict[str, list[float]] = {}
    for number in range(args.rounds + 1):  # the first compiles
        for name, each in (("one", whole), ("all", ring)):
            for part in ("forward", "both"):
                took = slowest(getattr(each, part))
                if number:
                    times.setdefault(f"{name}_{part}", []).append(took)
    row |= {f"{name}_seconds": median(found) for name, found in times.items()}
    for part in ("forward", "both"):
        row[f"efficiency_{part}"] = (
            row[f"one_{part}_seconds"] / row[f"all_{part}_seconds"] / group.size
        )
    row["difference"] = difference(whole, ring, rows)
    del whole, ring
    if torch is not None:
        row["context_parallel"], row["context_parallel_failed"] = fastest_peer(
            torch, arrays, args.rounds
        )
        for part, found in row["context_parallel"].items():
            row[f"beside_torch_{part}"] = found["seconds"] / row[f"all_{part}_seconds"]
    return row


def main() -> None:
    args = parse_args()
    group = NcclGroup(world())
    torch = None if args.no_torch else start_torch()
    rows = []
    name = name_of("cuda")
    place = args.json
    if args.publish:
        place = f"docs/results/{slug_of(name)}/ring.json"
    for length in args.lengths:
        rows.append(measure(group, length, args, torch))
        if WORLD.rank == 0:
            print(
                {k: round(v, 5) if isinstance(v, float) else v for k, v in rows[-1].items()},
                flush=True,
            )
            if place:
                command = command_line("project/bench_ring.py", sys.argv[1:])
                command = f"mpiexec -n {WORLD.size} {command}"
                write_record(place, command, name, gpus=WORLD.size, rows=rows)


if __name__ == "__main__":
    main()
