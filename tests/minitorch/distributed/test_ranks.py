"""Groups of processes and attention over them: each test starts ``mpiexec`` once."""

from __future__ import annotations

import re
import socket
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from ...support.ranks import ROOT, needs_mpi, python, run_check

pytestmark = [pytest.mark.slow, needs_mpi]


@pytest.mark.parametrize(
    ("check", "size"),
    [
        *((check, size) for check in ("attention", "exchanges") for size in (1, 3, 4)),
        ("many_heads", 2), ("grids", 3), ("grids", 4), ("default_seed", 2), ("wrong_calls", 2),
        ("memory", 3),
        ("gradients", 2), ("gradients", 3), ("curves", 3), ("state", 3),
        ("other_weights", 3), ("rings", 4),
        # From three ranks on, sums of 16-bit results are stored in float32.
        pytest.param("device", 2, marks=pytest.mark.emulated),
        pytest.param("device", 3, marks=pytest.mark.emulated),
    ],
)  # fmt: skip
def test_ranks_compute_exchange_and_train_as_one_device(check: str, size: int) -> None:
    training = check in ("gradients", "curves", "state", "other_weights", "rings")
    run_check(size, "training_on_ranks" if training else "on_ranks", check)


@pytest.mark.cuda
@pytest.mark.skipif(find_spec("nccl") is None, reason="needs nccl4py")
@pytest.mark.parametrize("check", ["device", "exchanges", "captured"])
def test_a_world_of_one_needs_no_mpi(check: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "", "MASTER_PORT": ""}
    run_check(0, "on_ranks", check, **launcher, NCCL_COMM_ID=place)


def test_without_a_launcher_nccl_says_what_is_missing() -> None:
    done = python(0, "-c", "from minitorch.distributed import nccl_group as n; n.NcclGroup()")
    assert "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set; start" in done.stderr


def test_the_program_of_the_guide_runs(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "guides" / "many-devices.md").read_text(encoding="utf-8")
    program = tmp_path / "ring.py"
    program.write_text("".join(re.findall(r"^```python mpi4py\n(.*?)^```", guide, re.M | re.S)))
    done = python(2, str(program))
    assert done.returncode == 0, done.stderr
    differences = [float(x) for x in re.findall(r"difference ([\d.e+-]+)", done.stdout)]
    assert len(differences) == 2 and max(differences) < 1e-5


#: What a rank does while the others wait for it, and the line that names it.
FAILURES = {
    "raise RuntimeError('the disk is full')": "rank 1 of 3: RuntimeError: the disk is full",
    "raise MemoryError": "rank 1 of 3: MemoryError",
    "os.kill(os.getpid(), signal.SIGSTOP)": r"rank 0 of 3: waited \d s for rank 1 \(process \d+ on .*\)",
    "os._exit(0)": r"rank 1 of 3: os\._exit\(0\) ended this rank",
    "sys.exit(0)": r"rank 0 of 3: waited \d s for rank 1 \(process .*whose program has ended",
    "group.receive(np.ones(3), 0).wait()": "rank 0 of 3: waited .* every rank waits for another: rank 0",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_rank_that_fails_or_hangs_ends_all_with_one_line(failure: str) -> None:
    script = f"""
import os, signal, sys
import numpy as np
from minitorch.distributed import world
group = world()
if group.rank == 1:
    {failure}
group.barrier()
"""
    start = time.perf_counter()
    done = python(3, "-c", script, MINITORCH_RANK_TIMEOUT="0.3")
    assert time.perf_counter() - start < 30.0
    assert done.returncode != 0
    (line,) = re.findall(r"^rank \d of 3: .*", done.stderr, re.MULTILINE)
    assert re.match(FAILURES[failure], line)


def test_ranks_may_end_at_different_times() -> None:
    script = """
import sys, time
import numpy as np
from minitorch.distributed import world
group = world()
pair = group.split(group.rank == 1)
numbers = np.full(3, group.rank)
if group.rank == 1: sent = group.send(numbers, 2)
if group.rank == 2: time.sleep(1.5)
group.broadcast(numbers, 1).wait()
if group.rank == 1: sent.wait(); sys.exit(0)
if group.rank == 2: group.receive(numbers, 1).wait(); time.sleep(1.5)
pair.barrier()
"""
    done = python(3, "-c", script)
    assert done.returncode == 0, done.stderr


def test_a_killed_process_is_known_by_its_number() -> None:
    script = (
        "import os, signal\n"
        "from minitorch.distributed import world\n"
        "group = world()\n"
        "if group.rank == 0: print(group.waiting.processes[1], flush=True)\n"
        "group.barrier()\n"
        "if group.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "group.barrier()"
    )
    start = time.perf_counter()
    done = python(2, "-c", script)
    assert time.perf_counter() - start < 30.0
    assert done.returncode != 0
    process = re.findall(r"process (\d+) on \S+", done.stdout)[0]
    # As MPICH or as Open MPI names it.
    assert re.search(rf"\b(PID {process}|rank 1)\b", done.stdout + done.stderr)
