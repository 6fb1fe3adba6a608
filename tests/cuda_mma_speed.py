"""Time layouts of the tensor-core kernel of attention on a GPU: TFLOP/s, one line a layout.

python -m tests.cuda_mma_speed [tokens a batch]
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from kernels.cuda.arrays import to_device
from kernels.cuda.mma_tiles import MmaLayout
from kernels.targets import EventTimer, why_no_cuda

from .mma_attention import FAR, Call, operands

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
    256: (MmaLayout(64, 32, 4, resident=2), MmaLayout(128, 32, 8), MmaLayout(64, 64, 4)),
}
HIDDEN, REPEATS = 2048, 10


def main() -> None:
    """Time every layout, full and causal, in float16."""
    if (missing := why_no_cuda()) is not None:
        raise SystemExit(missing)
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


def _time(call: Call, arrays: list[Any]) -> float:
    """Return TFLOP/s, everything counted as if no key were hidden."""
    launch = call.kernel[call.grid, call.layout.threads]
    launch(*arrays, call.scale, call.extras)
    with EventTimer() as timer:
        for _ in range(REPEATS):
            launch(*arrays, call.scale, call.extras)
    seq_q, seq_k, width, _ = call.sizes
    return 4e-12 * call.heads * seq_q * seq_k * width * REPEATS / timer.seconds


if __name__ == "__main__":
    main()
