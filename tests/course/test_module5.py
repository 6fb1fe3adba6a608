"""Module 5: FlashAttention, from the softmax of a vector to a transformer that learns.

Nothing here compares with the library: the textbook stands in a few lines below, and gradients are
measured by central differences, so that no task leans on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from course.kernel_text import faults
from numba import types
from pytest import mark

import kernels
import minitorch
from kernels import launch
from kernels.common.philox import PLAIN as PHILOX
from kernels.common.philox import attention_threshold, keep_scale
from kernels.cuda.attention import flash1
from kernels.cuda.attention.options.score_functions import make_score_functions
from kernels.cuda.attention.practice import algorithm0, make_flash1_rows
from kernels.cuda.runtime.kernel import device_function
from kernels.problem.operands import make_operands
from kernels.reference.lines import (
    Rows,
    add_tile,
    finished,
    merged,
    page_places,
    softmax_tangent,
    softmax_times,
)
from kernels.reference.softmax_ladder import (
    naive_softmax,
    online_softmax,
    online_statistics,
    safe_softmax,
)
from kernels.runtime.targets import cuda
from minitorch import (
    DecoderLM,
    FastBackend,
    MultiHeadAttention,
    SimpleBackend,
    TransformerLayer,
    from_numpy,
)
from minitorch.attention.naive import taped_derivative

from ..support.attention.mistakes import gradient_mistake, online_mistake, statistics_mistake
from ..support.mistakes import assert_close_or_explain
from ..support.tolerances import assert_close_arrays

ROOT = Path(__file__).parents[2]

Array = npt.NDArray[Any]
LEARNING_STEPS = 100
emulated = pytest.mark.emulated


# --- the textbook ------------------------------------------------------------------------------


def textbook(
    arrays: Sequence[Array], seen: Any = True, factor: Any = 1.0, bias: Any = 0.0, cap: float = 0.0
) -> tuple[Array, Array]:
    """Return out and lse; ``factor`` multiplies probabilities, ``bias`` is added to scores."""
    q, k, v = arrays[:3]
    s = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1]) + bias
    s = cap * np.tanh(s / cap) if cap else s
    s = np.where(seen, s, -np.inf)
    largest = s.max(-1, keepdims=True)
    p = np.exp(s - np.where(largest == -np.inf, 0.0, largest))
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (largest + np.log(total))[..., 0]
    return (p / np.where(total == 0.0, 1.0, total) * factor) @ v, lse


def measured_gradients(f: Any, arrays: tuple[Array, ...], step: float = 1e-5) -> list[Array]:
    """Return the gradient of a number, f(*arrays), in each array, by central differences."""
    gradients = []
    for array in arrays:
        gradient = np.zeros_like(array)
        for index in np.ndindex(*array.shape):
            old = array[index]
            array[index] = old + step
            above = f(*arrays)
            array[index] = old - step
            below = f(*arrays)
            array[index] = old
            gradient[index] = (above - below) / (2.0 * step)
        gradients.append(gradient)
    return gradients


def drawn(seq_q: int, seq_k: int, dim: int, seed: int = 0) -> tuple[Array, ...]:
    """Draw q, k, v and dout for one batch of two heads."""
    rng = np.random.default_rng(seed)
    shapes = [(1, 2, seq_q, dim), (1, 2, seq_k, dim), (1, 2, seq_k, dim), (1, 2, seq_q, dim)]
    return tuple(rng.standard_normal(shape) for shape in shapes)


def run(
    target: launch.Target, rung: str, arrays: tuple[Array, ...], tile: Any = None,
    backward: bool = False, dlse: Any = None, **options: Any,
) -> dict[str, Array]:  # fmt: skip
    """Run one rung on arrays of the host and return what it computes, on the host."""
    on_device = target is launch.CUDA
    q, k, v, dout = (cuda.to_device(x) if on_device else x for x in arrays)
    problem = kernels.make_problem(arrays[0], arrays[1], arrays[2], rung=rung, **options)
    operands = make_operands(target.memory, problem, q, k, v, options)
    out, lse, rest = launch.forward(target, problem, operands, tile)
    results = {"out": out, "lse": lse}
    if backward:
        operands = operands.having(out=out, lse=lse, lse_rest=rest, dout=dout, dlse=dlse)
        gradients = launch.backward(target, problem, operands, tile)
        results |= {name: getattr(gradients, name) for name in ("dq", "dk", "dv")}
    return {name: x.copy_to_host() if on_device else x for name, x in results.items()}


#: What makes NaN of masked rows.
NAN = "-inf - (-inf), where a row sees nothing in a tile?"


def check_forward(
    results: dict[str, Array],
    expected: tuple[Array, Array],
    arrays: tuple[Array, ...] = (),
    block_k: int = 0,
    nan: str = NAN,
) -> None:
    """Compare out and lse; with the operands and a tile, name a mistake that gives what is wrong."""
    if block_k:
        nan = "no row is masked; does e^(m - m_new) shrink what is summed? It is 0 at m = -inf"
    try:
        if not np.isnan(expected[0]).any() and np.isnan(results["out"]).any():
            raise AssertionError(f"out has NaN: {nan}")
        assert_close_arrays(results["out"], expected[0], np.float64, "out", 10.0)
        assert_close_arrays(results["lse"], expected[1], np.float64, "lse", 10.0)
    except AssertionError as error:
        why = online_mistake(results, arrays, block_k) if block_k else ""
        raise AssertionError(f"{why}{error}") from None


def check_gradients(
    results: dict[str, Array], arrays: tuple[Array, ...], dlse: Any = 0.0, tile: Any = None,
    **options: Any,
) -> None:  # fmt: skip
    *operands, dout = arrays

    def loss(q: Array, k: Array, v: Array) -> float:
        out, lse = textbook((q, k, v), **options)
        # The sum of -inf · 0 would be NaN.
        return float((out * dout).sum() + np.where(np.isfinite(lse), lse * dlse, 0.0).sum())

    gradients = measured_gradients(loss, tuple(operands))
    for name, expected in zip(("dq", "dk", "dv"), gradients, strict=True):
        got = results[name]
        if got.shape == expected.shape and np.allclose(got, expected, rtol=1e-5, atol=1e-7):
            continue
        why, factor = "", options.get("factor", 1.0)
        if set(options) <= {"factor"}:
            right = textbook(arrays, **options)
            why = gradient_mistake(name, got, arrays, right, dlse, factor, tile)
        raise AssertionError(
            f"{why}{name}, off by up to {np.abs(got - expected).max():.3g}: it begins with "
            f"{got.ravel()[:3]}, expected {expected.ravel()[:3]}"
        )


def below(seq_q: int, seq_k: int) -> Array:
    """Return what a causal mask shows."""
    return np.arange(seq_k) <= np.arange(seq_q)[:, None]


SIZES = [(1, 1, 1), (5, 7, 3), (9, 4, 2)]
TILES = [(1, 1), (3, 2), (4, 8)]
each_size = pytest.mark.parametrize("size", SIZES, ids=str)
each_tile = pytest.mark.parametrize("tile", TILES, ids=str)


# --- task 5.1: the softmax ladder ----------------------------------------------------------------


@pytest.mark.task5_1
@pytest.mark.parametrize("block", [1, 2, 3, 16])
@pytest.mark.parametrize("masked", [0, 4])
def test_statistics_of_one_pass_are_those_of_two(masked: int, block: int) -> None:
    x = np.random.default_rng(block).standard_normal(13) * 3.0
    x[:masked] = -np.inf
    with np.errstate(all="ignore"):
        maximum, total = online_statistics(x, block)
    why = statistics_mistake(x, block, float(total))
    assert maximum == x.max(), f"{why}m is {maximum}, expected {x.max()}"
    expected = np.exp(x - x.max()).sum()
    assert total == pytest.approx(expected), (
        f"{why}the sum is {total}, expected {expected}, for a row of 13 values by blocks of {block}"
    )


@pytest.mark.task5_1
def test_statistics_of_one_pass_do_not_overflow() -> None:
    maximum, total = online_statistics(np.array([-1e3, 2e3, -np.inf, 1e3, 2e3]), 2)
    assert (maximum, total) == (2e3, 2.0), "subtract the largest value so far in each exponential"


@pytest.mark.task5_1
@pytest.mark.parametrize("softmax", [naive_softmax, safe_softmax, online_softmax])
def test_softmax_of_small_numbers(softmax: Any) -> None:
    x = np.random.default_rng(0).standard_normal(11)
    assert_close_arrays(softmax(x), np.exp(x) / np.exp(x).sum(), np.float64, "softmax")
    if softmax is naive_softmax:
        with np.errstate(over="ignore", invalid="ignore"):
            assert np.isnan(softmax(np.array([1000.0, 0.0]))[0]), "it subtracts nothing"


@pytest.mark.task5_1
@pytest.mark.parametrize("softmax", [safe_softmax, online_softmax])
def test_a_safe_softmax_takes_any_numbers(softmax: Any) -> None:
    for x, expected in (
        ([1000.0, 1000.0, -1e4], [0.5, 0.5, 0.0]),
        ([-np.inf, -2000.0, -np.inf], [0.0, 1.0, 0.0]),
    ):
        with np.errstate(all="ignore"):
            p = softmax(np.array(x)).tolist()
        assert p == expected, (
            f"{softmax.__name__}({x}) is {p}, expected {expected}: subtract the largest element"
        )


@pytest.mark.parametrize(
    "task",
    [
        pytest.param("5.1", marks=pytest.mark.task5_1),
        *(
            pytest.param(f"5.{n}", marks=[getattr(pytest.mark, f"task5_{n}"), pytest.mark.emulated])
            for n in (4, 5, 6)
        ),
    ],
)
def test_a_pass_reads_its_vector_once_and_a_kernel_has_its_barriers(task: str) -> None:
    """Judged by their text: a result may be right without them."""
    for fault in faults(ROOT, task).values():
        assert not fault, fault


# --- task 5.2: composed attention and its gradient ------------------------------------------------


@pytest.mark.task5_2
@each_size
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_textbook(is_causal: bool, size: tuple[int, int, int]) -> None:
    arrays = drawn(*size)
    seen = below(*size[:2]) if is_causal else True
    results = run(launch.NUMPY, "naive", arrays, backward=True, is_causal=is_causal)
    check_forward(results, textbook(arrays, seen), arrays, 0 if is_causal else size[1])
    check_gradients(results, arrays, **({"seen": seen} if is_causal else {}))


@pytest.mark.task5_2
def test_the_textbook_takes_scores_of_any_size() -> None:
    q, *others = drawn(5, 7, 3)
    arrays = (1e4 * q, *others)
    with np.errstate(all="ignore"):
        results = run(launch.NUMPY, "naive", arrays)
    check_forward(results, textbook(arrays), nan="exp(S) overflows; subtract the maximum first")


@pytest.mark.task5_2
def test_a_row_that_sees_nothing_is_zero() -> None:
    arrays = drawn(4, 3, 2)
    results = run(launch.NUMPY, "naive", arrays, backward=True, is_causal=True, causal_offset=-2)
    assert (results["lse"][..., :2] == -np.inf).all(), (
        f"lse of a row that sees nothing is {results['lse'][0, 0, 0]}, expected -inf: subtract shift_of(m)"
    )
    for name in ("out", "dq"):
        assert (results[name][..., :2, :] == 0.0).all(), (
            f"{name} of a row that sees nothing is {results[name][0, 0, 0]}, expected 0: use divided"
        )
    assert (results["dk"][..., 2:, :] == 0.0).all()


#: Factors of dropout for 5 rows and 7 columns.
FACTOR = np.where(np.arange(35).reshape(5, 7) % 3 == 0, 0.0, 1.5)


def check_dropout(out: Array, lse: Array, arrays: tuple[Array, ...]) -> None:
    """Compare with the textbook, in which the sum is that of all probabilities, dropped or not."""
    expected, expected_lse = textbook(arrays, factor=FACTOR)
    s = arrays[0] @ np.swapaxes(arrays[1], -1, -2) / np.sqrt(3)
    p = np.exp(s - s.max(-1, keepdims=True))
    kept = p * FACTOR
    mistakes = {
        "dropout comes after the sum: ℓ is the sum of all of P, dropped or not": (
            kept @ arrays[2] / kept.sum(-1, keepdims=True)
        ),
        "P is not multiplied by z": p @ arrays[2] / p.sum(-1, keepdims=True),
    }
    assert_close_or_explain(out, expected, "out with dropout", mistakes)
    assert_close_or_explain(lse, expected_lse, "lse with dropout", {})


@pytest.mark.task5_2
def test_dropout_of_the_textbook() -> None:
    q, k, v, _ = arrays = drawn(5, 7, 3)
    s = q @ np.swapaxes(k, -1, -2) / np.sqrt(3)
    check_dropout(*softmax_times(s, FACTOR, v), arrays)


@pytest.mark.task5_2
def test_the_gradient_of_lse_is_subtracted_from_delta() -> None:
    arrays = drawn(5, 7, 3)
    dlse = np.random.default_rng(7).standard_normal((1, 2, 5))
    results = run(launch.NUMPY, "naive", arrays, backward=True, dlse=dlse)
    check_gradients(results, arrays, dlse=dlse)


@pytest.mark.task5_2
def test_gradients_of_q_and_k_go_through_the_capped_score() -> None:
    arrays = drawn(5, 7, 3)
    results = run(launch.NUMPY, "naive", arrays, backward=True, softcap=0.7)
    check_gradients(results, arrays, cap=0.7)


# --- task 5.3: tiles ------------------------------------------------------------------------------


@pytest.mark.task5_3
@each_size
@each_tile
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_by_tiles(is_causal: bool, tile: Any, size: tuple[int, int, int]) -> None:
    arrays = drawn(*size)
    seen = below(*size[:2]) if is_causal else True
    results = run(launch.NUMPY, "flash2", arrays, tile, is_causal=is_causal)
    check_forward(results, textbook(arrays, seen), arrays, 0 if is_causal else tile[1])


#: What makes NaN of scores of a thousand.
LARGE = "scores are large; is the number subtracted the largest score so far, of all tiles?"


@pytest.mark.task5_3
@pytest.mark.parametrize("block_k", [3, 7])
def test_dropout_by_tiles(block_k: int) -> None:
    q, k, v, _ = arrays = drawn(5, 7, 3)
    s = q @ np.swapaxes(k, -1, -2) / np.sqrt(3)
    rows = Rows(np.full((1, 2, 5), -np.inf), np.zeros((1, 2, 5)), np.zeros((1, 2, 5, 3)))
    for col in range(0, 7, block_k):
        cols = slice(col, col + block_k)
        rows = add_tile(rows, s[..., cols], FACTOR[:, cols], v[..., cols, :])
    check_dropout(*finished(rows), arrays)


@pytest.mark.parametrize(
    ("target", "rung", "seq", "tile"),
    [
        pytest.param(launch.NUMPY, "flash2", (6, 8), (2, 3), marks=mark.task5_3),
        pytest.param(launch.CUDA, "flash1", (4, 5), (2, 2), marks=[mark.emulated, mark.task5_4]),
        pytest.param(launch.CUDA, "flash2", (4, 9), (4, 4), marks=[mark.emulated, mark.task5_7]),
    ],
    ids=["numpy", "flash1", "flash2"],
)
def test_large_scores_do_not_overflow(target: Any, rung: str, seq: Any, tile: Any) -> None:
    q, k, v, dout = drawn(seq[0], seq[1], 2)
    arrays = (q * 1e3, k * 1e3, v, dout)
    check_forward(run(target, rung, arrays, tile), textbook(arrays), nan=LARGE)


@pytest.mark.task5_3
@each_tile
def test_rows_may_see_nothing_in_a_tile_or_at_all(tile: Any) -> None:
    arrays = drawn(7, 8, 2)
    for seen, options in (
        (np.eye(7, 8, k=2, dtype=bool), {}),  # a row sees one key
        (below(7, 8) & (np.arange(7)[:, None] >= 3), {"is_causal": True}),  # the first see none
    ):
        mask = np.broadcast_to(seen, (1, 2, 7, 8))
        results = run(launch.NUMPY, "flash2", arrays, tile, attn_mask=mask, **options)
        check_forward(results, textbook(arrays, seen))


# --- tasks 5.4 and 5.5: FlashAttention on CUDA ------------------------------------------------------


class TestFlash1:
    pytestmark = emulated

    @pytest.mark.task5_4
    @pytest.mark.parametrize("threads", [1, 4])
    def test_algorithm_0_with_a_thread_for_each_row(self, threads: int) -> None:
        q, k, v, dout = drawn(5, 7, 3)
        q[0, :, 2] *= 1e3  # without the maximum, the exponentials overflow
        k[0, 1], q[0, 1, 3] = -np.abs(k[0, 1]), 1e5  # all scores of this row are far below 0
        arrays = (q, k, v, dout)
        s, out = cuda.to_device(np.empty((2, 5, 7))), cuda.to_device(np.full((2, 5, 3), 7.0))
        operands = [cuda.to_device(x[0]) for x in (q, k, v)]
        algorithm0[(-(-5 // threads), 2), threads](*operands, s, out, 1.0 / np.sqrt(3))
        expected, _ = textbook(arrays)
        got = out.copy_to_host()
        if np.isnan(got).any():
            pytest.fail(
                "out has NaN: subtract the largest score of the row; it begins as -inf, not 0"
            )
        assert_close_arrays(got, expected[0], np.float64, "out", 10.0)

    @pytest.mark.task5_4
    @each_tile
    def test_algorithm_1_with_a_thread_for_each_row(self, tile: Any) -> None:
        arrays = drawn(5, 7, 3)
        operands = [cuda.to_device(x[0]) for x in arrays[:3]]
        out = cuda.to_device(np.empty((2, 5, 3)))
        m, total = (cuda.to_device(np.zeros((2, 5))) for _ in range(2))
        kernel = make_flash1_rows(*tile, 3, types.float64)
        kernel[2, tile[0]](*operands, out, m, total, 1.0 / np.sqrt(3))
        with np.errstate(divide="ignore"):
            lse = m.copy_to_host() + np.log(total.copy_to_host())
        assert not np.isneginf(lse).any(), (
            "l is 0 or m is -inf at the end, as it began: write both after each tile, line 13"
        )
        results = {"out": out.copy_to_host()[None], "lse": lse[None]}
        check_forward(results, textbook(arrays), arrays, tile[1])

    @pytest.mark.task5_4
    @each_size
    @each_tile
    def test_algorithm_1(self, tile: Any, size: tuple[int, int, int]) -> None:
        arrays = drawn(*size)
        results = run(launch.CUDA, "flash1", arrays, tile)
        check_forward(results, textbook(arrays), arrays, tile[1])

    @pytest.mark.task5_4
    @pytest.mark.parametrize("tile", [(2, 2), (4, 2)], ids=str)
    def test_a_causal_mask_skips_tiles_and_empty_rows_are_zero(self, tile: Any) -> None:
        arrays = drawn(5, 6, 2)
        options: dict[str, Any] = {"is_causal": True, "causal_offset": -2}
        rows, cols = np.arange(5)[:, None], np.arange(6)
        expected = textbook(arrays, cols <= rows - 2)
        results = run(launch.CUDA, "flash1", arrays, tile, **options)
        visited = rows // tile[0] * tile[0] + tile[0] - 1 - 2 >= cols // tile[1] * tile[1]
        within = visited & (cols % tile[1] <= rows % tile[0] - 2)
        mistakes = {
            "a Place counts from the first row and column of the call: row + r, col + c": within,
            "the mask is left out, which is part of score_of": visited,
        }
        wrong = {sentence: textbook(arrays, seen)[0] for sentence, seen in mistakes.items()}
        assert not np.isnan(results["out"]).any(), f"out has NaN: {NAN}"
        assert_close_or_explain(results["out"], expected[0], "out", wrong)
        check_forward(results, expected)

    @pytest.mark.task5_5
    @each_size
    @pytest.mark.parametrize("tile", TILES[1:], ids=str)
    def test_the_gradient_of_algorithm_1(self, tile: Any, size: tuple[int, int, int]) -> None:
        arrays = drawn(*size)
        results = run(launch.CUDA, "flash1", arrays, tile, backward=True)
        check_gradients(results, arrays, tile=tile)

    @pytest.mark.task5_5
    def test_the_gradient_of_lse_in_algorithm_1(self) -> None:
        arrays = drawn(5, 7, 3)
        dlse = np.random.default_rng(7).standard_normal((1, 2, 5))
        results = run(launch.CUDA, "flash1", arrays, (3, 2), backward=True, dlse=dlse)
        check_gradients(results, arrays, dlse=dlse, tile=(3, 2))

    @pytest.mark.task5_5
    def test_dropout_in_the_gradient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The factors are of this test, for those of the library are task 5.6."""

        @device_function
        def kept(place, extras):
            return 0.0 if (7 * place.row + place.col) % 3 == 0 else 1.5  # FACTOR

        def with_factors(*args: Any) -> Any:
            return make_score_functions(*args)._replace(kept=kept)

        monkeypatch.setattr(flash1, "make_score_functions", with_factors)
        backward_kernel = flash1.backward_kernel.__wrapped__  # not the kernel that is kept
        monkeypatch.setattr(flash1, "backward_kernel", backward_kernel)
        arrays = drawn(5, 7, 3)
        out, lse = textbook(arrays, factor=FACTOR)
        q, k, v, dout, out, lse = (cuda.to_device(x) for x in (*arrays, out, lse))
        problem = kernels.make_problem(*arrays[:3], rung="flash1", dropout_p=0.4, seed=1)
        operands = make_operands(launch.CUDA.memory, problem, q, k, v)
        operands = operands.having(out=out, lse=lse, dout=dout, dlse=None)
        gradients = launch.backward(launch.CUDA, problem, operands, (3, 2))
        results = {n: getattr(gradients, n).copy_to_host() for n in ("dq", "dk", "dv")}
        check_gradients(results, arrays, factor=FACTOR, tile=(3, 2))

    @pytest.mark.task5_5
    def test_the_gradient_under_a_causal_mask(self) -> None:
        arrays = drawn(5, 5, 2)
        results = run(launch.CUDA, "flash1", arrays, (2, 3), backward=True, is_causal=True)
        check_gradients(results, arrays, seen=below(5, 5))


