"""Options on Hopper's forward kernel on a GPU: are they right, and TFLOP/s beside PyTorch's fused call.

python -m project.bench.speed.flash3_options [head dims, as 64,128] [length] [options, as mask,dropout]

Work is counted of the tiles of 128 x 128 that a call visits.  Ours and PyTorch's are timed in turn, over
and over, and the medians count.  PyTorch is timed if it is there.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import kernels
from kernels import launch, make_problem
from kernels.cuda.attention.flash3_wgmma.forward import launch as flash3_wgmma
from kernels.cuda.runtime.arrays import empty_device, to_device, to_host
from kernels.problem.operands import make_operands
from kernels.problem.packed_sequences import Sequences
from kernels.runtime.dtypes import BFLOAT16, FLOAT32
from kernels.runtime.targets import EventTimer, why_no_cuda
from tests.kernels.cuda.attention.test_tensor_cores import OPTIONS, wide_case
from tests.support.attention.strategies import Case

from .flash3 import HIDDEN, TOKENS

ROUNDS, LAUNCHES, TILE = 5, 4, 128
#: Of the options that are timed.
WINDOW, DOCUMENT, RATE, CAP = 1024, 1000, 0.1, 30.0


def slanted(score: float, batch: int, head: int, row: int, col: int) -> float:
    """Subtract what grows with the distance."""
    return score - 0.02 * (head + 1) * abs(row - col)


def forward(case: Case, sequences: Any = None) -> list[Any]:
    """Return out and lse of the rung, on the host."""
    problem = replace(case.problem(rung="flash3_wgmma"), sequences=sequences)
    q, k, v = map(to_device, case.operands)
    operands = make_operands(launch.CUDA.memory, problem, q, k, v, case.options)
    return [to_host(x) for x in launch.forward(launch.CUDA, problem, operands)[:2]]


def textbook(case: Case) -> list[Any]:
    """Return out and lse in float64."""
    case = case.plain()
    problem = case.problem(rung="naive")
    operands = make_operands(launch.NUMPY.memory, problem, *case.operands, arrays=case.options)
    return list(launch.forward(launch.NUMPY, problem, operands)[:2])


def check(widths: list[int], names: list[str]) -> None:
    """Compare every option with the textbook in float64; print the largest errors.

    Raises:
        SystemExit: If one is off by more than four units of float16.
    """
    failed = False
    for width in widths:
        for name in names:
            case = wide_case(name, True, width)
            failed |= not _is_right(f"d {width} {name}", forward(case), textbook(case))
        failed |= not _check_packed(width)
    if failed:
        raise SystemExit("wrong results; no speeds are measured")


def _check_packed(width: int) -> bool:
    rng = np.random.default_rng(3)
    ends = (0, 300, 300, 317, 700), (0, 410, 500, 501, 900)
    shapes = (3, 700, width), (3, 900, width), (3, 900, width), (3, 700, width)
    q, k, v, dout = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
    case = Case(q, k, v, dout, {"is_causal": True, "causal_offset": 110}, (16, 16))
    first, last = map(np.array, ends)
    found = forward(case, Sequences(first, last, 700, 900))
    is_right = True
    for i in (0, 2, 3):
        rows, cols = (slice(*sums[i : i + 2]) for sums in ends)
        own = replace(case, q=q[:, rows], k=k[:, cols], v=v[:, cols], dout=dout[:, rows])
        parts = [x[:, rows] for x in found]
        is_right &= _is_right(f"d {width} packed, sequence {i}", parts, textbook(own))
    return is_right


def _is_right(what: str, found: list[Any], expected: list[Any]) -> bool:
    errors = []
    for x, y in zip(found, expected, strict=True):
        finite = np.isfinite(y)
        same = np.array_equal(x[~finite], y[~finite].astype(x.dtype))
        error = np.abs(x[finite].astype(np.float64) - y[finite]) / (1 + np.abs(y[finite]))
        errors.append(float(np.max(error)) if same else np.inf)
    is_right = errors[0] <= 2**-9 and errors[1] <= 3e-5
    print(f"{what}: out {errors[0]:.1e} lse {errors[1]:.1e} {'right' if is_right else 'WRONG'}",
          flush=True)  # fmt: skip
    return is_right


def calls(seq: int, width: int) -> dict[str, tuple[dict[str, Any], Any]]:
    """Return what is timed: name → options, and which row of 128 x 128 tiles must be visited."""
    tiles, heads = np.arange(seq // TILE), HIDDEN // width
    i, j = tiles[:, None], tiles
    everything, below = np.ones((len(tiles), len(tiles)), bool), j <= i
    document = np.arange(seq) // DOCUMENT
    first, last = document[::TILE], document[TILE - 1 :: TILE]
    mask = np.random.default_rng(1).random((seq, seq)) < 0.9
    slopes = (2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)).astype(np.float32)
    butterfly = kernels.BlockMask.butterfly(seq, seq, TILE)
    return {
        "full": ({}, everything),
        "causal": ({"is_causal": True}, below),
        "mask": ({"attn_mask": mask}, everything),
        "dropout": ({"dropout_p": RATE, "seed": 1}, everything),
        "window": (
            {"window_size": (WINDOW, 0)}, below & (i * TILE - WINDOW <= j * TILE + TILE - 1)
        ),
        "documents": ({}, (first[:, None] <= last) & (first <= last[:, None])),
        "butterfly": ({"block_mask": butterfly}, butterfly.states[0] > 0),
        "alibi": ({"alibi_slopes": slopes}, everything),
        "softcap": ({"softcap": CAP}, everything),
        "score_mod": ({"score_mod": slanted}, everything),
        "float mask": ({"attn_mask": np.where(mask, 0, 1).astype(BFLOAT16)}, everything),
    }  # fmt: skip


def _ours(arrays: list[Any], options: dict[str, Any], name: str) -> Callable[[], None]:
    problem = make_problem(*arrays, **options)
    if name == "documents":
        batch, heads, seq, width = arrays[0].shape
        one = np.append(np.arange(0, seq, DOCUMENT), seq)
        sums = np.unique(np.concatenate([one + b * seq for b in range(batch)]))
        shape = heads, batch * seq, width
        arrays = [to_device(to_host(x).swapaxes(0, 1).reshape(shape).copy()) for x in arrays]
        problem = replace(
            make_problem(*arrays), sequences=Sequences(sums, sums, batch * seq, batch * seq)
        )
    memory = launch.CUDA.memory
    q, k, v = arrays
    operands = make_operands(memory, problem, q, k, v, options)
    out = empty_device(problem.out_shape, BFLOAT16)
    lse = empty_device(problem.lse_shape, FLOAT32)
    call = operands.having(out=out, lse=lse).viewed(memory, problem)
    return lambda: flash3_wgmma.forward(problem, (0, 0), call)


def _theirs(arrays: list[Any], options: dict[str, Any], name: str) -> Any:
    """Return PyTorch's fused call, or None where it is not there or has no such option."""
    if name not in ("full", "causal", "mask", "dropout", "float mask"):
        return None
    try:
        import torch  # type: ignore[import-not-found]
    except ImportError:
        return None
    q, k, v = (
        torch.from_numpy(to_host(x).view(np.int16)).view(torch.bfloat16).cuda() for x in arrays
    )
    mask = options.get("attn_mask")
    if mask is not None:
        mask = torch.from_numpy(mask.astype(np.float32)).cuda()
        mask = mask.bool() if name == "mask" else mask.bfloat16()

    def run() -> None:
        with torch.no_grad():
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, mask, options.get("dropout_p", 0.0), options.get("is_causal", False)
            )

    return run


