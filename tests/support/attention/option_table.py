"""The table of docs/options.md: every option on every rung, tried and compared with the textbook.

    python -m tests.support.attention.option_table            prints the part that this process can try
    python -m tests.support.attention.option_table --write    writes docs/options.md, emulated GPU included

A cell says "yes" when forward and gradients agree with the textbook in float64, else why the rung refuses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import kernels
from kernels import launch
from kernels.cuda.runtime.arrays import to_device, to_host
from kernels.runtime.dtypes import FLOAT16, FLOAT32
from kernels.runtime.targets import EMULATED, why_no_cuda

from ..device.emulated_gpu import emulated_gpu
from .on_cuda import packed
from .strategies import MASK_MODS, SCORE_MODS, Case

PAGE = Path(__file__).parents[3] / "docs" / "options.md"
ROWS, COLS, HEADS = 7, 18, 2


def _case(**options: Any) -> Case:
    """Return a small problem of two batches and two heads that divides no tile."""
    rng = np.random.default_rng(0)
    key_heads = 1 if options.get("enable_gqa") else HEADS
    shapes = (
        (2, HEADS, ROWS, 3), (2, key_heads, COLS, 3), (2, key_heads, COLS, 2), (2, HEADS, ROWS, 2),
    )  # fmt: skip
    q, k, v, dout = (rng.standard_normal(shape) for shape in shapes)
    return Case(q, k, v, dout, options, (4, 4))


def _block_mask() -> kernels.BlockMask:
    rng = np.random.default_rng(1)
    patterns = rng.random((1, 16, 16)) < 0.5
    return kernels.BlockMask(np.array([[[1, 0]], [[0, 2]]]), ROWS, COLS, 16, patterns)


def _float_mask() -> Any:
    return np.random.default_rng(2).standard_normal((2, 1, ROWS, COLS))


def from_table(score: Any, batch: int, head: int, row: int, col: int, table: Any) -> Any:
    """Add a number of a table to each score, and bend those of the first head."""
    return score * table[row, 0] + table[head, col] if head else score + table[0, col] ** 2


def _with_dlse() -> Case:
    case = _case()
    return replace(case, dlse=np.random.default_rng(3).standard_normal((2, HEADS, ROWS)))


def _decoding() -> Case:
    rng = np.random.default_rng(4)
    shapes = (1, 1, 3), (1, 200, 3), (1, 200, 2), (1, 1, 2)
    q, k, v, dout = (rng.standard_normal(shape) for shape in shapes)
    return Case(q, k, v, dout, {"is_causal": True, "causal_offset": 190}, (4, 4))


#: Option → a case that has it.
OPTIONS: dict[str, Callable[[], Case]] = {
    "no option; unequal lengths, value dim ≠ head dim": _case,
    "`scale`": lambda: _case(scale=0.3),
    "`is_causal`": lambda: _case(is_causal=True),
    "`is_causal`, `causal_offset`": lambda: _case(is_causal=True, causal_offset=COLS - ROWS),
    "`window_size`": lambda: _case(window_size=(3, 2), causal_offset=4),
    "`chunk_size`": lambda: _case(chunk_size=5, causal_offset=4),
    "`attn_mask`, boolean": lambda: _case(attn_mask=_float_mask() > 0),
    "`attn_mask`, floating, and its gradient": lambda: _case(attn_mask=_float_mask()),
    "`softcap`": lambda: _case(softcap=1.5),
    "`alibi_slopes`": lambda: _case(alibi_slopes=np.array([0.5, 0.25])),
    "`sink`, and its gradient": lambda: _case(sink=np.array([1.0, -0.5])),
    "`dropout_p`, `seed`": lambda: _case(dropout_p=0.4, seed=11),
    "`block_mask`": lambda: _case(block_mask=_block_mask()),
    "`mask_mod`": lambda: _case(mask_mod=MASK_MODS[0]),
    "`score_mod`": lambda: _case(score_mod=SCORE_MODS[0]),
    "`score_table`": lambda: _case(score_mod=from_table, score_table=_float_mask()[0, 0]),
    "`enable_gqa`": lambda: _case(enable_gqa=True),
    "`return_lse` and its gradient": _with_dlse,
    "`deterministic=False`": lambda: _case(deterministic=False),
    "one row, many keys (decoding)": _decoding,
    "packed sequences": lambda: packed(0, (2, 0, 5), (5, 4, 9), (3, 2), {}),
}


def _of_whole_pieces(case: Case) -> Case:
    """Return a case of wider heads: rows of 16-bit numbers that are whole pieces of 16 bytes."""
    q, k = (np.tile(x, 8) for x in (case.q, case.k))
    v, dout = (np.tile(x, 4) for x in (case.v, case.dout))
    return replace(case, q=q, k=k, v=v, dout=dout)


#: Rungs of 16 bits on tensor cores.
TENSOR_CORES = [rung.name for rung in launch.CUDA.rungs if FLOAT16 in rung.dtypes]
COLUMNS = [
    (target, rung.name)
    for target in (launch.NUMPY, launch.CPU, launch.CUDA)
    for rung in target.rungs
]


def can_try(target: launch.Target) -> bool:
    """Tell whether this process can run a target; the emulated GPU is for CUDA alone."""
    return why_no_cuda() is None if target is launch.CUDA else not EMULATED


def cell(option: str, target: launch.Target, rung: str, **more: Any) -> str:
    """Try one option, and more options, on one rung.

    Returns:
        "yes", or the reason why the rung refuses.

    Raises:
        AssertionError: If it runs and is not the textbook.
    """
    case = OPTIONS[option]()
    case = replace(case, options={**case.options, **more})
    on_device = target is launch.CUDA
    place = to_device if on_device else None
    closeness = 1e-9
    try:
        if rung in (*TENSOR_CORES, "flash2_split"):
            dtype, closeness = (FLOAT16, 0.02) if rung in TENSOR_CORES else (FLOAT32, 1e-4)
            case = _of_whole_pieces(case).in_dtype(dtype)
        with emulated_gpu() if EMULATED else nullcontext():
            actual, expected = case.run(target, rung, place=place), case.oracle()
    except ValueError as error:
        return str(error).split("cannot run this call: ")[1].split("; use ")[0]
    for name, wanted in expected.items():
        got = to_host(actual[name]) if on_device else actual[name]
        np.testing.assert_allclose(got, wanted, closeness, closeness, err_msg=f"{name}, {option}")
    return "yes"


def tried() -> dict[str, dict[str, str]]:
    """Try all that this process can: option → column → cell."""
    return {
        option: {
            f"{target.name} {rung}": cell(option, target, rung)
            for target, rung in COLUMNS
            if can_try(target)
        }
        for option in OPTIONS
    }


def page(cells: dict[str, dict[str, str]]) -> str:
    """Return the page: a table with numbers for reasons, and the reasons."""
    reasons: list[str] = []
    names = [f"{target.name} {rung}" for target, rung in COLUMNS]
    lines = [f"| option | {' | '.join(names)} |", "|---|" + ":-:|" * len(names)]
    for option, row in cells.items():
        marks = []
        for name in names:
            value = row[name]
            if value != "yes" and value not in reasons:
                reasons.append(value)
            marks.append("yes" if value == "yes" else f"no ({reasons.index(value) + 1})")
        lines.append(f"| {option} | {' | '.join(marks)} |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *notes]).rstrip() + "\n"


def main() -> None:
    cells = tried()
    if "--write" not in sys.argv:
        print(json.dumps(cells))
        return
    command = [sys.executable, "-m", "tests.support.attention.option_table"]
    emulated = {**os.environ, "MINITORCH_EMULATE": "1"}
    done = subprocess.run(command, env=emulated, capture_output=True, text=True, check=True)
    for option, row in json.loads(done.stdout.splitlines()[-1]).items():
        cells[option] |= row
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{page(cells)}{END}{after}")


BEGIN, END = (
    "<!-- python -m tests.support.attention.option_table --write -->",
    "<!-- end of the table -->",
)

if __name__ == "__main__":
    main()
