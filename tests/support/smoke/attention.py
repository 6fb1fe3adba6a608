"""One small case of every rung and of every option on a GPU, to be run under NVIDIA's compute-sanitizer.

compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.support.smoke.attention
compute-sanitizer --tool racecheck --error-exitcode 1 python -m tests.support.smoke.attention

Compiling takes most of the time: ``python -m tests.support.smoke.attention 2 6`` runs the second
of six parts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from kernels import BlockMask, launch, make_problem
from kernels.cuda.runtime.arrays import to_device, to_host
from kernels.problem.operands import make_operands
from kernels.problem.packed_sequences import Sequences
from kernels.problem.question import Problem
from kernels.runtime.dtypes import FLOAT16, FLOAT32, is_floating
from kernels.runtime.targets import why_no_cuda

from ..cuda_attention import RUNGS
from ..option_table import TENSOR_CORES
from ..tolerances import assert_close_arrays

#: seq_q, seq_k, head_dim and value_dim that divide no tile.
SHAPES = ((70, 33, 24, 40), (37, 101, 20, 7))
#: Likewise, with dims that the copy engine takes: multiples of 8.
HALF_SHAPES = ((70, 33, 24, 40), (37, 101, 16, 8))
HEADS = 2
#: What rungs for tensor cores run, in 16 bits: each is a kernel of its own.
IN_HALF = ("window", "softcap", "boolean mask", "dropout", "block mask")


def _two_of_three(batch: int, head: int, row: int, col: int) -> bool:
    return (row + col + head) % 3 != 0


def _half_more(score: float, batch: int, head: int, row: int, col: int) -> float:
    return score * 1.5


def _slope_of_half_more(score: float, batch: int, head: int, row: int, col: int) -> float:
    return 1.5


def options(rng: np.random.Generator, seq_q: int, seq_k: int) -> dict[str, dict[str, Any]]:
    """Return what each case of flash2 asks beside a causal mask, by name."""
    blocks = rng.integers(0, 4, (HEADS, -(-seq_q // 16), -(-seq_k // 16)))
    patterns = rng.random((2, 16, 16)) < 0.7
    bias = rng.standard_normal((HEADS, 1, seq_k), dtype=np.float32)
    return {
        "window": {"window_size": (20, 30)},
        "softcap": {"softcap": 2.0},
        "alibi": {"alibi_slopes": np.array([0.5, 0.1], np.float32)},
        "sink": {"sink": np.array([3.0, -1.0], np.float32)},
        "boolean mask": {"attn_mask": rng.random((seq_q, seq_k)) < 0.7},
        "float mask": {"attn_mask": rng.standard_normal((seq_q, seq_k), dtype=np.float32)},
        "float mask of columns": {"attn_mask": bias},
        "dropout": {"dropout_p": 0.3, "seed": 7},
        "block mask": {"block_mask": BlockMask(blocks, seq_q, seq_k, 16, patterns)},
        "mods": {"mask_mod": _two_of_three, "score_mod": (_half_more, _slope_of_half_more)},
        "everything": {
            "softcap": 2.0,
            "alibi_slopes": np.array([0.5, 0.1], np.float32),
            "sink": np.array([3.0, -1.0], np.float32),
            "attn_mask": bias,
            "dropout_p": 0.3,
            "seed": 7,
            "block_mask": BlockMask(blocks, seq_q, seq_k, 16, patterns),
            "mask_mod": _two_of_three,
            "score_mod": (_half_more, _slope_of_half_more),
        },
    }


def cases(rng: np.random.Generator) -> Iterator[tuple[str, tuple[int, ...], dict[str, Any]]]:
    """Yield name, (seq_q, seq_k, head_dim, value_dim) and options of each case."""
    for shape in SHAPES:
        for rung in RUNGS:
            yield rung, shape, {"rung": rung}
        yield "flash2 with atomics", shape, {"rung": "flash2", "deterministic": False}
        for name, asked in options(rng, *shape[:2]).items():
            yield f"flash2, {name}", shape, {"rung": "flash2", **asked}
        with_atomics = {**options(rng, *shape[:2])["everything"], "deterministic": False}
        yield "flash2, everything with atomics", shape, {"rung": "flash2", **with_atomics}
        yield "flash2, packed", shape, {"rung": "flash2", "packed": True}
    yield "flash2, few rows", (3, 1000, 64, 64), {"rung": "flash2", "causal_offset": 997}
    for rung in TENSOR_CORES:
        asked = {"rung": rung, "dtype": FLOAT16}
        for shape in HALF_SHAPES:
            yield rung, shape, asked
        shape = HALF_SHAPES[0]
        yield f"{rung} with atomics", shape, {**asked, "deterministic": False}
        for name, one in options(rng, *shape[:2]).items():
            if name in IN_HALF:
                yield f"{rung}, {name}", shape, {**asked, **one}
        yield f"{rung}, packed", shape, {**asked, "packed": True}


def results(
    target: launch.Target, problem: Problem, arrays: dict[str, Any], given: dict[str, Any]
) -> list[Any]:
    """Return out, lse and the gradients, those of a floating mask and of sinks too, on the host."""
    on_device = target is launch.CUDA
    q, k, v, dout, dlse = (to_device(x) if on_device else x for x in arrays.values())
    own = map(given.get, ("attn_mask", "alibi_slopes", "sink"))
    operands = make_operands(target.memory, problem, q, k, v, *own)
    out, lse = launch.forward(target, problem, operands)
    operands = operands.having(out=out, lse=lse, dout=dout, dlse=dlse)
    gradients = launch.backward(
        target, problem, operands, with_mask=problem.mask == "float", with_sink=problem.sink
    )
    return [x if x is None or not on_device else to_host(x) for x in (out, lse, *gradients)]


def main(part: int = 1, parts: int = 1) -> None:
    """Run every case of a part forward and backward and compare with the textbook."""
    if (missing := why_no_cuda()) is not None:
        raise SystemExit(missing)
    rng = np.random.default_rng(0)
    for name, (seq_q, seq_k, head_dim, value_dim), asked in islice(
        cases(rng), part - 1, None, parts
    ):
        sizes = ((seq_q, head_dim), (seq_k, head_dim), (seq_k, value_dim), (seq_q, value_dim))
        dtype = asked.get("dtype", FLOAT32)
        arrays = {
            name: rng.standard_normal((HEADS, *size), dtype=np.float32).astype(dtype)
            for name, size in zip(("q", "k", "v", "dout"), sizes, strict=True)
        }
        arrays["dlse"] = rng.standard_normal((HEADS, seq_q), dtype=np.float32)
        given = {key: value for key, value in asked.items() if key not in ("packed", "dtype")}
        sequences = Sequences([0, 2, 2, seq_q], [0, 3, seq_k - 2, seq_k], seq_q, seq_k)

        def ask(
            convert: Any, given: Any = given, arrays: Any = arrays, sequences: Any = sequences,
            packed: bool = "packed" in asked,
        ) -> tuple[Problem, dict[str, Any], dict[str, Any]]:  # fmt: skip
            own = {key: convert(value) for key, value in given.items()}
            operands = {key: convert(value) for key, value in arrays.items()}
            q, k, v, *_ = operands.values()
            problem = make_problem(q, k, v, is_causal=True, **own)
            return replace(problem, sequences=sequences if packed else None), operands, own

        got = results(launch.CUDA, *ask(lambda x: x))
        problem, *rest = ask(_in_float64)
        expected = results(launch.NUMPY, replace(problem, rung="naive"), *rest)
        for what, x, y in zip(
            ("out", "lse", "dq", "dk", "dv", "dmask"), got, expected, strict=True
        ):
            if y is not None:
                size = max(1.0, float(np.abs(y[np.isfinite(y)]).max(initial=0.0)))
                stored = FLOAT32 if what == "lse" else dtype
                assert_close_arrays(x, y, stored, f"{what} by {name}", size)
        print(f"{name}: right")


def _in_float64(value: Any) -> Any:
    is_float = isinstance(value, np.ndarray) and is_floating(value.dtype)
    return value.astype(np.float64) if is_float else value


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
