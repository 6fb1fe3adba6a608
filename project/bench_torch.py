"""Our operator of PyTorch beside PyTorch's own attention: one call, and a training step of GPT-2 small.

    python project/bench_torch.py                    every part on a GPU
    python project/bench_torch.py --only call        forward and backward of one call, half a minute
    python project/bench_torch.py --only step        a step of GPT-2 small, eager, half a minute
    python project/bench_torch.py --only compiled    the same with torch.compile, a minute
    python project/bench_torch.py --publish          also write docs/results/DEVICE/torch.json

A call is causal, in bfloat16, with gradients that need not be reproducible, as PyTorch's own.  A step is
that of a plain PyTorch model under autocast; one differs from another by its function of attention alone.
Each ratio is the other's time over ours, of the fastest backend that PyTorch has for the case.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import cycle
from typing import Any

import numpy as np
from bench.measuring import (
    command_line,
    interleaved,
    name_of,
    published_file,
    ratio,
    spread,
    timing_note,
    write_record,
)
from bench.torch_attention import load_torch
from bench.torch_gpt import TorchGPT
from bench.training_contestants import BETA2, SEED, WEIGHT_DECAY, Size, our_model, size_of

from kernels.runtime.targets import why_no_cuda

Step = Callable[[], Any]
Row = dict[str, Any]
OURS = "ours"
#: PyTorch's fused backends of each device.
BACKENDS = {
    "cuda": ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"),
    "cpu": ("FLASH_ATTENTION",),
}
#: Of a call: lengths, tokens in all, and the width of a model.
LENGTHS, TOKENS, WIDTH, DIMS = (2048, 8192), 16384, 2048, (64, 128)
QUICK_LENGTHS, QUICK_TOKENS, QUICK_WIDTH = (128, 256), 256, 128
#: Steps before the clock starts, in which kernels compile.
WARM_UP = 3


class Call:
    """Attention and its gradients, by our operator or by a backend of PyTorch."""

    def __init__(self, torch: Any, attend: Any, tensors: list[Any], backend: str | None = None):
        self._torch, self._attend, self._backend = torch, attend, backend
        *self._leaves, self._dout = tensors

    def __call__(self) -> Any:
        """Return dq, dk and dv."""
        if self._backend is None:
            return self._gradients()
        attention = self._torch.nn.attention
        with attention.sdpa_kernel(getattr(attention.SDPBackend, self._backend)):
            return self._gradients()

    def _gradients(self) -> Any:
        out = self._attend(*self._leaves, is_causal=True)
        return self._torch.autograd.grad(out, self._leaves, self._dout)


def reason_against(step: Step) -> str | None:
    """Run a step a few times; return why it cannot run, or None."""
    try:
        for _ in range(WARM_UP):
            step()
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return None


def row_of(kind: str, steps: dict[str, Step], device: str, budget: float, **case: Any) -> Row:
    """Time contestants; return the time of each, and that of PyTorch's fastest over ours."""
    reasons = {name: reason_against(step) for name, step in steps.items()}
    why_not = {name: reason for name, reason in reasons.items() if reason}
    times = interleaved({n: s for n, s in steps.items() if n not in why_not}, device, budget)
    row: Row = {"kind": kind, **case}
    row["ms"] = {name: spread(found, 1e3) for name, found in times.items()}
    if why_not:
        row["why_not"] = why_not
    theirs = [name for name in times if name != OURS]
    if theirs and OURS in times:
        best = min(theirs, key=lambda name: row["ms"][name]["median"])
        row |= {"best": best, "ratio": ratio(times[best], times[OURS])}
    return row


