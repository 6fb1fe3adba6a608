"""The IO meter: what the kernels move, counted on the emulated GPU, is what the formulas say, exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import launch, make_problem
from kernels.cuda.runtime.kernel import Kernel
from kernels.metering.io_meter import IOMeter
from kernels.metering.rung_traffic import RUNGS, PassTraffic, head_shape, metered, problem_of
from kernels.problem.operands import make_operands
from kernels.runtime.targets import EMULATED
from kernels.traffic.formulas import HeadShape, Traffic

from ...support.attention.on_cuda import draw, on_device

needs_emulation = pytest.mark.skipif(
    not EMULATED, reason="arrays count on the emulated GPU only: MINITORCH_EMULATE=1"
)


@st.composite
def options(drawn: Any) -> dict[str, Any]:
    """Draw bounds: none, causal from any diagonal, a window, or both."""
    found: dict[str, Any] = {}
    if drawn(st.booleans()):
        found |= {"is_causal": True, "causal_offset": drawn(st.integers(-4, 4))}
    if drawn(st.booleans()):
        sides = st.integers(-1, 5)
        found["window_size"] = (drawn(sides), drawn(sides))
    return found


def moving(counts: dict[str, Traffic]) -> dict[str, Traffic]:
    """Leave out arrays that were neither read nor written."""
    return {name: traffic for name, traffic in counts.items() if traffic.moved}


def of_shape(
    name: str, lengths: tuple[int, int], dims: tuple[int, int], tile: Any, **more: Any
) -> tuple[PassTraffic, PassTraffic]:
    return metered(name, HeadShape(*lengths, *dims, lower=0, upper=0), tile, **more)


@pytest.mark.emulated
@needs_emulation
@pytest.mark.parametrize("name", RUNGS)
@settings(max_examples=12)
@given(
    lengths=st.tuples(st.integers(1, 21), st.integers(1, 21)),
    dims=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    tile=st.tuples(*[st.sampled_from([4, 8, 12])] * 2) | st.none(),
    bounds=options(),
)
def test_a_rung_moves_what_its_formulas_say(
    name: str, lengths: Any, dims: Any, tile: Any, bounds: dict[str, Any]
) -> None:
    if name == "flash1" and "window_size" in bounds:
        bounds = {**bounds, "window_size": (-1, bounds["window_size"][1])}  # it has no left side
    counted, expected = of_shape(name, lengths, dims, tile, **bounds)
    for direction in PassTraffic._fields:
        actual, wanted = (moving(getattr(x, direction)) for x in (counted, expected))
        assert actual == wanted, f"{name} {direction}, {lengths} x {dims}, tile {tile}, {bounds}"


@pytest.mark.emulated
@needs_emulation
@pytest.mark.parametrize("bounds", [{}, {"is_causal": True}], ids=str)
@pytest.mark.parametrize("name", RUNGS)
def test_formulas_hold_where_products_have_several_tiles(name: str, bounds: Any) -> None:
    counted, expected = of_shape(name, (20, 34), (6, 17), (8, 4), **bounds)
    assert [moving(x) for x in counted] == [moving(x) for x in expected]


@pytest.mark.emulated
@needs_emulation
def test_elements_tell_how_often_each_was_read() -> None:
    q, k, v = map(on_device, draw(2, *[(1, 8, 4)] * 3, dtype=np.float32))
    problem = make_problem(q, k, v, rung="flash1", is_causal=True)
    with IOMeter() as meter:
        launch.forward(
            launch.CUDA, problem, make_operands(launch.CUDA.memory, problem, q, k, v), (2, 4)
        )
    reads, writes = meter.elements(q)
    assert reads.shape == (1, 8, 4) and not writes.any()
    assert (reads[0, :4] == 1).all()  # the second key tile is hidden from the first rows
    assert (reads[0, 4:] == 2).all()


@pytest.mark.skipif(EMULATED, reason="this process is on the emulated GPU")
def test_outside_of_the_emulated_gpu_a_meter_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="MINITORCH_EMULATE=1"), IOMeter():
        pass


def test_bounds_of_a_shape_count_as_a_mask_does() -> None:
    problem = problem_of("flash2", 1, 9, 13, 4, is_causal=True, causal_offset=2)
    shape = head_shape(problem)
    seen = np.arange(13) <= np.arange(9)[:, None] + 2
    assert shape.pairs == shape.transposed.pairs == seen.sum()
    assert shape.transposed.seen(5, 8) == seen[:, 5:8].any(1).sum()


@pytest.mark.emulated
@needs_emulation
def test_a_meter_leaves_nothing_behind() -> None:
    before = Kernel.__getitem__
    with pytest.raises(ZeroDivisionError), IOMeter() as meter:
        raise ZeroDivisionError
    assert Kernel.__getitem__ is before and meter.counts() == {}
