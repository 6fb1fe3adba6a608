"""Attention with float8 products on a Hopper GPU: each launch of it, and layouts of its forward kernel.

python -m project.bench.speed.flash3_float8 [head dims, as 64,128] [lengths, as 2048,8192]

Prints TFLOP/s of the bfloat16 kernel, then for each precision and layout those of the float8 kernel alone,
the share of its time that rounding q, k and v takes on top, and both together over bfloat16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np

from kernels import make_problem
from kernels.cuda.attention.flash3_wgmma.float8 import launch as flash3_float8
from kernels.cuda.attention.flash3_wgmma.float8 import quantise
from kernels.cuda.attention.flash3_wgmma.float8.layout import layout_of
from kernels.cuda.attention.flash3_wgmma.layout import Widths
from kernels.cuda.attention.flash3_wgmma.layout import layout_of as layout_of_halves
from kernels.cuda.runtime.arrays import empty_device, to_device
from kernels.problem.operands import Operands
from kernels.runtime.dtypes import BFLOAT16, FLOAT32
from kernels.runtime.targets import EventTimer, why_no_cuda
from kernels.traffic.formulas import attention_flops

from .flash3_layouts import Noted, launch_of

TOKENS, HIDDEN = 32768, 2048
ROUNDS, LAUNCHES = 15, 4
#: What is tried of the table's layout.
CHANGES: tuple[dict[str, Any], ...] = (
    {}, {"ping_pong": False}, {"stages": 2}, {"patience": 0}, {"patience": 1}
)  # fmt: skip
PRECISIONS = ("float8_e4m3", "float8_e4m3+blocks", "float8_e4m3+blocks+hadamard")
_ROUNDING = ("rows_kernel", "values_kernel")

Launch = Callable[[], None]


def launches_of(problem: Any, operands: Operands, layout: Any) -> tuple[list[Launch], Launch]:
    """Return the launches that round the operands, and that of the forward kernel; all have run once."""
    rounding: list[Launch] = []
    forward: list[Launch] = []
    places = [(quantise, name, rounding) for name in _ROUNDING]
    with ExitStack() as stack:
        for module, name, found in (*places, (flash3_float8, "forward_kernel", forward)):
            real = getattr(module, name)

            def noted(*kind: Any, real: Any = real, found: list[Launch] = found) -> Noted:
                return Noted(real(*kind), found)

            stack.enter_context(patch.object(module, name, noted))
        stack.enter_context(patch.object(flash3_float8, "layout_of", lambda widths: layout))
        flash3_float8.layout_for.cache_clear()
        flash3_float8.forward(problem, (0, 0), operands)
    flash3_float8.layout_for.cache_clear()
    return rounding, forward[0]


def compare(dim: int, length: int, is_causal: bool) -> Iterator[str]:
    """Yield a line for each precision and layout."""
    shape = 1, TOKENS // length * (HIDDEN // dim), length, dim
    rng = np.random.default_rng(length)
    q, k, v = (to_device(rng.standard_normal(shape, np.float32).astype(BFLOAT16)) for _ in range(3))
    out, lse = empty_device(shape, BFLOAT16), empty_device(shape[:3], FLOAT32)
    operands, widths = Operands(q=q, k=k, v=v, out=out, lse=lse), Widths(dim, dim)
    halves = make_problem(q, k, v, is_causal=is_causal)
    steps: dict[Any, list[Launch]] = {
        "bfloat16": [launch_of(halves, operands, layout_of_halves(widths))]
    }
    for precision in PRECISIONS:
        problem = replace(halves, precision=precision)
        for change in CHANGES if precision == PRECISIONS[0] else CHANGES[:1]:
            layout = replace(layout_of(widths), **change)
            rounding, forward = launches_of(problem, operands, layout)
            steps[precision, str(change), "forward"] = [forward]
            steps[precision, str(change), "both"] = [*rounding, forward]
    times: dict[Any, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, launches in steps.items():
            with EventTimer() as timer:
                for _ in range(LAUNCHES):
                    for launch in launches:
                        launch()
            times[name].append(timer.seconds / LAUNCHES)
    work = attention_flops(shape[1], length, length, dim, causal=is_causal) / 1e12
    base = median(times["bfloat16"])
    yield f"bfloat16 {work / base:.0f}"
    for name, found in times.items():
        if name[-1] == "both":
            precision, change, _ = name
            alone, both = median(times[precision, change, "forward"]), median(found)
            yield (
                f"{precision} {change}: forward {work / alone:.0f} TFLOP/s, rounding "
                f"{both / alone - 1:.0%}, {base / both:.2f} times bfloat16"
            )


def main() -> None:
    """Compare all."""
    if (missing := why_no_cuda()) is not None:
        raise SystemExit(missing)
    given = [list(map(int, each.split(","))) for each in sys.argv[1:]]
    dims, lengths = [*given, *([64, 128], [2048, 8192, 16384])[len(given) :]]
    for dim in dims:
        for length in lengths:
            for is_causal in (False, True):
                print(f"d {dim}, N {length}{', causal' * is_causal}", flush=True)
                for line in compare(dim, length, is_causal):
                    print(f"  {line}", flush=True)


if __name__ == "__main__":
    main()
