"""The time of attention's derivatives along a direction, relative to the passes that they differentiate."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from bench.contestants import Call, place_on
from bench.kit import Case, Figure, Measurement, Record, Run, markdown, ratio, spread, timed_cell

import kernels
from kernels.runtime.dtypes import BFLOAT16, FLOAT32

DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16}
#: Derivative → the pass that it differentiates, and the largest ratio of their times.
BOUNDS = {"JVP": ("forward", 3.0), "double backward": ("backward", 4.0)}


def cases(run: Run) -> Iterator[Case]:
    run.note(heads=run.heads, length=run.length)
    for dtype in run.dtypes:
        for head_dim in run.dims:
            yield {"dtype": dtype, "head_dim": head_dim}, partial(timed, run, dtype, head_dim)


def timed(run: Run, dtype: str, head_dim: int) -> Record:
    rng, shape = np.random.default_rng(0), (1, run.heads, run.length, head_dim)
    place = place_on(run.device)
    arrays = [place(rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])) for _ in range(7)]
    call, tangents = Call(arrays[:4], {}), arrays[4:]
    call.forward()
    times = run.timed({
        "forward": call.forward,
        "JVP": partial(kernels.flash_attention_jvp, *call.operands, *tangents),
        "backward": call.backward,
        "double backward": partial(
            kernels.flash_attention_double_backward, *tangents, call.dout, *call.operands
        ),
    })  # fmt: skip
    ms = {name: spread(took, 1e3) for name, took in times.items()}
    pairs = {name: ratio(times[name], times[of])["median"] for name, (of, _) in BOUNDS.items()}
    return {"ms": ms, "ratio": pairs}


def table(record: Record) -> str:
    names = [x for name, (of, _) in BOUNDS.items() for x in (of, name)]
    head = ["dtype", "head_dim", *(f"{name}, ms" for name in names)]
    head += [f"{name} / {of}" for name, (of, _) in BOUNDS.items()]
    lines = (
        [row["dtype"], str(row["head_dim"]), *(timed_cell(row["ms"][name]) for name in names),
         *(f"{row['ratio'][name]:.2f}" for name in BOUNDS)]
        for row in record["rows"]
    )  # fmt: skip
    return markdown(head, lines)


def figures(record: Record) -> list[Figure]:
    return [
        Figure(f"{name} / {of}, {row['dtype']}, {row['head_dim']}", row["ratio"][name], most, is_most=True)
        for row in record["rows"] if "ratio" in row
        for name, (of, most) in BOUNDS.items()
    ]  # fmt: skip


MEASUREMENT = Measurement(
    "derivatives", "What do the JVP and the double backward cost, relative to the two passes?", cases,
    {"cpu": {"normal": {"heads": 4, "length": 2048, "dtypes": ("float32",), "dims": (64,), "seconds": 4.0},
             "quick": {"length": 256, "seconds": 0.1}},
     "cuda": {"normal": {"heads": 16, "length": 8192, "dtypes": ("bfloat16", "float32"),
                         "dims": (64, 128), "seconds": 0.5},
              "quick": {"length": 1024}}},
    table=table, figures=figures, minutes={"cpu": 1, "cuda": 2}, paths=("kernels",),
)  # fmt: skip
