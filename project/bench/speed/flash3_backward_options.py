"""Options on Hopper's backward kernels on a GPU: whether they are right, and TFLOP/s beside PyTorch's.

python -m project.bench.speed.flash3_backward_options [dims: 64,128] [length] [names: mask,dropout] [alone]

Each call is first compared with the textbook in float64, at a length that no tile divides, in both modes;
then timed, delta and conversions included.  Work is counted of the tiles of 128 x 128 that a call must
visit.  "alone" leaves PyTorch out; "atomic" besides leaves out the deterministic mode.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kernels import launch, make_problem
from kernels.cuda.attention.flash3_wgmma.backward import launch as flash3_wgmma_backward
from kernels.cuda.attention.flash3_wgmma.forward import launch as flash3_wgmma
from kernels.cuda.runtime.arrays import empty_device, to_device, to_host
from kernels.problem.operands import make_operands
from kernels.problem.packed_sequences import Sequences
from kernels.runtime.dtypes import BFLOAT16, FLOAT32
from kernels.runtime.targets import EventTimer, why_no_cuda
from tests.support.attention.strategies import Case

from .flash3 import HIDDEN, LAUNCHES, ROUNDS, TOKENS
from .flash3_options import CAP, DOCUMENT, TILE, calls, slanted

#: Query rows and keys of what is checked.
CHECKED = 300, 410


def level(score: float, batch: int, head: int, row: int, col: int) -> float:
    """Return the derivative of what only adds to a score."""
    return 1.0


def capped(score: float, batch: int, head: int, row: int, col: int) -> float:
    """Cap a score."""
    return CAP * math.tanh(score / CAP)


def slope_of_capped(score: float, batch: int, head: int, row: int, col: int) -> float:
    bent = math.tanh(score / CAP)
    return 1.0 - bent * bent


def timed_calls(seq: int, width: int) -> dict[str, tuple[dict[str, Any], Any]]:
    """Return what is timed: name → options, and which tiles of 128 x 128 must be visited."""
    known = calls(seq, width)
    everything = known["full"][1]
    return known | {
        "score_mod": ({"score_mod": (slanted, level)}, everything),
        "softcap as score_mod": ({"score_mod": (capped, slope_of_capped)}, everything),
    }


def check(width: int, name: str, deterministic: bool) -> bool:
    """Compare a call with the textbook in float64; print what is wrong."""
    rng, (seq_q, seq_k) = np.random.default_rng(0), CHECKED
    shapes = ((2, 2, seq, width) for seq in (seq_q, seq_k, seq_k, seq_q))
    q, k, v, dout = (rng.standard_normal(shape).astype(BFLOAT16) for shape in shapes)
    options, sequences = dict(timed_calls(1024, width)[name][0]), None
    if "attn_mask" in options:
        options["attn_mask"] = options["attn_mask"][:seq_q, :seq_k]
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"][:2]
    if "block_mask" in options:
        options["block_mask"] = type(options["block_mask"]).butterfly(seq_q, seq_k, 64)
    case = Case(q, k, v, dout, options, (16, 16))
    if name == "documents":
        case, sequences = _packed(case)
    found = case.run(
        launch.CUDA, "flash3_wgmma", place=to_device, sequences=sequences,
        deterministic=deterministic,
    )  # fmt: skip
    found = {what: to_host(x) for what, x in found.items()}
    try:
        for own, results in _parts(case, found, sequences):
            own.check(results, name)
    except AssertionError as error:
        print(
            f"d {width} {name} deterministic {deterministic}: WRONG {str(error)[:300]}", flush=True
        )
        return False
    return True


def _packed(case: Case) -> tuple[Case, Sequences]:
    """Return a call of sequences, of the first entry of the batch."""
    names = ("q", "k", "v", "dout")
    case = replace(case, **{name: getattr(case, name)[0] for name in names})
    ends = np.array([0, 100, 100, 117, CHECKED[0]]), np.array([0, 200, 250, 251, CHECKED[1]])
    return case, Sequences(*ends, *CHECKED)


def _parts(case: Case, found: dict[str, Any], sequences: Sequences | None) -> Any:
    """Yield calls without sequences, and their results."""
    if sequences is None:
        yield case, found
        return
    for i in range(sequences.count):
        rows, cols = (
            slice(*sums[i : i + 2]) for sums in (sequences.cu_seqlens_q, sequences.cu_seqlens_k)
        )
        if rows.stop > rows.start:
            places = {"q": rows, "k": cols, "v": cols, "dout": rows}
            own = replace(case, **{name: getattr(case, name)[:, x] for name, x in places.items()})
            yield (
                own,
                {name: x[:, cols if name in ("dk", "dv") else rows] for name, x in found.items()},
            )


def ours(arrays: list[Any], options: dict[str, Any], name: str) -> dict[str, Callable[[], None]]:
    """Return what is timed of ours, by mode."""
    problem = make_problem(*arrays[:3], **options)
    if name == "documents":
        batch, heads, seq, width = arrays[0].shape
        one = np.append(np.arange(0, seq, DOCUMENT), seq)
        sums = np.unique(np.concatenate([one + b * seq for b in range(batch)]))
        shape = heads, batch * seq, width
        arrays = [to_device(to_host(x).swapaxes(0, 1).reshape(shape).copy()) for x in arrays]
        sequences = Sequences(sums, sums, batch * seq, batch * seq)
        problem = replace(make_problem(*arrays[:3]), sequences=sequences)
    memory = launch.CUDA.memory
    q, k, v, dout = arrays
    operands = make_operands(memory, problem, q, k, v, options)
    gradients = {
        f"d{x}": empty_device(y.shape, BFLOAT16) for x, y in zip("qkv", arrays, strict=False)
    }
    call = operands.having(
        out=empty_device(problem.out_shape, BFLOAT16), lse=empty_device(problem.lse_shape, FLOAT32),
        dout=dout, **gradients,
    ).viewed(memory, problem)  # fmt: skip
    flash3_wgmma.forward(problem, (0, 0), call)

    def timed(deterministic: bool) -> Callable[[], None]:
        asked = replace(problem, deterministic=deterministic)
        return lambda: flash3_wgmma_backward.backward(asked, (0, 0), call)

    return {"atomic": timed(False), "determ.": timed(True)}


def theirs(arrays: list[Any], options: dict[str, Any], name: str) -> dict[str, Callable[[], None]]:
    """Return the backward pass of PyTorch's fused call, or nothing where it is not there or cannot."""
    if name not in ("full", "causal", "mask", "dropout", "float mask"):
        return {}
    try:
        import torch  # type: ignore[import-not-found]
    except ImportError:
        return {}
    q, k, v, dout = (
        torch.from_numpy(to_host(x).view(np.int16)).view(torch.bfloat16).cuda() for x in arrays
    )
    for x in (q, k, v):
        x.requires_grad_()
    mask = options.get("attn_mask")
    if mask is not None:
        mask = torch.from_numpy(mask.astype(np.float32)).cuda()
        mask = mask.bool() if name == "mask" else mask.bfloat16()
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask, options.get("dropout_p", 0.0), options.get("is_causal", False)
    )
    return {"SDPA": lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)}


