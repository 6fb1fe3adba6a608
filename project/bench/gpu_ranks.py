"""Processes of ``mpiexec`` that have one GPU of the host each: import this before CUDA starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
#: Each process sees its GPU only, which CUDA must know before it starts.
LOCAL = WORLD.Split_type(MPI.COMM_TYPE_SHARED).rank
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get(
    "CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7"
).split(",")[LOCAL]

from bench.measuring import (  # noqa: E402
    command_line,
    name_of,
    published_file,
    seconds,
    write_record,
)
from minitorch.distributed import GradientAverage  # noqa: E402


class OwnBatches:
    """What ``train_step`` asks of ranks, for batches that are the part of this rank already.

    Args:
        average: Of the gradients.
    """

    def __init__(self, average: GradientAverage):
        self.during_backward = average.during_backward

    def rows(self, array: Any, parts: int) -> Any:
        """Return all rows."""
        return array

    columns = staticmethod(np.ascontiguousarray)


def start_torch() -> Any:
    """Return PyTorch with its process group over NCCL."""
    import torch
    import torch.distributed

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    os.environ |= {"RANK": str(WORLD.rank), "WORLD_SIZE": str(WORLD.size), "LOCAL_RANK": "0"}
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
    return torch


def slowest(step: Callable[[], Any], repeats: int = 1) -> float:
    """Return the time of a step on the slowest rank; all of them take it."""
    WORLD.Barrier()
    return WORLD.allreduce(seconds(step, "cuda", repeats), op=MPI.MAX)


def in_turn(steps: dict[str, Callable[[], Any]], rounds: int, repeats: int = 1) -> dict[str, float]:
    """Return the median time of each step on the slowest rank; the first round, which compiles, aside."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            took = slowest(step, repeats)
            if number:
                times[name].append(took)
    return {name: median(found) for name, found in times.items()}


def show(row: dict[str, Any]) -> None:
    """Print a row on rank 0."""
    if WORLD.rank == 0:
        print({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}, flush=True)


def write(script: str, args: Any, rows: list[dict[str, Any]]) -> None:
    """Write a record on rank 0, to the file of ``--json`` or, with ``--publish``, among the results.

    Args:
        script: Its name in ``project``, without the suffix; the record's has no ``bench_``.
        args: Of the command line.
        rows: Of the record.
    """
    record = script.removeprefix("bench_")
    place = published_file("cuda", record) if args.publish else args.json
    if WORLD.rank == 0 and place:
        command = f"mpiexec -n {WORLD.size} {command_line(f'project/{script}.py', sys.argv[1:])}"
        write_record(place, command, name_of("cuda"), gpus=WORLD.size, rows=rows)
