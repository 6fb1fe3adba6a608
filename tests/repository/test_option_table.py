"""docs/options.md says what every rung does with every option: each cell is tried."""

from __future__ import annotations

from typing import Any

import pytest

from kernels import launch
from kernels.runtime.dtypes import FLOAT64

from ..support.attention.option_table import BEGIN, COLUMNS, END, OPTIONS, PAGE, can_try, cell

#: Columns of the device; a call of tensor cores takes seconds on the emulated GPU.
ON_DEVICE = [
    pytest.param(launch.CUDA, rung.name, marks=[pytest.mark.slow] * (FLOAT64 not in rung.dtypes))
    for rung in launch.CUDA.rungs
]


def on_page() -> dict[str, dict[str, str]]:
    """Return the cells of the page: option → column → "yes" or the reason."""
    table, _, notes = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip().partition("\n\n")
    reasons = dict(line.split(". ", 1) for line in notes.splitlines() if line)
    head, _, *lines = (
        [entry.strip() for entry in line.strip("|").split("|")] for line in table.splitlines()
    )
    return {
        option: {
            name: reasons[mark[4:-1]] if mark.startswith("no (") else mark
            for name, mark in zip(head[1:], marks, strict=True)
        }
        for option, *marks in lines
    }


def test_the_page_has_a_cell_for_every_option_and_rung() -> None:
    names = {f"{target.name} {rung}" for target, rung in COLUMNS}
    found = on_page()
    assert set(found) == set(OPTIONS)
    assert all(set(row) == names and all(row.values()) for row in found.values())


@pytest.mark.emulated
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("target", "rung"), ON_DEVICE)
def test_a_cell_of_the_device_is_true(option: str, target: Any, rung: str) -> None:
    assert cell(option, target, rung) == on_page()[option][f"{target.name} {rung}"]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("target", "rung"), [c for c in COLUMNS if c[0] is not launch.CUDA])
def test_a_cell_of_the_host_is_true(option: str, target: Any, rung: str) -> None:
    if not can_try(target):
        pytest.skip("the emulated run tries the device")
    assert cell(option, target, rung) == on_page()[option][f"{target.name} {rung}"]
