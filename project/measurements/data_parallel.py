"""Data parallel training of GPT-2 small over the GPUs of one host, beside one GPU and PyTorch's DDP.

It needs ``pip install -e ".[mpi,nccl]"``.  Steps in bfloat16, a batch on each GPU: forward, backward,
averaged gradients, AdamW.  Efficiency is the tokens/s of all GPUs over those of one and their number.  Our
steps are captured, with messages between the graphs.  PyTorch is eager, with its fused attention and AdamW.
The four are measured in turn, by events on the stream of each GPU; the slowest rank counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.gpu_ranks import OwnBatches, in_turn, start_torch
from bench.harness import Case, Measurement, Run
from bench.records import Record
from bench.training_contestants import OURS, THEIRS, OurGPT, Training, size_of

import minitorch
from minitorch.distributed import GradientAverage, world
from minitorch.distributed.nccl_group import NcclGroup

PRESET, PRECISION = "gpt2-small", "bfloat16"


def cases(run: Run) -> Iterator[Case]:
    yield {"preset": PRESET, "precision": PRECISION}, partial(measured, run)


def measured(run: Run) -> Record:
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


MEASUREMENT = Measurement(
    "data_parallel", "How well does data parallel training scale over GPUs, beside PyTorch's DDP?", cases,
    {"cuda": {"normal": {"ranks": 2, "rounds": 9, "steps": 5, "no_torch": False},
              "quick": {"rounds": 1, "steps": 1}}},
    minutes={"cuda": 3}, with_ranks=True,
)  # fmt: skip
