"""Layouts of Hopper's forward kernel on a GPU, in turn: TFLOP/s, and the time of the table's own over each.

python -m project.bench.speed.flash3_layouts [head dims, as 64,128] [lengths, as 512,4096]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np

from kernels import make_problem
from kernels.cuda.attention.flash3_wgmma.forward import launch as flash3_wgmma
from kernels.cuda.attention.flash3_wgmma.layout import ForwardLayout, Widths, layout_of
from kernels.cuda.runtime.arrays import empty_device, to_device, to_host
from kernels.cuda.runtime.kernel import Kernel
from kernels.problem.operands import Operands
from kernels.reference import attention as reference
from kernels.runtime.dtypes import BFLOAT16, FLOAT32
from kernels.runtime.targets import EventTimer, why_no_cuda
from kernels.traffic.formulas import attention_flops
from tests.support.emulated.hopper import forget_launches

TOKENS, HIDDEN = 16384, 2048
ROUNDS, LAUNCHES = 15, 8
#: What is tried of the table's layout.
CHANGES: tuple[dict[str, Any], ...] = ({}, {"patience": 0}, {"patience": 8})


class Noted:
    """A kernel whose launches are noted.

    Args:
        kernel: Launched.
        found: Gets a function for each launch that makes it again.
    """

    def __init__(self, kernel: Kernel, found: list[Callable[[], None]]):
        self.kernel, self.found = kernel, found

    def __getitem__(self, where: Any) -> Callable[..., None]:
        run = self.kernel[where]

        def launch(*args: Any) -> None:
            self.found.append(lambda: run(*args))
            run(*args)

        return launch


def launch_of(problem: Any, operands: Operands, layout: ForwardLayout) -> Callable[[], None]:
    """Return the launch of a forward pass with a layout, which has run once."""
    found: list[Callable[[], None]] = []
    real = flash3_wgmma.forward_kernel
    own = {
        "forward_kernel": lambda *kind: Noted(real(*kind), found),
        "layout_of": lambda widths, has_options=False: layout,
    }
    forget_launches()
    with patch.multiple(flash3_wgmma, **own):
        flash3_wgmma.forward(problem, (0, 0), operands)
    forget_launches()
    (launch,) = found
    return launch


def compare(dim: int, length: int, is_causal: bool) -> Iterator[str]:
    """Yield what each layout reaches; raise AssertionError if one is wrong."""
    heads = TOKENS // length * (HIDDEN // dim)
    rng = np.random.default_rng(length)
    host = [
        rng.standard_normal((1, heads, length, dim), np.float32).astype(BFLOAT16) for _ in "qkv"
    ]
    q, k, v = (to_device(x) for x in host)
    problem = make_problem(q, k, v, is_causal=is_causal)
    out, lse = empty_device(q.shape, BFLOAT16), empty_device(q.shape[:3], FLOAT32)
    operands = Operands(q=q, k=k, v=v, out=out, lse=lse)
    first: list[Any] = [x[:, :1].astype(np.float64) for x in host]
    wanted = Operands(*first, out=np.empty(first[0].shape), lse=np.empty(first[0].shape[:3]))
    reference.attention(make_problem(*first[:3], is_causal=is_causal), (1, 1), wanted)
    table, launches = layout_of(Widths(dim, dim)), {}
    for change in CHANGES:
        layout = replace(table, **change)
        launches[str(change)] = launch_of(problem, operands, layout)
        error = np.abs(to_host(out)[:, :1].astype(np.float64) - wanted.out).max()
        assert error < 0.03, f"{layout} is off by {error}"
    times: dict[str, list[float]] = {name: [] for name in launches}
    for _ in range(ROUNDS):
        for name, launch in launches.items():
            with EventTimer() as timer:
                for _ in range(LAUNCHES):
                    launch()
            times[name].append(timer.seconds / LAUNCHES)
    work = attention_flops(heads, length, length, dim) / (2 if is_causal else 1) / 1e12
    base = times[str(CHANGES[0])]
    for name, found in times.items():
        gain = median(a / b for a, b in zip(base, found, strict=True))
        yield f"{name} {work / median(found):.0f} ({gain:.3f})"


def main() -> None:
    """Compare all."""
    if (missing := why_no_cuda()) is not None:
        raise SystemExit(missing)
    given = [list(map(int, each.split(","))) for each in sys.argv[1:]]
    dims, lengths = [*given, *([64, 128, 256], [512, 2048, 8192])[len(given) :]]
    for dim in dims:
        for length in lengths:
            for is_causal in (False, True):
                found = "; ".join(compare(dim, length, is_causal))
                print(f"d {dim}, N {length}{', causal' if is_causal else ''}: {found}", flush=True)


if __name__ == "__main__":
    main()
