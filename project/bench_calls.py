"""The cost of a call around its kernel on a GPU, beside PyTorch: host time, and calls from an idle device.

    python project/bench_calls.py                     both tables, about two minutes
    python project/bench_calls.py --json out.json

Host time is the time that Python takes for a call: small operands, a hundred calls in a row, no wait for
the device in between.  A call from an idle device is timed by the host from the call until its result is
there.  All contestants of a row are timed in turn, and a ratio is taken within a round.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from operator import add, matmul
from statistics import geometric_mean, median
from typing import Any

from bench.measuring import command_line, name_of, ratio, write_record
from bench.torch_attention import load_torch
from tqdm import tqdm

import kernels
import minitorch
from kernels.runtime.targets import cuda, why_no_cuda

Step = Callable[[], Any]
Row = dict[str, Any]
#: Of the host's table: few heads of few rows, so that the device is done before the host is.
SMALL = (1, 2, 64, 64)
#: Calls in a row; a device queues more than these before the host has to wait.
CALLS = 100
#: Of the other table: tokens, the width of a model, and what varies.
TOKENS, WIDTH = 16384, 2048
LENGTHS, DIMS = (777, 4096, 8192), (64, 128, 256)


class Attention:
    """PyTorch's attention by one of its backends; which one is chosen before the clock starts.

    Args:
        torch: PyTorch.
        backend: A name of ``torch.nn.attention.SDPBackend``.
        tensors: q, k and v.
        is_causal: Mask later columns.
    """

    def __init__(self, torch: Any, backend: str, tensors: Any, is_causal: bool = False):
        self._attend = torch.nn.functional.scaled_dot_product_attention
        self._kernel = torch.nn.attention.sdpa_kernel
        self._backend = getattr(torch.nn.attention.SDPBackend, backend)
        self._tensors, self._is_causal = tensors, is_causal

    def chosen(self) -> Any:
        """Return the context in which PyTorch takes this backend."""
        return self._kernel(self._backend)

    def __call__(self) -> Any:
        """Attend."""
        return self._attend(*self._tensors, is_causal=self._is_causal)


def context_of(step: Step) -> Any:
    """Return the context in which a step is called."""
    return step.chosen() if isinstance(step, Attention) else nullcontext()


def in_context(step: Step) -> Any:
    """Call a step in its context; return its result."""
    with context_of(step):
        return step()


def host_time(step: Step) -> float:
    """Return the seconds that Python takes for one call."""
    with context_of(step):
        cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            step()
        spent = time.perf_counter() - start
        cuda.synchronize()
    return spent / CALLS


def idle_time(step: Step) -> float:
    """Return the seconds from a call on an idle device until its result is there."""
    with context_of(step):
        cuda.synchronize()
        start = time.perf_counter()
        step()
        cuda.synchronize()
        return time.perf_counter() - start


def in_turn(
    steps: dict[str, Step], seconds: Callable[[Step], float], rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each step in every round, every other round backwards."""
    for step in steps.values():
        seconds(step)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in [*steps][:: -1 if number % 2 else 1]:
            times[name].append(seconds(steps[name]))
    return times


