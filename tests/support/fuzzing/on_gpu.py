"""Draw calls of attention on a GPU: rungs, dtypes, options, lengths, layouts, and libraries of the arrays.

    python -m tests.support.fuzzing.on_gpu --seed 1 --seconds 60

``project/measure.py fuzz_gpu`` runs several of these side by side.  A kind of call fixes the compiled
kernels; some calls of each kind are drawn and compared with the textbook in float64, fp16 and bf16 by what
rounding P, dS and the results allows.  Every operand has a layout of its own, with NaN in its gaps.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from typing import Any, NamedTuple

import cupy
import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from kernels import launch
from kernels.interop.libraries import as_array
from kernels.operand_types import as_operand
from kernels.runtime.dtypes import BFLOAT16, is_half

from ..attention.on_cuda import PACKED_FEATURES, Packed, by_tensors, in_layouts, packed_cases
from ..attention.strategies import FEATURES, Case, cases
from ..layouts import in_order, memory_of, on_device
from . import extreme

#: Calls of a kind.
EACH = 50
#: Rung and how often it is drawn.
RUNGS = {"auto": 4, "flash3_wgmma": 5, "flash2_mma": 5, "flash2": 3, "naive": 2, "flash1": 1}
ENTRIES = {"arrays": 6, "packed": 2, "decoding": 1, "tensors": 1}
LENGTHS = st.sampled_from([1, 2, 3, 5, 16, 17, 40, 64, 70, 130, 257])
LEADS = st.sampled_from([[], [2], [3], [1, 2], [2, 1], [2, 3], [2, 2, 2]])
#: What a rung that cannot run a call says.
REFUSAL = "cannot run"


class Kind(NamedTuple):
    """What the kernels of a call are compiled for."""

    entry: str
    rung: str
    dtype: np.dtype[Any]
    dim: int
    features: frozenset[str]
    deterministic: bool
    extreme: bool


def draw_kind(rng: np.random.Generator) -> Kind:
    """Draw a kind of call that its rung takes."""

    def one(weights: dict[str, int]) -> str:
        return str(rng.choice([name for name, weight in weights.items() for _ in range(weight)]))

    entry, rung = one(ENTRIES), one(RUNGS)
    halves, wide = [np.dtype(np.float16), BFLOAT16], [np.dtype(np.float32), np.dtype(np.float64)]
    dtypes = {"flash3_wgmma": halves, "flash2_mma": [*halves, wide[0]]}.get(rung, halves + wide)
    dims = [8, 16, 40, 64, 64, 128, 128, 80, 256]
    dims += [] if rung == "flash3_wgmma" else [3, 33]
    names = PACKED_FEATURES if entry == "packed" else FEATURES
    count = int(rng.choice([0, 0, 1, 1, 1, 2]))
    features = frozenset(map(str, rng.choice(names, count, replace=False)))
    if entry == "packed" and rung == "naive":
        rung = "auto"
    if entry == "tensors":
        features -= {"dlse"}
    if entry == "decoding":
        features = frozenset()
    if {"bool mask", "float mask"} <= features:
        features -= {"bool mask"}
    dtype = dtypes[rng.integers(len(dtypes))]
    dim, deterministic, is_extreme = (
        int(rng.choice(dims)),
        bool(rng.integers(4)),
        rng.random() < 0.4,
    )
    if is_extreme and "float mask" in features:
        features -= extreme.NOT_MASKED
    return Kind(entry, rung, dtype, dim, features, deterministic, is_extreme)


def with_torch(array: np.ndarray[Any, Any]) -> Any:
    """Return PyTorch's tensor with an array's elements and strides, on the GPU."""
    buffer, strides, offset = memory_of(array)
    if array.dtype == BFLOAT16:
        memory = torch.from_numpy(buffer.view(np.int16)).cuda().view(torch.bfloat16)
    else:
        memory = torch.from_numpy(buffer).cuda()
    return torch.as_strided(memory, array.shape, strides, offset)


def with_cupy(array: np.ndarray[Any, Any]) -> Any:
    """Return CuPy's array with an array's elements and strides."""
    buffer, _, offset = memory_of(array)
    memory = cupy.asarray(buffer)
    return cupy.ndarray(
        array.shape, array.dtype, memory.data + offset * array.itemsize, array.strides
    )


LIBRARIES = {"torch": with_torch, "cupy": with_cupy, "numba": on_device}


def placed(data: Any, dtype: np.dtype[Any]) -> Any:
    """Draw a library, and return what puts arrays of the host on the device as that library's."""
    name = data.draw(st.sampled_from(sorted(LIBRARIES)))

    def put(array: np.ndarray[Any, Any]) -> Any:
        chosen = name
        if chosen == "torch" and min(array.strides, default=0) < 0:
            chosen = "cupy"  # PyTorch has no negative strides
        if chosen == "cupy" and array.dtype == BFLOAT16:
            chosen = "numba"  # CuPy has no bfloat16
        return LIBRARIES[chosen](array)

    return put