def speed(width: int, seq: int, name: str, left_out: list[str]) -> None:
    """Print a line for an option."""
    options, visited = timed_calls(seq, width)[name]
    rng, shape = np.random.default_rng(0), (TOKENS // seq, HIDDEN // width, seq, width)
    few = rng.standard_normal((4, 1 << 20), dtype=np.float32).astype(BFLOAT16)
    arrays = [to_device(np.resize(x, shape)) for x in few]
    timed = ours(arrays, options, name)
    if "atomic" in left_out:
        del timed["determ."]
    if "alone" not in left_out:
        timed |= theirs(arrays, options, name)
    seconds: dict[str, list[float]] = {one: [] for one in timed}
    for run in timed.values():
        run()  # compiles
    for _ in range(ROUNDS):
        for one, run in timed.items():
            with EventTimer() as timer:
                for _ in range(LAUNCHES):
                    run()
            seconds[one].append(timer.seconds / LAUNCHES)
    scores = math.prod(shape[:2]) * np.count_nonzero(visited) * TILE**2
    if name == "causal":
        scores = math.prod(shape[:2]) * seq**2 / 2
    work = 10e-12 * scores * width
    rates = " ".join(
        f"{one} {work / statistics.median(times):.0f}" for one, times in seconds.items()
    )
    print(f"d {width} N {seq} {name}: {rates}", flush=True)


def main() -> None:
    """Check, then measure."""
    if (missing := why_no_cuda()) is not None:
        raise SystemExit(missing)
    given, left_out = [*sys.argv[1:4], *[""] * 3][:3], sys.argv[4:]
    widths = [int(x) for x in given[0].split(",") if x] or [64, 128]
    names, modes = [x for x in given[2].split(",") if x], [False]
    if "atomic" not in left_out:
        modes.append(True)
    for width in widths:
        for name in names or list(timed_calls(1024, width)):
            right = [check(width, name, mode) for mode in modes]
            print(f"d {width} {name}: {'right' if all(right) else 'WRONG'}", flush=True)
            speed(width, int(given[1] or 8192), name, left_out)


if __name__ == "__main__":
    main()
