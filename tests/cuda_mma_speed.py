"""Time layouts of the tensor-core kernels of attention on a GPU: TFLOP/s, one line a layout.

python -m tests.cuda_mma_speed [tokens a batch]
python -m tests.cuda_mma_speed backward 64 [tokens a batch]    and 128, 256: head widths
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from kernels.cuda.arrays import to_device
from kernels.cuda.mma_tiles import KeyLayout, MmaLayout, RoleLayout
from kernels.targets import EventTimer, why_no_cuda

from .mma_attention import FAR, Call, operands
from .mma_backward import Gradients, backward_launches

#: Head width → layouts.
LAYOUTS = {
    64: (
        MmaLayout(128, 64, 4, resident=2),
        MmaLayout(128, 128, 4, resident=1),
        MmaLayout(128, 64, 8, resident=2),
        MmaLayout(64, 64, 4, resident=3),
        MmaLayout(256, 64, 8, resident=1),
    ),
    128: (
        MmaLayout(128, 64, 4, resident=2),
        MmaLayout(128, 32, 4, resident=2),
        MmaLayout(128, 64, 8, resident=1),
        MmaLayout(64, 64, 4, resident=2),
    ),
    256: (
        MmaLayout(128, 64, 8),
        MmaLayout(64, 64, 4, resident=2, stages=1),
        MmaLayout(64, 32, 4, resident=2),
    ),
}
#: Likewise of the backward kernels: by keys, with parts, and by rows.
BY_KEYS = {
    64: (
        (KeyLayout(64, 128, 4, 32, resident=2), 1),
        (KeyLayout(64, 128, 4, 16, resident=2), 1),
        (KeyLayout(32, 128, 4, 32, resident=2), 1),
        (KeyLayout(64, 128, 8, 64), 1),
    ),
    128: (
        (KeyLayout(64, 128, 8, 64), 1),
        (KeyLayout(64, 128, 8, 32), 1),
        (KeyLayout(64, 64, 4, 64, resident=2), 1),
        (RoleLayout(64, 128, 8, 32), 1),
    ),
    256: ((RoleLayout(64, 64, 8, 32), 1), (KeyLayout(64, 64, 4, 32), 2)),
}
BY_ROWS = {
    64: (MmaLayout(128, 64, 4, resident=2), MmaLayout(128, 32, 4, resident=2)),
    128: (MmaLayout(64, 64, 4, resident=2), MmaLayout(128, 32, 4, resident=2)),
    256: (MmaLayout(64, 32, 4),),
}
HIDDEN, REPEATS = 2048, 10


def main() -> None:
    """Time every layout, full and causal, in float16."""
    if (missing := why_no_cuda()) is not None:
        raise SystemExit(missing)
    if sys.argv[1:2] == ["backward"]:
        _backward(*map(int, sys.argv[2:]))
        return
    tokens = int(sys.argv[1]) if sys.argv[1:] else 16384
    rng = np.random.default_rng(0)
    for width, layouts in LAYOUTS.items():
        for seq in (2048, 8192):
            sizes, heads = (seq, seq, width, width), HIDDEN // width * tokens // seq
            call = Call(layouts[0], sizes, scale=width**-0.5, heads=heads)
            arrays = [to_device(array) for array in operands(call, rng)]
            for layout in layouts:
                full = _time(call._replace(layout=layout), arrays)
                causal = _time(call._replace(layout=layout, bounds=(-FAR, 0)), arrays) / 2
                shape = f"{layout.block_q} x {layout.block_k}, {layout.warps} warps"
                line = f"d {width:3} N {seq:5} {shape:22} full {full:6.1f} causal {causal:6.1f}"
                print(line, flush=True)


def _backward(width: int = 64, tokens: int = 16384) -> None:
    """Time each layout's kernels by themselves: by atomics with zeros before and the end after."""
    rng = np.random.default_rng(0)
    for seq in (2048, 8192):
        sizes, heads = (seq, seq, width, width), HIDDEN // width * tokens // seq
        call = Call(BY_ROWS[width][0], sizes, scale=width**-0.5, heads=heads)
        *arrays, out, lse = operands(call, rng)
        given = [to_device(x) for x in (out, *arrays, lse, np.zeros_like(lse))]
        given[0] = given[1]  # any numbers do for dout, and any finite ones for lse and delta
        given[4] = to_device(np.full_like(lse, 5.0))
        cases = [
            (str(layout), Gradients(call, layout, parts), atomics)
            for layout, parts in BY_KEYS[width]
            for atomics in (True, False)
        ]
        times: dict[str, dict[str, float]] = {}
        for mask, bounds, share in (("full", (-FAR, FAR), 1.0), ("causal", (-FAR, 0), 0.5)):
            for name, case, atomics in cases:
                one = case._replace(call=call._replace(bounds=bounds))
                for what, run in backward_launches(one, given, atomics, to_device).items():
                    if what != "by rows":
                        seconds = _seconds(run)
                        times.setdefault(f"{what}, {name}", {})[mask] = seconds / share
            for layout in BY_ROWS[width]:
                key = Gradients(call._replace(bounds=bounds, layout=layout), BY_KEYS[width][0][0])
                run = backward_launches(key, given, False, to_device)["by rows"]
                times.setdefault(f"by rows, {layout}", {})[mask] = _seconds(run) / share
        work = 10e-12 * heads * seq * seq * width
        for name, found in times.items():
            line = "  ".join(
                f"{mask} {work / x:6.1f} ({1e3 * x:6.2f} ms)" for mask, x in found.items()
            )
            print(f"d {width:3} N {seq:5} {line}  {name}", flush=True)


def _seconds(run: Any) -> float:
    run()
    with EventTimer() as timer:
        for _ in range(REPEATS):
            run()
    return timer.seconds / REPEATS


def _time(call: Call, arrays: list[Any]) -> float:
    """Return TFLOP/s, everything counted as if no key were hidden."""
    launch = call.kernel[call.grid, call.layout.threads]
    launch(*arrays, call.scale, call.flag(), call.extras)
    with EventTimer() as timer:
        for _ in range(REPEATS):
            launch(*arrays, call.scale, call.flag(), call.extras)
    seq_q, seq_k, width, _ = call.sizes
    return 4e-12 * call.heads * seq_q * seq_k * width * REPEATS / timer.seconds


if __name__ == "__main__":
    main()
