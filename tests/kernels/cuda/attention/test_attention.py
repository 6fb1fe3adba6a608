"""Attention on the device: every CUDA rung against the float64 textbook, emulated or real."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels
import minitorch
from kernels import launch
from kernels.cuda.runtime.arrays import device_view, element_strides, is_device_array
from kernels.problem.operands import Operands
from kernels.runtime.dtypes import FLOAT32, FLOAT64
from kernels.runtime.targets import EMULATED, cuda
from minitorch import CudaBackend

from ....support.attention.large_scores import NAMES, large_case
from ....support.attention.on_cuda import (
    LATER_OPTIONS,
    RESULTS,
    RUNGS,
    check,
    draw,
    fitting,
    forwards,
    run,
)
from ....support.attention.strategies import Case
from ....support.fuzzing.extreme import check as check_extreme
from ....support.fuzzing.extreme import settled
from ....support.layouts import on_device
from ....support.tolerances import assert_close_arrays

pytestmark = pytest.mark.emulated


def framed(array: Any) -> tuple[Any, Any]:
    """Put an array on the device inside a larger one of NaN; return the larger one and the view."""
    stored = np.full([size + 1 for size in array.shape], np.nan)
    stored[tuple(slice(size) for size in array.shape)] = array
    whole = cuda.to_device(stored)
    return whole, device_view(whole, array.shape, element_strides(stored))


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("causal", [True, False])
def test_every_element_is_written_and_none_beyond_the_last_row(rung: str, causal: bool) -> None:
    """Operands and results lie in larger arrays of NaN: one row more, one column more."""
    q, k, v, dout = draw(0, (1, 2, 5, 3), (1, 2, 7, 3), (1, 2, 7, 2), (1, 2, 5, 2))
    case = Case(q, k, v, dout, {"is_causal": causal}, (4, 3))
    problem = case.problem(rung=rung)
    picked = launch.CUDA.pick(problem)
    rows = dout.shape[:3]
    names = *RESULTS, "lse_rest"
    shapes = dict(zip(names, (dout.shape, rows, q.shape, k.shape, v.shape, rows), strict=True))
    blanks = [np.full(shape, np.nan) for shape in shapes.values()]
    wholes, results = zip(*(framed(blank) for blank in blanks), strict=True)
    inputs = {
        name: framed(x)[1] for name, x in zip(("q", "k", "v", "dout"), (q, k, v, dout), strict=True)
    }
    operands = Operands(**inputs, **dict(zip(shapes, results, strict=True)))
    viewed = operands.viewed(launch.CUDA.memory, problem)
    picked.forward(problem, fitting(picked.name, case.tile), viewed)
    picked.backward(problem, fitting(picked.name, case.tile), viewed)
    wanted = {**case.oracle(), "lse_rest": np.zeros(rows)}
    for name, whole, blank in zip(shapes, wholes, blanks, strict=True):
        host = whole.copy_to_host()
        inside = tuple(slice(size) for size in blank.shape)
        check(host[inside], wanted[name], case, f"{name} by {rung}")
        host[inside] = np.nan
        assert np.isnan(host).all(), f"{rung} wrote {name} outside of its shape {blank.shape}"


@pytest.mark.parametrize("causal", [True, False])
def test_tangents_are_written_whole_and_read_within_their_shapes(causal: bool) -> None:
    """As above, for the JVP and the double backward."""
    shapes = (1, 2, 5, 3), (1, 2, 7, 3), (1, 2, 7, 2)
    q, k, v, dout = draw(0, *shapes, (1, 2, 5, 2))
    case = Case(q, k, v, dout, {"is_causal": causal}, (4, 3))
    tangents = draw(1, *shapes)
    wanted = {**case.derive(tangents, launch.NUMPY, "naive"), "lse_rest": np.zeros(dout.shape[:3])}
    names = "q", "k", "v", "q_tangent", "k_tangent", "v_tangent", "dout"
    arrays = zip(names, (q, k, v, *tangents, dout), strict=True)
    inputs = {name: framed(array)[1] for name, array in arrays}
    frames = {name: framed(np.full(x.shape, np.nan)) for name, x in wanted.items()}
    problem = case.problem(rung="flash2")
    picked = launch.CUDA.pick(problem, tangent=True).tangents
    results = {name: view for name, (_, view) in frames.items()}
    viewed = Operands(**inputs, **results).viewed(launch.CUDA.memory, problem)
    for fill in (picked.jvp, picked.double_backward):
        fill(problem, fitting("flash2", case.tile), viewed)
    for name, (whole, _) in frames.items():
        host = whole.copy_to_host()
        inside = tuple(map(slice, wanted[name].shape))
        check(host[inside], wanted[name], case, name)
        host[inside] = np.nan
        assert np.isnan(host).all(), f"{name} was written outside of its shape"


def test_every_rung_is_available_here() -> None:
    available = kernels.available_rungs()
    assert all(available[rung] is None for rung in RUNGS)
    if EMULATED:
        for rung in ("flash2_mma", "flash3_wgmma"):
            assert "needs compute capability" in str(available[rung])


@pytest.mark.parametrize(
    ("rung", "reason"),
    [
        ("naive", "needs 16384 threads a block, the most is 1024"),
        ("flash1", "bytes of shared memory, a block has"),
        ("auto", "naive: tile .* threads a block.*no rung of the cuda target can"),
    ],
)
def test_a_tile_that_does_not_fit_is_refused(rung: str, reason: str) -> None:
    q, k, v, dout = draw(5, (2, 3), (4, 3), (4, 3), (2, 3))
    with pytest.raises(ValueError, match=reason):
        run(Case(q, k, v, dout, {}, (1, 1)), rung, (512, 512))


def test_views_of_tensors_are_read_without_a_copy() -> None:
    x = minitorch.from_numpy(draw(7, (2, 3, 4))[0], CudaBackend).permute(1, 0, 2)
    array = x.array()
    assert tuple(array.shape) == (3, 2, 4) and is_device_array(array)
    np.testing.assert_array_equal(array.copy_to_host(), x.to_numpy())
    x[1, 1, 1] = 5.0
    assert array[1, 1, 1] == 5.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_rows_of_large_scores_have_their_probabilities(rung: str, name: str) -> None:
    dtype = FLOAT64 if name in ("softcap", "a window") else FLOAT32
    # The last row of lengths has parts that weigh as many keys as they have.
    for keys in (9, 27) if (rung, name) == ("flash2", "a row of a large negative number") else (9,):
        case = large_case(name, dtype, 3, keys, 4)
        if rung == "flash1" and case.options.keys() & {*LATER_OPTIONS, "window_size"}:
            pytest.skip("flash1 has fewer options")
        spoiled = [on_device(np.full(case.v.size, np.nan)) for _ in range(8)]
        del spoiled  # results get this memory
        case.check(run(case, rung, (4, 4)), f"by {rung}")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_rows_of_large_scores_have_the_tangents_of_the_textbook(name: str) -> None:
    case = large_case(name, FLOAT64 if name in ("softcap", "a window") else FLOAT32, 3, 9, 4)
    tangents = draw(2, *[x.shape for x in case.operands], dtype=case.q.dtype)
    found = case.derive(tangents, launch.CUDA, "flash2", (4, 4), forwards)
    wide = [tangent.astype(FLOAT64) for tangent in tangents]
    for kind, wanted in case.in_dtype(FLOAT64).derive(wide, launch.NUMPY, "naive").items():
        largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=1.0)
        # The textbook itself, in float32, uses 0.9 of the tolerance for dk under alibi.
        size = max(2 * float(largest), case.cancelling(kind) / 100)
        got, what = found[kind].copy_to_host(), f"{kind} of {case}"
        assert_close_arrays(got, wanted, case.q.dtype, what, size)


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
def test_moving_all_keys_alike_moves_no_output(dtype: Any) -> None:
    """Every score of a row has the same tangent, which a softmax does not see, however large it is."""
    q, k, v = draw(3, *[(1, 2, size, 4) for size in (6, 9, 9)], dtype=dtype)
    k_tangent = np.full_like(k, 1e4)
    arrays = [None if x is None else on_device(x) for x in (q, k, v, None, k_tangent, None)]
    _, out_tangent, _, lse_tangent = kernels.flash_attention_jvp(*arrays, rung="flash2")
    np.testing.assert_array_equal(out_tangent.copy_to_host(), 0.0)
    wanted = 0.5 * (q @ np.swapaxes(k_tangent, -1, -2))[..., 0]
    np.testing.assert_allclose(lse_tangent.copy_to_host(), wanted, 1e-5, 1e-2)


@pytest.mark.parametrize("rung", RUNGS)
def test_the_gradient_of_a_mask_is_of_scores_of_its_own(rung: str) -> None:
    q, k, v, dout = draw(0, (2, 6, 5), (2, 9, 5), (2, 9, 4), (2, 6, 4))
    options = {"attn_mask": np.random.default_rng(1).standard_normal((6, 9))}
    if rung != "flash1":
        options["sink"] = np.array([1.0, -1.0])
    case = settled(Case(q * 2.0**16, k * 2.0**16, v, dout, options, (4, 4)).in_dtype(FLOAT32))
    check_extreme(case, run(case, rung, (4, 4)), f"by {rung}")
