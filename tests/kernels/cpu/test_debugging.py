"""``NUMBA_DISABLE_JIT=1``: a debugger stops in each hop of a call, and the results are the same."""

from __future__ import annotations

import ast
import bdb
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernels
import minitorch

from ...support.tolerances import assert_close_arrays

ROOT = Path(__file__).parents[3]

#: Functions that a first call passes through, as docs/architecture.md has them, each with its file.
FORWARD = [
    ("AttentionMethods.flash_attention", "minitorch/tensors/attention_methods.py"),
    ("FlashAttention.forward", "minitorch/functions/flash_attention.py"),
    ("BoundCall.__init__", "kernels/launch.py"),
    ("BoundCall.in_full", "kernels/launch.py"),
    ("make_forward.forward_item", "kernels/cpu/attention/flash2.py"),
]
BACKWARD = [
    ("FlashAttention.backward", "minitorch/functions/flash_attention.py"),
    ("BoundCall.__init__", "kernels/launch.py"),
    ("BoundCall.in_full", "kernels/launch.py"),
    ("make_backward.backward_item", "kernels/cpu/attention/flash2_backward.py"),
]

#: More rows than ``flash_decoding`` takes.
ROWS, COLS, DIM = 10, 12, 4


def half_of(score: float, batch: int, head: int, row: int, col: int) -> float:
    """Return a modified score."""
    return score / 2 + (col - row) / 8


def derivative_of_half(score: float, batch: int, head: int, row: int, col: int) -> float:
    """Return its derivative."""
    return 0.5


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": np.arange(ROWS * COLS).reshape(ROWS, COLS) % 3 != 0},
    "dropout": {"dropout_p": 0.3, "seed": 5},
    "softcap": {"softcap": 2.0},
    "score_mod": {"score_mod": (half_of, derivative_of_half)},
    "together": {"is_causal": True, "softcap": 2.0, "dropout_p": 0.3, "seed": 5},
}


def operands() -> list[Any]:
    """Return q, k and v of every call."""
    draw = np.random.default_rng(0)
    return [draw.standard_normal((1, 2, n, DIM)).astype(np.float32) for n in (ROWS, COLS, COLS)]


class Debugger(bdb.Bdb):
    """A debugger with a breakpoint at the first statement of some functions; it notes where it stops."""

    def __init__(self, functions: list[tuple[str, str]]) -> None:
        super().__init__()
        self.stops: list[tuple[str, str]] = []
        self.places: dict[tuple[str, int], tuple[str, str]] = {}
        for name, file in functions:
            path = self.canonic(str(ROOT / file))
            line = first_statement(path, name)
            assert self.set_break(path, line) is None
            self.places[path, line] = name, file

    def user_line(self, frame: Any) -> None:
        """Note a breakpoint, once however often it stops there."""
        hop = self.places.get((self.canonic(frame.f_code.co_filename), frame.f_lineno))
        if hop is not None and hop not in self.stops:
            self.stops.append(hop)
        self.set_continue()


def first_statement(path: str, name: str) -> int:
    """Return the line of the first statement of a function, its docstring not counted."""
    node: Any = ast.parse(Path(path).read_text())
    for part in name.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    return node.body[1].lineno if ast.get_docstring(node) else node.body[0].lineno


def debug() -> None:
    """Print, for all options, where a debugger stops forward and backward, and the results."""
    found = {}
    for name, options in OPTIONS.items():
        q, k, v = (
            minitorch.from_numpy(x, minitorch.FastBackend, requires_grad=True) for x in operands()
        )
        forward, backward = Debugger(FORWARD), Debugger(BACKWARD)
        out: Any = forward.runcall(q.flash_attention, k, v, **options)
        backward.runcall(out.sum().backward)
        results = {"out": out, "dq": q.grad, "dk": k.grad, "dv": v.grad}
        arrays = {what: x.to_numpy().tolist() for what, x in results.items() if x is not None}
        found[name] = {"forward": forward.stops, "backward": backward.stops, "results": arrays}
    print(json.dumps(found))


@pytest.fixture(scope="module")
def debugged() -> Any:
    """Return what :func:`debug` prints where numba compiles nothing."""
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import debug; debug()"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_debugger_stops_in_each_hop(debugged: Any, option: str) -> None:
    stops = {
        each: {tuple(hop) for hop in debugged[option][each]} for each in ("forward", "backward")
    }
    assert stops == {"forward": set(FORWARD), "backward": set(BACKWARD)}


@pytest.mark.parametrize("option", OPTIONS)
def test_kernels_as_plain_python_are_the_textbook(debugged: Any, option: str) -> None:
    options: dict[str, Any] = {**OPTIONS[option], "rung": "naive"}
    q, k, v = (x.astype(np.float64) for x in operands())
    out, lse = kernels.flash_attention_forward(q, k, v, **options)
    gradients = kernels.flash_attention_backward(np.ones_like(out), q, k, v, out, lse, **options)
    expected = dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))
    for name, values in debugged[option]["results"].items():
        assert_close_arrays(np.array(values, np.float32), expected[name], np.float32, name)
