"""Attention on the device: every CUDA rung against the float64 textbook, in the simulator or on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels
import minitorch
from kernels import launch
from kernels.cuda.runtime.arrays import device_view, element_strides, is_device_array
from kernels.problem.operands import Operands
from kernels.runtime.targets import IS_SIMULATOR, cuda
from minitorch import CudaBackend, Tensor

from ....support.attention.on_cuda import (
    RESULTS,
    RUNGS,
    TILES,
    check,
    draw,
    fitting,
    run,
    taken_by,
    tiny,
)
from ....support.attention.strategies import FEATURES, Case, planted
from ....support.examples import at_most
from ....support.layouts import on_device
from ....support.tolerances import assert_close_arrays

pytestmark = [pytest.mark.simulator, pytest.mark.usefixtures("quick_barriers")]


@pytest.mark.parametrize("rung", RUNGS)
@at_most(6)
@given(case=tiny())
def test_every_rung_is_the_textbook(rung: str, case: Case) -> None:
    case = taken_by(rung, case)
    case.check(run(case, rung, fitting(rung, case.tile)), f"by {rung}")


# The tiles of naive are those of its products, and all of these are rounded up to 16 x 16 there.
@pytest.mark.parametrize("rung", ["flash2", "flash1"])
@at_most(6)
@given(
    case=tiny(np.float64, features=FEATURES if IS_SIMULATOR else ()), tile=st.sampled_from(TILES)
)
def test_tile_size_changes_nothing(rung: str, case: Case, tile: Any) -> None:
    case = taken_by(rung, case)
    one, other = run(case, rung), run(case, rung, fitting(rung, tile))
    for name in one:
        check(other[name], one[name], case, f"{name} by {rung}, tile {tile}")


@at_most(8)
@given(case=tiny(features=FEATURES if IS_SIMULATOR else ()), tile=st.sampled_from(TILES))
def test_atomics_add_up_to_the_textbook(case: Case, tile: Any) -> None:
    case.check(run(case, "flash2", fitting("flash2", tile), deterministic=False), "with atomics")


@pytest.mark.parametrize(
    ("rung", "deterministic"), [*((rung, True) for rung in RUNGS), ("flash2", False)]
)
@at_most(8)
@given(drawn=planted(tiny()))
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:divide by zero")
def test_nan_and_infinity_come_out_where_the_textbook_has_them(
    rung: str, deterministic: bool, drawn: tuple[Case, float]
) -> None:
    case, value = taken_by(rung, drawn[0]), drawn[1]
    actual = run(case, rung, fitting(rung, case.tile), deterministic=deterministic)
    case.check_what_is_not_finite(actual, value)


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


# -- arrays in, arrays out ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_public_functions_take_device_arrays_and_undo_their_broadcasting(dtype: Any) -> None:
    q, k, v, dout = draw(
        2, (2, 1, 1, 3, 2), (2, 4, 2), (2, 2, 1, 4, 3), (2, 2, 2, 3, 3), dtype=dtype
    )
    v = v.transpose(1, 0, 2, 3, 4)  # two leading dimensions that no single stride steps through
    case = Case(q, k, v, dout, {"is_causal": True}, (3, 4))
    arrays = [on_device(x) for x in (q, k, v, dout)]
    out, lse = kernels.flash_attention_forward(*arrays[:3], is_causal=True)
    gradients = kernels.flash_attention_backward(arrays[3], *arrays[:3], out, lse, is_causal=True)
    for (name, expected), got in zip(case.oracle().items(), (out, lse, *gradients), strict=True):
        assert is_device_array(got) and got.dtype == dtype
        check(got.copy_to_host(), expected, case, name)


def test_arrays_of_two_kinds_are_refused() -> None:
    q = np.ones((2, 3))
    with pytest.raises(TypeError, match=r"got ndarray on the host; \w+ on a CUDA device"):
        kernels.flash_attention_forward(q, on_device(q), q)


@pytest.mark.cuda
def test_arrays_of_other_libraries_are_read_where_they_lie() -> None:
    class Foreign:
        def __init__(self, array: Any):
            self.__cuda_array_interface__ = array.__cuda_array_interface__
            self.owner = array

    q, k, v = draw(3, (2, 5, 3), (2, 4, 3), (2, 4, 3))
    foreign = [Foreign(on_device(x)) for x in (q, k, v)]
    out, _ = kernels.flash_attention_forward(*foreign)
    expected, _ = kernels.flash_attention_forward(q, k, v)
    assert_close_arrays(out.copy_to_host(), expected, np.float64)


# -- rungs ----------------------------------------------------------------------------------------


def test_every_rung_is_available_here() -> None:
    available = kernels.available_rungs()
    assert all(available[rung] is None for rung in RUNGS)
    if IS_SIMULATOR:
        for rung in ("flash2_mma", "flash3_wgmma"):
            assert available[rung] == "numba's simulator has no tensor cores"


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


# -- tensors --------------------------------------------------------------------------------------


def attend(attention: Any, case: Case, **more: Any) -> dict[str, Any]:
    """Run one attention on tensors of the CUDA backend, forward and backward."""
    tensors = [minitorch.from_numpy(x, CudaBackend, requires_grad=True) for x in case.operands]
    out = attention(*tensors, **case.options, **more)
    out.backward(minitorch.from_numpy(case.dout, CudaBackend))
    results = {"out": out, **{f"d{n}": t.grad for n, t in zip("qkv", tensors, strict=True)}}
    assert all(is_device_array(t._tensor._storage) for t in results.values())
    return {name: t.to_numpy() for name, t in results.items()}


@pytest.mark.parametrize("rung", ["auto", *RUNGS])
@at_most(4)
@given(case=tiny())
def test_tensors_attend_on_the_device(rung: str, case: Case) -> None:
    case = taken_by(rung, case)
    expected = case.oracle()
    for name, got in attend(Tensor.flash_attention, case, rung=rung).items():
        check(got, expected[name], case, name)


def test_views_of_tensors_are_read_without_a_copy() -> None:
    x = minitorch.from_numpy(draw(7, (2, 3, 4))[0], CudaBackend).permute(1, 0, 2)
    array = x.array()
    assert tuple(array.shape) == (3, 2, 4) and is_device_array(array)
    np.testing.assert_array_equal(array.copy_to_host(), x.to_numpy())
    x[1, 1, 1] = 5.0
    assert array[1, 1, 1] == 5.0


HALVES = [pytest.param(None, np.float16, marks=pytest.mark.cuda, id="half")]


@pytest.mark.parametrize(("rung", "dtype"), [*((rung, np.float32) for rung in RUNGS), *HALVES])
def test_results_lie_as_the_operands_so_that_heads_are_joined_without_a_copy(
    rung: str | None, dtype: Any
) -> None:
    """Heads that were split off by a view, (batch, seq, heads, dim), come back without a launch."""
    shape = (2, 4, 2, 3) if rung else (2, 70, 3, 64)
    options: Any = {"rung": rung or "auto"}
    arrays, results = draw(9, *[shape] * 4, dtype=dtype), []
    for is_split in (True, False):
        whole = [minitorch.from_numpy(x, CudaBackend, requires_grad=True) for x in arrays[:3]]
        heads = [x.permute(0, 2, 1, 3) for x in whole]
        heads = heads if is_split else [x.contiguous() for x in heads]
        out = heads[0].flash_attention(*heads[1:], is_causal=True, **options).permute(0, 2, 1, 3)
        assert out._tensor.is_contiguous() == is_split
        out.backward(minitorch.from_numpy(arrays[3], CudaBackend))
        gradients = [x.grad for x in whole if x.grad is not None]
        assert not is_split or all(x._tensor.is_contiguous() for x in gradients)
        results.append([out.to_numpy(), *(x.to_numpy() for x in gradients)])
        assert len(gradients) == 3
    for split, joined in zip(*results, strict=True):
        np.testing.assert_array_equal(split, joined)
