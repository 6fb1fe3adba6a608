"""One small case of every rung and of every option on a GPU, to be run under NVIDIA's compute-sanitizer.

python -m tests.support.smoke.attention [part of a name]
compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.support.smoke.attention
compute-sanitizer --tool racecheck --error-exitcode 1 python -m tests.support.smoke.attention flash3

Compiling takes most of the time: ``python -m tests.support.smoke.attention "flash2," 2 6`` runs the second
of six parts of the cases whose names contain "flash2,".
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from kernels import launch, make_problem
from kernels.cuda.runtime.arrays import to_device, to_host
from kernels.problem.float8 import FLOAT8
from kernels.problem.operands import make_operands
from kernels.problem.packed_sequences import Sequences
from kernels.problem.question import Problem
from kernels.runtime.dtypes import FLOAT16, FLOAT32, is_floating
from kernels.runtime.targets import why_no_cuda

from ..attention.float8 import PRECISIONS, assert_near, wanted
from ..attention.on_cuda import RUNGS
from ..attention.option_examples import option_examples
from ..tolerances import assert_close_arrays

#: seq_q, seq_k, head_dim and value_dim that divide no tile.
SHAPES = ((70, 33, 24, 40), (37, 101, 20, 7))
#: Likewise, with dims that the copy engine takes: multiples of 8.
HALF_SHAPES = ((70, 33, 24, 40), (37, 101, 16, 8))
#: Lengths that fill the stages of shared memory more than once.
LONG = (150, 700)
HEADS = 2
#: More tiles than the multiprocessors of a GPU: a block computes several.
MANY_HEADS = 300
#: What :func:`cases` gives besides the options of a call.
OWN = ("packed", "dtype", "heads")
#: What rungs for tensor cores run, in 16 bits: each is a kernel of its own.
IN_HALF = ("window", "softcap", "boolean mask", "dropout", "block mask", "mask_mod", "score_mod")


class Case(NamedTuple):
    """A call: its name, (seq_q, seq_k, head_dim, value_dim), and its options and those of :data:`OWN`."""

    name: str
    shape: tuple[int, int, int, int]
    asked: dict[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        """The options of the call."""
        return {key: value for key, value in self.asked.items() if key not in OWN}


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """Yield the cases of all rungs of the device."""
    for shape in SHAPES:
        for rung in RUNGS:
            yield Case(rung, shape, {"rung": rung})
        yield Case("flash2 with atomics", shape, {"rung": "flash2", "deterministic": False})
        everything = {"rung": "flash2", **option_examples(HEADS, *shape[:2], FLOAT32)["everything"]}
        yield Case("flash2, everything", shape, everything)
    shape = SHAPES[0]
    everything = {"rung": "flash2", **option_examples(HEADS, *shape[:2], FLOAT32)["everything"]}
    yield Case("flash2, everything with atomics", shape, {**everything, "deterministic": False})
    for name, asked in option_examples(HEADS, *shape[:2], FLOAT32).items():
        if name != "everything":
            yield Case(f"flash2, {name}", shape, {"rung": "flash2", **asked})
    yield Case("flash2, packed", shape, {"rung": "flash2", "packed": True})
    yield Case("flash2, few rows", (3, 1000, 64, 64), {"rung": "flash2", "causal_offset": 997})
    on_tensor_cores = [
        rung for rung in launch.CUDA.rungs
        if FLOAT16 in rung.dtypes and rung.why_no_device() is None
    ]  # fmt: skip
    for one in on_tensor_cores:
        yield from in_half(rng, one.name)
        if one.forward_float8:
            yield from in_float8(one.name)


def in_half(rng: np.random.Generator, rung: str) -> Iterator[Case]:
    """Yield the cases of a rung in 16 bits."""
    asked: dict[str, Any] = {"rung": rung, "dtype": FLOAT16}
    for shape in HALF_SHAPES:
        yield Case(rung, shape, asked)
    shape, (head_dim, value_dim) = HALF_SHAPES[0], HALF_SHAPES[0][2:]
    long, shifted = (*LONG, head_dim, value_dim), {"causal_offset": LONG[1] - LONG[0]}
    for name, more in {"": {}, " with atomics": {"deterministic": False}}.items():
        yield Case(f"{rung}{name}, long", long, {**asked, **shifted, **more})
        yield Case(f"{rung}{name}, many heads", shape, {**asked, **more, "heads": MANY_HEADS})
    for name, one in option_examples(HEADS, *shape[:2], FLOAT32).items():
        if name in IN_HALF:
            yield Case(f"{rung}, {name}", shape, {**asked, **one})
    yield Case(f"{rung}, packed", shape, {**asked, "packed": True})


def in_float8(rung: str) -> Iterator[Case]:
    """Yield the cases of a rung with float8 products."""
    shifted = {"causal_offset": LONG[1] - LONG[0]}
    asked: dict[str, Any] = {"rung": rung, "dtype": FLOAT16}
    for precision in (PRECISIONS[0], PRECISIONS[-1]):
        own = {**asked, "precision": precision}
        yield Case(f"{rung}, {precision}", (*LONG, 64, 64), {**own, **shifted})
        yield Case(
            f"{rung}, {precision}, many heads", (70, 33, 64, 64), {**own, "heads": MANY_HEADS}
        )


def results(
    target: launch.Target, problem: Problem, arrays: dict[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    """Return out, lse and the gradients, those of a floating mask and of sinks too, on the host.

    With float8 products there are no gradients.
    """
    on_device = target is launch.CUDA
    q, k, v, dout, dlse = (to_device(x) if on_device else x for x in arrays.values())
    operands = make_operands(target.memory, problem, q, k, v, given)
    out, lse, rest = launch.forward(target, problem, operands)
    found = {"out": out, "lse": lse}
    if problem.precision not in FLOAT8:
        operands = operands.having(out=out, lse=lse, lse_rest=rest, dout=dout, dlse=dlse)
        found |= launch.backward(
            target, problem, operands, with_mask=problem.mask == "float", with_sink=problem.sink
        )._asdict()
    return {name: to_host(x) if on_device else x for name, x in found.items() if x is not None}


def check(case: Case, rng: np.random.Generator, target: launch.Target = launch.CUDA) -> None:
    """Run a case forward and backward, and compare with the textbook.

    Raises:
        AssertionError: If a result is wrong.
    """
    (seq_q, seq_k, head_dim, value_dim), given = case.shape, case.options
    sizes = ((seq_q, head_dim), (seq_k, head_dim), (seq_k, value_dim), (seq_q, value_dim))
    dtype, heads = case.asked.get("dtype", FLOAT32), case.asked.get("heads", HEADS)
    arrays = {
        name: rng.standard_normal((heads, *size), dtype=np.float32).astype(dtype)
        for name, size in zip(("q", "k", "v", "dout"), sizes, strict=True)
    }
    arrays["dlse"] = rng.standard_normal((heads, seq_q), dtype=np.float32)
    sequences = Sequences([0, 2, 2, seq_q], [0, 3, seq_k - 2, seq_k], seq_q, seq_k)

    def ask(convert: Any) -> tuple[Problem, dict[str, Any], dict[str, Any]]:
        own = {key: convert(value) for key, value in given.items()}
        operands = {key: convert(value) for key, value in arrays.items()}
        q, k, v, *_ = operands.values()
        problem = make_problem(q, k, v, is_causal=True, **own)
        if "packed" in case.asked:
            problem = replace(problem, sequences=sequences)
        return problem, operands, own

    got = results(target, *ask(lambda x: x))
    if "precision" in given:
        q, k, v, *_ = arrays.values()
        visible = np.tri(seq_q, seq_k, given.get("causal_offset", 0), dtype=bool)
        right = wanted(q, k, v, given["precision"], visible=visible)
        assert_near(got["out"], got["lse"], right, dtype)
        return
    problem, *rest = ask(_in_float64)
    expected = results(launch.NUMPY, replace(problem, rung="naive"), *rest)
    assert got.keys() == expected.keys(), f"{list(got)}, not {list(expected)}"
    for what, y in expected.items():
        size = max(1.0, float(np.abs(y[np.isfinite(y)]).max(initial=0.0)))
        stored = FLOAT32 if what in ("lse", "dsink") else dtype
        assert_close_arrays(got[what], y, stored, f"{what} by {case.name}", size)


def main(text: str = "", part: str = "1", parts: str = "1") -> None:
    """Check the cases whose names contain a text, or one of several parts of them."""
    if (missing := why_no_cuda()) is not None:
        raise SystemExit(missing)
    rng = np.random.default_rng(0)
    chosen = (case for case in cases(rng) if text in case.name)
    for case in islice(chosen, int(part) - 1, None, int(parts)):
        check(case, rng)
        print(f"{case.name}: right", flush=True)


def _in_float64(value: Any) -> Any:
    is_float = isinstance(value, np.ndarray) and is_floating(value.dtype)
    return value.astype(np.float64) if is_float else value


if __name__ == "__main__":
    main(*sys.argv[1:])
