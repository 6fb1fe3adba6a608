"""Time layouts of the tensor-core kernels of attention on a GPU, in turn: TFLOP/s, one line a layout.

python -m project.bench.speed.flash2_mma [head widths, as 64,128]
python -m project.bench.speed.flash2_mma backward 64    and 128, 256: head widths
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from kernels.common.online_softmax import PATIENCE
from kernels.cuda.attention.flash2_mma.tiles import MmaKeyLayout, MmaLayout, MmaRoleLayout
from kernels.cuda.runtime.arrays import to_device
from kernels.runtime.targets import EventTimer, why_no_cuda
from tests.support.tensor_cores.attention import FAR, Call, operands
from tests.support.tensor_cores.backward import Gradients, backward_launches

#: Head width → layouts; the first is what the others are compared with.
LAYOUTS = {
    64: (
        MmaLayout(128, 64, 4, resident=2),
        MmaLayout(128, 64, 4, resident=2, patience=PATIENCE),
        MmaLayout(128, 64, 4, resident=2, patience=PATIENCE, skips=True),
    ),
    128: (
        MmaLayout(128, 64, 4, resident=2),
        MmaLayout(128, 64, 4, resident=2, patience=PATIENCE),
        MmaLayout(128, 64, 4, resident=2, patience=PATIENCE, skips=True),
    ),
    256: (
        MmaLayout(128, 64, 8),
        MmaLayout(128, 64, 8, patience=PATIENCE),
        MmaLayout(128, 64, 8, patience=PATIENCE, skips=True),
        MmaLayout(64, 32, 4, resident=2, patience=PATIENCE, skips=True),
    ),
}
#: Likewise of the backward kernels: by keys, with parts, and by rows.
BY_KEYS = {
    64: (
        (MmaKeyLayout(64, 128, 4, 32, resident=2), 1),
        (MmaKeyLayout(64, 128, 4, 16, resident=2), 1),
        (MmaKeyLayout(32, 128, 4, 32, resident=2), 1),
        (MmaKeyLayout(64, 128, 8, 64), 1),
    ),
    128: (
        (MmaKeyLayout(64, 128, 8, 64), 1),
        (MmaKeyLayout(64, 128, 8, 32), 1),
        (MmaKeyLayout(64, 64, 4, 64, resident=2), 1),
        (MmaRoleLayout(64, 128, 8, 32), 1),
    ),
    256: ((MmaRoleLayout(64, 64, 8, 32), 1), (MmaKeyLayout(64, 64, 4, 32), 2)),
}
BY_ROWS = {
    64: (MmaLayout(128, 64, 4, resident=2), MmaLayout(128, 32, 4, resident=2)),
    128: (MmaLayout(64, 64, 4, resident=2), MmaLayout(128, 32, 4, resident=2)),
    256: (MmaLayout(64, 32, 4),),
}
TOKENS, HIDDEN = 16384, 2048
REPEATS, ROUNDS = 4, 9


def main() -> None:
    """Time every layout, full and causal, in float16."""
    if (missing := why_no_cuda()) is not None:
        raise SystemExit(missing)
    if sys.argv[1:2] == ["backward"]:
        _backward(*map(int, sys.argv[2:]))
        return
    rng = np.random.default_rng(0)
    for width in map(int, sys.argv[1].split(",")) if sys.argv[1:] else LAYOUTS:
        layouts = LAYOUTS[width]
        for seq in (512, 2048, 8192):
            sizes, heads = (seq, seq, width, width), HIDDEN // width * TOKENS // seq
            call = Call(layouts[0], sizes, scale=width**-0.5, heads=heads)
            arrays = [to_device(array) for array in operands(call, rng)]
            runs = [
                _launch(call._replace(layout=layout, bounds=bounds), arrays)
                for layout in layouts
                for bounds in ((-FAR, FAR), (-FAR, 0))
            ]
            times = [[_seconds(run) for run in runs] for _ in range(ROUNDS)]
            full_and_causal = np.array(times).reshape(ROUNDS, len(layouts), 2)
            gains = np.median(full_and_causal[:, :1] / full_and_causal, axis=0)
            work = 4e-12 * heads * seq * seq * width / np.array((1, 2))
            for layout, speed, gain in zip(
                layouts, work / np.median(full_and_causal, axis=0), gains, strict=True
            ):
                found = "  ".join(
                    f"{mask} {x:6.1f} ({y:.3f})"
                    for mask, x, y in zip(("full", "causal"), speed, gain, strict=True)
                )
                print(f"d {width:3} N {seq:5} {found}  {layout}", flush=True)


def _backward(width: int = 64) -> None:
    """Time each layout's kernels by themselves: by atomics with zeros before and the end after."""
    rng = np.random.default_rng(0)
    for seq in (2048, 8192):
        sizes, heads = (seq, seq, width, width), HIDDEN // width * TOKENS // seq
        call = Call(BY_ROWS[width][0], sizes, scale=width**-0.5, heads=heads)
        *arrays, out, lse, _ = operands(call, rng)
        rows = np.full_like(lse, 5.0), *[np.zeros_like(lse)] * 2  # lse, its rest and delta
        given = [to_device(x) for x in (out, *arrays, *rows)]
        given[0] = given[1]  # any numbers do for dout
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


def _launch(call: Call, arrays: list[Any]) -> Any:
    launch = call.kernel[call.grid, call.layout.threads]
    return lambda: launch(*arrays, call.scale, call.extras)


if __name__ == "__main__":
    main()
