"""Figures of measurements: a column of panels for each device that has a record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import records
from bench.records import ROOT, Record

IMAGES = ROOT / "docs" / "images" / "experiments"
#: Inches of a column of panels: two of them are as wide as a page of the site.
WIDTH = 4.2


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


def path_of(name: str, folder: str) -> Path:
    """Return the file of a published record."""
    return records.RESULTS / folder / f"{name}.json"


def stored(name: str) -> list[Result]:
    """Return the published records of a name by device, the CPUs first."""
    paths = sorted(records.RESULTS.glob(f"*/{name}.json"))
    return [Result(records.read_record(path), path.parent.name) for path in paths]


def beside(fresh: Result, name: str) -> list[Result]:
    """Return the results of all devices; a fresh one takes the place of the record of its device."""
    found = [fresh, *(result for result in stored(name) if result.folder != fresh.folder)]
    return sorted(found, key=lambda result: (not result.folder.startswith("cpu"), result.folder))


def panels(
    figure: Any, results: Sequence[Result], rows: int = 1, **options: Any
) -> list[tuple[Any, Result]]:
    """Divide a figure into a column of panels for each result; title each with its device."""
    figure.set_size_inches(max(WIDTH * len(results), 6.4), figure.get_figheight() * rows)
    grid = figure.subplots(rows, len(results), squeeze=False, **options)
    for axes, result in zip(grid[0], results, strict=True):
        axes.set_title(result.label, fontsize=9)
    return [(grid[0, i] if rows == 1 else grid[:, i], result) for i, result in enumerate(results)]


def headline(axes: Any, text: str) -> None:
    """Add the quantity and the workload to the title of a panel."""
    device = axes.get_title()
    axes.set_title(f"{device}\n{text}" if device else text, fontsize=9)


def legend(figure: Any, axes: Iterable[Any], place: str = "lower", columns: int = 4) -> None:
    """Draw one legend for several panels, "lower" or "upper": below or above them."""
    found: dict[str, Any] = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        figure.legend(
            list(found.values()), list(found), loc=f"outside {place} center",
            ncols=min(columns, len(found)), fontsize=8, frameon=False,
        )  # fmt: skip


def draw(measurement: Any, results: list[Result], path: Path) -> str | None:
    """Draw the figure of a measurement; return why not, or None."""
    if not results:
        return "no figure: nothing has been measured"
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return 'no figure: matplotlib is not installed; pip install -e ".[plot]"'
    # The same rows make the same file; text stays text.
    with rc_context({"svg.hashsalt": measurement.name, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(WIDTH, measurement.height), layout="constrained")
        measurement.draw(figure, results)
        path.parent.mkdir(parents=True, exist_ok=True)
        date = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, metadata=date, dpi=150)
    return None
