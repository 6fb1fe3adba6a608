"""Tables and pictures of trainings on the Long-Range Arena, from the rows of a record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Any

from training.lra_methods import METHODS
from training.script_helpers import Panel

from bench.long_range import NAIVE, over_naive
from bench.record_files import Record
from bench.table_cells import cell, colour_of, markdown

MEBIBYTE = 2**20


def finished(rows: Sequence[Record]) -> list[Record]:
    """Return the rows of trainings that are done."""
    return [row for row in rows if row.get("done")]


def titles(rows: Sequence[Record]) -> dict[str, str]:
    """Return by task what a table calls it: its name and where its examples come from."""
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
    the seeds.  Speed-up and memory are relative to naive attention.  A figure that no row has is left out.
    """
    rows = finished(rows)
    parts = []
    for task, title in titles(rows).items():
        base = _of(rows, task, NAIVE)
        lines = []
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
    rows = finished(rows)
    rates = sorted({row["lr"] for row in rows})
    lines = []
    for task in titles(rows):
        for name in METHODS:
            own = _of(rows, task, name)
            if not own:
                continue
            means = [
                _mean([row for row in own if row["lr"] == lr], "valid_accuracy") for lr in rates
            ]
            best = max(mean for mean in means if mean is not None)
            cells = ["–" if mean is None else f"{100 * mean:.1f}" for mean in means]
            cells = [f"**{c}**" if m == best else c for c, m in zip(cells, means, strict=True)]
            lines.append([f"{task}, {METHODS[name].title}", *cells])
    return markdown(["validation accuracy, %", *(f"lr {lr:g}" for lr in rates)], lines)


def _legend_below(axes: Any) -> None:
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)


def scatter(rows: Sequence[Record], task: str, key: str, label: str, scale: float = 1.0) -> Panel:
    """Return a panel of accuracy against a cost, a point for each attention.

    Args:
        rows: Of a record.
        task: Of which rows are drawn.
        key: Of the cost in a row.
        label: Below the picture.
        scale: Of the cost.
    """

    def panel(axes: Any) -> None:
        names = [name for name in METHODS if _of(rows, task, name)]
        for name in names:
            own = _of(rows, task, name)
            cost, accuracy = _mean(own, key), _mean(own, "test_accuracy")
            if cost is None or accuracy is None:
                continue
            axes.scatter(
                [cost * scale],
                [100 * accuracy],
                color=colour_of(name, names),
                label=METHODS[name].title,
            )
        axes.set(xscale="log", xlabel=label, ylabel="test accuracy, %", title=titles(rows)[task])
        axes.grid(alpha=0.3)
        if axes.has_data():
            _legend_below(axes)

    return panel


def pictures(rows: Sequence[Record]) -> dict[str, list[Panel]]:
    """Return the panels of each picture: accuracy against speed and against memory, by task."""
    rows = finished(rows)
    costs: dict[str, Callable[[str], Panel]] = {
        "accuracy_speed": lambda task: scatter(
            rows, task, "step_ms", "time of a training step, ms"
        ),
        "accuracy_memory": lambda task: scatter(
            rows, task, "peak_bytes", "peak memory of a step, MiB", 1 / MEBIBYTE
        ),
    }
    return {name: [make(task) for task in titles(rows)] for name, make in costs.items()}


def steps_tables(rows: Sequence[Record]) -> str:
    """Return two tables as Markdown: speed-up and share of memory of training steps, by task.

    The means are over the tasks that all attentions have.
    """
    tasks = [*titles(rows)]
    speed = over_naive(rows, lambda row: row["ms"] and row["ms"]["median"])
    memory = over_naive(rows, lambda row: row["peak_bytes"])
    head = [*tasks, "geometric mean of the measured tasks"]
    lines, shares = [], []
    for name in speed:
        title = METHODS[name].title
        found = [speed[name].get(task) for task in (*tasks, "all")]
        lines.append([title, *("–" if ratio is None else f"{ratio:.2f}" for ratio in found)])
        found = [memory[name].get(task) for task in (*tasks, "all")]
        shares.append([title, *("–" if ratio is None else f"{1 / ratio:.3f}" for ratio in found)])
    return "\n\n".join(
        [
            markdown(["speed of a step relative to the Transformer", *head], lines),
            markdown(["memory of a step relative to the Transformer", *head], shares),
        ]
    )


def lengths_panel(rows: Sequence[Record], title: str) -> Panel:
    """Return a panel of the time by length, a curve for each attention, with both axes logarithmic."""

    def panel(axes: Any) -> None:
        names = [*rows[0]["ms"]]
        for name in names:
            known = [(row["length"], row["ms"][name]) for row in rows if row["ms"].get(name)]
            x = [length for length, _ in known]
            y = [entry["median"] for _, entry in known]
            axes.plot(x, y, "o-", color=colour_of(name, names), label=METHODS[name].title,
                      linewidth=1.2, markersize=3)  # fmt: skip
        axes.set(xlabel="length", ylabel="forward and backward, ms")
        axes.set_title(f"one sequence, 2 heads of 32 columns; {title}", fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        _legend_below(axes)

    return panel
