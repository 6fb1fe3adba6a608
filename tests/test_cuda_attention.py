"""Attention on the device: every CUDA rung against the float64 textbook, in the simulator or on a GPU."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
import minitorch
from kernels import launch
from kernels.cuda.arrays import device_view, element_strides, is_device_array, pool
from kernels.targets import IS_SIMULATOR, cuda
from minitorch import CudaBackend, Tensor, naive_attention

from .attention_strategies import Case, cases, planted, sum_to
from .tolerances import assert_close_arrays

pytestmark = [pytest.mark.simulator, pytest.mark.usefixtures("quick_barriers")]

RUNGS = [rung.name for rung in launch.CUDA.rungs]
RESULTS = ("out", "lse", "dq", "dk", "dv")
# On a GPU flash1 is compiled for each tile and each pair of dims: there are few of them.
TILES = ((1, 2), (3, 5), (4, 4), (5, 2)) if IS_SIMULATOR else ((3, 5), (5, 2))
DIMS = st.integers(1, 5) if IS_SIMULATOR else st.sampled_from([3, 4])


def tiny(*dtypes: Any) -> st.SearchStrategy[Case]:
    """Draw what the simulator, a Python thread for each of a GPU, finishes in a second."""
    leads = st.sampled_from([[], [2], [1, 2], [2, 1]])
    sizes = {"lengths": st.integers(1, 9), "dims": DIMS, "leads": leads}
    return cases(dtypes or (np.float32, np.float64), **sizes, tiles=TILES)


def on_device(array: Any) -> Any:
    """Put an array on the device, its dimensions in the order they have, NaN after each run."""
    order = sorted(range(array.ndim), key=lambda dim: -abs(array.strides[dim]))
    ordered = array.transpose(order)
    stored = np.full((*ordered.shape[:-1], ordered.shape[-1] + 1), np.nan, array.dtype)
    stored[..., :-1] = ordered
    steps = dict(zip(order, element_strides(stored), strict=True))
    return device_view(
        cuda.to_device(stored), array.shape, tuple(steps[dim] for dim in range(array.ndim))
    )


def run(case: Case, rung: str = "auto", tile: Any = None, problem: Any = None) -> dict[str, Any]:
    """Run one rung forward and backward; the results come back to the host."""
    problem = problem or case.problem(rung=rung)
    q, k, v, dout = (on_device(x) for x in (*case.operands, case.dout))
    out, lse = launch.forward(launch.CUDA, problem, q, k, v, tile)
    gradients = launch.backward(launch.CUDA, problem, dout, q, k, v, out, lse, tile)
    results = (out, lse, *gradients)
    assert all(is_device_array(x) for x in results), "a result left the device"
    return {name: x.copy_to_host() for name, x in zip(RESULTS, results, strict=True)}


def fitting(rung: str, tile: tuple[int, int]) -> tuple[int, int]:
    """Return a tile that a rung takes: flash2 reads whole vectors of four elements."""
    block_q, block_k = tile
    if rung not in ("auto", "flash2"):
        return tile
    return 4 * ((block_q + 3) // 4), 4 * ((block_k + 3) // 4)


def check(actual: Any, expected: Any, case: Case, what: str) -> None:
    """Compare; a gradient is a sum of products, so its rounding grows with the largest element."""
    finite = np.abs(expected[np.isfinite(expected)])
    size = max(1.0, float(finite.max(initial=0.0)))
    assert_close_arrays(actual, expected, case.q.dtype, what=f"{what} of {case}", size=size)


def draw(seed: int, *shapes: tuple[int, ...], dtype: Any = np.float64) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("rung", RUNGS)
@settings(max_examples=8)
@given(case=tiny())
def test_every_rung_is_the_textbook(rung: str, case: Case) -> None:
    actual = run(case, rung, fitting(rung, case.tile))
    for name, expected in case.oracle().items():
        check(sum_to(actual[name], expected.shape), expected, case, f"{name} by {rung}")


@pytest.mark.parametrize("rung", RUNGS)
@settings(max_examples=6)
@given(case=tiny(np.float64), tile=st.sampled_from(TILES))
def test_tile_size_changes_nothing(rung: str, case: Case, tile: Any) -> None:
    one, other = run(case, rung), run(case, rung, fitting(rung, tile))
    for name in RESULTS:
        check(other[name], one[name], case, f"{name} by {rung}, tile {tile}")


@settings(max_examples=8)
@given(case=tiny(), tile=st.sampled_from(TILES))
def test_atomics_add_up_to_the_textbook(case: Case, tile: Any) -> None:
    problem = case.problem(rung="flash2", deterministic=False)
    actual = run(case, tile=fitting("flash2", tile), problem=problem)
    for name, expected in case.oracle().items():
        check(sum_to(actual[name], expected.shape), expected, case, f"{name} with atomics")


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("rung", RUNGS)
@settings(max_examples=8)
@given(drawn=planted(tiny()))
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:divide by zero")
def test_nan_and_infinity_come_out_where_the_textbook_has_them(
    rung: str, deterministic: bool, drawn: tuple[Case, float]
) -> None:
    case, value = drawn
    problem = case.problem(rung=rung, deterministic=deterministic)
    case.check_what_is_not_finite(run(case, tile=fitting(rung, case.tile), problem=problem), value)


@pytest.mark.parametrize("rung", RUNGS)
@settings(max_examples=6)
@given(case=tiny(np.float32))
def test_large_scores_do_not_overflow(rung: str, case: Case) -> None:
    case.q = (case.q * 1e6).astype(np.float32)
    actual = run(case, rung)
    assert (actual.pop("lse") < np.inf).all()  # minus infinity where a row sees nothing
    assert all(np.isfinite(x).all() for x in actual.values())


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("causal", [True, False])
def test_every_element_is_written_and_none_beyond_the_last_row(rung: str, causal: bool) -> None:
    """Operands and results lie in larger arrays of NaN: one row more, one column more."""
    q, k, v, dout = draw(0, (1, 2, 5, 3), (1, 2, 7, 3), (1, 2, 7, 2), (1, 2, 5, 2))
    case = Case(q, k, v, dout, {"is_causal": causal}, (4, 3))

    def framed(array: Any) -> tuple[Any, Any]:
        stored = np.full([size + 1 for size in array.shape], np.nan)
        stored[tuple(slice(size) for size in array.shape)] = array
        whole = cuda.to_device(stored)
        return whole, device_view(whole, array.shape, element_strides(stored))

    problem = case.problem(rung=rung)
    picked = launch.CUDA.pick(problem)
    inputs = [framed(x)[1] for x in (q, k, v)]
    blanks = [np.full(s, np.nan) for s in (dout.shape, dout.shape[:3], q.shape, k.shape, v.shape)]
    wholes, results = zip(*(framed(blank) for blank in blanks), strict=True)
    out, lse, *gradients = results
    picked.forward(problem, fitting(picked.name, case.tile), *inputs, out, lse)
    picked.backward(
        problem, fitting(picked.name, case.tile), framed(dout)[1], *inputs, out, lse, *gradients
    )
    for name, whole, blank, expected in zip(
        RESULTS, wholes, blanks, case.oracle().values(), strict=True
    ):
        host = whole.copy_to_host()
        inside = tuple(slice(size) for size in blank.shape)
        check(host[inside], expected, case, f"{name} by {rung}")
        host[inside] = np.nan
        assert np.isnan(host).all(), f"{rung} wrote {name} outside of its shape {blank.shape}"


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("diagonal", [-3, 2])
def test_causal_by_any_diagonal_and_a_row_that_sees_nothing_is_zero(
    rung: str, diagonal: int
) -> None:
    q, k, v, dout = draw(1, (1, 7, 3), (1, 6, 3), (1, 6, 4), (1, 7, 4))
    case = Case(q, k, v, dout, {"is_causal": True}, (3, 4))
    shifted = kernels.Problem(**{**vars(case.problem(rung=rung)), "diagonal": diagonal})
    actual = run(case, tile=fitting(shifted.rung, case.tile), problem=shifted)
    assert all(np.isfinite(actual[name]).all() for name in ("out", "dq", "dk", "dv"))
    blind = max(-diagonal, 0)
    assert (actual["out"][:, :blind] == 0).all() and (actual["dq"][:, :blind] == 0).all()
    assert (actual["lse"][:, :blind] == -np.inf).all()
    on_host = Case(q, k, v, dout, {}, (3, 4)).problem()
    on_host = kernels.Problem(**{**vars(on_host), "diagonal": diagonal})
    out, lse = launch.forward(launch.CPU, on_host, q, k, v)
    gradients = launch.backward(launch.CPU, on_host, dout, q, k, v, out, lse)
    for name, expected in zip(RESULTS, (out, lse, *gradients), strict=True):
        finite = np.isfinite(expected)
        check(actual[name][finite], expected[finite], case, f"{name} by {rung}")


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
    with pytest.raises(TypeError, match="NumPy arrays, or arrays on one CUDA device, got ndarray"):
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


def test_a_rung_that_is_not_there_is_refused() -> None:
    q, k, v, dout = draw(4, (2, 3), (4, 3), (4, 3), (2, 3))
    with pytest.raises(ValueError, match=r"no rung is named 'flash9'.*'naive'"):
        run(Case(q, k, v, dout, {}, (1, 1)), "flash9")


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
@settings(max_examples=4)
@given(case=tiny())
def test_tensors_attend_on_the_device(rung: str, case: Case) -> None:
    expected = case.oracle()
    for name, got in attend(Tensor.flash_attention, case, rung=rung).items():
        check(got, expected[name], case, name)


def test_the_composed_baseline_attends_on_the_device() -> None:
    q, k, v, dout = draw(6, (2, 5, 3), (1, 4, 3), (2, 4, 2), (2, 5, 2))
    case = Case(q, k, v, dout, {"is_causal": True}, (1, 1))
    expected = case.oracle()
    for name, got in attend(naive_attention, case).items():
        check(got, expected[name], case, name)


def test_views_of_tensors_are_read_without_a_copy() -> None:
    x = minitorch.from_numpy(draw(7, (2, 3, 4))[0], CudaBackend).permute(1, 0, 2)
    array = x.array()
    assert tuple(array.shape) == (3, 2, 4) and is_device_array(array)
    np.testing.assert_array_equal(array.copy_to_host(), x.to_numpy())
    x[1, 1, 1] = 5.0
    assert array[1, 1, 1] == 5.0


# -- what only a GPU runs --------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dims", [(1, 1), (64, 64), (33, 80), (128, 64), (256, 256)])
def test_long_sequences_and_every_width(rung: str, dtype: Any, dims: tuple[int, int]) -> None:
    head_dim, value_dim = dims
    q, k, v, dout = draw(
        8, (2, 3, 517, head_dim), (2, 3, 390, head_dim), (2, 1, 390, value_dim),
        (2, 3, 517, value_dim), dtype=dtype,
    )  # fmt: skip
    for causal in (False, True):
        case = Case(q, k, v, dout, {"is_causal": causal}, (1, 1))
        actual = run(case, rung)
        for name, expected in case.oracle().items():
            check(sum_to(actual[name], expected.shape), expected, case, f"{name} by {rung}")


@pytest.mark.cuda
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("causal", [False, True])
def test_four_thousand_rows_and_columns(rung: str, causal: bool) -> None:
    q, k, v, dout = draw(9, *[(1, 1, 4096, 64)] * 4, dtype=np.float32)
    case = Case(q, k, v, dout, {"is_causal": causal}, (1, 1))
    actual = run(case, rung)
    for name, expected in case.oracle().items():
        check(actual[name], expected, case, f"{name} by {rung}")


@pytest.mark.cuda
@pytest.mark.parametrize("rung", RUNGS)
def test_results_are_equal_bit_for_bit_from_run_to_run(rung: str) -> None:
    q, k, v, dout = draw(9, *[(1, 4, 300, 40)] * 4, dtype=np.float32)
    case = Case(q, k, v, dout, {"is_causal": True}, (1, 1))
    first = run(case, rung)
    for _ in range(250):
        again = run(case, rung)
        assert all(np.array_equal(first[name], again[name]) for name in RESULTS)


@pytest.mark.cuda
@pytest.mark.parametrize("deterministic", [True, False])
def test_memory_is_linear_in_the_length(deterministic: bool) -> None:
    """65,536 rows and columns: S would be 128 GB; delta, lse and the gradients are a few dozen MB."""
    memory = pool()
    assert memory is not None
    heads, length, dim = 8, 65536, 64
    q, k, v, dout = draw(10, *[(heads, length, dim)] * 4, dtype=np.float32)
    problem = kernels.make_problem(q, k, v, is_causal=True, deterministic=deterministic)
    q_, k_, v_, dout_ = (cuda.to_device(x) for x in (q, k, v, dout))
    before = memory.reset_peak()
    out, lse = launch.forward(launch.CUDA, problem, q_, k_, v_)
    dq, _, _ = launch.backward(launch.CUDA, problem, dout_, q_, k_, v_, out, lse)
    results = 4 * q.nbytes  # out, dq, dk and dv
    assert memory.peak() - before <= results + 4 * heads * length * 4
    # Some rows against the textbook: row r sees the columns up to r.
    for head, row in ((0, 0), (3, 1000), (7, length - 1)):
        keys, values = (x[head, : row + 1].astype(np.float64) for x in (k, v))
        scores = keys @ q[head, row] * problem.scale
        probs = np.exp(scores - scores.max())
        probs /= probs.sum()
        expected, gradient = probs @ values, dout[head, row].astype(np.float64)
        ds = probs * (values @ gradient - expected @ gradient)
        what = f"row {row} of head {head}"
        assert_close_arrays(out.copy_to_host()[head, row], expected, np.float32, what)
        dq_row = dq.copy_to_host()[head, row]
        assert_close_arrays(dq_row, ds @ keys * problem.scale, np.float32, f"dq, {what}")


@pytest.mark.cuda
def test_a_thousand_training_steps_leak_nothing() -> None:
    memory = pool()
    assert memory is not None
    minitorch.manual_seed(0)
    model = minitorch.DecoderLM(
        11, 16, 2, 8, n_layer=1, middle_dim=16, backend=CudaBackend, dtype=np.float32
    )
    optimizer = minitorch.Adam(model.parameters(), lr=1e-2)
    ids = np.random.default_rng(0).integers(0, 11, (4, 9))
    in_use = []
    for step in range(1000):
        optimizer.zero_grad()
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
        if step % 100 == 99:
            gc.collect()
            in_use.append(memory.in_use())
    assert len(set(in_use)) == 1, f"bytes in use after each 100 steps: {in_use}"