def call_rows(torch: Any, attend: Any, device: str, budget: float, quick: bool) -> list[Row]:
    """Time forward and backward of one call at each length."""
    rows = []
    tokens, width = (QUICK_TOKENS, QUICK_WIDTH) if quick else (TOKENS, WIDTH)
    for dim in DIMS:
        for length in QUICK_LENGTHS if quick else LENGTHS:
            shape = tokens // length, width // dim, length, dim
            leaves = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)]
            tensors = [*(x.requires_grad_() for x in leaves[:3]), leaves[3]]
            sdpa = torch.nn.functional.scaled_dot_product_attention
            steps: dict[str, Step] = {OURS: Call(torch, attend, tensors)}
            for backend in BACKENDS[device]:
                steps[backend] = Call(torch, sdpa, tensors, backend)
            rows.append(row_of("call", steps, device, budget, shape=list(shape), dtype="bfloat16"))
    return rows


def step_row(
    torch: Any, attend: Any, device: str, budget: float, size: Size, compiled: bool
) -> Row:
    """Time a training step with our operator and with each backend of PyTorch."""
    source = our_model(size, "cpu", "float32", "flash")
    rng = np.random.default_rng(SEED)
    ids = rng.integers(size.vocabulary, size=(4, 2, size.batch, size.context))
    backends = BACKENDS[device][:2]

    def step_of(name: str) -> Step:
        gpt = TorchGPT(
            source, BACKENDS[device][0] if name == OURS else name, device, size.lr, BETA2,
            WEIGHT_DECAY, "bfloat16", compiled=compiled,
            attend=attend if name == OURS else None,
        )  # fmt: skip
        turns = cycle([[gpt.place(x) for x in pair] for pair in ids])

        def step() -> None:
            inputs, targets = next(turns)
            gpt.step(inputs, targets, size.lr)

        return step

    steps = {name: step_of(name) for name in (OURS, *backends)}
    case: Row = {
        "batch": size.batch, "context": size.context, "layers": size.layers, "width": size.width,
    }  # fmt: skip
    return row_of("compiled step" if compiled else "step", steps, device, budget, **case)


def line(row: Row) -> str:
    """Return a row in words."""
    case = (
        f"(batch, heads, seq, head_dim) {tuple(row['shape'])}" if "shape" in row else "GPT-2 small"
    )
    times = ", ".join(f"{name} {found['median']:.3f} ms" for name, found in row["ms"].items())
    ratio = (
        f"; {row['ratio']['median']:.3f} times as fast as {row['best']}" if "ratio" in row else ""
    )
    why = "".join(f"; no {name}: {text}" for name, text in row.get("why_not", {}).items())
    return f"{row['kind']}, {case}: {times}{ratio}{why}"


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=("call", "step", "compiled"), help="(default: all)")
    add("--device", choices=("cpu", "cuda"), help="(default: cuda where there is one, else cpu)")
    add("--seconds", type=float, default=3.0, help="of each row (default: %(default)s)")
    add("--quick", action="store_true", help="tiny sizes: what is printed is no figure")
    add("--json", metavar="FILE", help="also write the rows there")
    add("--publish", action="store_true", help="write them to docs/results")
    args = parser.parse_args(argv)
    torch = load_torch()
    if torch is None:
        raise SystemExit("PyTorch is not installed; run pip install torch")
    device = args.device or ("cpu" if why_no_cuda() else "cuda")
    size = size_of("gpt2-small", quick=args.quick)
    attend = import_module("kernels.interop.torch").flash_attention
    parts: dict[str, Callable[[], list[Row]]] = {
        "call": lambda: call_rows(torch, attend, device, args.seconds, args.quick),
        "step": lambda: [step_row(torch, attend, device, args.seconds, size, False)],
        "compiled": lambda: [step_row(torch, attend, device, args.seconds, size, True)],
    }
    path = published_file(device, "torch") if args.publish else args.json
    print(name_of(device))
    rows: list[Row] = []
    for name in args.only or parts:
        for row in parts[name]():
            print(line(row), flush=True)
            rows.append(row)
        if path:
            command = command_line("project/bench_torch.py", argv)
            write_record(path, command, name_of(device), timing=timing_note(device), rows=rows)


if __name__ == "__main__":
    main()
