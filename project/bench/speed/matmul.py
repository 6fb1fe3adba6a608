"""Matrix products on a GPU: whether they are right, and TFLOP/s beside PyTorch's.

python -m project.bench.speed.matmul          checks, then measures
python -m project.bench.speed.matmul check    checks only
python -m project.bench.speed.matmul speed    measures only

A line for each dtype and shape.  All of a line are timed in turn, over and over, and the medians count; the
error is the largest of some rows against float64, in units of the largest sum of absolute values.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from kernels.cuda.matmul import cuda_cores, dispatch
from kernels.cuda.runtime.arrays import empty_device, to_device, to_host
from kernels.runtime.dtypes import BFLOAT16, FLOAT16, FLOAT32
from kernels.runtime.targets import EventTimer, compute_capability, cuda, why_no_cuda
from tests.support.tensor_cores.products import CALLS, run_on_gpu

ROUNDS, LAUNCHES, SAMPLES = 7, 5, 64
#: rows, cols, depth; whether the left one is a transposed view, and the right one.
SQUARE = (8192, 8192, 8192, False, False)
#: Squares, and GPT-2 at 16k tokens: the products of feed-forward layers, their gradients, scores of tokens.
SHAPES = (
    SQUARE,
    (4096, 4096, 4096, False, False),
    (16384, 3072, 768, False, False),
    (16384, 768, 3072, False, False),
    (16384, 768, 3072, False, True),
    (768, 3072, 16384, True, False),
    (16384, 50257, 768, False, True),
)
Shape = tuple[int, int, int, bool, bool]


def check() -> None:
    """Run the calls of the tests.

    Raises:
        SystemExit: If one is wrong.
    """
    wrong = 0
    for name, call in CALLS.items():
        if call.kind == "split" and compute_capability() < (9, 0):
            continue
        error = run_on_gpu(call, np.random.default_rng(0))
        wrong += not error <= 1
        print(
            f"{name:36} {error:.2g} of what is allowed{'' if error <= 1 else '  WRONG'}", flush=True
        )
    if wrong:
        raise SystemExit(f"{wrong} are wrong; no speeds are measured")


def _peers(host: list[Any], kind: str) -> dict[str, Callable[[], Any]]:
    """Return PyTorch's product of the same operands, if it is there; it returns the result."""
    try:
        import torch  # type: ignore[import-not-found]
    except ImportError:
        return {}
    a, b = (
        torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)
        if x.dtype == BFLOAT16
        else torch.from_numpy(x).cuda()
        for x in host
    )
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device="cuda")

    def multiply() -> Any:
        torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
        return torch.matmul(a, b, out=out)

    return {"torch": multiply}


def _line(kind: str, dtype: Any, shape: Shape, ours: dict[str, str | None]) -> None:
    rows, cols, depth, a_turned, b_turned = shape
    rng, host = np.random.default_rng(0), []
    for sizes, is_turned in (((rows, depth), a_turned), ((depth, cols), b_turned)):
        memory = rng.standard_normal(sizes[::-1] if is_turned else sizes, dtype=np.float32)
        host.append(memory.astype(dtype).T if is_turned else memory.astype(dtype))
    flat = [to_device((x.T if x.strides[0] < x.strides[1] else x).reshape(-1)) for x in host]
    steps = [(0, 0, *(step // x.itemsize for step in x.strides)) for x in host]
    out = empty_device((rows * cols,), dtype)
    sizes = (1, 1, rows, cols, depth)
    operands = out, (0, 0, cols, 1), flat[0], steps[0], flat[1], steps[1], sizes

    def own(name: str | None) -> Callable[[], Any]:
        if name is None:
            return lambda: cuda_cores.multiply(*operands)
        return lambda: dispatch.multiply(*operands, name)

    timed = {name: own(each) for name, each in ours.items()}
    picked = np.linspace(0, rows - 1, min(SAMPLES, rows)).astype(int)
    wide = host[0][picked].astype(np.float64), host[1].astype(np.float64)
    exact, size = wide[0] @ wide[1], (np.abs(wide[0]) @ np.abs(wide[1])).max()
    errors = {}
    for name, run in timed.items():
        run()
        found = to_host(out).reshape(rows, cols)[picked].astype(np.float64)
        errors[name] = np.abs(found - exact).max() / size
    peers = _peers(host, kind)
    for name, run in peers.items():
        found = run()[picked].double().cpu().numpy()
        errors[name] = np.abs(found - exact).max() / size
    timed |= peers
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(ROUNDS):
        for name, run in timed.items():
            with EventTimer() as timer:
                for _ in range(LAUNCHES):
                    run()
            seconds[name].append(timer.seconds / LAUNCHES)
    work = 2e-12 * rows * cols * depth
    rates = {name: work / statistics.median(times) for name, times in seconds.items()}
    text = "  ".join(f"{name} {rate:.0f} ({errors[name]:.1e})" for name, rate in rates.items())
    if "torch" in rates:
        text += "  / torch " + " ".join(
            f"{rate / rates['torch']:.2f}" for name, rate in rates.items() if name != "torch"
        )
    layout = f"{'T' if a_turned else 'N'}{'T' if b_turned else 'N'}"
    print(f"{kind:9} {rows}x{cols}x{depth} {layout}: {text}", flush=True)


def speed() -> None:
    """Print a line for each dtype and shape."""
    for shape in (*SHAPES, (768, 768, 16384, True, False), (2048, 2048, 2048, False, False)):
        _line("bfloat16", BFLOAT16, shape, {"tensor cores": "bfloat16"})
    _line("float16", FLOAT16, SQUARE, {"tensor cores": "float16"})
    for shape in (SQUARE, (16384, 3072, 768, False, False)):
        _line("tf32", FLOAT32, shape, {"tf32": "tf32", "as bfloat16": "bfloat16"})
        _line("float32", FLOAT32, shape, {"split": "split", "CUDA cores": None})


def main() -> None:
    """Check, then measure."""
    if (missing := why_no_cuda()) is not None:
        raise SystemExit(missing)
    cuda.current_context()
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    if asked != "speed":
        check()
    if asked != "check":
        speed()


if __name__ == "__main__":
    main()