def draw_case(kind: Kind, data: Any) -> Case:
    """Draw a call of a kind."""
    dtypes, dims = (kind.dtype,), st.just(kind.dim)
    if kind.entry == "packed":
        drawn = in_layouts(packed_cases(dtypes, LENGTHS, dims, kind.features))
    elif kind.entry == "decoding":
        drawn = cases(dtypes, st.integers(1, 4), dims, LEADS, keys=st.integers(300, 3000))
    else:
        drawn = cases(dtypes, LENGTHS, dims, LEADS, features=kind.features).map(_large)
    if kind.extreme:
        drawn = (
            extreme.scaled(drawn) | extreme.masked(drawn)
            if "float mask" in kind.features
            else extreme.scaled(drawn)
        )
    return data.draw(drawn)


def _large(case: Case) -> Case:
    """Return a case whose scores are large, and not larger with the dim."""
    if "scale" in case.options:
        case.options["scale"] *= 2 * case.q.shape[-1] ** -0.5
    return case


def attend(case: Case, kind: Kind, put: Any) -> dict[str, Any]:
    """Make a call forward and backward; return the results by name, where they are."""
    options = {"rung": kind.rung, "deterministic": kind.deterministic}
    if kind.extreme and kind.entry != "tensors":  # public functions have no rest of lse
        return case.run(launch.CUDA, place=lambda x: as_operand(put(x)), **options)
    if kind.entry != "tensors":
        return {name: as_array(x) for name, x in case.call(put, **options).items()}
    return {name: t.array() for name, t in by_tensors(case, put, **options).items()}


def attempt(kind: Kind, data: Any) -> str:
    """Draw a call and check it; return "right" or "refused"."""
    case = draw_case(kind, data)
    try:
        results = attend(case, kind, placed(data, kind.dtype))
    except ValueError as error:
        if kind.rung == "auto" or REFUSAL not in str(error):
            raise AssertionError(f"{error!r} for {case}") from error
        return "refused"
    if kind.entry in ("arrays", "decoding"):
        of = {"out": case.q, "dq": case.q, "dk": case.k, "dv": case.v}
        for name, operand in of.items():
            if results[name].ndim == operand.ndim:
                assert in_order(results[name], operand), f"{name}: {results[name].strides}, {case}"
    actual = {name: x.copy_to_host() for name, x in results.items()}
    if kind.extreme:
        extreme.check(case, actual, "by the GPU")
    elif is_half(kind.dtype) and not isinstance(case, Packed):
        case.check_halves(actual, "by the GPU")
    else:
        case.check(actual, "by the GPU")
    return "right"


def run(number: int, first: int) -> tuple[Kind, Counter[str], str | None]:
    """Draw the calls of one kind; return it, how they ended, and what was wrong."""
    kind = draw_kind(np.random.default_rng((first, number)))
    counts: Counter[str] = Counter()

    @seed(first * 100_000 + number)
    @settings(
        max_examples=EACH, phases=[Phase.generate], database=None, deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        report_multiple_bugs=False,
    )  # fmt: skip
    @given(data=st.data())
    def draws(data: Any) -> None:
        counts[attempt(kind, data)] += 1

    try:
        draws()
    except Exception as error:  # of any kind: it is what the draws are for
        counts["wrong"] += 1
        return (
            kind,
            counts,
            f"kind {number} of seed {first}, {kind}: {type(error).__name__}: {error}",
        )
    return kind, counts, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", type=int, help="the number of one kind")
    args = parser.parse_args()
    begin, number = time.perf_counter(), args.only or 0
    while time.perf_counter() - begin < args.seconds:
        kind, counts, failure = run(number, args.seed)
        named = kind._replace(dtype=str(kind.dtype), features=sorted(kind.features))._asdict()  # type: ignore[arg-type]
        print(json.dumps({"kind": named, "counts": counts, "failure": failure}), flush=True)
        number += 1
        if args.only is not None:
            break


if __name__ == "__main__":
    main()
