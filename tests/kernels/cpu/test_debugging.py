"""``NUMBA_DISABLE_JIT=1``: kernels run as plain Python, in which a debugger stops."""

from __future__ import annotations

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

from ...support.attention.strategies import SCORE_MODS
from ...support.tolerances import assert_close_arrays

ROOT = Path(__file__).parents[3]

#: More rows than ``flash_decoding`` takes.
ROWS, COLS, DIM = 10, 12, 4


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": np.arange(ROWS * COLS).reshape(ROWS, COLS) % 3 != 0},
    "dropout": {"dropout_p": 0.3, "seed": 5},
    "softcap": {"softcap": 2.0},
    "score_mod": {"score_mod": SCORE_MODS[0]},
    "together": {"is_causal": True, "softcap": 2.0, "dropout_p": 0.3, "seed": 5},
}


def operands() -> list[Any]:
    """Return q, k and v of every call."""
    draw = np.random.default_rng(0)
    return [draw.standard_normal((1, 2, n, DIM)).astype(np.float32) for n in (ROWS, COLS, COLS)]


def debug() -> None:
    """Print the results of all options."""
    found = {}
    for name, options in OPTIONS.items():
        q, k, v = (
            minitorch.from_numpy(x, minitorch.FastBackend, requires_grad=True) for x in operands()
        )
        out: Any = q.flash_attention(k, v, **options)
        out.sum().backward()
        results = {"out": out, "dq": q.grad, "dk": k.grad, "dv": v.grad}
        found[name] = {what: x.to_numpy().tolist() for what, x in results.items() if x is not None}
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
def test_kernels_as_plain_python_are_the_textbook(debugged: Any, option: str) -> None:
    options: dict[str, Any] = {**OPTIONS[option], "rung": "naive"}
    q, k, v = (x.astype(np.float64) for x in operands())
    out, lse = kernels.flash_attention_forward(q, k, v, **options)
    gradients = kernels.flash_attention_backward(np.ones_like(out), q, k, v, out, lse, **options)
    expected = dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))
    for name, values in debugged[option].items():
        assert_close_arrays(np.array(values, np.float32), expected[name], np.float32, name)
