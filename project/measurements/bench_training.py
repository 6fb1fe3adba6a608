"""Training the GPT presets beside PyTorch: speed, memory and losses, and whether they reach their bounds.

Both sides train the same weights on the same batches in one process, a few steps each in turn: forward,
backward, AdamW, no clipping, no loss read.  On a GPU our steps are captured (``minitorch.graph_step``), as
``train_gpt.py`` takes them; the figures "eager" launch them kernel by kernel.  PyTorch is eager, or
compiled for the figures "compiled", with the fused attention that it prefers, its fused AdamW, and batches
that are already on the device; its bfloat16 is autocast over float32 weights, ours is the policy of
``minitorch.Precision``.  A speed is the median of ratios within rounds, a peak of memory that of a process
of its own, a curve's difference the largest of all steps, relative to PyTorch's loss; curves are trained
with the clipping of the preset.  Losses in bfloat16 are held to PyTorch's own distance from its float32:
their quotient is the figure; beside those in float32 stands how far PyTorch is from itself when its
attention is the composed one, and both sides from float64.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.kit import Case, Figure, Measurement, Record, Run, ratio, spread
from bench.measuring import out_of_memory
from bench.training_contestants import (
    BACKENDS,
    COMPILED,
    OURS,
    THEIRS,
    Size,
    Training,
    peak_of_training,
    size_of,
)
from common.child import in_child
from training.gpt_presets import PRESETS, peak_tflops, utilisation

import minitorch
from kernels.cuda.runtime.arrays import pool

#: Seconds of a reading at least: short steps are read many at a time.
READING = 0.1
#: The name of PyTorch's curve beside which one of bfloat16 is noisy, and of that of its other attention,
#: which says how far a training is from itself when only roundings differ.
BASE, CONTROL, EXACT = f"{THEIRS} float32", f"{THEIRS}, math attention", f"{THEIRS} float64"
#: That the context of the figure "context" is compared with.
SHORT_CONTEXT = 2048
GPT2 = "gpt2-small"
#: Kind, preset, precision, context (None: the preset's own), bound, aim, and whether less is better.
#: What is measured for each preset comes before what takes long.
FIGURES: tuple[tuple[str, str, str, int | None, float, float | None, bool], ...] = (
    ("speed", "toy", "bfloat16", None, 1.5, 4.0, False),
    ("speed", "char", "bfloat16", None, 0.8, 1.2, False),
    ("speed", GPT2, "bfloat16", 1024, 0.7, 1.0, False),
    ("speed", GPT2, "bfloat16", 4096, 0.7, 1.0, False),
    ("speed", GPT2, "float32", 1024, 1.0, 2.0, False),
    ("eager", "char", "bfloat16", None, 0.75, 1.1, False),
    ("eager", GPT2, "bfloat16", 1024, 0.95, 1.15, False),
    ("compiled", "char", "bfloat16", None, 1.15, 1.4, False),
    ("compiled", GPT2, "bfloat16", 1024, 1.05, 1.2, False),
    ("memory", GPT2, "bfloat16", 1024, 1.1, 0.9, True),
    ("memory", GPT2, "bfloat16", 4096, 1.1, 0.9, True),
    ("context", GPT2, "bfloat16", 8192, 0.85, 0.93, False),
    ("context", GPT2, "bfloat16", 65_536, 0.9, 1.0, False),
    ("attention", GPT2, "bfloat16", 1024, 2.0, 3.5, False),
    ("attention", GPT2, "bfloat16", 4096, 5.0, 8.0, False),
    *(("losses", preset, "float32", None, 1e-3, None, True) for preset in PRESETS),
    *(("losses", preset, "bfloat16", None, 2.0, 1.0, True) for preset in PRESETS),
)
KINDS = tuple(dict.fromkeys(kind for kind, *_ in FIGURES))


def difference(losses: list[float], wanted: list[float]) -> float:
    """Return the largest difference of two curves, relative to the second."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))