def speed(widths: list[int], seq: int, names: list[str]) -> None:
    """Print a line for each width and option."""
    rng = np.random.default_rng(0)
    for width in widths:
        shape = (TOKENS // seq, HIDDEN // width, seq, width)
        arrays = [
            to_device(rng.standard_normal(shape, dtype=np.float32).astype(BFLOAT16)) for _ in "qkv"
        ]
        for name, (options, visited) in calls(seq, width).items():
            if names and name not in names:
                continue
            timed = {"ours": _ours(arrays, options, name), "SDPA": _theirs(arrays, options, name)}
            seconds: dict[str, list[float]] = {one: [] for one, run in timed.items() if run}
            for one in seconds:
                timed[one]()  # compiles
            for _ in range(ROUNDS):
                for one in seconds:
                    with EventTimer() as timer:
                        for _ in range(LAUNCHES):
                            timed[one]()
                    seconds[one].append(timer.seconds / LAUNCHES)
            scores = TOKENS // seq * HIDDEN // width * np.count_nonzero(visited) * TILE**2
            work = 4e-12 * scores * width
            work = 2e-12 * TOKENS * HIDDEN * seq if name == "causal" else work
            rates = " ".join(
                f"{one} {work / statistics.median(times):.0f}" for one, times in seconds.items()
            )
            print(f"d {width} N {seq} {name}: {rates}", flush=True)


def main() -> None:
    """Check, then measure."""
    if (missing := why_no_cuda()) is not None:
        raise SystemExit(missing)
    given = [*sys.argv[1:], *[""] * 3][:3]
    widths = [int(x) for x in given[0].split(",") if x] or [64, 128]
    check(widths, list(OPTIONS))
    speed(widths, int(given[1] or 8192), [x for x in given[2].split(",") if x])


if __name__ == "__main__":
    main()
