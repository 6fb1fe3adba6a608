"""Exact, sparse and approximate attention on the Long-Range Arena: accuracy, speed and memory.

python project/measure.py lra --tasks listops --attentions performer
python project/measure.py lra --tasks listops text --resume      all nine attentions, what the record lacks
python project/measure.py lra --tasks text --data aclImdb           the official files; a stand-in otherwise
python project/measure.py lra --tasks listops --rates 1e-3 2e-3 4e-3    compare learning rates
python project/measure.py lra_lengths lra_steps                     time by length, and of training steps

--data is a folder of a task's official files: aclImdb for text, AAN's three .tsv for retrieval, CIFAR-10's
binary version for image.  Sets, checkpoints and best models are in --folder.
"""

from __future__ import annotations

import gc
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench.kit import Case, Measurement, Panel, Record, Run, curves, ready, spread
from bench.long_range import (
    FLASH,
    NAIVE,
    lengths_table,
    peak_in_child,
    peak_of_step,
    rates_table,
    results_table,
    steps_tables,
)
from bench.measuring import timing_note
from data.long_range import GENERATED, TASKS, TEXT_LENGTH, LraTask, load_task
from data.pathfinder import PUBLISHED
from training.lra_loop import BEST, Training
from training.lra_methods import BACKENDS, METHODS, QUICK, SETTINGS, Settings, learning_rate_of
from training.pathfinder_stages import (
    FIRST_STAGES,
    STAGES,
    Arrays,
    begun_with,
    grown,
    stage_task,
    task_name,
)
from training.runs import resumable
from training.script_helpers import make_folder

import minitorch
from minitorch.backends.matmul_precision import find_precision
from minitorch.training.captured_step import RECORDED
from minitorch.training.captured_step import WARM_UP as WARM_UP_CALLS

HEADS, HEAD_DIM = 2, 32
#: Settings of a training that are those of its task unless they are given.
OF_TASK = ("steps", "batch", "judge_every", "dropout")
#: Bytes of the score matrices of one training step that naive attention may take on the CPU.  It keeps
#: about six of them.
MOST_BYTES, KEPT_MATRICES = 4 * 2**30, 6
#: Steps before measured ones: the first compile, the others are captured, with no other step between.
STEPS_BEFORE = WARM_UP_CALLS + RECORDED
SETS = Path(__file__).resolve().parents[2] / "runs" / "lra" / "sets"


def backend_of(run: Run) -> str:
    """Return the backend of a device."""
    return "cuda" if run.device == "cuda" else "fast"


def started(
    run: Run, make: Callable[[str], Callable[[], Any]], calls: int
) -> dict[str, Callable[[], Any]]:
    """Return the steps of all attentions that do not run out of memory, each called so often before."""

    def one(name: str) -> Callable[[], Any]:
        step = make(name)
        for _ in range(calls):
            step()
        return step

    return ready({name: partial(one, name) for name in run.attentions})[0]


# -- by length -------------------------------------------------------------------------------------------


def make_pass(attention: str, length: int, backend: str, precision: str) -> Callable[[], None]:
    """Return a forward and a backward pass of one attention on random operands."""
    needed = KEPT_MATRICES * 4 * HEADS * length**2
    if attention == NAIVE and backend == "fast" and needed > MOST_BYTES:
        raise MemoryError(f"naive attention needs {needed} bytes")
    minitorch.manual_seed(0)
    own, random = find_precision(precision), np.random.default_rng(0)
    layer = minitorch.MultiHeadAttention(
        HEADS * HEAD_DIM, HEADS, False, 0.0, backend=BACKENDS[backend], attention=attention,
        attention_options=METHODS[attention].options(length, 0), dtype=own.dtype,
    )  # fmt: skip
    arrays = [random.standard_normal((1, HEADS, length, HEAD_DIM)).astype(own.dtype) for _ in "qkv"]
    q, k, v = (minitorch.from_numpy(x, BACKENDS[backend], requires_grad=True) for x in arrays)
    if layer.shares_keys:
        k = q

    def both() -> None:
        with minitorch.matmul_precision(own.products):
            layer.attend(q, k, v).sum().backward()
        for operand in (q, k, v):
            operand.zero_grad_()

    return both


def by_length(run: Run) -> Iterator[Case]:
    note = f"{timing_note(run.device)}; a dash means that there was not enough memory"
    run.note(note=note, heads=HEADS, head_dim=HEAD_DIM, precision=run.precision)
    for length in run.lengths:
        yield {"length": length}, partial(at_length, run, length)


