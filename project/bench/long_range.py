"""Time and memory of the nine attentions of the Long-Range Arena: of training steps, and by length."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
from data.long_range import Task
from tqdm import tqdm
from training.lra_loop import Training
from training.lra_methods import BACKENDS, METHODS, Settings, build_classifier

import minitorch
from bench.measuring import (
    in_child,
    interleaved,
    out_of_memory,
    peak_memory,
    reset_peak_memory,
    spread,
    wait,
)
from bench.record_files import Record
from bench.table_cells import cell, markdown
from kernels.cuda.runtime.arrays import pool
from minitorch.backends.matmul_precision import find_precision
from minitorch.training.captured_step import RECORDED
from minitorch.training.captured_step import WARM_UP as WARM_UP_CALLS

#: With which everything is compared, and those that compute the same as it.
NAIVE, FLASH = "naive", "flash"
HEADS, HEAD_DIM = 2, 32
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
#: Bytes of the score matrices of one training step that naive attention may take on the CPU.  It keeps
#: about six of them.
MOST_BYTES, KEPT_MATRICES = 4 * 2**30, 6
#: Length of the step before a measured one, which compiles.
WARM_UP = 256
#: Steps before measured ones: the first compile, the others are captured, with no other step between.
STEPS_BEFORE = WARM_UP_CALLS + RECORDED


# -- memory --------------------------------------------------------------------------------------


def peak_of_step(
    attention: str, settings: Settings, backend: str, model: Mapping[str, Any]
) -> int | None:
    """Return the bytes that one training step adds to the peak of this process, or of the GPU's pool.

    To be called in a fresh process.

    Args:
        attention: One of ``METHODS``.
        settings: Of the model; its dropout stays.
        backend: "fast" or "cuda".
        model: Arguments by name of :func:`training.lra_methods.build_classifier`.

    Returns:
        None where the memory is too small for the step, or its peak is not known.
    """
    memory = pool() if backend == "cuda" else None
    if (memory is None) if backend == "cuda" else (peak_memory() == 0):
        return None
    try:
        for length in (min(WARM_UP, model["length"]), model["length"]):
            changed = {"length": length, "side": None}  # what positions begin with does not matter
            own = build_classifier(attention, settings, backend, **{**model, **changed})
            lead = (settings.batch, *[2] * (model["documents"] == 2))
            X = np.random.default_rng(0).integers(1, model["vocabulary"], (*lead, length))
            y = np.zeros(settings.batch, np.int64)
            wait("cuda" if backend == "cuda" else "cpu")
            before = memory.reset_peak() if memory is not None else reset_peak_memory()
            with minitorch.matmul_precision(find_precision(settings.precision).products):
                own.loss(X, y).backward()
        wait("cuda" if backend == "cuda" else "cpu")
        return (memory.peak() if memory is not None else peak_memory()) - before
    except Exception as error:
        if not out_of_memory(error):
            raise
        return None


def peak_in_child(
    attention: str, settings: Settings, backend: str, model: Mapping[str, Any]
) -> int | None:
    """Return what :func:`peak_of_step` does, from a fresh process; None if that process fails."""
    try:
        return in_child(peak_of_step, attention, replace(settings), backend, dict(model))
    except RuntimeError as error:
        print(f"no peak of memory: {error}")
        return None


# -- training steps --------------------------------------------------------------------------------


def time_of_steps(
    attentions: Sequence[str], task: Task, settings: Settings, backend: str, budget: float,
    eager: bool = False,
) -> list[Record]:  # fmt: skip
    """Measure a training step of each attention on a task, in interleaved rounds, and its memory.

    Args:
        attentions: Of ``METHODS``.
        task: With examples for a batch at least.
        settings: Of the model and the training.
        backend: "fast" or "cuda".
        budget: Seconds for the rounds.
        eager: Whether to launch the kernels of a step one by one, rather than to capture them.

    Returns:
        A row for each attention; None is the time, or the peak, where memory was too small.
    """
    train = task.parts["train"]
    X, y = train.X[: settings.batch].astype(np.int64), train.y[: settings.batch]
    model = task.model
    peaks: dict[str, int | None] = {}
    steps: dict[str, Callable[[], Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in tqdm(attentions, desc=task.name, unit="attention", disable=None, leave=False):
            # A GPU's pool has a peak of its own; that of the system's memory needs a fresh process.
            of_step = peak_of_step if backend == "cuda" else peak_in_child
            peaks[name] = of_step(name, settings, backend, model)
            try:
                training = Training(
                    task, name, settings, 0, backend, Path(folder) / name, eager=eager
                )
                steps[name] = partial(training.take_step, X, y)
                for _ in range(STEPS_BEFORE):
                    steps[name]()
            except Exception as error:
                if not out_of_memory(error):
                    raise
                steps.pop(name, None)
        times = interleaved(steps, "cuda" if backend == "cuda" else "cpu", budget)
    return [
        {
            "task": task.name, "source": task.source, "length": task.length, "attention": name,
            "batch": settings.batch, "precision": settings.precision, "peak_bytes": peaks[name],
            "ms": spread(times[name], 1e3) if name in times else None,
        }
        for name in attentions
    ]  # fmt: skip


def over_naive(rows: Iterable[Record], key: Callable[[Record], float | None]) -> dict[str, Any]:
    """Return for each attention what a figure of naive attention is over its own.

    Args:
        rows: Of :func:`time_of_steps`, of any tasks.
        key: The figure of a row.

    Returns:
        By attention a dict: the ratio by task, tasks for which one of the two figures is missing left out;
        and under "all" the geometric mean over the tasks that every attention has.
    """
    rows = [*rows]
    base = {row["task"]: key(row) for row in rows if row["attention"] == NAIVE}
    found: dict[str, Any] = {}
    for row in rows:
        above, below = base.get(row["task"]), key(row)
        own = found.setdefault(row["attention"], {})
        if above and below:
            own[row["task"]] = above / below
    common = set[str](base).intersection(*found.values())
    if common:
        for own in found.values():
            own["all"] = geometric_mean(own[task] for task in common)
    return found


# -- time by length --------------------------------------------------------------------------------


class Pass:
    """A forward and a backward pass of one attention on random operands.

    Args:
        attention: One of ``METHODS``.
        length: Of the sequence.
        backend: "fast" or "cuda".
        batch: Sequences.
        precision: "float32" or "bfloat16", the dtype of the operands.
    """

    def __init__(
        self, attention: str, length: int, backend: str, batch: int = 1, precision: str = "float32"
    ):
        minitorch.manual_seed(0)
        own = find_precision(precision)
        dtype, self.products = own.dtype, own.products
        layer = minitorch.MultiHeadAttention(
            HEADS * HEAD_DIM, HEADS, False, 0.0, backend=BACKENDS[backend], attention=attention,
            attention_options=METHODS[attention].options(length, 0), dtype=dtype,
        )  # fmt: skip
        self.attend: Callable[..., Any] = layer.attend
        random = np.random.default_rng(0)
        shape = batch, HEADS, length, HEAD_DIM
        self.q, self.k, self.v = (
            minitorch.from_numpy(
                random.standard_normal(shape).astype(dtype),
                BACKENDS[backend],
                requires_grad=True,
            )
            for _ in range(3)
        )
        if layer.shares_keys:
            self.k = self.q
        self.device = "cuda" if backend == "cuda" else "cpu"

    def __call__(self) -> None:
        """Run both passes and forget the gradients."""
        with minitorch.matmul_precision(self.products):
            self.attend(self.q, self.k, self.v).sum().backward()
        for operand in (self.q, self.k, self.v):
            operand.zero_grad_()


def has_room(attention: str, length: int, backend: str, batch: int = 1) -> bool:
    """Tell whether an attention may run at a length: naive attention may take ``MOST_BYTES`` on the CPU."""
    is_large = KEPT_MATRICES * 4 * batch * HEADS * length**2 > MOST_BYTES
    return not (attention == NAIVE and backend == "fast" and is_large)


def time_by_length(
    attentions: Sequence[str], lengths: Sequence[int], backend: str, budget: float,
    add: Callable[[Record], None], batch: int = 1, precision: str = "float32",
) -> None:  # fmt: skip
    """Measure a forward and a backward pass of each attention at each length, in interleaved rounds.

    Args:
        attentions: Of ``METHODS``.
        lengths: Of the sequences.
        backend: "fast" or "cuda".
        budget: Seconds for the rounds of a length.
        add: Called with each row: ``{"length": …, "ms": {attention: spread or None}}``.
        batch: Sequences.
        precision: "float32" or "bfloat16", the dtype of the operands.
    """
    device = "cuda" if backend == "cuda" else "cpu"
    for length in tqdm(lengths, desc="time by length", unit="length", disable=None):
        passes: dict[str, Pass] = {}
        for name in attentions:
            if not has_room(name, length, backend, batch):
                continue
            try:
                passes[name] = Pass(name, length, backend, batch, precision)
                passes[name]()
            except Exception as error:
                if not out_of_memory(error):
                    raise
                passes.pop(name, None)
        times = interleaved(passes, device, budget)
        found = {name: spread(values, 1e3) for name, values in times.items()}
        add(
            {"length": length, "batch": batch, "ms": {name: found.get(name) for name in attentions}}
        )


def crossovers(rows: Iterable[Record], over: str = FLASH) -> dict[str, int | None]:
    """Return for each attention the first length from which on it stays faster than another one.

    Args:
        rows: Of :func:`time_by_length`.
        over: The other one.

    Returns:
        None where it is not faster at the longest length at which both were measured.
    """
    first: dict[str, int | None] = {}
    for row in sorted(rows, key=lambda row: row["length"]):
        times = row["ms"]
        for name, entry in times.items():
            if name == over or entry is None or times.get(over) is None:
                continue
            is_faster = entry["median"] < times[over]["median"]
            first[name] = (first.get(name) or row["length"]) if is_faster else None
    return first


def lengths_table(rows: Sequence[Record]) -> str:
    """Return the medians of the time by length in ms, and the crossover of each attention, as Markdown."""
    lengths = [row["length"] for row in rows]
    first = crossovers(rows)
    lines = []
    for name in rows[0]["ms"]:
        entries = [row["ms"].get(name) for row in rows]
        cells = [cell(None if entry is None else entry["median"]) for entry in entries]
        since = f"{first[name]:,}" if first.get(name) else f"not up to {lengths[-1]:,}"
        lines.append([METHODS[name].title, *cells, "" if name == FLASH else since])
    head = ["forward and backward, ms", *(f"{n:,}" for n in lengths), "faster than flash from"]
    return markdown(head, lines)