def host_rows(torch: Any, rounds: int) -> list[Row]:
    """Time small calls: ours on PyTorch's tensors and on tensors of ours, and PyTorch's."""
    leaves = [torch.randn(SMALL, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    q, k, v, dout = leaves
    out, lse = kernels.flash_attention_forward(q, k, v)
    own = [minitorch.from_dlpack(x, requires_grad=True) for x in (q, k, v)]
    recorded = [x.clone().requires_grad_() for x in (q, k, v)]
    theirs = partial(Attention, torch)
    kept = in_context(theirs("CUDNN_ATTENTION", recorded))
    squares = [torch.randn(64, 64, device="cuda") for _ in range(2)]
    ours = [minitorch.from_dlpack(x) for x in squares]
    table: dict[str, dict[str, Step]] = {
        "attention forward, PyTorch's tensors": {
            "ours": partial(kernels.flash_attention_forward, q, k, v),
            "cuDNN": theirs("CUDNN_ATTENTION", (q, k, v)),
            "FLASH": theirs("FLASH_ATTENTION", (q, k, v)),
        },
        "attention backward, PyTorch's tensors": {
            "ours": partial(kernels.flash_attention_backward, dout, q, k, v, out, lse),
            "cuDNN": partial(torch.autograd.grad, kept, recorded, dout, retain_graph=True),
        },
        "q.flash_attention, recorded": {
            "ours": partial(own[0].flash_attention, *own[1:]),
            "cuDNN": theirs("CUDNN_ATTENTION", recorded),
        },
        "addition of 64 x 64": {"ours": partial(add, *ours), "PyTorch": partial(add, *squares)},
        "product of 64 x 64": {
            "ours": partial(matmul, *ours),
            "PyTorch": partial(matmul, *squares),
        },
    }
    rows = []
    for name, steps in tqdm(table.items(), desc="host"):
        times = in_turn(steps, host_time, rounds)
        rows.append({"call": name, "us": {who: 1e6 * median(t) for who, t in times.items()}})
    return rows


def idle_rows(torch: Any, rounds: int) -> list[Row]:
    """Time calls of attention from an idle device, forward and backward, beside cuDNN's."""
    rows = []
    cases = [
        (dim, length, causal) for dim in DIMS for length in LENGTHS for causal in (False, True)
    ]
    for dim, length, causal in tqdm(cases, desc="idle"):
        shape = 1, max(TOKENS // length, 1) * (WIDTH // dim), length, dim
        q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        recorded = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = kernels.flash_attention_forward(q, k, v, is_causal=causal)

        kept = in_context(Attention(torch, "CUDNN_ATTENTION", recorded, causal))
        options = {"is_causal": causal, "deterministic": False}
        passes: dict[str, dict[str, Step]] = {
            "forward": {
                "ours": partial(kernels.flash_attention_forward, q, k, v, is_causal=causal),
                "theirs": Attention(torch, "CUDNN_ATTENTION", (q, k, v), causal),
            },
            "backward": {
                "ours": partial(
                    kernels.flash_attention_backward, dout, q, k, v, out, lse, **options
                ),
                "theirs": partial(torch.autograd.grad, kept, recorded, dout, retain_graph=True),
            },
        }
        one: Row = {"head_dim": dim, "length": length, "causal": causal}
        for name, steps in passes.items():
            times = in_turn(steps, idle_time, rounds)
            one[name] = ratio(times["theirs"], times["ours"])["median"]
        rows.append(one)
    return rows


def table(host: list[Row], idle: list[Row]) -> str:
    """Return both tables in Markdown."""
    lines = ["| host time of a call, µs | ours | PyTorch |", "|---|---:|---:|"]
    for row in host:
        others = ", ".join(f"{us:.1f} ({who})" for who, us in row["us"].items() if who != "ours")
        lines.append(f"| {row['call']} | {row['us']['ours']:.1f} | {others} |")
    lines += ["", "| one call from an idle device, cuDNN's time over ours | forward | backward |"]
    lines.append("|---|---:|---:|")
    for row in idle:
        name = f"d {row['head_dim']}, N {row['length']}{', causal' if row['causal'] else ''}"
        lines.append(f"| {name} | {row['forward']:.2f} | {row['backward']:.2f} |")
    means = (geometric_mean(row[name] for row in idle) for name in ("forward", "backward"))
    lines.append("| geometric mean | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_option = parser.add_argument
    add_option("--rounds", type=int, default=30, help="of each row (default: %(default)s)")
    add_option("--json", metavar="FILE", help="also write the rows there")
    args = parser.parse_args(argv)
    if (missing := why_no_cuda()) is not None:
        raise SystemExit(missing)
    torch = load_torch()
    if torch is None:
        raise SystemExit("PyTorch is not installed, and these calls are timed beside it")
    host, idle = host_rows(torch, args.rounds), idle_rows(torch, args.rounds)
    if args.json:
        command = command_line("project/bench_calls.py", argv)
        write_record(args.json, command, name_of("cuda"), rows=[*host, *idle])
    print(f"{name_of('cuda')}\n\n{table(host, idle)}")


if __name__ == "__main__":
    main()
