"""Groups of processes and attention over them: each test starts ``mpiexec`` once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ...support.ranks import ROOT, needs_mpi, python, run_check

pytestmark = needs_mpi


def run_on_ranks(size: int, check: str) -> None:
    """Run one check of ``on_ranks`` on several ranks."""
    run_check(size, "on_ranks", check)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_attention_over_ranks_is_one_device(size: int) -> None:
    run_on_ranks(size, "attention")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_groups_exchange_arrays(size: int) -> None:
    run_on_ranks(size, "exchanges")


@pytest.mark.parametrize("size", [3, 4])
def test_ranks_form_a_grid(size: int) -> None:
    run_on_ranks(size, "grids")


@pytest.mark.simulator
def test_tensors_on_a_device_travel_too() -> None:
    run_on_ranks(2, "device")


def test_dropout_takes_the_seed_of_rank_0() -> None:
    run_on_ranks(2, "default_seed")


def test_a_wrong_call_says_on_every_rank_what_is_wrong() -> None:
    run_on_ranks(2, "wrong_calls")


def test_memory_does_not_grow_with_the_ranks() -> None:
    run_on_ranks(4, "memory")


def test_the_program_of_the_guide_runs(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "guides" / "many-devices.md").read_text(encoding="utf-8")
    program = tmp_path / "ring.py"
    program.write_text("".join(re.findall(r"^```python mpi4py\n(.*?)^```", guide, re.M | re.S)))
    done = python(2, str(program))
    assert done.returncode == 0, done.stderr
    differences = [float(x) for x in re.findall(r"difference ([\d.e+-]+)", done.stdout)]
    assert len(differences) == 2 and max(differences) < 1e-5


def test_an_error_on_one_rank_ends_all() -> None:
    script = (
        "from minitorch.distributed import world\n"
        "group = world()\n"
        "if group.rank == 1: raise RuntimeError('the disk is full')\n"
        "group.barrier()"
    )
    done = python(2, "-c", script)
    assert done.returncode != 0
    assert "rank 1 of 2: RuntimeError: the disk is full" in done.stderr