def cases(run: Run) -> Iterator[Case]:
    run.note(quick=run.is_quick)
    for kind, preset, precision, context, must, aim, is_most in FIGURES:
        own = context or PRESETS[preset]["context"]
        if kind in run.kinds and preset in run.presets and own in (run.contexts or (own,)):
            size = size_of(preset, context, run.is_quick)
            key = {"kind": kind, "preset": preset, "precision": precision, "context": size.context}
            judged = kind == "losses" or (run.device == "cuda" and not run.is_quick)
            bound = {"must": must, "aim": aim, "is_most": is_most, "is_judged": judged}
            yield key, partial(measured, run, kind, preset, precision, size, bound)


def measured(run: Run, kind: str, preset: str, precision: str, size: Size, bound: Record) -> Record:
    row = bound | {"batch": size.batch, "value": None}
    row |= MEASURE[kind](run, kind, preset, precision, size)
    gc.collect()  # a model and its graph are cycles
    if run.device == "cuda":  # neither side keeps memory that the other one may need
        if (own := pool()) is not None:
            own.trim()
        if run.torch is not None:
            run.torch.cuda.empty_cache()
    return row


def timed(run: Run, trainings: dict[str, Training]) -> tuple[dict[str, list[float]], Record]:
    """Return the seconds a step of each in every round, and the spreads of tokens a second."""
    steps = {name: each.timed_step() for name, each in trainings.items()}
    times = run.timed(steps, least=5, shortest=READING)
    rates = {n: spread([trainings[n].tokens / t for t in found]) for n, found in times.items()}
    return times, {"tokens_per_second": rates}


def ours(
    run: Run, kind: str, precision: str, size: Size, attention: str = "flash", clip: float | None = None
) -> Training:  # fmt: skip
    """Return ours in training as a figure asks for it."""
    captures = run.device == "cuda" and kind != "eager"
    capture = minitorch.graph_step if captures else None
    given = OURS, size, run.device, precision, attention
    return Training(*given, capture=capture, clip=clip, recompute=run.recompute)


def speed(run: Run, kind: str, preset: str, precision: str, size: Size) -> Record:
    """Compare steps of ours with PyTorch's, eager or compiled: its time over ours."""
    peer = COMPILED if kind == "compiled" else THEIRS
    sides = {OURS: ours(run, kind, precision, size)}
    if run.torch is not None:
        source = sides[OURS].model
        sides[peer] = Training(peer, size, run.device, precision, source=source)
    times, row = timed(run, sides)
    how = "captured step" if run.device == "cuda" and kind != "eager" else "eager step"
    row["figure"] = f"{preset} {precision}, context {size.context:,}, {how} / {peer}"
    if peer in times:
        row["value"] = ratio(times[peer], times[OURS])["median"]
    return row


