"""What every experiment shares: its command line, its record, the files of other devices, its figure.

An experiment is a script of this folder.  It measures rows, prints them as a Markdown table, and draws a
figure with a panel for each device of which there is a file::

    EXPERIMENT = Experiment("speedup", __doc__, measure, table, draw)

    if __name__ == "__main__":
        run(EXPERIMENT)

Rows are written as they come, so that an interruption keeps them.  Records go to ``build/experiments``,
where they change nothing; with ``--publish`` they go to ``docs/results`` and figures to
``docs/images/experiments``.  A file of another machine, put into ``docs/results/<device>``, is drawn beside
what is measured here, and its panel says where it comes from; what is published never takes its place.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm import tqdm

# A script's own folder is where Python looks for modules; what all of project/ shares lies one up.  It
# comes first: project/training/script_helpers.py is not the experiment of that name.
PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT)]
from bench import measuring  # noqa: E402
from bench.record_files import FOREIGN, BadRecordError, Record, bad_record, folder_of, read_record  # noqa: E402
from bench.table_cells import COLOURS as COLOURS  # noqa: E402  # experiments have these from here
from bench.table_cells import cell as cell  # noqa: E402
from bench.table_cells import colour_of as colour_of  # noqa: E402
from bench.table_cells import markdown as markdown  # noqa: E402
from bench.table_cells import timed_cell as timed_cell  # noqa: E402
from common.command_line import OneLineParser  # noqa: E402

from kernels.runtime.targets import why_no_cuda  # noqa: E402

ROOT = PROJECT.parent
RESULTS = ROOT / "docs" / "results"
IMAGES = ROOT / "docs" / "images" / "experiments"
BUILD = ROOT / "build" / "experiments"
#: Inches of a column of panels: two of them are as wide as a page of the site.
WIDTH = 4.2
#: Where results and figures go, for the record of the command they are left out.
PLACES = ("--json", "--figure")


@dataclass(frozen=True)
class Experiment:
    """One table and figure.

    Attributes:
        name: Of the script and of its files.
        description: For ``--help``.
        measure: ``(args, report)``: measures, and hands each row to ``report.add``.
        table: Of a record: Markdown.
        draw: ``(figure, results)``: fills a matplotlib figure; see :func:`panels`.
        devices: That it can measure, the first by default.
        options: Adds options of its own to the parser; those with a default of None may be filled in by
            ``measure`` from ``args.size``.
        height: Of the figure in inches, for each row of panels.
        caption: What the figure shows, in one or two sentences of Markdown; the site prints it below.
    """

    name: str
    description: str | None
    measure: Callable[[argparse.Namespace, Report], None]
    table: Callable[[Record], str]
    draw: Callable[[Any, list[Result]], None]
    devices: tuple[str, ...] = ("cpu", "cuda")
    options: Callable[[OneLineParser], None] = lambda parser: None
    height: float = 4.2
    caption: str = ""


@dataclass(frozen=True)
class Result:
    """What was measured on one device.

    Attributes:
        record: As in the file.
        folder: Of the device under ``docs/results``, or that it would have.
        fresh: Measured by this run; else it comes from a file.
    """

    record: Record
    folder: str
    fresh: bool = False

    @property
    def rows(self) -> list[Record]:
        """Return what was measured."""
        return self.record["rows"]

    @property
    def label(self) -> str:
        """Return the title of the panel: the device, and whether it is from a file."""
        name = self.record["device"]
        if self.record.get("kind") == "cpu":
            name += f", {self.record['cores']} cores"
        return f"{name} ({'measured here' if self.fresh else 'from file'}, {self.record['date']})"


class Report:
    """The record of one run, written again with each row.

    Args:
        experiment: That runs.
        args: Of the command line.
        command: To be recorded.
        path: Of the file.

    Attributes:
        rows: So far.
    """

    def __init__(self, experiment: Experiment, args: argparse.Namespace, command: str, path: Path):
        self.rows: list[Record] = []
        self.path = path
        self._command, self._device = command, measuring.name_of(args.device)
        hidden = {"json", "figure", "publish", "redraw", "device"}
        settings = {
            key: value
            for key, value in vars(args).items()
            if key not in hidden and value is not None
        }
        self._figures: Record = {
            "experiment": experiment.name,
            "kind": args.device,
            "settings": settings,
        }
        self._started = False

    def add(self, **row: Any) -> None:
        """Add a row and write the file."""
        self.rows.append(row)
        self._write()

    def note(self, **figures: Any) -> None:
        """Set further entries of the record beside the rows, such as ``timing`` or ``note``."""
        self._figures.update(figures)
        if self.rows:
            self._write()

    def progress(self, things: Iterable[Any], unit: str = "row", total: int | None = None) -> Any:
        """Return the things one by one behind a progress bar on the standard error."""
        return tqdm(things, unit=unit, total=total, desc=self._figures["experiment"])

    def _write(self) -> None:
        measuring.write_record(
            self.path, self._command, self._device, **self._figures, rows=self.rows
        )

    def read(self) -> Record:
        """Return the record as it lies in the file."""
        return json.loads(self.path.read_text(encoding="utf-8"))


def parse_args(experiment: Experiment, argv: list[str]) -> argparse.Namespace:
    """Return the options; ``args.size`` is "quick", "normal" or "full"."""
    parser = OneLineParser(
        description=experiment.description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    parser.choice("--device", experiment.devices, experiment.devices[0], "to measure")
    size = parser.add_mutually_exclusive_group()
    for name, what in (("quick", "a few seconds"), ("full", "the published sizes")):
        size.add_argument(
            f"--{name}", action="store_const", const=name, dest="size", default="normal", help=what
        )
    add("--json", metavar="FILE", help="write the record there, not to build/experiments")
    add("--figure", metavar="FILE", help="draw the figure there (.svg, .png or .pdf)")
    add("--publish", action="store_true", help="write to docs/results and docs/images/experiments")
    add("--redraw", action="store_true", help="measure nothing: table and figure from the files")
    experiment.options(parser)
    return parser.parse_args(argv)


def stored(name: str, results: Path | None = None) -> list[Result]:
    """Return what ``docs/results/*/<name>.json`` hold, by device, the CPUs first.

    Raises:
        BadRecordError: If such a file is no record of that experiment.
    """
    paths = sorted((results or RESULTS).glob(f"*/{name}.json"))
    return [Result(read_record(path, name), path.parent.name) for path in paths]