def at_length(run: Run, length: int) -> Record:
    def make(name: str) -> Callable[[], None]:
        return make_pass(name, length, backend_of(run), run.precision)

    times = run.timed(started(run, make, 1))
    found = {name: spread(values, 1e3) for name, values in times.items()}
    return {"batch": 1, "ms": {name: found.get(name) for name in run.attentions}}


def draw(record: Record) -> list[Panel]:
    lines = curves(
        (METHODS[name].title, row["length"], ms and ms["median"])
        for row in record["rows"]
        for name, ms in row["ms"].items()
    )
    title = f"one sequence, {record['heads']} heads of {record['head_dim']} columns"
    return [Panel(title, "length", "forward and backward, ms", lines, log="xy")]


# -- of training steps -----------------------------------------------------------------------------------


def of_steps(run: Run) -> Iterator[Case]:
    run.note(note=f"{timing_note(run.device)}; one batch, again and again")
    for name in run.tasks:
        settings = QUICK if run.is_quick else SETTINGS[name]
        settings = Settings(**{**vars(settings), "precision": run.precision})
        sets = SETS.parent / "quick" if run.is_quick else SETS
        task = load_task(name, sets, None, 0, run.is_quick, 8 * settings.batch, 32, TEXT_LENGTH)
        timed: Record = {}  # by the first of the rows
        for attention in run.attentions:
            key = {"task": task.name, "attention": attention}
            yield key, partial(of_task, run, task, settings, attention, timed)


def of_task(run: Run, task: LraTask, settings: Settings, attention: str, timed: Record) -> Record:
    """Return the time of a training step, and its memory; None where memory was too small."""
    if not timed:
        timed |= times_of_task(run, task, settings) | {"": None}
    backend = backend_of(run)
    # A GPU's pool has a peak of its own; that of the system's memory needs a fresh process.
    peak = peak_of_step if backend == "cuda" else peak_in_child
    times = timed.get(attention)
    return {
        "source": task.source, "length": task.length, "batch": settings.batch,
        "precision": settings.precision, "peak_bytes": peak(attention, settings, backend, task.model),
        "ms": spread(times, 1e3) if times else None,
    }  # fmt: skip


def times_of_task(run: Run, task: LraTask, settings: Settings) -> dict[str, list[float]]:
    """Return the times of a training step of each attention, in interleaved rounds."""
    train = task.parts["train"]
    X, y = train.X[: settings.batch].astype(np.int64), train.y[: settings.batch]
    with tempfile.TemporaryDirectory() as folder:

        def make(name: str) -> Callable[[], Any]:
            place = Path(folder) / name
            training = Training(task, name, settings, 0, backend_of(run), place)
            return partial(training.take_step, X, y)

        return run.timed(started(run, make, STEPS_BEFORE))


# -- trainings -------------------------------------------------------------------------------------------


def trainings(run: Run) -> Iterator[Case]:
    if run.data and (len(run.tasks) > 1 or run.tasks[0] in GENERATED):
        sys.exit("--data holds the files of one task: add --tasks text, retrieval or image")
    make_folder(run.folder)
    given: Record = {name: getattr(run, name)[0] for name in OF_TASK if getattr(run, name)}
    for task, attention in itertools.product(run.tasks, run.attentions):
        settings = replace(
            QUICK if run.is_quick else SETTINGS[task], precision=run.precision, **given
        )
        for lr, seed in itertools.product(run.rates or (learning_rate_of(task),), run.seeds):
            key = {"task": task, "attention": attention, "seed": seed, "lr": lr}
            yield {**key, **asdict(settings)}, partial(trained, run, settings, **key)


def trained(
    run: Run, settings: Settings, task: str, attention: str, seed: int, lr: float
) -> Record:
    """Train, and measure the memory of a step."""
    folder, given = (
        Path(run.folder) / f"{task}-{attention}-seed-{seed}-lr-{lr:g}",
        (seed, backend_of(run)),
    )
    with resumable(run.folder):
        found = load_task(
            task, Path(run.folder) / "sets", run.data or None, 0, run.is_quick, run.examples or None,
            run.pixels, run.length,
        )  # fmt: skip
        start = None
        if task == "pathfinder":
            found = replace(found, source=found.source + begun_with(FIRST_STAGES[-1]))
            start = partial(begun_small, run, settings, folder, attention, given, lr)
        own = folder, lr, run.resumed, run.eager, start
        row = Training(found, attention, settings, *given, *own).run()
    if row["done"]:
        row["peak_bytes"] = peak_in_child(attention, settings, given[1], found.model)
    gc.collect()  # a captured step, and its memory
    return row


