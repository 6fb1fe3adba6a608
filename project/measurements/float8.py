"""Errors of attention with float8 products on data with outliers, and its speed beside bfloat16.

The table of errors is that of FlashAttention-3, section 4.3: root mean square errors against float64,
where q, k and v are drawn from N(0, 1) + N(0, 100) · Bernoulli(0.001).  The paper does not give its
lengths.  On the CPU, which rounds like a GPU, the probabilities are not rounded to float8.  Speed includes
the rounding of q, k and v.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from bench.contestants import place_on
from bench.kit import Case, Measurement, Panel, Record, Run, cell, markdown, ratio, spread

import kernels
from kernels.cuda.runtime.arrays import to_host
from kernels.runtime.dtypes import BFLOAT16, FLOAT16
from kernels.traffic.formulas import attention_flops

HEAD_DIM = 128
#: Heads of a sequence, and rows of q, k and v of a timed call over all heads.
HEADS, ROWS = 16, 16 * 16384
COMPOSED, BASE = "float16, composed", "float16"
#: Contestant → the error that the paper's table has for the same technique.
PAPER = {
    COMPOSED: 3.2e-4, BASE: 1.9e-4, "float8_e4m3": 2.4e-2, "float8_e4m3+blocks": 2.4e-2,
    "float8_e4m3+hadamard": 9.3e-3, "float8_e4m3+blocks+hadamard": 9.1e-3,
}  # fmt: skip
#: Contestant → options; all take float16.
CONTESTANTS: dict[str, Record] = {
    name: {} if name == BASE else {"precision": name} for name in [*PAPER][1:]
}


def drawn(rng: np.random.Generator, *shape: int) -> Any:
    """Return numbers of which one in a thousand is an outlier, float16."""
    outliers = 10.0 * rng.standard_normal(shape) * (rng.random(shape) < 0.001)
    return (rng.standard_normal(shape) + outliers).astype(FLOAT16)


def composed(q: Any, k: Any, v: Any) -> Any:
    """Return attention of one head by operations whose results are float16."""
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    scores = ((q @ k.T).astype(FLOAT16) * FLOAT16.type(HEAD_DIM**-0.5)).astype(np.float32)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p = (p / p.sum(-1, keepdims=True)).astype(FLOAT16)
    return (p.astype(np.float32) @ v).astype(FLOAT16)


def cases(run: Run) -> Iterator[Case]:
    heads, rows, cols = run.checked
    run.note(shape=f"{heads} heads of {rows:,} queries and {cols:,} keys, head_dim {HEAD_DIM}")
    rng = np.random.default_rng(0)
    arrays = [drawn(rng, heads, length, HEAD_DIM) for length in (rows, cols, cols)]
    exact = np.empty(arrays[0].shape)
    for head in range(heads):  # its scores take 64 MB
        wide = (x[head].astype(np.float64) for x in arrays)
        exact[head], _ = kernels.flash_attention_forward(*wide, rung="naive")
    for name in PAPER:
        yield {"contestant": name}, partial(error, run.device, name, arrays, exact)
    rng = np.random.default_rng(1)
    for length in run.lengths if run.device == "cuda" else ():
        shape = max(ROWS // (HEADS * length), 1), HEADS, length, HEAD_DIM
        operands = [place_on("cuda")(drawn(rng, *shape).astype(BFLOAT16)) for _ in range(3)]
        for causal in (False, True):
            yield {"length": length, "causal": causal}, partial(speed, run, operands, shape, causal)


def error(device: str, name: str, arrays: list[Any], exact: Any) -> Record:
    if name == COMPOSED:
        out = np.stack([composed(*one) for one in zip(*arrays, strict=True)])
    else:
        operands = map(place_on(device), arrays)
        out, _ = kernels.flash_attention_forward(*operands, **CONTESTANTS[name])
        out = to_host(out) if device == "cuda" else out
    off = np.square(out - exact, dtype=np.float64)
    return {"error": float(np.sqrt(np.mean(off))), "paper": PAPER[name]}


def speed(run: Run, operands: list[Any], shape: tuple[int, ...], causal: bool) -> Record:
    times = run.timed({
        name: partial(kernels.flash_attention_forward, *operands, is_causal=causal, **options)
        for name, options in CONTESTANTS.items()
    })  # fmt: skip
    batch, heads, length, dim = shape
    flops = attention_flops(batch * heads, length, length, dim, causal=causal)
    return {
        "tflops": {name: spread([flops / t for t in found], 1e-12) for name, found in times.items()},
        "speedup": {name: ratio(times[BASE], found) for name, found in times.items() if name != BASE},
    }  # fmt: skip


def table(record: Record) -> str:
    errors = [row for row in record["rows"] if "error" in row]
    text = f"{record['shape']}:\n\n" + markdown(
        ["precision", "root mean square error", "in the FlashAttention-3 paper"],
        ([row["contestant"], f"{row['error']:.1e}", f"{row['paper']:.1e}"] for row in errors),
    )
    timed = [row for row in record["rows"] if "tflops" in row]
    if not timed:
        return text
    names = list(timed[0]["speedup"])
    lines = (
        [f"{row['length']:,}{', causal' * row['causal']}", cell(row["tflops"][BASE]["median"]),
         *(f"{cell(row['tflops'][name]['median'])} ({row['speedup'][name]['median']:.2f})"
           for name in names)]
        for row in timed
    )  # fmt: skip
    head = ["length", "bfloat16, TFLOP/s", *(f"{name} (ratio to bfloat16)" for name in names)]
    return f"{text}\n\n{markdown(head, lines)}"


def draw(record: Record) -> list[Panel]:
    rows = [row for row in record["rows"] if "error" in row]
    bars = {
        name: {row["contestant"]: row[key] for row in rows}
        for name, key in (("here", "error"), ("FlashAttention-3", "paper"))
    }
    title = record["shape"].replace("keys, ", "keys,\n")
    return [Panel(title, "root mean square error", bars=bars, log="x")]


MEASUREMENT = Measurement(
    "float8", "What does attention with float8 products lose in accuracy, and gain in speed?", cases,
    {"cpu": {"quick": {"checked": (1, 64, 1024)}, "normal": {"checked": (64, 1024, 8192)}},
     "cuda": {"quick": {"checked": (2, 256, 2048), "lengths": (8192,), "seconds": 0.3},
              "normal": {"checked": (16, 1024, 8192), "lengths": (8192, 16384), "seconds": 1.0}}},
    table=table, draw=draw, height=3.4, minutes={"cpu": 1, "cuda": 1}, paths=("kernels",),
    caption="Root mean square error of the forward pass against float64, beside the figures in the paper's "
    "table. The inputs are normally distributed, and one number in a thousand is ten times as large.",
)  # fmt: skip
