"""How machine code is kept on disk: cache hits of a second process, and the fingerprint of a kernel."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numba import types

from kernels.runtime.jit import fingerprint

ROOT = Path(__file__).parents[3]


def run(script: str, cache: Path, *path: Path) -> Any:
    """Run a script in a process of its own and return what it prints, as JSON."""
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *path))),
        "PYTHONDONTWRITEBYTECODE": "1",  # the sources change faster than their time stamps
    }
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


ATTENTION = """
import numba.core.event as event
import numpy as np
import kernels

class Compiled(event.Listener):
    count = 0
    def on_start(self, started): self.count += 1
    def on_end(self, ended): pass

q = np.ones((1, 1, 10, 4), np.float32)
few, mask = q[:, :, :1], np.ones((10, 10), bool)
compiled = Compiled()
with event.install_listener("numba:compile", compiled):
    for options in ({}, {"softcap": 2.0, "attn_mask": mask, "dropout_p": 0.1, "seed": 1}):
        out, lse = kernels.flash_attention_forward(q, q, q, **options)
        kernels.flash_attention_backward(q, q, q, q, out, lse, **options)
    for dtype in (np.float32, np.float64):  # the kernels of both are in one file
        kernels.flash_attention_forward(*(x.astype(dtype) for x in (few, q, q)))
print(compiled.count)
"""


@pytest.mark.slow
def test_a_second_process_compiles_no_attention(tmp_path: Path) -> None:
    """Its kernels close over compiled functions, which numba's own key does not know again."""
    assert run(ATTENTION, tmp_path) > 0
    assert run(ATTENTION, tmp_path) == 0


KERNEL = """
import helper
from helper import OFFSET, STEP, helped
from kernels.runtime.jit import njit_cached

@njit_cached(fastmath={fastmath})
def kernel(x):
    return helped(x) + helper.also_helped(x) + OFFSET + STEP
"""
HELPER = """
import numpy as np
from numba.extending import register_jitable

OFFSET = {offset}
STEP = np.float32({step})

def unused(x):
    return {unused}

@register_jitable
def helped(x):
    return inner(x)

@register_jitable
def inner(x):
    return {inner}

@register_jitable
def also_helped(x):
    return {by_module}
"""


def write(folder: Path, **changes: str) -> None:
    code = {"offset": "0.0", "step": "0.0", "inner": "x * 10.0", "by_module": "0.0", "unused": "x"}
    code = {**code, "fastmath": "False", **changes}
    (folder / "kernel.py").write_text(KERNEL.format(**code))
    (folder / "helper.py").write_text(HELPER.format(**code))


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a fresh copy of the kernel and the helper of a folder."""
    for name in ("helper", "kernel"):
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({}, False),
        ({"unused": "x + 1"}, False),
        ({"inner": "x * 30.0"}, True),
        ({"inner": "abs(x) * 10.0"}, True),
        ({"offset": "1.0"}, True),
        ({"step": "1.0"}, True),
        ({"by_module": "x"}, True),
    ],
    ids=[
        "nothing",
        "another function",
        "a number",
        "a call",
        "a constant",
        "a NumPy constant",
        "a function called by its module",
    ],
)
def test_the_fingerprint_covers_what_a_kernel_calls(
    change: dict[str, str], differs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    prints = []
    for name, changes in (("before", {}), ("after", change)):
        folder = tmp_path / name
        folder.mkdir()
        write(folder, **changes)
        prints.append(fingerprint(loaded(folder, monkeypatch).kernel))
    assert (prints[0] != prints[1]) == differs


def test_the_fingerprint_covers_a_captured_array() -> None:
    # A mod is frozen with the array that it captured; another array is another kernel.
    def capturing(table: Any) -> Any:
        def mod(score: float, head: int) -> float:
            return score * table[head]

        return mod

    table = np.arange(4.0)
    same, another = table.copy(), table + 1
    assert fingerprint(capturing(table)) == fingerprint(capturing(same))
    assert fingerprint(capturing(table)) != fingerprint(capturing(another))
    assert fingerprint(capturing(table)) != fingerprint(capturing(table.astype(np.float32)))


def test_the_fingerprint_covers_the_order_of_names_in_a_tuple() -> None:
    # A launch fills a tuple by name; machine code finds the elements where they were when it was compiled.
    def kernel(shape: Any) -> Any:
        return shape.rows

    def kind(*names: str) -> types.NamedUniTuple:
        return types.NamedUniTuple(types.int32, 2, namedtuple("Shape", names))

    before, after = kind("rows", "cols"), kind("cols", "rows")
    assert fingerprint(kernel, before) == fingerprint(kernel, kind("rows", "cols"))
    assert fingerprint(kernel, before) != fingerprint(kernel, after)


KERNEL_PRINTS = """
import json
from kernels.runtime.jit import fingerprint
from kernels.cuda.attention.flash2_mma import forward as flash2_mma
from kernels.cuda.attention.flash2_mma.arithmetic import HALVES
from kernels.cuda.attention.flash2_mma.pipeline import MmaVariant
from kernels.cuda.attention.flash2_mma.tiles import MmaLayout
from kernels.cuda.attention.flash3_wgmma import layout
from kernels.cuda.attention.flash3_wgmma.forward import kernel as flash3_wgmma

widths = layout.Widths(64, 64)
found = [
    *(flash3_wgmma.forward_kernel(layout.layout_of(widths), widths, dtype)
      for dtype in ("float16", "bfloat16")),
    *(flash2_mma.forward_kernel(
        MmaVariant(MmaLayout(64, rows, 4), 64, width, HALVES["float16"], vectors))
      for rows in (32, 64) for width in (64, 80) for vectors in (False, True)),
]
print(json.dumps([fingerprint(kernel.source) for kernel in found]))
"""


def test_kernels_of_a_gpu_differ_by_all_they_are_made_of(tmp_path: Path) -> None:
    # Instructions too: float16 and bfloat16 differ in nothing else.
    prints = run(KERNEL_PRINTS, tmp_path)
    assert len(set(prints)) == len(prints)
    assert run(KERNEL_PRINTS, tmp_path) == prints


KERNELS_OF_A_CALL = """
import json
import numpy as np
from numba.cuda.dispatcher import CUDADispatcher
from kernels import flash_attention_forward
from kernels.cuda.runtime.arrays import to_device, to_host

compiled = []
compile_ = CUDADispatcher.compile
CUDADispatcher.compile = lambda self, *args: compiled.append(self) or compile_(self, *args)
q = to_device(np.ones((1, 1, 40, 16), np.float32))
out, _ = flash_attention_forward(q, q, q)
assert (to_host(out) == 1).all()
counts = [[sum(c.values()) for c in (one._cache_hits, one._cache_misses)] for one in compiled]
print(json.dumps([sum(count) for count in zip(*counts)]))
"""


@pytest.mark.cuda
def test_a_second_process_compiles_no_kernel_of_a_gpu(tmp_path: Path) -> None:
    hits, misses = run(KERNELS_OF_A_CALL, tmp_path)
    assert hits == 0 and misses > 0
    assert run(KERNELS_OF_A_CALL, tmp_path) == [misses, 0]
