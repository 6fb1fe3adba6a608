"""Groups of processes and attention over them: each test starts ``mpiexec`` once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SECONDS = 300
#: That of the MPI library in the environment of this Python, or any other.
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")

pytestmark = pytest.mark.skipif(
    find_spec("mpi4py") is None or MPIEXEC is None, reason="needs mpi4py and mpiexec"
)


def run_on_ranks(size: int, check: str) -> None:
    """Run one check of ``on_ranks`` on several ranks of one thread each."""
    program = [sys.executable, "-m", "tests.minitorch.distributed.on_ranks", check]
    one_thread = {"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(MPIEXEC), "-n", str(size), *program],
        cwd=ROOT, env={**os.environ, **one_thread}, timeout=SECONDS, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{check} on {size} ranks:\n{done.stdout}\n{done.stderr}"


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
    done = subprocess.run(
        [str(MPIEXEC), "-n", "2", sys.executable, str(program)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=SECONDS,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    differences = [float(x) for x in re.findall(r"largest difference (\S+)", done.stdout)]
    assert len(differences) == 2 and max(differences) < 1e-5


def test_an_error_on_one_rank_ends_all() -> None:
    script = (
        "from minitorch.distributed import world\n"
        "group = world()\n"
        "if group.rank == 1: raise RuntimeError('the disk is full')\n"
        "group.barrier()"
    )
    done = subprocess.run(
        [str(MPIEXEC), "-n", "2", sys.executable, "-c", script],
        cwd=ROOT, timeout=SECONDS, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert "rank 1 of 2: RuntimeError: the disk is full" in done.stderr
