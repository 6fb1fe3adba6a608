"""Memory, tables and pictures of trainings on the Long-Range Arena, from the rows of a record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, geometric_mean, pstdev
from typing import Any

import numpy as np
from common.child import in_child
from training.lra_methods import METHODS, Settings, build_classifier

import minitorch
from bench.measuring import Peak, ready, wait
from bench.records import Record
from bench.table_cells import cell, markdown
from minitorch.backends.matmul_precision import find_precision

#: With which everything is compared.
NAIVE, FLASH = "naive", "flash"
#: Length of the step before a measured one, which compiles.
WARM_UP = 256
MEBIBYTE = 2**20


def peak_of_step(
    attention: str, settings: Settings, backend: str, model: Mapping[str, Any]
) -> int | None:
    """Return the bytes that one training step adds to the peak of this process, or of the GPU's pool."""
    device = "cuda" if backend == "cuda" else "cpu"
    peak, rng = Peak(device), np.random.default_rng(0)
    lead = (settings.batch, *[2] * (model["documents"] == 2))
    y = np.zeros(settings.batch, np.int64)

    def step() -> int:
        for length in (min(WARM_UP, model["length"]), model["length"]):
            changed = {"length": length, "side": None}  # what positions begin with does not matter
            own = build_classifier(attention, settings, backend, **{**model, **changed})
            X = rng.integers(1, model["vocabulary"], (*lead, length))
            wait(device)
            peak.begin()
            with minitorch.matmul_precision(find_precision(settings.precision).products):
                own.loss(X, y).backward()
        wait(device)
        return peak.bytes()

    return ready({"": step})[0].get("") if peak.is_known else None


def peak_in_child(
    attention: str, settings: Settings, backend: str, model: Mapping[str, Any]
) -> int | None:
    """Return what :func:`peak_of_step` does, from a fresh process; None if that process fails."""
    try:
        return in_child(peak_of_step, attention, replace(settings), backend, dict(model))
    except RuntimeError as error:
        print(f"no peak of memory: {error}")
        return None


def finished(rows: Sequence[Record]) -> list[Record]:
    """Return the rows of trainings that are done."""
    return [row for row in rows if row.get("done")]


def titles(rows: Sequence[Record]) -> dict[str, str]:
    """Return the title of each task: its name and where its examples come from."""
    return {row["task"]: f"{row['task']} ({row['source']})" for row in rows}


def _of(rows: Sequence[Record], task: str, attention: str) -> list[Record]:
    return [row for row in rows if row["task"] == task and row["attention"] == attention]


def _mean(rows: Sequence[Record], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return fmean(values) if values else None


def _ratio(above: float | None, below: float | None) -> str:
    return "–" if above is None or not below else f"{above / below:.2f}"


def results_table(rows: Sequence[Record]) -> str:
    """Return a table for each task: accuracy, time of a step and memory of each attention, as Markdown.

    Accuracies are those of the best validated model on the test part, as mean and standard deviation over
    the seeds.  Speedup and memory are relative to naive attention.  A column without figures is left out.
    """
    rows, parts = finished(rows), []
    for task, title in titles(rows).items():
        base, lines = _of(rows, task, NAIVE), []
        for name, method in METHODS.items():
            own = _of(rows, task, name)
            if not own:
                continue
            accuracies = [100 * row["test_accuracy"] for row in own]
            spread = f" ± {pstdev(accuracies):.1f}" if len(own) > 1 else ""
            peak, step = _mean(own, "peak_bytes"), _mean(own, "step_ms")
            lines.append([
                method.title, f"{fmean(accuracies):.1f}{spread}", str(len(own)), cell(step),
                _ratio(_mean(base, "step_ms"), step),
                cell(None if peak is None else peak / MEBIBYTE),
                _ratio(peak, _mean(base, "peak_bytes")),
            ])  # fmt: skip
        head = [
            title, "test accuracy, %", "seeds", "step, ms", "speed-up", "peak memory of a step, MiB",
            "memory relative to the Transformer",
        ]  # fmt: skip
        known = [place for place, cells in enumerate(zip(*lines, strict=True)) if {*cells} != {"–"}]
        head, *lines = ([line[place] for place in known] for line in (head, *lines))
        parts.append(markdown(head, lines))
    return "\n\n".join(parts)


def rates_table(rows: Sequence[Record]) -> str:
    """Return the best validation accuracy of each learning rate, the best of each line in bold."""
    rows, lines = finished(rows), []
    rates = sorted({row["lr"] for row in rows})
    for task in titles(rows):
        for name in METHODS:
            own = _of(rows, task, name)
            if not own:
                continue
            by_rate = [[row for row in own if row["lr"] == lr] for lr in rates]
            means = [_mean(part, "valid_accuracy") for part in by_rate]
            best = max(mean for mean in means if mean is not None)
            cells = ["–" if mean is None else f"{100 * mean:.1f}" for mean in means]
            cells = [f"**{c}**" if m == best else c for c, m in zip(cells, means, strict=True)]
            lines.append([f"{task}, {METHODS[name].title}", *cells])
    return markdown(["validation accuracy, %", *(f"lr {lr:g}" for lr in rates)], lines)


def over_naive(rows: Iterable[Record], key: Callable[[Record], float | None]) -> dict[str, Any]:
    """Return for each attention a figure of naive attention over its own."""
    rows = [*rows]
    base = {row["task"]: key(row) for row in rows if row["attention"] == NAIVE}
    found: dict[str, Any] = {}
    for row in rows:
        above, below = base.get(row["task"]), key(row)
        own = found.setdefault(row["attention"], {})
        if above and below:
            own[row["task"]] = above / below
    if common := set[str](base).intersection(*found.values()):
        for own in found.values():
            own["all"] = geometric_mean(own[task] for task in common)
    return found


def steps_tables(rows: Sequence[Record]) -> str:
    """Return two tables as Markdown: speedup and share of memory of training steps, by task.

    The means are over the tasks that all attentions have.
    """
    tasks = [*titles(rows)]
    shown = []
    for what, key, form in (
        ("speed", lambda row: row["ms"] and row["ms"]["median"], lambda x: f"{x:.2f}"),
        ("memory", lambda row: row["peak_bytes"], lambda x: f"{1 / x:.3f}"),
    ):
        found = over_naive(rows, key)
        lines = [
            [METHODS[name].title, *(form(own[t]) if t in own else "–" for t in (*tasks, "all"))]
            for name, own in found.items()
        ]
        head = [f"{what} of a step relative to the Transformer", *tasks]
        shown.append(markdown([*head, "geometric mean of the measured tasks"], lines))
    return "\n\n".join(shown)


def crossovers(rows: Iterable[Record], over: str = FLASH) -> dict[str, int | None]:
    """Return for each attention the first length from which on it stays faster than another one.

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
    lengths, first, lines = [row["length"] for row in rows], crossovers(rows), []
    for name in rows[0]["ms"]:
        entries = [row["ms"].get(name) for row in rows]
        cells = [cell(None if entry is None else entry["median"]) for entry in entries]
        since = f"{first[name]:,}" if first.get(name) else f"not up to {lengths[-1]:,}"
        lines.append([METHODS[name].title, *cells, "" if name == FLASH else since])
    head = ["forward and backward, ms", *(f"{n:,}" for n in lengths), "faster than flash from"]
    return markdown(head, lines)
