"""Attention on CUDA where scores are so large that lse has lost the sums of rows, or all fractions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels import launch
from kernels.cuda.runtime.arrays import to_device, to_host
from kernels.runtime.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

from ....support.attention.large_scores import NAMES, large_case
from ....support.attention.on_cuda import LATER_OPTIONS, RUNGS, on_device
from ....support.attention.strategies import Case
from ....support.fuzzing.extreme import check, settled

#: Dtype, rung and options of calls on a GPU.
ON_GPU: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "flash2": (FLOAT32, "flash2", {}),
    "flash2_mma in bfloat16": (BFLOAT16, "flash2_mma", {}),
    "flash2_mma in float16": (FLOAT16, "flash2_mma", {}),
    "flash2_split": (FLOAT32, "flash2_split", {"precision": "float32"}),
}


def _check(case: Case, rung: str, **more: Any) -> None:
    spoiled = [to_device(np.full(case.v.size, np.nan)) for _ in range(8)]
    del spoiled  # results get this memory
    found = case.run(launch.CUDA, rung, place=on_device, **more)
    results = {name: to_host(x) for name, x in found.items()}
    case.check(results, f"by {rung}")


@pytest.mark.simulator
@pytest.mark.usefixtures("quick_barriers")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_rows_of_large_scores_have_their_probabilities(rung: str, name: str) -> None:
    dtype = FLOAT64 if name in ("softcap", "a window") else FLOAT32
    case = large_case(name, dtype, 3, 9, 4)
    if rung == "flash1" and case.options.keys() & {*LATER_OPTIONS, "window_size"}:
        pytest.skip("flash1 has fewer options")
    _check(case, rung, tile=(4, 4))


@pytest.mark.simulator
@pytest.mark.usefixtures("quick_barriers")
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_parts_of_a_row_of_large_scores_weigh_as_many_keys_as_they_have() -> None:
    case = large_case("a row of a large negative number", FLOAT32, 3, 27, 4)
    _check(case, "flash2", tile=(4, 4))


@pytest.mark.simulator
@pytest.mark.usefixtures("quick_barriers")
@pytest.mark.parametrize("rung", RUNGS)
def test_the_gradient_of_a_mask_is_of_scores_of_its_own(rung: str) -> None:
    rng = np.random.default_rng(0)
    shapes = (2, 6, 5), (2, 9, 5), (2, 9, 4), (2, 6, 4)
    q, k, v, dout = (rng.standard_normal(shape) for shape in shapes)
    options = {"attn_mask": rng.standard_normal((6, 9))}
    if rung != "flash1":
        options["sink"] = np.array([1.0, -1.0])
    case = Case(q * 2.0**16, k * 2.0**16, v, dout, options, (4, 4)).in_dtype(FLOAT32)
    case = settled(case)
    found = case.run(launch.CUDA, rung, (4, 4), place=on_device)
    check(case, {name: to_host(x) for name, x in found.items()}, f"by {rung}")


@pytest.mark.cuda
@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "by atomics"])
@pytest.mark.parametrize(("n", "keys"), [(40, 40), (300, 300), (4, 1100)])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ON_GPU)
def test_rows_of_large_scores_have_their_probabilities_on_a_gpu(
    kind: str, name: str, n: int, keys: int, deterministic: bool
) -> None:
    dtype, rung, own = ON_GPU[kind]
    case = large_case(name, dtype, n, keys, 64)
    _check(case, rung, deterministic=deterministic, **own)