def table_of(experiment: Experiment, result: Result) -> str:
    """Return the table of what was measured on one device.

    Raises:
        BadRecordError: If it is from a file, and the rows of that are not those of the experiment.
    """
    try:
        return experiment.table(result.record)
    except BadRecordError:  # of another file that the table reads
        raise
    except FOREIGN as error:
        if result.fresh:
            raise
        raise bad_record(_file_of(experiment, result), experiment.name, repr(error)) from None


def _file_of(experiment: Experiment, result: Result) -> Path:
    return RESULTS / result.folder / f"{experiment.name}.json"


def beside_files(fresh: Result | None, name: str) -> list[Result]:
    """Return the results of all devices; a fresh one takes the place of the file of its device."""
    found = stored(name)
    if fresh is not None and fresh.rows:
        found = [fresh, *(result for result in found if result.folder != fresh.folder)]
    return sorted(found, key=lambda result: (not result.folder.startswith("cpu"), result.folder))


def panels(
    figure: Any, results: Sequence[Result], rows: int = 1, **options: Any
) -> list[tuple[Any, Result]]:
    """Divide a figure into a column of panels for each device; title each with its device.

    Args:
        figure: Of matplotlib.
        results: A column each.
        rows: Panels of each device.
        options: Of ``figure.subplots``.

    Returns:
        (axes, result), where axes is one Axes, or an array of ``rows`` of them.
    """
    figure.set_size_inches(max(WIDTH * len(results), 6.4), figure.get_figheight() * rows)
    grid = figure.subplots(rows, len(results), squeeze=False, **options)
    for axes, result in zip(grid[0], results, strict=True):
        axes.set_title(result.label, fontsize=9)
    return [(grid[0, i] if rows == 1 else grid[:, i], result) for i, result in enumerate(results)]


def headline(axes: Any, text: str) -> None:
    """Add the quantity and the workload to the title of a panel, below the device if it names one."""
    device = axes.get_title()
    axes.set_title(f"{device}\n{text}" if device else text, fontsize=9)


def legend(figure: Any, axes: Iterable[Any], place: str = "lower", columns: int = 4) -> None:
    """Draw one legend for several panels, outside of all of them.

    Args:
        figure: Of matplotlib.
        axes: The panels; what has the same label in two of them is named once.
        place: "lower" or "upper": below or above the panels.
        columns: At most.
    """
    found: dict[str, Any] = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        figure.legend(
            list(found.values()), list(found), loc=f"outside {place} center",
            ncols=min(columns, len(found)), fontsize=8, frameon=False,
        )  # fmt: skip