def begun_small(
    run: Run, settings: Settings, folder: Path, attention: str, given: tuple[int, str], lr: float
) -> Arrays:
    """Train on smaller images of Pathfinder; return parameters for those of the task."""
    models = [folder / task_name(name) / BEST for name in FIRST_STAGES]
    counts = {"valid": settings.judged, "test": settings.judged}
    for name, before in zip(FIRST_STAGES, (None, *models[:-1]), strict=True):
        stage, processes = STAGES[name], 0 if run.is_quick else None
        start = None if before is None else partial(grown, before, stage.task.size)
        steps, judge_every = min(stage.steps, settings.steps), min(200, settings.judge_every)
        small = replace(settings, steps=steps, judge_every=judge_every)
        task = stage_task(name, Path(run.folder) / "sets", given[0], counts, processes=processes)
        own = folder / task.name, lr, run.resumed, run.eager, start
        training = Training(task, attention, small, *given, *own)
        if training.done < steps and not training.run()["done"]:
            raise KeyboardInterrupt
    return grown(models[-1], run.pixels)


def trainings_table(record: Record) -> str:
    rows = record["rows"]
    rates = {row["lr"] for row in rows if row["task"] == rows[0]["task"]} if rows else set()
    return rates_table(rows) if len(rates) > 1 else results_table(rows)


COMMON: Record = {"attentions": tuple(METHODS)}
LENGTHS = tuple(2**power for power in range(8, 17))
CHOICES = {**COMMON, "tasks": tuple(TASKS), "precision": ("float32", "bfloat16")}
LRA: Record = {
    "tasks": ("listops",), **COMMON, "seeds": (0,), "rates": (), **dict.fromkeys(OF_TASK, ()), "data": "",
    "examples": 0, "pixels": 32, "length": TEXT_LENGTH, "precision": "float32", "eager": False,
    "folder": "runs/lra",
}  # fmt: skip
SHORT = {
    "tasks": ("text", "retrieval", "image", "pathfinder"), "attentions": (NAIVE, FLASH), "seeds": (0, 1),
    "steps": (1500,), "precision": "bfloat16",
}  # fmt: skip
MEASUREMENTS = (
    Measurement(
        "lra", "Which accuracy does each attention reach on the Long-Range Arena, how fast?", trainings,
        {"cpu": {"normal": LRA}, "cuda": {"normal": LRA}}, table=trainings_table,
        minutes={"cpu": 1e4, "cuda": 600}, choices={**CHOICES, "pixels": tuple(PUBLISHED)},
        records={"lra_short": SHORT},
    ),
    Measurement(
        "lra_lengths", "From which length on is each approximation faster than exact attention?", by_length,
        {"cpu": {"normal": {"lengths": LENGTHS[:6], "precision": "float32", "seconds": 20.0, **COMMON},
                 "quick": {"lengths": (64, 128), "seconds": 0.05}},
         "cuda": {"normal": {"lengths": LENGTHS[1:], "precision": "bfloat16", "seconds": 2.0, **COMMON},
                  "quick": {"lengths": LENGTHS[:2], "seconds": 0.2}}},
        table=lambda record: lengths_table(record["rows"]), draw=draw, minutes={"cpu": 4, "cuda": 2},
        choices=CHOICES,
    ),
    Measurement(
        "lra_steps", "How fast is a training step with each approximation, and how much memory?", of_steps,
        {"cpu": {"normal": {"tasks": tuple(TASKS), "precision": "float32", "seconds": 20.0, **COMMON},
                 "quick": {"tasks": ("listops",), "seconds": 0.05, "attentions": (NAIVE, FLASH)}},
         "cuda": {"normal": {"tasks": tuple(TASKS), "precision": "bfloat16", "seconds": 4.0, **COMMON},
                  "quick": {"tasks": ("listops",), "seconds": 0.2}}},
        table=lambda record: steps_tables(record["rows"]), minutes={"cpu": 30, "cuda": 10}, choices=CHOICES,
    ),
)  # fmt: skip
