"""Our operator of PyTorch beside PyTorch's own attention: one call, and a training step of GPT-2 small.

A call is causal, in bfloat16, with gradients that need not be reproducible, as PyTorch's own.  A step is
that of a plain PyTorch model under autocast; one differs from another by its function of attention alone.
Each ratio is the other's time over ours, of the fastest backend that PyTorch has for the case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import cycle
from typing import Any

import numpy as np
from bench.kit import Case, Measurement, Record, Run, ratio, ready, spread
from bench.torch_attention import fused
from bench.torch_gpt import TorchGPT
from bench.training_contestants import BETA2, SEED, WEIGHT_DECAY, our_model, size_of

OURS = "ours"
#: PyTorch's fused backends of each device.
BACKENDS = {
    "cuda": ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"),
    "cpu": ("FLASH_ATTENTION",),
}
#: Steps before the clock starts, in which kernels compile.
WARM_UP = 3


def cases(run: Run) -> Iterator[Case]:
    _ = run.pytorch
    for dim in run.dims:
        for length in run.lengths:
            shape = [run.tokens // length, run.width // dim, length, dim]
            yield {"kind": "call", "shape": shape}, partial(call, run, shape)
    for kind in ("step", "compiled step"):
        yield {"kind": kind}, partial(step, run, kind == "compiled step")


def compared(run: Run, steps: dict[str, Callable[[], Any]], **case: Any) -> Record:
    """Time contestants; return the time of each, and that of PyTorch's fastest over ours."""

    def started(step: Callable[[], Any]) -> Callable[[], Any]:
        for _ in range(WARM_UP):
            step()
        return step

    make = {name: partial(started, step) for name, step in steps.items()}
    found, why_not = ready(make, RuntimeError, ValueError)
    times = run.timed(found)
    row: Record = {**case, "ms": {name: spread(took, 1e3) for name, took in times.items()}}
    row |= {"not_run": why_not} if why_not else {}
    theirs = [name for name in times if name != OURS]
    if theirs and OURS in times:
        best = min(theirs, key=lambda name: row["ms"][name]["median"])
        row |= {"best": best, "ratio": ratio(times[best], times[OURS])}
    return row


def our_operator() -> Any:
    """Return our operator, which is compiled at its first use."""
    return import_module("kernels.interop.torch").flash_attention


def call(run: Run, shape: list[int]) -> Record:
    torch = run.torch
    leaves = [torch.randn(shape, device=run.device, dtype=torch.bfloat16) for _ in range(4)]
    *leaves, dout = [*(x.requires_grad_() for x in leaves[:3]), leaves[3]]

    def gradients(attend: Any) -> Any:
        return torch.autograd.grad(attend(*leaves, is_causal=True), leaves, dout)

    steps = {name: partial(gradients, fused(torch, name)) for name in BACKENDS[run.device]}
    return compared(run, {OURS: partial(gradients, our_operator()), **steps}, dtype="bfloat16")


def step(run: Run, compiled: bool) -> Record:
    size, device = size_of("gpt2-small", quick=run.is_quick), run.device
    source, rng = our_model(size, "cpu", "float32"), np.random.default_rng(SEED)
    ids = rng.integers(size.vocabulary, size=(4, 2, size.batch, size.context))

    def step_of(name: str) -> Callable[[], Any]:
        backend = BACKENDS[device][0] if name == OURS else name
        gpt = TorchGPT(
            source, backend, device, size.lr, BETA2, WEIGHT_DECAY, "bfloat16", compiled=compiled,
            attend=our_operator() if name == OURS else None,
        )  # fmt: skip
        turns: Any = cycle([[gpt.place(x) for x in pair] for pair in ids])

        def step() -> Any:
            inputs, targets = next(turns)
            return gpt.step(inputs, targets, size.lr)

        return step

    steps = {name: step_of(name) for name in (OURS, *BACKENDS[device][:2])}
    case = {key: getattr(size, key) for key in ("batch", "context", "layers", "width")}
    return compared(run, steps, **case)


CALL = {"lengths": (2048, 8192), "tokens": 16384, "width": 2048, "dims": (64, 128), "seconds": 2.0}
QUICK = {"lengths": (128, 256), "tokens": 256, "width": 128, "seconds": 0.05}
MEASUREMENT = Measurement(
    "torch", "Is our operator of PyTorch as fast as PyTorch's own attention, in a call and in training?",
    cases, {"cpu": {"normal": CALL, "quick": QUICK}, "cuda": {"normal": CALL, "quick": QUICK}},
    minutes={"cpu": 8, "cuda": 2},
)  # fmt: skip
