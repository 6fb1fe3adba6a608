"""What a student has not written does not work: nothing else computes it behind the student's back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .test_starter_trees import start

pytestmark = pytest.mark.slow
#: Before each program: x and y are tensors of a backend, and each call must stop at a region of a task.
BEGIN = """
import numpy as np
import minitorch

def tensors(backend, *shape):
    return [minitorch.from_numpy(np.full(shape, 0.5), backend) for _ in range(2)]

def stops(task, *calls):
    for number, call in enumerate(calls):
        try:
            call()
        except Exception as error:
            assert f"Task {task}" in str(error), f"{task}, call {number}: {error!r}"
        else:
            raise SystemExit(f"{task}, call {number}: works without the task")
"""
#: Module → a program in its tree, without and with the simulator.
FAST = """
for size in (2, 200):
    x, y = tensors(minitorch.FastBackend, size, size)
    stops("3.1", lambda: -x, lambda: x + y, lambda: x * 2.0, lambda: x.sum(1), lambda: x.mean(),
          lambda: x.exp(), lambda: x.permute(1, 0).contiguous(), lambda: x.all())
    stops("3.2", lambda: x @ y)
"""
CUDA = """
x, y = tensors(minitorch.CudaBackend, 3, 3)
stops("3.3", lambda: -x, lambda: x + y, lambda: x.sum(1), lambda: x.mean(), lambda: x.exp())
stops("3.4", lambda: x @ y)
"""
LAYERS = """
for backend in (minitorch.SimpleBackend, minitorch.FastBackend):
    x, y = tensors(backend, 1, 2, 4, 4)
    stops("4.1", lambda: minitorch.conv1d(x.view(2, 4, 4), y.view(2, 4, 4)))
    stops("4.2", lambda: minitorch.conv2d(x, y))
    stops("4.3", lambda: minitorch.tile(x, (2, 2)), lambda: minitorch.avgpool2d(x, (2, 2)))
    stops("4.4", lambda: minitorch.max(x, 3), lambda: minitorch.argmax(x, 3),
          lambda: minitorch.softmax(x, 3), lambda: minitorch.softmax(x, 0),
          lambda: minitorch.logsoftmax(x, 3), lambda: minitorch.dropout(x, 0.5),
          lambda: minitorch.softmax_loss(x.view(8, 4), np.zeros(8, int)))
"""
ATTENTION = """
for backend in (minitorch.SimpleBackend, minitorch.FastBackend):
    x, y = tensors(backend, 1, 2, 4, 4)
    stops("5.3", lambda: x.flash_attention(y, y), lambda: x.flash_attention(y, y, is_causal=True))
    model = minitorch.DecoderLM(7, 8, 2, 10, backend=backend, n_layer=1)
    ids = np.array([[1, 2]])
    stops("5.10", lambda: model.generate([1], 3), lambda: model.loss(ids, ids), lambda: model(ids),
          lambda: minitorch.TransformerLayer(8, 2, backend=backend)(x.view(1, 4, 8)))
"""


@pytest.mark.parametrize(
    ("module", "program", "simulator"),
    [(3, FAST, "0"), (3, CUDA, "1"), (4, LAYERS, "0"), (5, ATTENTION, "0")],
    ids=["loops", "kernels", "layers", "attention"],
)
def test_an_operation_stops_at_the_task_that_is_not_written(
    module: int, program: str, simulator: str, tmp_path: Path
) -> None:
    start(module, tmp_path / "tree")
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": simulator, "PYTHONPATH": "."}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BEGIN + program], env=environment,
        cwd=tmp_path / "tree", capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
