"""Task 5.8: what the kernels of tasks 5.4 and 5.7 move, by formula and by meter, and a budget.

The meter counts each element that a kernel reads from global memory or writes to it, on the emulated GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import launch, make_problem
from kernels.cuda.attention import split_keys
from kernels.metering.io_meter import IOMeter
from kernels.problem.operands import make_operands
from kernels.runtime.targets import EMULATED, cuda
from kernels.traffic.formulas import HeadShape, Traffic, flash1_traffic, flash2_traffic, total
from kernels.traffic.tile_budget import STEP, least_traffic_tile, tile_elements

pytestmark = [
    pytest.mark.task5_8,
    pytest.mark.emulated,
    pytest.mark.usefixtures("undivided"),
    pytest.mark.skipif(not EMULATED, reason="a meter counts on the emulated GPU only"),
]
FORMULAS = {"flash1": flash1_traffic, "flash2": flash2_traffic}
each_rung = pytest.mark.parametrize("rung", FORMULAS)
BOUNDS: list[dict[str, Any]] = [{}, {"is_causal": True}, {"is_causal": True, "causal_offset": -3}]


@pytest.fixture(scope="module")
def undivided() -> Iterator[None]:
    """Let one block do all keys of a query tile, as it does where there are many heads."""
    before = split_keys.SIZES
    split_keys.SIZES = replace(before, split_blocks=0)
    yield
    split_keys.SIZES = before


def metered(
    rung: str, sizes: tuple[int, int, int, int], tile: tuple[int, int], **options: Any
) -> tuple[dict[str, Traffic], HeadShape]:
    """Run the forward pass of one head under a meter; return the counts and the shape."""
    seq_q, seq_k, dim, value_dim = sizes
    rng = np.random.default_rng(0)
    shapes = [(1, seq_q, dim), (1, seq_k, dim), (1, seq_k, value_dim)]
    q, k, v = (cuda.to_device(rng.standard_normal(shape)) for shape in shapes)
    problem = make_problem(q, k, v, rung=rung, **options)
    operands = make_operands(launch.CUDA.memory, problem, q, k, v)
    with IOMeter() as meter:
        out, lse, _ = launch.forward(launch.CUDA, problem, operands, tile)
    counts = meter.counts(q=q, k=k, v=v, out=out, lse=lse)
    return counts, HeadShape(*sizes, problem.lower, problem.upper)


def unbounded(seq: int, dim: int) -> HeadShape:
    return HeadShape(seq, seq, dim, dim, -seq, seq)


def of_the_paper(rung: str, n: int, d: int, side: int) -> int:
    """Return the elements that an algorithm moves with square tiles that divide N."""
    tiles = n // side
    if rung == "flash1":
        # Its own kernel turns l and m, which it reads once more, into L, two numbers, at the end.
        return 3 * n * d + 2 * n + tiles * (3 * n * d + 4 * n) + 4 * n
    return 2 * n * d + 2 * n + tiles * 2 * n * d  # n of the rest of L


# --- the formulas ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rung", "options"),
    [*itertools.product(FORMULAS, BOUNDS), ("flash2", {"window_size": (3, 2)})],
    ids=str,
)
def test_a_formula_says_what_the_meter_counts(rung: str, options: dict[str, Any]) -> None:
    sides = st.integers(1, 3).map(lambda n: STEP * n)

    @given(
        st.tuples(st.integers(1, 9), st.integers(1, 11), st.integers(1, 3), st.integers(1, 4)),
        st.tuples(sides, sides),
    )
    def check(sizes: tuple[int, int, int, int], tile: tuple[int, int]) -> None:
        counts, shape = metered(rung, sizes, tile, **options)
        formula = FORMULAS[rung](shape, tile)
        names = {*counts, *formula}
        wrong = {
            name: (formula.get(name), counts.get(name))
            for name in names
            if formula.get(name, Traffic(0, 0)) != counts.get(name, Traffic(0, 0))
        }
        assert not wrong, f"{rung}, {shape}, tile {tile}: by formula, by meter: {wrong}"

    check()


def test_formulas_are_those_of_the_papers() -> None:
    shape = unbounded(1024, 64)
    for rung, formula in FORMULAS.items():
        assert total(formula(shape, (64, 64))).moved == of_the_paper(rung, 1024, 64, 64), rung


# --- the budget -----------------------------------------------------------------------------------


@each_rung
@pytest.mark.parametrize("options", BOUNDS[:2], ids=str)
def test_no_tile_that_fits_moves_less_than_the_chosen_one(
    rung: str, options: dict[str, Any]
) -> None:
    sizes, elements = (12, 12, 2, 2), 110
    sides = range(STEP, 13, STEP)
    moved: dict[tuple[int, int], int] = {}
    shape = unbounded(12, 2)
    for tile in ((i, j) for i in sides for j in sides):
        if tile_elements(rung, shape, tile) <= elements:
            counts, shape = metered(rung, sizes, tile, **options)
            moved[tile] = total(counts).moved
    chosen = least_traffic_tile(rung, shape, elements)
    assert chosen in moved, f"{chosen} does not fit, or its sides are no multiples of {STEP}"
    least = min(moved.values())
    assert moved[chosen] == least, (
        f"{chosen} is chosen and moves {moved[chosen]}; the least is {least}, of {moved}"
    )
    equals = [tile for tile in moved if moved[tile] == moved[chosen]]
    least = min(tile_elements(rung, shape, tile) for tile in equals)
    assert tile_elements(rung, shape, chosen) == least, (
        f"{chosen} is chosen of {equals}, which move equally many: take the one that needs the least room"
    )


@pytest.mark.parametrize(("rung", "times"), [("flash1", 4.0), ("flash2", 2.0)])
def test_a_chip_of_256_elements_is_enough_for_the_budget(rung: str, times: float) -> None:
    """The budget is a multiple of Q, K, V and O, which have to travel once."""
    n, d = 32, 4
    tile = least_traffic_tile(rung, unbounded(n, d), 256)
    assert tile_elements(rung, unbounded(n, d), tile) <= 256
    moved = total(FORMULAS[rung](unbounded(n, d), tile)).moved
    budget = times * 4 * n * d
    assert moved <= budget, f"{rung} moves {moved} elements with {tile}; the budget is {budget:g}"


@each_rung
def test_a_chip_that_is_too_small_is_an_error(rung: str) -> None:
    try:
        tile = least_traffic_tile(rung, unbounded(8, 64), 100)
    except ValueError as error:
        assert "100" in str(error), (
            f"a ValueError that names the 100 elements is expected, not: {error}"
        )
    else:
        pytest.fail(f"no tile fits into 100 elements, and {tile} is returned: raise a ValueError")
