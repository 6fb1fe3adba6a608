"""From softmax to attention: every step is the textbook, moves what it says, and the first fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from bench.softmax_steps import STEPS
from hypothesis import given
from hypothesis import strategies as st
from measurements import evolution

from kernels.cpu.layers import softmax_ladder as cpu_ladder
from kernels.cuda.layers import softmax_ladder as cuda_ladder
from kernels.metering.io_meter import IOMeter
from kernels.reference.softmax_ladder import READS
from kernels.runtime.targets import EMULATED, cuda

from ...support.tolerances import assert_close_arrays

# The emulated GPU's threads compute with NumPy's scalars, which warn of what a GPU does in silence.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in scalar:RuntimeWarning")

Array = npt.NDArray[Any]
SAFE = [step for step in READS if step != "naive"]
#: From where on e^x is infinite.
OVERFLOW = {"float32": 89.0, "float64": 710.0}


def on_host(step: str, x: Array) -> Array:
    out = np.full_like(x, np.nan)
    cpu_ladder.softmax(step, x, out)
    return out


def on_device(step: str, x: Array, block: Any = None) -> Array:
    out = cuda.to_device(np.full_like(x, np.nan))
    with np.errstate(over="ignore", invalid="ignore"):
        cuda_ladder.softmax(step, cuda.to_device(x), out, block)
    return out.copy_to_host()


def textbook(x: Array) -> Array:
    """Return softmax of each row in float64; a row that is minus infinity throughout gives zeros."""
    x = x.astype(np.float64)
    largest = x.max(1, keepdims=True)
    powers = np.exp(x - np.where(np.isneginf(largest), 0.0, largest))
    total = powers.sum(1, keepdims=True)
    return powers / np.where(total == 0.0, 1.0, total)


@st.composite
def rows(draw: st.DrawFn, longest: int) -> Array:
    """Draw rows of any length, of numbers small and large, some of them minus infinity."""
    count, length = draw(st.integers(1, 3)), draw(st.integers(1, longest))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.standard_normal((count, length)) * draw(st.sampled_from([0.1, 3.0, 50.0]))
    x += draw(st.sampled_from([0.0, -2000.0, 2000.0]))
    x[rng.random(x.shape) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = -np.inf
    return x.astype(dtype)


@given(rows(5000), st.sampled_from(SAFE))
def test_softmax_on_the_host_is_the_textbook(x: Array, step: str) -> None:
    assert_close_arrays(on_host(step, x), textbook(x), x.dtype, f"{step} softmax")


@pytest.mark.emulated
@given(rows(70), st.sampled_from(SAFE))
def test_softmax_on_the_device_is_the_textbook(x: Array, step: str) -> None:
    assert_close_arrays(on_device(step, x), textbook(x), x.dtype, f"{step} softmax")


@pytest.mark.emulated
@pytest.mark.parametrize("where", [on_host, on_device])
@pytest.mark.parametrize("dtype", OVERFLOW)
def test_naive_softmax_is_the_textbook_until_it_overflows(where: Any, dtype: str) -> None:
    x = np.random.default_rng(1).standard_normal((3, 37)).astype(dtype)
    assert_close_arrays(where("naive", x), textbook(x), dtype, "naive softmax")
    x[1, 5] = OVERFLOW[dtype]
    out = where("naive", x)
    assert np.isnan(out[1, 5])
    assert np.isfinite(out[[0, 2]]).all(), "a row has spoilt another"


@pytest.mark.emulated
@pytest.mark.skipif(not EMULATED, reason="arrays count on the emulated GPU only")
@pytest.mark.parametrize("length", [1, 7, 32, 75])
@pytest.mark.parametrize("step", READS)
def test_the_kernels_move_what_the_ladder_is_about(step: str, length: int) -> None:
    x = cuda.to_device(np.random.default_rng(3).standard_normal((2, length), dtype=np.float32))
    out = cuda.to_device(np.full((2, length), np.nan, np.float32))
    with IOMeter() as meter:
        cuda_ladder.softmax(step, x, out)
    (x_reads, x_writes), (out_reads, out_writes) = meter.elements(x), meter.elements(out)
    assert (x_reads == READS[step]).all() and not x_writes.any()
    assert (out_writes == 1).all() and not out_reads.any()


# --- attention for one query -----------------------------------------------------------------------


@st.composite
def queries(draw: st.DrawFn) -> tuple[Array, Array, Array, float]:
    """Draw q, k, v and a scale, with scores up to some hundreds."""
    seq, dims = draw(st.integers(1, 40)), draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shapes = ((dims[0],), (seq, dims[0]), (seq, dims[1]))
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    return q, k * draw(st.sampled_from([1.0, 100.0])), v, draw(st.sampled_from([0.1, 1.0]))


def attention(q: Array, k: Array, v: Array, scale: float) -> Array:
    return (textbook((k @ q * scale)[None]) @ v)[0]


@given(queries(), st.sampled_from([name for name in STEPS if name != "sum of exponentials"]))
def test_every_step_to_attention_is_the_textbook(arrays: Any, name: str) -> None:
    assert_close_arrays(STEPS[name](*arrays), attention(*arrays), np.float64, name, 10.0)


def test_passes_and_memory_are_counted() -> None:
    """One pass, two, and a memory that grows with the keys or does not."""
    passes = {name: evolution.passes(step, 50) for name, step in STEPS.items()}
    assert passes.pop("maximum first") == (2, 1)
    assert set(passes.values()) == {(1, 1)}
    for name, step in STEPS.items():
        short, long = (evolution.peak_bytes(step, length) for length in (200, 1200))
        if name == "scores kept":
            assert long - short >= 1000 * 4
        else:
            assert long - short < 200, name
