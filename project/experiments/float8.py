"""Errors of attention with float8 products on data with outliers, and its speed beside bfloat16.

    python project/experiments/float8.py                  errors on the CPU, which rounds like a GPU
    python project/experiments/float8.py --device cuda    errors and speed on a Hopper GPU

The table of errors is that of FlashAttention-3, section 4.3: root mean square errors against float64,
where q, k and v are drawn from N(0, 1) + N(0, 100) · Bernoulli(0.001).  The paper does not give its
lengths.  On the CPU the probabilities are not rounded to float8.  Speed includes the rounding of q, k, v.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from harness import (
    Experiment,
    Record,
    Report,
    Result,
    cell,
    headline,
    legend,
    markdown,
    panels,
    run,
)

# isort: split
from bench.measuring import interleaved, ratio, spread, timing_note

# isort: split
import kernels
from kernels.cuda.runtime.arrays import to_device, to_host
from kernels.runtime.dtypes import BFLOAT16, FLOAT16
from kernels.traffic.formulas import attention_flops

HEAD_DIM = 128
#: Heads, query rows and keys of the table of errors, by size.
CHECKED = {"quick": (2, 256, 2048), "normal": (16, 1024, 8192), "full": (64, 1024, 8192)}
#: Heads of a sequence, rows of q, k and v of a timed call over all heads, and lengths of a sequence.
HEADS, ROWS = 16, 16 * 16384
LENGTHS = {
    "quick": (8192,),
    "normal": (8192, 16384),
    "full": (1024, 2048, 4096, 8192, 16384, 32768),
}
SECONDS = {"quick": 0.3, "normal": 1.0, "full": 3.0}
COMPOSED, FLOAT8 = "float16, composed", ("", "+blocks", "+hadamard", "+blocks+hadamard")
#: Contestant → options; all take float16.
CONTESTANTS: dict[str, dict[str, Any]] = {
    "float16": {},
    **{f"float8_e4m3{more}": {"precision": f"float8_e4m3{more}"} for more in FLOAT8},
}
#: Contestant → the error that the paper's table has for the same technique.
PAPER = {
    COMPOSED: 3.2e-4,
    "float16": 1.9e-4,
    "float8_e4m3": 2.4e-2,
    "float8_e4m3+blocks": 2.4e-2,
    "float8_e4m3+hadamard": 9.3e-3,
    "float8_e4m3+blocks+hadamard": 9.1e-3,
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


def root_mean_square(errors: Any) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.mean(np.square(errors, dtype=np.float64))))


def measure_errors(args: argparse.Namespace, report: Report) -> None:
    """Add a row for each contestant."""
    heads, rows, cols = CHECKED[args.size]
    rng = np.random.default_rng(0)
    q, k, v = (drawn(rng, heads, length, HEAD_DIM) for length in (rows, cols, cols))
    exact = np.empty(q.shape)
    for head in report.progress(range(heads), "head"):  # its scores take 64 MB
        wide = (x[head].astype(np.float64) for x in (q, k, v))
        exact[head], _ = kernels.flash_attention_forward(*wide, rung="naive")
    found = np.stack([composed(*one) for one in zip(q, k, v, strict=True)])
    report.add(contestant=COMPOSED, error=root_mean_square(found - exact), paper=PAPER[COMPOSED])
    operands = [to_device(x) for x in (q, k, v)] if args.device == "cuda" else [q, k, v]
    for name, options in CONTESTANTS.items():
        out, _ = kernels.flash_attention_forward(*operands, **options)
        out = to_host(out) if args.device == "cuda" else out
        report.add(contestant=name, error=root_mean_square(out - exact), paper=PAPER[name])


def timed_steps(operands: list[Any], is_causal: bool) -> dict[str, Callable[[], Any]]:
    """Return a forward pass for each contestant."""
    return {
        name: partial(kernels.flash_attention_forward, *operands, is_causal=is_causal, **options)
        for name, options in CONTESTANTS.items()
    }


def measure_speed(args: argparse.Namespace, report: Report) -> None:
    """Add a row for each length, full and causal: every contestant, on bfloat16."""
    rng = np.random.default_rng(1)
    base, *others = CONTESTANTS
    for length in report.progress(LENGTHS[args.size], "length"):
        lead = max(ROWS // (HEADS * length), 1), HEADS
        shape = *lead, length, HEAD_DIM
        operands = [to_device(drawn(rng, *shape).astype(BFLOAT16)) for _ in range(3)]
        for is_causal in (False, True):
            times = interleaved(timed_steps(operands, is_causal), args.device, SECONDS[args.size])
            flops = attention_flops(math.prod(lead), length, length, HEAD_DIM, causal=is_causal)
            report.add(
                length=length,
                causal=is_causal,
                tflops={n: spread([flops / t for t in found], 1e-12) for n, found in times.items()},
                speedup={name: ratio(times[base], times[name]) for name in others},
            )


def measure(args: argparse.Namespace, report: Report) -> None:
    """Measure errors, and on a GPU speed."""
    heads, rows, cols = CHECKED[args.size]
    report.note(shape=f"{heads} heads of {rows:,} queries and {cols:,} keys, head_dim {HEAD_DIM}")
    measure_errors(args, report)
    if args.device == "cuda":
        report.note(timing=timing_note(args.device))
        measure_speed(args, report)


def table(record: Record) -> str:
    """Return the table of errors, and that of speed where it was measured."""
    errors = [row for row in record["rows"] if "error" in row]
    text = f"{record['shape']}:\n\n" + markdown(
        ["precision", "root mean square error", "in the FlashAttention-3 paper"],
        ([row["contestant"], f"{row['error']:.1e}", f"{row['paper']:.1e}"] for row in errors),
    )
    timed = [row for row in record["rows"] if "tflops" in row]
    if not timed:
        return text
    base = next(iter(CONTESTANTS))
    names = list(timed[0]["speedup"])
    lines = (
        [
            f"{row['length']:,}{', causal' * row['causal']}",
            cell(row["tflops"][base]["median"]),
            *(
                f"{cell(row['tflops'][name]['median'])} ({row['speedup'][name]['median']:.2f})"
                for name in names
            ),
        ]
        for row in timed
    )
    head = ["length", "bfloat16, TFLOP/s", *(f"{name} (ratio to bfloat16)" for name in names)]
    return f"{text}\n\n{markdown(head, lines)}"


def draw(figure: Any, results: list[Result]) -> None:
    """Draw the errors as bars, measured and published."""
    drawn_axes: list[Any] = []
    for axes, result in panels(figure, results, sharey=True):
        rows = [row for row in result.rows if "error" in row]
        places = np.arange(len(rows))
        axes.barh(places - 0.2, [row["error"] for row in rows], 0.4, color="#1b6ca8", label="here")
        paper = [row["paper"] for row in rows]
        axes.barh(places + 0.2, paper, 0.4, color="#bbb", label="FlashAttention-3")
        axes.set_yticks(places, [row["contestant"] for row in rows])
        axes.set(xscale="log", xlabel="root mean square error")
        axes.set_ylim(len(rows) - 0.5, -0.5)
        headline(axes, result.record["shape"].replace("keys, ", "keys,\n"))
        drawn_axes.append(axes)
    legend(figure, drawn_axes)


CAPTION = (
    "Root mean square error of the forward pass against float64, beside the figures in the paper's "
    "table. The inputs are normally distributed, and one number in a thousand is ten times as large."
)
EXPERIMENT = Experiment("float8", __doc__, measure, table, draw, height=3.4, caption=CAPTION)

if __name__ == "__main__":
    raise SystemExit(run(EXPERIMENT))