def draw(experiment: Experiment, results: list[Result], path: Path) -> str | None:
    """Draw the figure; return why not, or None.

    Raises:
        BadRecordError: If the rows of a file are not those of the experiment.
    """
    if not results:
        return "no figure: nothing has been measured"
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return 'no figure: matplotlib is not installed; pip install -e ".[plot]"'
    # The same rows make the same file; text stays text.
    with rc_context({"svg.hashsalt": experiment.name, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(WIDTH, experiment.height), layout="constrained")
        try:
            experiment.draw(figure, results)
        except BadRecordError:
            raise
        except FOREIGN:
            for result in results:
                if not result.fresh and (why := _why_not_drawn(experiment, result, Figure())):
                    raise bad_record(_file_of(experiment, result), experiment.name, why) from None
            raise
        path.parent.mkdir(parents=True, exist_ok=True)
        date = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, metadata=date, dpi=150)
    return None


def _why_not_drawn(experiment: Experiment, result: Result, figure: Any) -> str:
    """Return what drawing one result alone raises, or an empty text."""
    try:
        experiment.draw(figure, [result])
    except FOREIGN as error:
        return repr(error)
    return ""


def show(experiment: Experiment, result: Result) -> None:
    """Print the table, and under it where it was measured."""
    record = result.record
    print(table_of(experiment, result))
    origin = f"{record['device']}, {record['cores']} cores, {record['threads']} threads, {record['date']}"
    print(f"\n{origin}; {', '.join(f'{k} {v}' for k, v in record['versions'].items())}")
    if record.get("interrupted"):
        print("interrupted: rows are missing.")
    for key in ("timing", "note"):
        if record.get(key):
            print(f"{record[key]}.")


def run(experiment: Experiment, argv: list[str] | None = None) -> int:
    """Run an experiment from its command line; return the exit code: 130 if it was interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(experiment, argv)
    if args.device == "cuda" and not args.redraw and (missing := why_no_cuda()) is not None:
        sys.exit(missing)
    folder = folder_of(args.device, RESULTS) if not args.redraw else ""
    results, images = (RESULTS, IMAGES) if args.publish else (BUILD, BUILD)
    name = f"{experiment.name}.json"
    # What is published is whole: rows on their way lie elsewhere.
    path = Path(args.json or BUILD / folder / name)
    picture = Path(args.figure or images / f"{experiment.name}.svg")
    fresh, code = None, 0
    if not args.redraw:
        script = f"project/experiments/{experiment.name}.py"
        command = measuring.command_line(script, argv, leave_out=PLACES)
        report = Report(experiment, args, command, path)
        try:
            experiment.measure(args, report)
        except KeyboardInterrupt:
            print(f"interrupted: {len(report.rows)} rows are done", file=sys.stderr)
            code = 130
            report.note(interrupted=True)
        if not report.rows:
            return code
        if args.publish and not args.json and code == 0:
            path = results / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(report.path, path)
        fresh = Result(report.read(), folder, fresh=True)
        print()
        show(experiment, fresh)
        print(f"\nrecord: {_shown(path)}")
    try:
        found = beside_files(fresh, experiment.name)
        if args.redraw:
            for result in found:
                show(experiment, result)
                print()
        why_not = draw(experiment, found, picture)
    except BadRecordError as error:
        sys.exit(str(error))
    print(f"figure: {_shown(picture)}" if why_not is None else why_not)
    return code


def _shown(path: Path) -> str:
    """Return a path for people: from the root of the repository where it lies in it."""
    path = path.resolve()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def load(name: str) -> ModuleType:
    """Import the script of an experiment under the name ``experiments.<name>``, without running it.

    Raises:
        ValueError: If there is no such script.
    """
    full = f"experiments.{name}"
    if full in sys.modules:
        return sys.modules[full]
    path = Path(__file__).parent / f"{name}.py"
    if not path.exists():
        raise ValueError(
            f"no experiment {name!r} in {_shown(path.parent)}; there are {list(names())}"
        )
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(full, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module
    spec.loader.exec_module(module)
    return module


def names() -> tuple[str, ...]:
    """Return the names of all experiments: the scripts of this folder that make one."""
    made = sorted(
        path.stem
        for path in Path(__file__).parent.glob("*.py")
        if "\nEXPERIMENT = " in path.read_text(encoding="utf-8")
    )
    return tuple(made)
