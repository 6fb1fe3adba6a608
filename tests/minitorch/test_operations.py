"""The table of operations: what it prints is what serves a call, and plain() takes all of it away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import minitorch
from minitorch import CudaBackend, FastBackend, SimpleBackend

ROOT = Path(minitorch.__file__).parents[1]
BACKENDS = (SimpleBackend, FastBackend, CudaBackend)


def places(backend: minitorch.TensorBackend) -> dict[str, str]:
    """Return the file of each operation's function, as the printed table names it."""
    lines = (line.split() for line in repr(backend.ops).splitlines())
    return {name: place.partition(":")[0] for name, _, place in lines}


def test_plain_serves_every_operation_by_the_function_of_its_name() -> None:
    assert places(FastBackend)["softmax"] == "minitorch/accelerated/layers.py"
    homes = dict(zip(BACKENDS, ("tensor_ops", "fast_ops", "cuda_ops"), strict=True))
    loops = "map", "zip", "reduce", "matrix_multiply"
    with minitorch.plain(), minitorch.plain():
        for backend, home in homes.items():
            own = dict.fromkeys(loops, f"minitorch/{home}.py")
            assert places(backend) == {**places(SimpleBackend), **own}
    assert places(FastBackend)["matrix_multiply"] == "minitorch/accelerated/cpu_loops.py"


@pytest.mark.parametrize("leaves", [False, True])
def test_a_graph_has_its_gradients_on_either_side_of_plain(leaves: bool) -> None:
    x = minitorch.from_numpy(np.arange(6.0).reshape(2, 3), FastBackend, requires_grad=True)
    if leaves:
        with minitorch.plain():
            total = (minitorch.softmax(x, 1) * x).sum()
        total.backward()
    else:
        total = (minitorch.softmax(x, 1) * x).sum()
        with minitorch.plain():
            total.backward()
    p = np.exp([0.0, 1.0, 2.0]) / np.exp([0.0, 1.0, 2.0]).sum()
    expected = [p * (1.0 + row - p @ row) for row in np.arange(6.0).reshape(2, 3)]
    assert x.grad is not None
    np.testing.assert_allclose(x.grad.to_numpy(), expected, rtol=1e-12)


def test_a_variable_makes_a_whole_program_plain() -> None:
    program = "import minitorch; print(minitorch.FastBackend.ops)"
    environment = {**os.environ, "MINITORCH_PLAIN": "1"}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert "minitorch/nn.py" in run.stdout and "accelerated" not in run.stdout
