"""The IO meter: what the kernels move, counted in the simulator, is what the formulas say, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels import launch, make_problem
from kernels.cuda import flash2_merge, product
from kernels.cuda.device import Kernel
from kernels.formulas import TRAFFIC, HeadShape, Traffic, naive_traffic, total
from kernels.io_meter import IOMeter
from kernels.operands import make_operands
from kernels.targets import IS_SIMULATOR

from .cuda_attention import draw, on_device

needs_simulator = pytest.mark.skipif(
    not IS_SIMULATOR, reason="arrays count in the simulator only: NUMBA_ENABLE_CUDASIM=1"
)
SHAPES = [  # seq_q, seq_k, head_dim, value_dim, tile
    (16, 16, 8, 8, (4, 4)),
    (9, 13, 5, 3, (4, 8)),  # nothing divides anything
    (20, 34, 6, 17, (8, 4)),
    (1, 7, 4, 4, (4, 4)),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"is_causal": True, "window_size": (3, 0)},
    {"window_size": (2, 5)},
]


@pytest.fixture
def undivided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no sum be divided among blocks, as none is where there are many heads."""
    sizes = product.SIZES
    monkeypatch.setattr(product, "SIZES", replace(sizes, product_blocks=0))
    monkeypatch.setattr(flash2_merge, "SIZES", replace(sizes, split_blocks=0))


@pytest.fixture(scope="module", autouse=True)
def quick(quick_barriers: None) -> Iterator[None]:
    yield


def metered(rung: str, shape: tuple[Any, ...], **options: Any) -> tuple[Any, HeadShape]:
    """Run the forward pass of one head under a meter; return the counts and the shape."""
    seq_q, seq_k, dim, value_dim, tile = shape
    arrays = draw(1, (1, seq_q, dim), (1, seq_k, dim), (1, seq_k, value_dim), dtype=np.float32)
    q, k, v = map(on_device, arrays)
    problem = make_problem(q, k, v, rung=rung, **options)
    operands = make_operands(launch.CUDA.memory, problem, q, k, v)
    with IOMeter() as meter:
        out, lse = launch.forward(launch.CUDA, problem, operands, tile)
    counts = meter.counts(q=q, k=k, v=v, out=out, lse=lse)
    return counts, HeadShape(seq_q, seq_k, dim, value_dim, problem.lower, problem.upper)


@pytest.mark.simulator
@needs_simulator
@pytest.mark.usefixtures("undivided")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rung", ["flash1", "flash2"])
def test_the_tiled_rungs_move_what_their_formulas_say(
    rung: str, shape: tuple[Any, ...], options: Any
) -> None:
    counts, head = metered(rung, shape, **options)
    assert counts == TRAFFIC[rung](head, shape[-1])


@pytest.mark.simulator
@needs_simulator
@pytest.mark.usefixtures("undivided")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_naive_rung_moves_what_its_formula_says(shape: tuple[Any, ...]) -> None:
    counts, head = metered("naive", shape)
    tile = [16 * ((block + 15) // 16) for block in shape[-1]]  # as the products round it
    assert counts == naive_traffic(head, (tile[0], tile[1]))


@pytest.mark.simulator
@needs_simulator
@pytest.mark.usefixtures("undivided")
def test_a_long_sequence_costs_the_naive_rung_most() -> None:
    shape = (48, 48, 4, 4, (16, 16))
    moved = {rung: total(metered(rung, shape)[0]).moved for rung in TRAFFIC}
    assert moved["naive"] > moved["flash1"] > moved["flash2"], moved


@pytest.mark.simulator
@needs_simulator
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


@pytest.mark.simulator
@needs_simulator
def test_a_meter_leaves_nothing_behind() -> None:
    before = Kernel.__getitem__
    with pytest.raises(ZeroDivisionError), IOMeter() as meter:
        raise ZeroDivisionError
    assert Kernel.__getitem__ is before and meter.counts() == {}


@pytest.mark.skipif(IS_SIMULATOR, reason="this process is in the simulator")
def test_outside_of_the_simulator_a_meter_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="NUMBA_ENABLE_CUDASIM=1"), IOMeter():
        pass


def test_a_total_is_the_sum() -> None:
    assert total({"q": Traffic(3, 0), "out": Traffic(1, 5)}) == Traffic(4, 5)
    assert total({"q": Traffic(3, 0), "out": Traffic(1, 5)}).moved == 9
