"""The time of each part of one naive attention, beside the fused one; and the roofline of the device.

The parts are the tensor operations of an attention without a kernel of its own: product, scale, mask,
softmax, dropout, product, each timed alone on the result of the one before.  Dropout draws its bits: with
NumPy's generator on the CPU, on the device on a GPU.

In the roofline a rung stands at its operations per byte of global memory, both by formula.  Left of the
ridge memory is the limit, right of it arithmetic.  The peaks are measured, since a data sheet assumes a
clock that the device may never have.

Source: FlashAttention (2022), figure 1, right; Williams et al., Roofline, 2009.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from bench.contestants import DIRECTIONS, directions, random_arrays, rungs_of
from bench.harness import Case, Measurement, Run
from bench.kit import Panel, Record, cell, columns, curves, spread, timed_cell, workload_text
from bench.measuring import interleaved
from numba import float32, int64, njit, prange, void

import minitorch
from kernels.cpu.attention.flash2 import TILE
from kernels.cuda.runtime.arrays import empty_device
from kernels.cuda.runtime.kernel import Kernel, array_type
from kernels.metering.rung_traffic import call_traffic, head_shape, problem_of
from kernels.runtime.targets import cuda
from kernels.traffic.formulas import (
    PRODUCTS,
    attention_flops,
    flash2_backward_traffic,
    flash2_traffic,
    naive_backward_traffic,
    naive_traffic,
    total,
)
from minitorch import Tensor

DROPOUT = 0.1
PARTS = ("QKᵀ", "scale", "mask", "softmax", "dropout", "PV")
#: Of the CPU's loop: work items, turns, and chains side by side.  How many of them a compiler keeps in
#: vector registers is its decision, so that there are two loops, and the faster counts.
ITEMS, CPU_TURNS, LANES = 64, 20_000, (128, 256)
#: Elements that are copied: more than any cache holds.
COPIED = {"cpu": 1 << 25, "cuda": 1 << 28}
#: Of the GPU's loop: blocks, threads a block, and turns of eight chains of four.
BLOCKS, THREADS, TURNS, CHAINS, UNROLL = 2112, 256, 2048, 8, 4
PEAKS_NOTE = (
    "peaks: the best of several rounds of multiply-adds in registers, float32 without tensor cores, and of "
    "copying an array, read and written"
)


@njit(parallel=True)
def _copy(source, out):
    for i in prange(source.shape[0]):
        out[i] = source[i]


def _cpu_chains(lanes: int) -> Any:
    """Return a loop of multiply-adds for the CPU: so many independent chains."""

    @njit(parallel=True, fastmath={"contract"})
    def chains(out, turns, factor):
        for item in prange(out.shape[0]):
            acc = np.empty(lanes, np.float32)
            for i in range(lanes):
                acc[i] = float32(i)
            for _ in range(turns):
                for i in range(lanes):
                    acc[i] = acc[i] * factor + factor
            out[item] = acc.sum()

    return chains


@cache
def peak_kernels() -> tuple[Kernel, Kernel]:
    """Return a kernel that copies a flat array, and one of independent chains of multiply-adds."""

    def copy_flat(source, out):
        i = cuda.grid(1)
        if i < out.shape[0]:
            out[i] = source[i]

    def multiply_adds(out, turns, factor):
        chains = cuda.local.array(CHAINS, float32)
        for c in range(CHAINS):
            chains[c] = float32(c) + factor
        for _ in range(turns):
            for _u in range(UNROLL):
                for c in range(CHAINS):
                    chains[c] = chains[c] * factor + factor
        total = float32(0)  # written, so that the compiler keeps the chains
        for c in range(CHAINS):
            total += chains[c]
        out[cuda.grid(1)] = total

    flat = array_type(np.dtype(np.float32), 1)
    return (
        Kernel(copy_flat, void(flat, flat), THREADS),
        Kernel(multiply_adds, void(flat, int64, float32), THREADS),
    )


def measure_peaks(device: str, budget: float) -> Record:
    """Return ``tflops``, of float32 without tensor cores, and ``gbs``, read and written together."""
    elements, steps, flops = COPIED[device], dict[str, Any](), dict[str, float]()
    if device == "cuda":
        copy, multiply = peak_kernels()
        source, target = (empty_device((elements,), np.dtype(np.float32)) for _ in range(2))
        sums = empty_device((BLOCKS * THREADS,), np.dtype(np.float32))
        steps["chains"] = lambda: multiply[BLOCKS, THREADS](sums, TURNS, 0.5)
        flops["chains"] = 2.0 * BLOCKS * THREADS * TURNS * UNROLL * CHAINS
        steps["copy"] = lambda: copy[elements // THREADS, THREADS](source, target)
    else:
        source, target = (np.zeros(elements, np.float32) for _ in range(2))
        sums, factor = np.zeros(ITEMS, np.float32), np.float32(0.5)
        for lanes in LANES:
            chains = _cpu_chains(lanes)
            steps[f"{lanes} chains"] = lambda chains=chains: chains(sums, CPU_TURNS, factor)
            flops[f"{lanes} chains"] = 2.0 * ITEMS * CPU_TURNS * lanes
        steps["copy"] = lambda: _copy(source, target)
    times = interleaved(steps, device, budget, least=5)
    most = max(count / min(times[name]) for name, count in flops.items())
    return {"tflops": 1e-12 * most, "gbs": 1e-9 * 8 * elements / min(times["copy"])}


def parts(run: Run) -> dict[str, Callable[[], Any]]:
    """Return the operations of one causal naive attention with dropout, each on the result before it."""
    backend = minitorch.CudaBackend if run.device == "cuda" else minitorch.FastBackend
    arrays = random_arrays(run.batch_heads, run.length, run.head_dim)
    q, k, v = (minitorch.from_numpy(array, backend) for array in arrays)
    hidden = np.triu(np.full((run.length, run.length), -np.inf, np.float32), 1)
    penalty = minitorch.from_numpy(hidden, backend)
    keys, scale = k.permute(0, 2, 1), 1.0 / math.sqrt(run.head_dim)
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

    dropped, fused = drop(), {"is_causal": True, "dropout_p": DROPOUT, "seed": 1}
    calls: tuple[Callable[[], Any], ...] = (
        lambda: q @ keys, lambda: scores * scale, lambda: scaled + penalty,
        lambda: minitorch.softmax(masked, 2), drop, lambda: dropped @ v,
        lambda: Tensor.flash_attention(q, k, v, **fused),
    )  # fmt: skip
    return dict(zip((*PARTS, "fused"), calls, strict=True))


def least_elements(part: str, length: int, dim: int) -> int:
    """Return the elements of one head that a part reads and writes if it does so once."""
    scores, rows = length * length, length * dim
    if part in ("QKᵀ", "PV"):
        return scores + 2 * rows
    if part == "fused":
        return 4 * rows
    return (3 if part == "mask" else 2) * scores


def traffic_of(name: str, run: Run) -> Any:
    """Return the global traffic of a rung; on the CPU flash2 has its tile, and the baseline none."""
    problem = problem_of(name, run.batch_heads, run.length, run.length, run.head_dim)
    if run.device == "cuda":
        return call_traffic(name, problem)
    shape, whole = head_shape(problem), (run.length, run.length)
    if name == "naive":
        return naive_traffic(shape, whole), naive_backward_traffic(shape, whole)
    return flash2_traffic(shape, TILE), flash2_backward_traffic(shape, TILE)


def cases(run: Run) -> Iterator[Case]:
    workload = run.chosen("batch_heads", "length", "head_dim")
    run.note(
        workload=workload | {"dropout_p": DROPOUT, "causal": True}, note=PEAKS_NOTE,
        peaks=measure_peaks(run.device, min(run.seconds, 1.0)),
    )  # fmt: skip
    for part, seconds in run.timed(parts(run)).items():
        moved = 4e-9 * run.batch_heads * least_elements(part, run.length, run.head_dim)
        yield {"kind": "part", "name": part}, {"ms": spread(seconds, 1e3), "gb": moved}
    steps = directions(rungs_of(run.device, *workload.values()))
    flops = attention_flops(run.batch_heads, run.length, run.length, run.head_dim)
    for (name, way), seconds in run.timed(steps).items():
        place = DIRECTIONS.index(way)
        work, ms = flops * PRODUCTS[name][place] / 2, spread(seconds, 1e3)
        moved = 4.0 * run.batch_heads * total(traffic_of(name, run)[place]).moved
        yield {"kind": "rung", "name": name, "pass": way}, {
            "ms": ms, "gb": 1e-9 * moved, "gflop": 1e-9 * work, "intensity": work / moved,
            "tflops": 1e-9 * work / ms["median"],
        }  # fmt: skip


def of_kind(record: Record, kind: str) -> list[Record]:
    """Return the rows of the parts, or of the rungs."""
    return [row for row in record["rows"] if row["kind"] == kind]


def table(record: Record) -> str:
    own, workload, peaks = of_kind(record, "part"), record["workload"], record["peaks"]
    naive = sum(row["ms"]["median"] for row in own if row["name"] != "fused")
    text = (
        f"Forward pass, batch × heads = {workload['batch_heads']}, N = {workload['length']}, "
        f"d = {workload['head_dim']}, causal, dropout {workload['dropout_p']}, float32"
    )
    composed = columns(own, {
        "part": "name",
        "ms (quartiles)": lambda row: timed_cell(row["ms"]),
        "share of composed": lambda row: f"{row['ms']['median'] / naive:.0%}",
        "least traffic, GB": "gb",
        "GB/s": lambda row: 1e3 * row["gb"] / row["ms"]["median"],
    })  # fmt: skip
    roof = (
        f"Measured peaks: {cell(peaks['tflops'])} TFLOP/s and {cell(peaks['gbs'])} GB/s; the ridge is at "
        f"{cell(1e3 * peaks['tflops'] / peaks['gbs'])} FLOP per byte. Calls without a mask or dropout:"
    )
    points = columns(of_kind(record, "rung"), {
        "rung, pass": lambda row: f"{row['name']}, {row['pass']}",
        "ms (quartiles)": lambda row: timed_cell(row["ms"]),
        "traffic by formula, GB": "gb",
        "FLOP per byte": "intensity",
        "TFLOP/s": "tflops",
        "share of peak": lambda row: f"{row['tflops'] / peaks['tflops']:.0%}",
    })  # fmt: skip
    return "\n\n".join([text, composed, roof, points])


def draw(record: Record) -> list[Panel]:
    peaks, size = record["peaks"], workload_text(record).replace("keys, ", "keys,\n")
    parts = {
        row["name"]: {"fused" if row["name"] == "fused" else "composed": row["ms"]["median"]}
        for row in of_kind(record, "part")
    }
    lines = curves(
        (f"{row['name']}, {row['pass']}", row["intensity"], row["tflops"])
        for row in of_kind(record, "rung")
    )
    reach, ridge = [x for ((x, _),) in lines.values()], 1e3 * peaks["tflops"] / peaks["gbs"]
    low, high = min(ridge / 30, *reach), max(ridge * 30, *reach)
    top = [(x, peaks["tflops"]) for x in (ridge, high)]
    lines["roofline"] = [(low, 1e-3 * low * peaks["gbs"]), *top]
    return [
        Panel(f"forward, causal, dropout: {size}", "ms", bars=parts, stacked=True),
        Panel("roofline, no mask, no dropout", "FLOP per byte of global memory (formula)", "TFLOP/s", lines,
              log="xy"),
    ]  # fmt: skip


MEASUREMENT = Measurement(
    "breakdown", "Where does the time of naive attention go, and what limits each rung?", cases,
    {"cpu": {"quick": {"batch_heads": 2, "length": 256, "seconds": 0.1},
             "normal": {"batch_heads": 8, "length": 1024, "head_dim": 64, "seconds": 3.0}},
     "cuda": {"quick": {"length": 512},
              "normal": {"batch_heads": 64, "length": 2048, "head_dim": 64, "seconds": 3.0}}},
    table=table, draw=draw, height=3.4, minutes={"cpu": 0.5, "cuda": 0.5},
    caption="Above: the time of each part of attention composed of tensor operations, beside the time of "
    "one fused kernel. Below: each rung on the roofline of the device. The slope of the roofline "
    "is the measured memory bandwidth, and its flat part is the measured arithmetic peak.",
)  # fmt: skip
