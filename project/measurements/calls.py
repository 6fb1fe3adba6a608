"""The cost of a call around its kernel on a GPU, beside PyTorch: host time, and calls from an idle device.

Host time is the time that Python takes for a call: small operands, a hundred calls in a row, no wait for
the device in between.  A call from an idle device is timed by the host from the call until its result is
there.  All contestants of a row are timed in turn, and a ratio is taken within a round.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from operator import add, matmul
from statistics import geometric_mean, median
from typing import Any

from bench.contestants import DIRECTIONS
from bench.kit import Case, Measurement, Record, Run, markdown, ratio
from bench.measuring import interleaved

import kernels
import minitorch
from kernels.runtime.targets import cuda

#: Of the host's table: few heads of few rows, so that the device is done before the host is.
SMALL = (1, 2, 64, 64)
#: Calls in a row; a device queues more than these before the host has to wait.
CALLS = 100
#: Of the other table: tokens, the width of a model, and what varies.
TOKENS, WIDTH = 16384, 2048


class Attention:
    """PyTorch's attention by one of its backends, which is chosen before the clock starts."""

    def __init__(self, torch: Any, backend: str, tensors: Any, is_causal: bool = False):
        sdpa = torch.nn.functional.scaled_dot_product_attention
        self._call = partial(sdpa, *tensors, is_causal=is_causal)
        own = getattr(torch.nn.attention.SDPBackend, backend)
        self.chosen: Callable[[], Any] = partial(torch.nn.attention.sdpa_kernel, own)

    def __call__(self) -> Any:
        """Attend."""
        return self._call()

    def kept(self) -> Any:
        """Return the result of a call, whose gradients can be taken."""
        with self.chosen():
            return self._call()


def host_time(step: Any, *ignored: Any, calls: int = CALLS, until_there: bool = False) -> float:
    """Return the seconds that Python takes for one call, or also those until its result is there."""
    with getattr(step, "chosen", nullcontext)():
        cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        if until_there:
            cuda.synchronize()
        spent = time.perf_counter() - start
        cuda.synchronize()
        return spent / calls


def idle_time(step: Any, *ignored: Any) -> float:
    """Return the seconds from a call on an idle device until its result is there."""
    return host_time(step, calls=1, until_there=True)


def in_turn(run: Run, steps: dict[str, Any], clock: Any) -> dict[str, list[float]]:
    """Return the seconds of each step in every round, by a clock of its own."""
    rounds: Record = {"least": run.rounds, "most": run.rounds, "shortest": 0.0}
    return interleaved(steps, "cuda", 0.0, **rounds, clock=clock)


def host_calls(torch: Any) -> dict[str, dict[str, Any]]:
    """Return small calls: ours on PyTorch's tensors and on tensors of ours, and PyTorch's."""
    q, k, v, dout = (torch.randn(SMALL, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    out, lse = kernels.flash_attention_forward(q, k, v)
    own = [minitorch.from_dlpack(x, requires_grad=True) for x in (q, k, v)]
    recorded = [x.clone().requires_grad_() for x in (q, k, v)]
    theirs = partial(Attention, torch)
    their_call = theirs("CUDNN_ATTENTION", recorded)
    gradients = partial(torch.autograd.grad, their_call.kept(), recorded, dout, retain_graph=True)
    squares = [torch.randn(64, 64, device="cuda") for _ in range(2)]
    ours = [minitorch.from_dlpack(x) for x in squares]
    return {
        "attention forward, PyTorch's tensors": {
            "ours": partial(kernels.flash_attention_forward, q, k, v),
            "cuDNN": theirs("CUDNN_ATTENTION", (q, k, v)),
            "FLASH": theirs("FLASH_ATTENTION", (q, k, v)),
        },
        "attention backward, PyTorch's tensors": {
            "ours": partial(kernels.flash_attention_backward, dout, q, k, v, out, lse),
            "cuDNN": gradients,
        },
        "q.flash_attention, recorded": {
            "ours": partial(own[0].flash_attention, *own[1:]), "cuDNN": their_call,
        },
        "addition of 64 x 64": {"ours": partial(add, *ours), "PyTorch": partial(add, *squares)},
        "product of 64 x 64": {"ours": partial(matmul, *ours), "PyTorch": partial(matmul, *squares)},
    }  # fmt: skip


def cases(run: Run) -> Iterator[Case]:
    for name, steps in host_calls(run.pytorch).items():
        yield {"call": name}, partial(host, run, steps)
    for dim, length, causal in itertools.product(run.dims, run.lengths, (False, True)):
        key = {"head_dim": dim, "length": length, "causal": causal}
        yield key, partial(idle, run, dim, length, causal)


def host(run: Run, steps: dict[str, Any]) -> Record:
    times = in_turn(run, steps, host_time)
    return {"us": {name: 1e6 * median(found) for name, found in times.items()}}


def idle(run: Run, dim: int, length: int, causal: bool) -> Record:
    """Time a call of attention from an idle device, forward and backward, beside cuDNN's."""
    torch, shape = run.torch, (1, max(TOKENS // length, 1) * (WIDTH // dim), length, dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    recorded = [x.clone().requires_grad_() for x in (q, k, v)]
    forward = partial(kernels.flash_attention_forward, q, k, v, is_causal=causal)
    theirs = partial(Attention, torch, "CUDNN_ATTENTION", is_causal=causal)
    options = {"is_causal": causal, "deterministic": False}
    backward = partial(kernels.flash_attention_backward, dout, q, k, v, *forward(), **options)
    kept = theirs(recorded).kept()
    gradients = partial(torch.autograd.grad, kept, recorded, dout, retain_graph=True)
    pairs = (forward, theirs((q, k, v))), (backward, gradients)
    found: Record = {}
    for way, pair in zip(DIRECTIONS, pairs, strict=True):
        times = in_turn(run, dict(zip(("ours", "theirs"), pair, strict=True)), idle_time)
        found[way] = ratio(times["theirs"], times["ours"])["median"]
    return found


def table(record: Record) -> str:
    lines, idle = [], [row for row in record["rows"] if "forward" in row]
    for row in (row for row in record["rows"] if "us" in row):
        own, *others = row["us"].items()
        theirs = ", ".join(f"{us:.1f} ({name})" for name, us in others)
        lines.append([row["call"], f"{own[1]:.1f}", theirs])
    calls = markdown(["host time of a call, µs", "ours", "PyTorch"], lines)
    lines = [
        [f"d {row['head_dim']}, {'causal' if row['causal'] else 'full'}, N {row['length']:,}",
         *(f"{row[way]:.2f}" for way in DIRECTIONS)]
        for row in idle
    ]  # fmt: skip
    means = (geometric_mean([row[way] for row in idle]) for way in DIRECTIONS)
    lines.append(["geometric mean", *(f"{mean:.2f}" for mean in means)])
    head = ["one call on an idle device: cuDNN's time / our time", *DIRECTIONS]
    return f"{calls}\n\n{markdown(head, lines)}"


MEASUREMENT = Measurement(
    "calls", "What does a call cost around its kernel, beside PyTorch?", cases,
    {"cuda": {"normal": {"rounds": 15, "lengths": (777, 4096, 8192), "dims": (64, 128, 256)},
              "quick": {"rounds": 2, "lengths": (777,), "dims": (64,)}}},
    table=table, minutes={"cuda": 2},
)  # fmt: skip
