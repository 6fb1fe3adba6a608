"""Where the time of one naive attention goes, beside the fused one; and the roofline of the device.

    python project/experiments/breakdown.py
    python project/experiments/breakdown.py --device cuda

The parts are the tensor operations of an attention without a kernel of its own: product, scale, mask,
softmax, dropout, product, each timed alone on the result of the one before.  Dropout draws its bits: with
NumPy's generator on the CPU, on the device on a GPU.  Only the two products do arithmetic worth the name;
between them a matrix of N x N numbers travels to memory and back for each part.

In the roofline a rung stands at the operations that it does for each byte that it asks of global memory,
both by formula.  Left of the ridge memory is the limit, right of it arithmetic.

Source: FlashAttention (2022), figure 1, right; Williams et al., Roofline, 2009.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
from bench.contestants import ArrayCall, Bound, contestants, random_arrays
from bench.measuring import interleaved, spread, timing_note
from common.command_line import COUNT
from device_peaks import PEAKS_NOTE, measure_peaks
from harness import Experiment, Record, Report, Result, cell, markdown, timed_cell

import minitorch
from kernels.cpu.attention.flash2 import TILE
from kernels.metering.rung_traffic import RUNGS, PassTraffic, call_traffic, head_shape, problem_of
from kernels.traffic.formulas import (
    PRODUCTS,
    Counts,
    attention_flops,
    flash2_backward_traffic,
    flash2_traffic,
    naive_backward_traffic,
    naive_traffic,
    total,
)
from minitorch import Tensor

#: Batch · heads and length by device and size.
WORKLOADS = {
    "cpu": {"quick": (2, 256), "normal": (8, 1024), "full": (16, 2048)},
    "cuda": {"quick": (64, 512), "normal": (64, 2048), "full": (256, 2048)},
}
DROPOUT = 0.1
PARTS = ("QKᵀ", "scale", "mask", "softmax", "dropout", "PV")
PART_COLOURS = ("#1b6ca8", "#95a5a6", "#b8860b", "#c0392b", "#8e44ad", "#2e8b57")


def options(parser: Any) -> None:
    parser.add_argument("--batch-heads", type=COUNT, help="batch · heads")
    parser.add_argument("--length", type=COUNT, help="of queries and keys")
    parser.option("--head-dim", int, 64, "of q, k and v")
    parser.option("--seconds", float, 3.0, "to spend on each of breakdown and roofline")


def parts(args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Return the operations of one causal naive attention with dropout, each on what came before."""
    backend = minitorch.CudaBackend if args.device == "cuda" else minitorch.FastBackend
    arrays = random_arrays((args.batch_heads, args.length, args.head_dim))
    q, k, v = (minitorch.from_numpy(array, backend) for array in arrays)
    hidden = np.triu(np.full((args.length, args.length), -np.inf, np.float32), 1)
    penalty = minitorch.from_numpy(hidden, backend)
    keys, scale = k.permute(0, 2, 1), 1.0 / math.sqrt(args.head_dim)
    scores = q @ keys
    scaled = scores * scale
    masked = scaled + penalty
    probs = minitorch.softmax(masked, 2)
    rng = np.random.default_rng(1)

    def drop() -> Tensor:
        if backend.cuda:
            return minitorch.dropout(probs, DROPOUT)  # draws on the device
        kept = rng.random(probs.shape, np.float32) >= DROPOUT
        return probs * minitorch.from_numpy(kept.astype(np.float32), backend)

    dropped = drop()
    steps: dict[str, Callable[[], Any]] = dict(
        zip(
            PARTS,
            (
                lambda: q @ keys,
                lambda: scores * scale,
                lambda: scaled + penalty,
                lambda: minitorch.softmax(masked, 2),
                drop,
                lambda: dropped @ v,
            ),
            strict=True,
        )
    )
    steps["fused"] = lambda: Tensor.flash_attention(
        q, k, v, is_causal=True, dropout_p=DROPOUT, seed=1
    )
    return steps