# --- task 5.6: masks and dropout inside the tile ----------------------------------------------------


@pytest.mark.task5_6
@pytest.mark.emulated
def test_bits_of_dropout_have_their_rate_and_depend_on_every_coordinate() -> None:
    places = np.indices((2, 64, 96)).reshape(3, -1).T.tolist()
    threshold = attention_threshold(0.25)
    bits = np.array([bool(PHILOX.keep(5, b, r, c, threshold)) for b, r, c in places])
    assert bits.mean() == pytest.approx(0.75, abs=0.02), (
        f"with p = 0.25, {bits.mean():.3f} of the places are kept, expected 0.75: a place whose half word "
        "reaches the threshold is kept"
    )
    grid = bits.reshape(2, 64, 96)
    for axis in range(3):
        assert not np.array_equal(grid, np.roll(grid, 1, axis=axis)), f"axis {axis}"
    # The words of a counter serve eight columns, each its own half.
    halves = []
    for col in range(16):
        words = PHILOX.attention_words(5, 1, 3, col // 8)
        halves.append(words[col % 8 // 2] >> 16 * (col % 2) & 0xFFFF)
        assert bool(PHILOX.keep(5, 1, 3, col, threshold)) == (halves[col] >= threshold), (
            f"column {col} has the {'high' if col % 2 else 'low'} half of word {col % 8 // 2}"
        )
    for col, half in enumerate(halves):
        assert PHILOX.keep(5, 1, 3, col, half), "a half word that equals the threshold is kept: >="


class TestMasks:
    pytestmark = emulated

    @pytest.mark.task5_6
    def test_a_boolean_mask_hides(self) -> None:
        arrays = drawn(5, 6, 2)
        seen = np.random.default_rng(3).random((1, 2, 5, 6)) < 0.6
        results = run(launch.CUDA, "flash1", arrays, (2, 4), backward=True, attn_mask=seen)
        mistakes = {
            "True hides, and is to show": textbook(arrays, ~seen)[0],
            "the mask is left out": textbook(arrays)[0],
        }
        assert_close_or_explain(results["out"], textbook(arrays, seen)[0], "out", mistakes)
        check_forward(results, textbook(arrays, seen))
        check_gradients(results, arrays, seen=seen)

    @pytest.mark.task5_6
    def test_a_floating_mask_is_added(self) -> None:
        arrays = drawn(5, 6, 2)
        bias = np.random.default_rng(3).standard_normal((1, 2, 5, 6))
        results = run(launch.CUDA, "flash1", arrays, (2, 4), attn_mask=bias)
        mistakes = {
            "the mask is subtracted": textbook(arrays, bias=-bias)[0],
            "the mask is left out": textbook(arrays)[0],
        }
        assert_close_or_explain(results["out"], textbook(arrays, bias=bias)[0], "out", mistakes)
        check_forward(results, textbook(arrays, bias=bias))

    @pytest.mark.task5_6
    def test_dropout_drops_the_same_in_every_tile_and_in_the_backward_pass(self) -> None:
        arrays = drawn(5, 6, 2)
        options: dict[str, Any] = {"dropout_p": 0.4, "seed": 17}
        kept = kernels.dropout_mask((1, 2, 5, 6), 0.4, 17)
        assert 0 < kept.sum() < kept.size
        factor = kept * keep_scale(0.4)
        for tile in ((2, 4), (5, 3)):
            results = run(launch.CUDA, "flash1", arrays, tile, backward=True, **options)
            rows, cols = (np.arange(n) % t for n, t in zip((5, 6), tile, strict=True))
            p = textbook((*arrays[:2], np.broadcast_to(np.eye(6), (1, 2, 6, 6))))[0]
            mistakes = {
                "what is kept is not multiplied by keep_scale": p * kept,
                "what is to be dropped is kept": p * ~kept * keep_scale(0.4),
                "a Place counts from the first row and column of the call: row + r, col + c": (
                    p * factor[..., rows[:, None], cols]
                ),
                "P is not dropped": p,
                "dropout comes after the sum: l~ is the sum of all of P~, dropped or not": (
                    p * factor / (p * factor).sum(-1, keepdims=True)
                ),
            }
            wrong = {sentence: x @ arrays[2] for sentence, x in mistakes.items()}
            assert_close_or_explain(results["out"], p * factor @ arrays[2], "out", wrong)
            check_forward(results, textbook(arrays, factor=factor))
            check_gradients(results, arrays, factor=factor)


# --- task 5.7: FlashAttention-2 -----------------------------------------------------------------------


class TestFlash2:
    pytestmark = emulated

    @pytest.mark.task5_7
    @pytest.mark.parametrize("size", [(1, 1, 1), (9, 4, 5), (5, 9, 3)], ids=str)
    @pytest.mark.parametrize("tile", [(4, 4), (8, 4)], ids=str)
    def test_flash2(self, tile: Any, size: tuple[int, int, int]) -> None:
        arrays = drawn(*size)
        results = run(launch.CUDA, "flash2", arrays, tile)
        check_forward(results, textbook(arrays), arrays, tile[1])

    @pytest.mark.task5_7
    def test_flash2_under_a_mask_and_dropout(self) -> None:
        arrays = drawn(6, 7, 3)
        options: dict[str, Any] = {
            "is_causal": True,
            "causal_offset": -1,
            "dropout_p": 0.4,
            "seed": 3,
        }
        results = run(launch.CUDA, "flash2", arrays, (4, 4), **options)
        seen = np.arange(7) <= np.arange(6)[:, None] - 1
        factor = kernels.dropout_mask((1, 2, 6, 7), 0.4, 3) * keep_scale(0.4)
        p = textbook((*arrays[:2], np.broadcast_to(np.eye(7), (1, 2, 7, 7))), seen, factor)[0]
        total = p.sum(-1, keepdims=True)
        wrong = p @ arrays[2] / np.where(total == 0.0, 1.0, total)
        if np.allclose(results["out"], wrong):
            pytest.fail("dropout comes after the sum: l is the sum of all of P, dropped or not")
        check_forward(results, textbook(arrays, seen, factor))


# --- task 5.9: block-sparse ---------------------------------------------------------------------------


def sparse() -> kernels.BlockMask:
    """Return a mask of 40 rows and 50 columns whose first head has an empty line."""
    states = np.array(
        [[[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 0]], [[0, 1, 0, 0], [1, 0, 0, 1], [1, 1, 1, 1]]]
    )
    return kernels.BlockMask(states, 40, 50, 16)


@pytest.mark.task5_9
@pytest.mark.emulated
@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("tile", [(16, 16), (8, 24), (64, 64)], ids=str)
def test_a_list_holds_the_tiles_in_which_something_is_seen(tile: Any, by_keys: bool) -> None:
    mask, (rows, cols) = sparse(), tile
    dense, found = mask.dense(), mask.tile_list(rows, cols, by_keys)
    tiles_q, tiles_k = -(-40 // rows), -(-50 // cols)
    assert found.tile_ptr[0] == 0, f"tile_ptr begins with {found.tile_ptr[0]}, expected 0"
    line = 0
    for head in range(2):
        for i in range(tiles_k if by_keys else tiles_q):
            expected = []
            for j in range(tiles_q if by_keys else tiles_k):
                r, c = (j, i) if by_keys else (i, j)
                part = dense[head, r * rows : (r + 1) * rows, c * cols : (c + 1) * cols]
                if part.any():
                    expected.append((j, bool(part.all())))
            entries = slice(found.tile_ptr[line], found.tile_ptr[line + 1])
            listed = zip(found.tile_ids[entries], found.tile_full[entries], strict=True)
            got = [(int(j), bool(full)) for j, full in listed]
            numbers = [j for j, _ in got], [j for j, _ in expected]
            why = "tile_full tells whether all elements of the tile are visible; "
            if set(numbers[0]) != set(numbers[1]):
                why = "a tile belongs in the list if any of its elements is visible; "
            assert got == expected, (
                f"{why}line {i} of head {head} lists (tile, full) {got}, expected {expected}"
            )
            line += 1
    assert len(found.tile_ptr) == line + 1


class TestBlockSparse:
    pytestmark = emulated

    @pytest.mark.task5_9
    def test_what_is_listed_is_attended_to(self) -> None:
        arrays = drawn(40, 50, 2)
        results = run(launch.CUDA, "flash2", arrays, (16, 16), block_mask=sparse())
        dense = sparse().dense()
        # Of the last tile of a list, which is short, each element is looked up.
        of_first = dense[:1] & (dense | (np.arange(50) < 48))
        mistakes = {
            "each head has the lists of the first: the lines of a head follow those of the heads "
            "before it": textbook(arrays, of_first)[0],
        }
        assert_close_or_explain(results["out"], textbook(arrays, dense)[0], "out", mistakes)
        check_forward(results, textbook(arrays, dense))

    @pytest.mark.task5_9
    def test_keys_in_tiles_that_are_not_listed_are_not_read(self) -> None:
        q, k, v, dout = drawn(40, 50, 2)
        mask = kernels.BlockMask(np.array([[1, 0, 0, 1]] * 3), 40, 50, 16)
        expected = run(launch.CUDA, "flash2", (q, k, v, dout), (16, 16), block_mask=mask)
        k[..., 16:48, :] = v[..., 16:48, :] = np.nan
        again = run(launch.CUDA, "flash2", (q, k, v, dout), (16, 16), block_mask=mask)
        assert np.array_equal(again["out"], expected["out"]), (
            "a tile that is not listed is read: the number of a tile is tile_ids[entry]"
        )


# --- task 5.10: train the transformer -------------------------------------------------------------------


@pytest.mark.task5_10
def test_multi_head_attention_is_attention_of_each_head() -> None:
    minitorch.manual_seed(0)
    layer = MultiHeadAttention(6, 2, causal=True, p_dropout=0.0, attention="naive")
    x = np.random.default_rng(0).standard_normal((2, 4, 6))
    heads: list[Array] = []
    projection: Any
    for projection in (layer.q_projection, layer.k_projection, layer.v_projection):
        y = x @ projection.weights.value.to_numpy() + projection.bias.value.to_numpy()
        heads.append(y.reshape(2, 4, 2, 3).transpose(0, 2, 1, 3))
    joined = textbook(heads, below(4, 4))[0].transpose(0, 2, 1, 3).reshape(2, 4, 6)
    out: Any = layer.out_projection
    expected = joined @ out.weights.value.to_numpy() + out.bias.value.to_numpy()
    y = from_numpy(np.arange(48.0).reshape(2, 4, 6), SimpleBackend)
    array = y.to_numpy()
    assert_close_or_explain(
        layer.split_heads(y).to_numpy(),
        array.reshape(2, 4, 2, 3).transpose(0, 2, 1, 3),
        "split_heads of (2, 4, 6) for 2 heads",
        {
            "a view alone mixes positions and heads: view as (…, n_head, head_dim), then permute": (
                array.reshape(2, 2, 4, 3)
            ),
            "the width is (n_head, head_dim), and not (head_dim, n_head)": (
                array.reshape(2, 4, 3, 2).transpose(0, 3, 1, 2)
            ),
        },
    )
    assert_close_arrays(layer(from_numpy(x, SimpleBackend)), expected, np.float64, "out", 10.0)


@pytest.mark.task5_10
def test_attention_drops_its_result_in_training_only() -> None:
    layer = MultiHeadAttention(6, 2, p_dropout=0.5, attention="naive")
    x = from_numpy(np.random.default_rng(0).standard_normal((1, 5, 6)), SimpleBackend)
    assert not layer(x).to_numpy().all(), "nothing is dropped: the last step is dropout"
    layer.eval()
    assert layer(x).to_numpy().all(), "nothing is dropped after eval()"


@pytest.mark.task5_10
def test_a_layer_adds_attention_and_feed_forward_to_its_input() -> None:
    minitorch.manual_seed(0)
    layer = TransformerLayer(6, 2, p_dropout=0.0, attention="naive")
    x = from_numpy(np.random.default_rng(0).standard_normal((1, 5, 6)), SimpleBackend)
    for factor, norm in enumerate((layer.ln_1, layer.ln_2), 2):  # as different as after training
        norm.weights.update(norm.weights.value.detach() * factor)
    middle = x + layer.attention(layer.ln_1(x))
    expected = (middle + layer.ff(layer.ln_2(middle))).to_numpy()
    if not np.allclose(layer(x).to_numpy(), expected):
        pytest.fail("a layer is x + attention(ln_1(x)), and then that + ff(ln_2(that))")


@pytest.mark.task5_10
def test_a_position_does_not_see_what_follows() -> None:
    minitorch.manual_seed(0)
    layer = TransformerLayer(6, 2, p_dropout=0.0, attention="naive")
    x = np.random.default_rng(0).standard_normal((1, 5, 6))
    before = layer(from_numpy(x, SimpleBackend)).to_numpy()
    x[0, 3:] += 1.0
    after = layer(from_numpy(x, SimpleBackend)).to_numpy()
    assert np.array_equal(before[0, :3], after[0, :3])
    assert not np.allclose(before[0, 3:], after[0, 3:])


@pytest.mark.task5_10
def test_a_transformer_learns_to_copy() -> None:
    """The first half is random, the second repeats it: only attention can know what comes next."""
    minitorch.manual_seed(1)
    rng = np.random.default_rng(1)
    model = DecoderLM(4, 16, 2, 8, 0.0, n_layer=2, middle_dim=16, backend=FastBackend)
    optimizer = minitorch.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(LEARNING_STEPS):
        half = rng.integers(0, 4, (32, 4))
        text = np.concatenate([half, half], axis=1)
        optimizer.zero_grad()
        loss = model.loss(text[:, :-1], text[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # Three of seven tokens are random, log 4 nats each; the four others follow from them.
    best = 3.0 / 7.0 * np.log(4.0)
    assert np.mean(losses[:3]) > 2.0 * best
    assert np.mean(losses[-5:]) < 1.15 * best, f"{np.mean(losses[-5:]):.3f}, the best is {best:.3f}"


# --- task 5.11: the JVP of softmax -------------------------------------------------------------------


@pytest.mark.task5_11
@pytest.mark.parametrize("shape", [(1, 1), (4, 7), (2, 3, 5)], ids=str)
def test_the_tangents_of_softmax_are_its_derivatives_along_a_direction(
    shape: tuple[int, ...],
) -> None:
    s, s_tangent = np.random.default_rng(0).standard_normal((2, *shape))
    s[..., 1::3] = -np.inf
    step = 1e-30  # as an imaginary part it loses nothing by rounding
    powers = np.exp(s + step * 1j * s_tangent)
    total = powers.sum(-1, keepdims=True)
    p, lse = powers / total, np.log(total[..., 0])
    p_tangent, lse_tangent = softmax_tangent(p.real, s_tangent)
    mean = s_tangent.mean(-1, keepdims=True)
    mistakes = {
        "L̇ is left out: P = exp(S - L) also changes with L": p.real * s_tangent,
        "L̇ is a mean of Ṡ with the weights P, not a plain one": p.real * (s_tangent - mean),
    }
    assert_close_or_explain(p_tangent, p.imag / step, "Ṗ", mistakes)
    mistakes = {"L̇ is a mean of Ṡ with the weights P": s_tangent.sum(-1)}
    assert_close_or_explain(lse_tangent, lse.imag / step, "L̇", mistakes)


@pytest.mark.task5_11
def test_the_tangents_of_a_row_that_sees_nothing_are_zero() -> None:
    p_tangent, lse_tangent = softmax_tangent(np.zeros((2, 3)), np.ones((2, 3)))
    assert not p_tangent.any() and not lse_tangent.any()


# --- task 5.12: merging split keys --------------------------------------------------------------------


def part_of(s: Array, v: Array) -> Rows:
    """Return what a part of the keys gives, by the textbook."""
    row_max = s.max(-1, initial=-np.inf)
    p = np.exp(s - np.where(row_max == -np.inf, 0.0, row_max)[..., None])
    return Rows(row_max, p.sum(-1), p @ v)


@pytest.mark.task5_12
@pytest.mark.parametrize("cut", [0, 1, 4, 7])
def test_two_parts_of_the_keys_give_what_all_keys_give(cut: int) -> None:
    rng = np.random.default_rng(cut)
    s, v = rng.normal(0.0, 300.0, (2, 3, 7)), rng.normal(size=(2, 7, 4))
    s[:, 1, cut:] = -np.inf
    one, two = part_of(s[..., :cut], v[:, :cut]), part_of(s[..., cut:], v[:, cut:])
    got, expected = merged(one, two), part_of(s, v)
    assert_close_or_explain(got.row_max, expected.row_max, "m", {})
    mistakes = {"the sums are added without their factors e^(m - m_new)": one.row_sum + two.row_sum}
    assert_close_or_explain(got.row_sum, expected.row_sum, "ℓ", mistakes)
    mistakes = {"acc is added without the factors e^(m - m_new)": one.acc + two.acc}
    assert_close_or_explain(got.acc, expected.acc, "acc", mistakes)


@pytest.mark.task5_12
def test_a_row_that_is_masked_in_both_parts_stays_empty() -> None:
    unseen = part_of(np.full((2, 3), -np.inf), np.ones((3, 4)))
    got = merged(unseen, unseen)
    assert not np.isnan(got.row_sum).any(), "a row that is masked in both parts has m - m = NaN"
    assert (got.row_max == -np.inf).all() and not got.row_sum.any() and not got.acc.any()


# --- task 5.13: a page table --------------------------------------------------------------------------


@pytest.mark.task5_13
@pytest.mark.parametrize("page_size", [1, 4, 5])
def test_keys_that_are_written_by_the_table_are_read_in_order(page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    length = 11
    table = rng.permutation(3 * length).reshape(3, length)
    positions, keys = np.tile(np.arange(length), (3, 1)), rng.normal(size=(3, length, 2))
    pages, places = page_places(table, positions, page_size)
    number = np.tile(np.arange(length) // page_size, (3, 1))
    mistakes = {
        "the table is not read: a page of a sequence may lie anywhere": number,
        "the table of the first sequence is read for all": table[0][number],
        "the page of the position before is read": table[
            np.arange(3)[:, None], (positions - 1) // page_size
        ],
    }
    expected = [[float(row[p // page_size]) for p in range(length)] for row in table]
    assert_close_or_explain(1.0 * pages, expected, "the pages", mistakes)
    pool = np.full((3 * length, page_size, 2), np.nan)
    pool[pages, places] = keys
    order = rng.permutation(length)[None] + np.zeros((3, 1), int)
    pages, places = page_places(table, order, page_size)
    np.testing.assert_array_equal(
        pool[pages, places], np.take_along_axis(keys, order[..., None], 1)
    )


# --- task 5.14: the derivative of a score_mod ---------------------------------------------------------

#: Functions of (score, batch, head, row, col) for numbers of a tensor.
SCORE_MODS = {
    "a bias": lambda s, b, h, row, col: s - 0.5 * (row - col),
    "a softcap": lambda s, b, h, row, col: 4.0 * (s / 2.0).sigmoid() - 2.0,
    "the score twice": lambda s, b, h, row, col: s * s.sigmoid() * (h + 1.0),
}


@pytest.mark.task5_14
@pytest.mark.parametrize("name", SCORE_MODS)
def test_backpropagation_gives_the_derivative_of_a_score_mod(name: str) -> None:
    score_mod, place, step = SCORE_MODS[name], (0, 1, 5, 2), 1e-5

    def value(score: float, place: Sequence[int] = place) -> float:
        return score_mod(minitorch.tensor([score]), *place).item()

    def slope(score: float, place: Sequence[int] = place) -> float:
        return (value(score + step, place) - value(score - step, place)) / (2.0 * step)

    calls: list[Any] = []
    derivative = taped_derivative(lambda *args: (calls.append(args), score_mod(*args))[1])
    scores = [-2.0, 0.25, 1.5]
    got, expected = [derivative(s, *place) for s in scores], [slope(s) for s in scores]
    mistakes = {
        "this is the value of score_mod, not its derivative": [value(s) for s in scores],
        "the place is left out: score_mod(x, *place)": [slope(s, (0, 0, 0, 0)) for s in scores],
    }
    assert_close_or_explain(got, expected, "f'(S)", mistakes, size=1e4)
    assert len(calls) == len(scores), (
        f"score_mod is called {len(calls)} times for {len(scores)} scores: call it once, on a tensor that "
        "requires a gradient, and go backward; a quotient of differences is not exact"
    )
