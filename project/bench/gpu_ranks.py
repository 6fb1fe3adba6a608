"""Processes of ``mpiexec`` that have one GPU of the host each."""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from bench.measuring import seconds
from minitorch.distributed import GradientAverage, MPIGroup


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


def most(group: MPIGroup, number: float) -> float:
    """Return the largest of the numbers of all ranks."""
    found = np.array([number])
    group.all_reduce(found, "max").wait()
    return float(found[0])


def slowest(group: MPIGroup, step: Callable[[], Any], repeats: int = 1) -> float:
    """Return the time of a step on the slowest rank; all of them take it."""
    group.barrier()
    return most(group, seconds(step, "cuda", repeats))


def in_turn(
    group: MPIGroup, steps: dict[str, Callable[[], Any]], rounds: int, repeats: int = 1
) -> dict[str, float]:
    """Return the median time of each step on the slowest rank; the first round, which compiles, aside."""
    times = [
        {name: slowest(group, step, repeats) for name, step in steps.items()}
        for _ in range(rounds + 1)
    ]
    return {name: median(found[name] for found in times[1:]) for name in steps}