def least_elements(part: str, length: int, dim: int) -> int:
    """Return the elements of one head that a part reads and writes if it does so once."""
    scores, rows = length * length, length * dim
    if part in ("QKᵀ", "PV"):
        return scores + 3 * rows - rows
    if part == "fused":
        return 4 * rows
    return (3 if part == "mask" else 2) * scores


def traffic_of(name: str, args: argparse.Namespace) -> PassTraffic:
    """Return what a rung asks of memory; on the CPU flash2 with its tile, and the baseline with none."""
    problem = problem_of(name, args.batch_heads, args.length, args.length, args.head_dim)
    if args.device == "cuda":
        return call_traffic(name, problem)
    shape = head_shape(problem)
    if name == "naive":
        whole = (args.length, args.length)
        both: tuple[Counts, Counts] = (
            naive_traffic(shape, whole),
            naive_backward_traffic(shape, whole),
        )
        return PassTraffic(*both)
    return PassTraffic(flash2_traffic(shape, TILE), flash2_backward_traffic(shape, TILE))


def rungs(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the roofline shows, by rung."""
    size = args.batch_heads, args.length
    if args.device == "cuda":
        return {
            name: ArrayCall("cuda", *size, head_dim=args.head_dim, **rung)
            for name, rung in RUNGS.items()
        }
    arrays = random_arrays((*size, args.head_dim))
    return {
        "naive": Bound(contestants("cpu", False)["naive"], arrays),
        "flash2": ArrayCall("cpu", *size, head_dim=args.head_dim),
    }


def measure(args: argparse.Namespace, report: Report) -> None:
    batch_heads, length = WORKLOADS[args.device][args.size]
    args.batch_heads, args.length = args.batch_heads or batch_heads, args.length or length
    workload = {name: getattr(args, name) for name in ("batch_heads", "length", "head_dim")}
    peaks = measure_peaks(args.device)
    report.note(
        workload=workload | {"dropout_p": DROPOUT, "causal": True},
        timing=timing_note(args.device),
        peaks=peaks._asdict(),
        note=PEAKS_NOTE,
    )
    times = interleaved(parts(args), args.device, args.seconds)
    for part, seconds in times.items():
        moved = 4e-9 * args.batch_heads * least_elements(part, args.length, args.head_dim)
        report.add(kind="part", name=part, ms=spread(seconds, 1e3), gb=moved)
    calls = rungs(args)
    steps = {
        (name, way): getattr(calls[name], way) for name in calls for way in PassTraffic._fields
    }
    flops = attention_flops(args.batch_heads, args.length, args.length, args.head_dim)
    for (name, way), seconds in interleaved(steps, args.device, args.seconds).items():
        place = PassTraffic._fields.index(way)
        work = flops * PRODUCTS[name][place] / 2
        moved = 4.0 * args.batch_heads * total(traffic_of(name, args)[place]).moved
        timing = spread(seconds, 1e3)
        report.add(
            **{"kind": "rung", "name": name, "pass": way},
            ms=timing,
            gb=1e-9 * moved,
            gflop=1e-9 * work,
            intensity=work / moved,
            tflops=1e-9 * work / timing["median"],
        )


def table(record: Record) -> str:
    own = [row for row in record["rows"] if row["kind"] == "part"]
    naive = sum(row["ms"]["median"] for row in own if row["name"] != "fused")
    lines = []
    for row in own:
        middle = row["ms"]["median"]
        speed = 1e3 * row["gb"] / middle
        lines.append(
            [row["name"], timed_cell(row["ms"]), f"{middle / naive:.0%}", row["gb"], speed]
        )
    workload, peaks = record["workload"], record["peaks"]
    text = (
        f"Forward pass, batch × heads = {workload['batch_heads']}, N = {workload['length']}, "
        f"d = {workload['head_dim']}, causal, dropout {workload['dropout_p']}, float32"
    )
    roof = (
        f"Measured peaks: {cell(peaks['tflops'])} TFLOP/s and {cell(peaks['gbs'])} GB/s; the ridge is at "
        f"{cell(1e3 * peaks['tflops'] / peaks['gbs'])} FLOP per byte. Calls without a mask or dropout:"
    )
    points = [
        [f"{row['name']}, {row['pass']}", timed_cell(row["ms"]), row["gb"], row["intensity"], row["tflops"],
         f"{row['tflops'] / peaks['tflops']:.0%}"]
        for row in record["rows"] if row["kind"] == "rung"
    ]  # fmt: skip
    head = ["part", "ms (quartiles)", "share of composed", "least traffic, GB", "GB/s"]
    roof_head = [
        "rung, pass", "ms (quartiles)", "traffic by formula, GB", "FLOP per byte", "TFLOP/s",
        "share of peak",
    ]  # fmt: skip
    return "\n\n".join([text, markdown(head, lines), roof, markdown(roof_head, points)])


def draw(figure: Any, results: list[Result]) -> None:
    drawn = harness.panels(figure, results, rows=2)
    for axes, result in drawn:
        _draw_parts(axes[0], result)
        _draw_roofline(axes[1], result)
    harness.legend(figure, [axes[0] for axes, _ in drawn], "upper", columns=6)
    harness.legend(figure, [axes[1] for axes, _ in drawn], "lower", columns=5)


def _draw_parts(axes: Any, result: Result) -> None:
    bottom = 0.0
    found = {row["name"]: row["ms"]["median"] for row in result.rows if row["kind"] == "part"}
    for part, colour in zip(PARTS, PART_COLOURS, strict=True):
        if part in found:
            axes.bar("naive", found[part], bottom=bottom, color=colour, label=part, width=0.6)
            bottom += found[part]
    if "fused" in found:
        axes.bar("fused", found["fused"], color="#444", width=0.6)
        axes.text(
            1, found["fused"], f"{bottom / found['fused']:.1f} × faster", ha="center", va="bottom"
        )
    axes.set(ylabel="ms", xlim=(-0.6, 1.6), ymargin=0.1)
    workload = result.record["workload"]
    harness.headline(
        axes,
        f"forward, causal, dropout: {workload['batch_heads']} heads, {workload['length']:,} keys,\n"
        f"head_dim {workload['head_dim']}, float32",
    )


def _draw_roofline(axes: Any, result: Result) -> None:
    peaks = result.record["peaks"]
    ridge = 1e3 * peaks["tflops"] / peaks["gbs"]
    points = [row for row in result.rows if row["kind"] == "rung"]
    reach = [
        ridge / 30,
        ridge * 30,
        *(row["intensity"] * factor for row in points for factor in (0.5, 2)),
    ]
    low, high = min(reach), max(reach)
    axes.plot(
        [low, ridge, high], [1e-3 * low * peaks["gbs"], *[peaks["tflops"]] * 2], "k-", linewidth=1
    )
    for row in points:
        marker = "o" if row["pass"] == "forward" else "s"
        colour = harness.colour_of(row["name"], list(RUNGS))
        label = row["name"] if row["pass"] == "forward" else None
        axes.plot(row["intensity"], row["tflops"], marker, color=colour, label=label)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOP per byte of global memory (formula)",
        ylabel="TFLOP/s",
    )
    harness.headline(axes, "roofline, no mask, no dropout: ○ forward, □ backward")


CAPTION = (
    "Above: the time of each part of attention composed of tensor operations, beside the time of "
    "one fused kernel. Below: each rung on the roofline of the device. The slope of the roofline "
    "is the measured memory bandwidth, and its flat part is the measured arithmetic peak."
)
EXPERIMENT = Experiment(
    "breakdown", __doc__, measure, table, draw, options=options, height=3.4, caption=CAPTION
)

if __name__ == "__main__":
    raise SystemExit(harness.run(EXPERIMENT))
