"""Figures of measurements: a column of panels for each device that has a record.

A measurement says what a panel shows, and this module how it looks.  The colour of a curve or bar
belongs to the name before the first comma of its label, its line to the words after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import records
from bench.records import ROOT, Record
from bench.table_cells import cell, colour_of

IMAGES = ROOT / "docs" / "images" / "experiments"
#: Inches of a column of panels: two of them are as wide as a page of the site.
WIDTH = 4.2
LINES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Result:
    """What was measured on one device."""

    record: Record  # as in the file
    folder: str  # of the device
    fresh: bool = False  # measured by this run; otherwise it comes from a file

    @property
    def rows(self) -> list[Record]:
        """The rows of the record."""
        return self.record["rows"]

    @property
    def label(self) -> str:
        """The title of the panels: the device, and whether it is from a file."""
        name = self.record["device"]
        if self.record.get("kind") == "cpu":
            name += f", {self.record['cores']} cores"
        return f"{name} ({'measured here' if self.fresh else 'from file'}, {self.record['date']})"


def stored(name: str) -> list[Result]:
    """Return the published records of a name by device, the CPUs first."""
    paths = sorted(records.RESULTS.glob(f"*/{name}.json"))
    return [Result(records.read_record(path), path.parent.name) for path in paths]


def beside(fresh: Result, name: str) -> list[Result]:
    """Return the results of all devices; a fresh one takes the place of the record of its device."""
    found = [fresh, *(result for result in stored(name) if result.folder != fresh.folder)]
    return sorted(found, key=lambda result: (not result.folder.startswith("cpu"), result.folder))


@dataclass(frozen=True)
class Panel:
    """A diagram of one record."""

    title: str  # the quantity and the workload
    x: str = ""  # label of the axis
    y: str = ""
    #: Label → points (x, y) in order; y may be a spread, whose quartiles are drawn, too.
    lines: Mapping[str, Sequence[tuple[float, Any]]] = field(default_factory=dict)
    #: Label → category → length of a horizontal bar.
    bars: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    log: str = ""  # the logarithmic axes: "x", "y", "xy"
    stacked: bool = False  # the bars of a category make one, and its sum is written at the end

    def fill(self, axes: Any, names: Sequence[str], kinds: Sequence[str]) -> None:
        """Draw into axes of matplotlib; a name has a colour of its own, and a kind a line."""
        for label, points in self.lines.items():
            name, _, kind = label.partition(", ")
            x, y = zip(*points, strict=True) if points else ((), ())
            style: Record = {
                "color": colour_of(name, names), "label": label, "alpha": 0.8,
                "linestyle": LINES[kinds.index(kind) % 4],
                "marker": "os*D"[kinds.index(kind) % 4] if len(x) == 1 else "." if len(x) < 20 else "",
            }  # fmt: skip
            if y and isinstance(y[0], dict):
                bars = [[abs(one["median"] - one[end]) for one in y] for end in ("low", "high")]
                axes.errorbar(x, [one["median"] for one in y], bars, capsize=2, **style)
            else:
                axes.plot(x, y, **style)
        categories = list(dict.fromkeys(key for values in self.bars.values() for key in values))
        ends, width = dict.fromkeys(categories, 0.0), 0.8 / max(len(self.bars), 1)
        for i, (label, values) in enumerate(self.bars.items()):
            at = [categories.index(key) + (0 if self.stacked else i * width) for key in values]
            left = [ends[key] if self.stacked else 0.0 for key in values]
            style = {"color": colour_of(label.partition(", ")[0], names), "label": label}
            style["alpha"] = 0.55 if "backward" in label else 1.0
            axes.barh(at, list(values.values()), 0.8 if self.stacked else width, left, **style)
            ends |= {key: ends[key] + value for key, value in values.items()}
        if self.bars:
            middle = 0.0 if self.stacked else 0.4 - width / 2
            axes.set_yticks([y + middle for y in range(len(categories))], categories)
            axes.invert_yaxis()
            for y, end in enumerate(ends.values() if self.stacked else ()):
                axes.text(end, y, f"  {cell(end)}", va="center")
        xs = [float(x) for points in self.lines.values() for x, _ in points]
        base = {"base": 2} if self.lines and all(x.is_integer() for x in xs) else {}
        if "x" in self.log:
            axes.set_xscale("log", **base)
        if "y" in self.log:
            axes.set_yscale("log")
        axes.set(xlabel=self.x, ylabel=self.y, **{"xmargin": 0.25} if self.stacked else {})


def curves(points: Iterable[tuple[str, float, Any]]) -> dict[str, list[tuple[float, Any]]]:
    """Return the lines of a panel, in the order of their first points.

    Args:
        points: Label, x and y of each; one whose y is None is left out.
    """
    found: dict[str, list[tuple[float, Any]]] = {}
    for label, x, y in points:
        if y is not None:
            found.setdefault(label, []).append((x, y))
    return found


def draw(measurement: Any, results: list[Result], path: Path) -> str | None:
    """Draw the figure of a measurement; return why not, or None."""
    if not results:
        return "no figure: nothing has been measured"
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return 'no figure: matplotlib is not installed; pip install -e ".[plot]"'
    found = [measurement.draw(result.record) for result in results]
    labels = [label for panels in found for one in panels for label in (*one.lines, *one.bars)]
    names, kinds = (list(dict.fromkeys(one.partition(", ")[i] for one in labels)) for i in (0, 2))
    rows = max(map(len, found))
    size = (max(WIDTH * len(results), 6.4), measurement.height * rows)
    # The same rows make the same file; text stays text.
    with rc_context({"svg.hashsalt": measurement.name, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=size, layout="constrained")
        grid, handles = figure.subplots(rows, len(results), squeeze=False), dict[str, Any]()
        for column, result, panels in zip(grid.T, results, found, strict=True):
            for row, (axes, panel) in enumerate(zip(column, panels, strict=False)):
                title = "" if row else f"{result.label}\n"
                panel.fill(axes, names, kinds)
                axes.set_title(title + panel.title, fontsize=9)
                for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                    handles.setdefault(label, handle)
        columns = max(1, min(4, int(15 * size[0] / (8 + max(map(len, handles))))))
        style = {"loc": "outside lower center", "ncols": columns, "fontsize": 8, "frameon": False}
        figure.legend(handles.values(), handles, **style)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {}, dpi=150)
    return None
