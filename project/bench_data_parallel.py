"""Data parallel training of GPT-2 small over the GPUs of one host, beside one GPU and PyTorch's DDP.

    mpiexec -n 2 python project/bench_data_parallel.py                  two GPUs, one process each
    mpiexec -n 2 python project/bench_data_parallel.py --publish        also write docs/results

It needs ``pip install -e ".[mpi,nccl]"``.

Steps in bfloat16, a batch on each GPU: forward, backward, averaged gradients, AdamW.  Efficiency is the
tokens/s of all GPUs over those of one and their number.  Our steps are captured, with messages between the
graphs.  PyTorch is eager, with its fused attention and AdamW.  The four are measured in turn, by events on
the stream of each GPU; the slowest rank counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

# isort: split
from bench.gpu_ranks import WORLD, OwnBatches, in_turn, show, start_torch, write

# isort: split
from bench.training_contestants import OURS, THEIRS, OurGPT, Run, size_of
from common.command_line import COUNT, OneLineParser

import minitorch
from minitorch.distributed import GradientAverage, world
from minitorch.distributed.nccl_group import NcclGroup

PRESET, PRECISION = "gpt2-small", "bfloat16"


def parse_args() -> argparse.Namespace:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    parser.option("--rounds", COUNT, 9, "of which the median counts")
    parser.option("--steps", COUNT, 5, "of a round")
    add("--quick", action="store_true", help="tiny sizes, which say nothing of GPT-2")
    add("--no-torch", action="store_true", help="leave PyTorch out")
    add("--json", metavar="FILE", help="the record")
    add("--publish", action="store_true", help="write the record into docs/results")
    return parser.parse_args()


def ours(size: Any, group: NcclGroup) -> dict[str, Callable[[], Any]]:
    """Return our steps on one GPU and on all of them."""
    one = Run(OURS, size, "cuda", PRECISION, capture=minitorch.graph_step)
    everyone = Run(OURS, size, "cuda", PRECISION)
    model: Any = everyone.model
    ranks = OwnBatches(GradientAverage(model.parameters(), group))
    everyone.gpt = OurGPT(model, size.lr, minitorch.graph_step, ranks=ranks)
    return {"one": one.timed_step(), "all": everyone.timed_step()}


def theirs(size: Any, torch: Any) -> dict[str, Callable[[], Any]]:
    """Return PyTorch's steps on one GPU and on all of them."""
    one, everyone = (Run(THEIRS, size, "cuda", PRECISION) for _ in range(2))
    everyone.gpt.share_with_all_ranks()
    return {"torch_one": one.timed_step(), "torch_all": everyone.timed_step()}


def main() -> None:
    args = parse_args()
    group, size = NcclGroup(world()), size_of(PRESET, quick=args.quick)
    steps = ours(size, group)
    if not args.no_torch:
        steps |= theirs(size, start_torch())
    took = in_turn(steps, args.rounds, args.steps)
    row: dict[str, Any] = {
        "preset": PRESET, "precision": PRECISION, "context": size.context, "batch_per_gpu": size.batch,
        **{f"{name}_seconds": seconds for name, seconds in took.items()},
        "tokens_per_second": WORLD.size * size.tokens / took["all"],
        "efficiency": took["one"] / took["all"],
    }  # fmt: skip
    if "torch_all" in took:
        row["torch_efficiency"] = took["torch_one"] / took["torch_all"]
        row["beside_torch"] = took["torch_all"] / took["all"]
    show(row)
    write("bench_data_parallel", args, [row])


if __name__ == "__main__":
    main()