def attention(run: Run, kind: str, preset: str, precision: str, size: Size) -> Record:
    """Compare flash with naive attention here, on a batch for which naive has the memory."""
    while True:
        try:
            sides = {name: ours(run, kind, precision, size, name) for name in ("naive", "flash")}
            times, row = timed(run, sides)
            break
        except Exception as error:
            if not out_of_memory(error) or size.batch == 1:
                raise
        sides = {}
        gc.collect()
        size = size._replace(batch=size.batch // 2)
    name = f"{preset} {precision}, context {size.context:,} x {size.batch}: flash / naive"
    value = ratio(times["naive"], times["flash"])["median"]
    return {**row, "figure": name, "batch": size.batch, "value": value}


def context(run: Run, kind: str, preset: str, precision: str, size: Size) -> Record:
    """Compare operations a second at a long context with those at a short one."""
    short = size_of(preset, SHORT_CONTEXT, run.is_quick)
    sides = {f"context {one.context}": ours(run, kind, precision, one) for one in (size, short)}
    times, row = timed(run, sides)
    work = [each.tokens * each.flops for each in sides.values()]
    long_times, short_times = times.values()
    peak, rates = peak_tflops(BACKENDS[run.device], precision), row["tokens_per_second"]
    what = f"tokens/s x FLOP a token, context {size.context:,} / {short.context:,}"
    return {
        **row, "figure": f"{preset} {precision}: {what}",
        "utilisation": {n: utilisation(rates[n]["median"], x.flops, peak) for n, x in sides.items()},
        "value": work[0] / work[1] * ratio(short_times, long_times)["median"],
        "flops_per_token": [each.flops for each in sides.values()],
    }  # fmt: skip


def memory(run: Run, kind: str, preset: str, precision: str, size: Size) -> Record:
    """Compare the peaks of processes that train one model each."""
    names = (OURS,) if run.torch is None else (OURS, THEIRS)
    given = size, run.device, precision, run.device == "cuda"
    peaks = {name: in_child(peak_of_training, name, *given) for name in names}
    both = len(peaks) == 2 and all(peaks.values())
    return {
        "figure": f"{preset} {precision}, context {size.context:,}: peak memory / PyTorch",
        "peak_bytes": peaks, "value": peaks[OURS] / peaks[THEIRS] if both else None,
    }  # fmt: skip


def losses(run: Run, kind: str, preset: str, precision: str, size: Size) -> Record:
    """Compare the losses of steps from the same weights on the same batches."""
    clip, steps = PRESETS[preset].get("clip"), run.steps
    sides = {OURS: ours(run, kind, precision, size, clip=clip)}
    source = sides[OURS].model  # bfloat16 begins from rounded weights, on all sides
    if run.torch is not None:
        others: Record = {THEIRS: (precision, "flash")}
        if precision == "float32":
            others |= {CONTROL: ("float32", "naive"), EXACT: ("float64", "naive")}
        else:
            others[BASE] = ("float32", "flash")
        for name, of in others.items():
            sides[name] = Training(THEIRS, size, run.device, *of, source=source, clip=clip)
    curves = {key: each.losses(steps, f"{key}, {precision}") for key, each in sides.items()}
    what = f"{preset} {precision}, largest difference of the losses of {steps} steps"
    of = "/ PyTorch's losses"
    if precision != "float32":
        of = f"from PyTorch float32 / that of PyTorch's {precision}"
    row: Record = {"steps": steps, "curves": curves, "figure": f"{what} {of}"}
    bad = [key for key, curve in curves.items() if not all(map(math.isfinite, curve))]
    if bad:  # JSON has no such numbers
        raise ArithmeticError(f"a loss is not a number: {', '.join(bad)}")
    if THEIRS in curves and precision == "float32":
        row["value"] = difference(curves[OURS], curves[THEIRS])
        row["differences"] = {CONTROL: difference(curves[CONTROL], curves[THEIRS])} | {
            f"{name} from {EXACT}": difference(curves[name], curves[EXACT])
            for name in (OURS, THEIRS)
        }
    elif THEIRS in curves:
        found = {name: difference(curves[name], curves[BASE]) for name in (OURS, THEIRS)}
        noise = found[THEIRS]
        found["ours from PyTorch's"] = difference(curves[OURS], curves[THEIRS])
        row |= {"differences": found, "value": found[OURS] / noise if noise else None}
    return row


MEASURE: dict[str, Any] = {
    "speed": speed, "eager": speed, "compiled": speed, "losses": losses, "memory": memory,
    "context": context, "attention": attention,
}  # fmt: skip


def figures(record: Record) -> list[Figure]:
    names = ("figure", "value", "must", "aim", "is_most", "is_judged")
    return [Figure(*map(row.get, names)) for row in record["rows"] if "figure" in row]


COMMON = {
    "kinds": KINDS, "presets": tuple(PRESETS), "contexts": (), "steps": 200, "recompute": False,
}  # fmt: skip
QUICK = {
    "seconds": 0.1,
    "steps": 5,
    "presets": ("toy", "char"),
    "kinds": ("speed", "eager", "losses"),
}
MEASUREMENT = Measurement(
    "bench_training", "How fast is training beside PyTorch, in how much memory, with which losses?",
    cases,
    {"cpu": {"normal": {"seconds": 20.0, **COMMON}, "quick": QUICK},
     "cuda": {"normal": {"seconds": 4.0, **COMMON}, "quick": QUICK}},
    figures=figures, minutes={"cuda": 12}, choices={"kinds": KINDS, "presets": tuple(PRESETS)},
)  # fmt: skip
