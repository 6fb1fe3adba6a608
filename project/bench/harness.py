"""One harness for all measurements: benchmarks, experiments of the papers, and long checks.

A measurement is declared once, in a module of ``project/measurements`` or ``project/reliability``::

    def cases(run):
        call = ArrayCall(run.device, run.heads, run.length)          # set up here
        for part in run.parts:
            yield {"part": part}, partial(time_of, run, call, part)  # key of a row, its measuring

    MEASUREMENT = Measurement(
        "sparsity", "Is time proportional to the visited tiles?", cases,
        {"cpu": {"normal": {"heads": 1, "length": 8192, "parts": (0.5, 1.0), "seconds": 4.0}}},
        table=table, draw=draw)

- ``cases`` yields the key of a row and the rest of it, or a function that measures the rest, or that of
  several rows.  The harness calls the function unless the record has the row already (``--resume``).  A
  case that raises is recorded with the reason, ``why_not``, and the next one begins; the exit code is then
  1.  Rows are written as they come, so that Ctrl-C keeps them.  A measurement without rows returns the
  entries of its record.
- The *settings* of each device and size are attributes of ``run``, and options of the command line, whose
  types are those of the values.  "normal" is the size of the published records; "quick" takes seconds.
- ``run.timed(steps)`` times contestants in interleaved rounds on the clock of the device, ``run.note`` sets
  entries of the record beside its rows, and ``run.torch`` is PyTorch or None.
- ``table`` returns Markdown of a record, and ``draw`` the panels of a figure, which has a column for each
  device that has a record; the site uses the same two.  ``figures`` returns the figures that have bounds,
  and the exit code is 1 if one is missed.
- A record holds the command, the date, the device, versions, the commit and the settings.  It goes to
  ``build/measurements``; with ``--publish`` to ``docs/results`` once it is complete.  ``paths`` names the
  code that is measured: a record is stale if a commit has changed it since.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from common.command_line import COUNT, FROM_ZERO, POSITIVE, OneLineParser
from tqdm import tqdm

from bench import plots, records
from bench.measuring import (
    SHORTEST,
    Unavailable,
    interleaved,
    load_torch,
    out_of_memory,
    prepare,
    timing_note,
    why_failed,
)
from bench.processes import mpiexec, rank
from bench.records import ROOT, Record
from bench.table_cells import listed, markdown
from kernels.runtime.targets import why_no_cuda

PROJECT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "measurements"
FOLDERS = ("measurements", "reliability")
SIZES = ("quick", "normal")
Case = tuple[Record, Callable[[], Record | list[Record] | None] | Record]


@dataclass(frozen=True)
class Figure:
    """A figure that has a bound."""

    name: str  # in the table
    value: float | None  # that was reached; None if it is not known
    must: float  # bound
    aim: float | None = None  # better still, if anything is
    is_most: bool = False  # whether less is better
    is_judged: bool = True  # whether the bound holds for what was measured

    @property
    def holds(self) -> bool | None:
        """Whether the bound is reached; None if that is not known, or not judged."""
        if self.value is None or not self.is_judged:
            return None
        return self.value <= self.must if self.is_most else self.value >= self.must

    def cells(self) -> list[Any]:
        """Return the line of a table."""
        must = f"{'<=' if self.is_most else '>='} {self.must:g}"
        verdict = {True: "yes", False: "NO", None: ""}[self.holds]
        return [self.name, self.value, must, "" if self.aim is None else f"{self.aim:g}", verdict]


@dataclass(frozen=True)
class Measurement:
    """What is measured; see the docstring of the module."""

    name: str  # of the record, too
    answers: str  # a question that the record answers
    #: Given a :class:`Run`, yields keys of rows and functions that measure them; or returns the record.
    cases: Callable[[Any], Iterator[Case] | Record]
    #: By device, then by size: "normal", and "quick" where it differs from it.
    settings: Mapping[str, Mapping[str, Mapping[str, Any]]]
    #: Returns Markdown of a record; rows are listed when None.
    table: Callable[[Record], str] | None = None
    #: Returns the figures of a record that have bounds.
    figures: Callable[[Record], list[Figure]] = lambda record: []
    draw: Callable[[Record], list[plots.Panel]] | None = None  # returns the panels of a record
    height: float = 4.2  # of that figure in inches, for each row of panels
    caption: str = ""  # of that figure, Markdown
    minutes: Mapping[str, float] = field(default_factory=dict)  # that a run takes, about, by device
    paths: tuple[str, ...] = ("kernels", "minitorch")  # the code that is measured
    choices: Mapping[str, Any] = field(default_factory=dict)  # by option: values it may have
    #: Names of records beside its own, and the settings with which each is made.
    records: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    folder: str | None = None  # of its published records, where that is not the device's
    #: It runs on as many processes of ``mpiexec`` as the setting ``ranks`` says.
    with_ranks: bool = False

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that it can measure."""
        return tuple(self.settings)

    def shown(self, record: Record) -> str:
        """Return the table of a record."""
        return (self.table or listed)(record)


class Run:
    """A measurement that runs: its settings are attributes.

    ``rows`` are those measured so far.
    """

    def __init__(
        self, measurement: Measurement, device: str, size: str, settings: Record,
        command: str = "", path: Path | None = None,
    ):  # fmt: skip
        self.device, self.size, self.path, self.rows = device, size, path, list[Record]()
        self.seconds, self.resumed = 1.0, False
        vars(self).update(settings)
        self.is_quick = size == "quick"
        self._command, self._name = command, measurement.name
        self._entries: Record = {
            "experiment": measurement.name, "kind": device, "settings": {"size": size, **settings}
        }  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self._name} has no setting {name!r} for this device")

    @cached_property
    def torch(self) -> Any:
        """PyTorch, with as many threads as ours, or None where it is not installed."""
        torch = load_torch()
        if torch is not None:
            prepare(torch, self.device)
        return torch

    @property
    def pytorch(self) -> Any:
        """PyTorch, without which a case is unavailable."""
        if self.torch is None:
            raise Unavailable("PyTorch is not installed")
        return self.torch

    def timed(
        self, steps: Mapping[Any, Callable[[], Any]], seconds: float | None = None, **more: Any
    ) -> dict[Any, list[float]]:
        """Return the seconds of each step in every round; see :func:`bench.measuring.interleaved`."""
        self._entries.setdefault("timing", timing_note(self.device))
        if self.is_quick and "most" not in more:
            more |= {"most": 2, "least": 1, "shortest": min(more.get("shortest", 1.0), SHORTEST)}
        return interleaved(steps, self.device, self.seconds if seconds is None else seconds, **more)

    def note(self, **entries: Any) -> None:
        """Set entries of the record beside its rows."""
        self._entries.update(entries)

    def chosen(self, *names: str) -> Record:
        """Return some of the settings."""
        return {name: getattr(self, name) for name in names}

    @property
    def record(self) -> Record:
        """The record without its origin."""
        return {**self._entries, "rows": self.rows}

    def write(self) -> None:
        """Write the record as far as it has come."""
        if self.path is not None:
            name = records.name_of(self.device)
            records.write_record(self.path, self._command, name, **self.record)

    def measure(self, cases: Iterator[Case] | Record) -> int:
        """Measure all cases; return how many failed."""
        failed = 0
        if isinstance(cases, dict):
            self.note(**cases)
            return 0
        for key, work in tqdm(cases, desc=self._name, unit="case", disable=None):
            known = [row for row in self.rows if key and key.items() <= row.items()]
            if known and all("why_not" not in row and row.get("done", True) for row in known):
                continue
            self.rows[:] = [row for row in self.rows if row not in known]
            try:
                found = work() if callable(work) else work
            except Unavailable as error:
                found = {"why_not": str(error)}
            except Exception as error:  # the next case may do
                if not out_of_memory(error):
                    traceback.print_exc()
                found, failed = {"why_not": why_failed(error)}, failed + 1
            new = [] if found is None else [found] if isinstance(found, dict) else found
            self.rows += [key | row for row in new]
            self.write()
            if not all(row.get("done", True) for row in new):
                raise KeyboardInterrupt  # a training has kept it, to write what it has
        return failed


# -- the command line ------------------------------------------------------------------------------------


def settings_of(m: Measurement, device: str, size: str, record: str | None = None) -> Record:
    """Return the settings of a device and a size, for a record of another name if one is given."""
    sizes = m.settings[device]
    own = {} if record in (None, m.name) else m.records[record]
    return {**sizes["normal"], **own, **(sizes.get(size, {}) if size != "normal" else {})}


def add_settings(parser: OneLineParser, m: Measurement, device: str) -> None:
    """Add an option for each setting of a device; its type is that of the value."""
    for name, value in settings_of(m, device, "normal").items():
        option, first = f"--{name.replace('_', '-')}", value
        more: Record = {"default": argparse.SUPPRESS, "help": f"(default: {value})"}
        if isinstance(value, bool):
            parser.add_argument(option, action="store_true", **more)
            continue
        if isinstance(value, tuple):
            first, more["nargs"] = (value or (None,))[0], "+"
        kinds = {int: COUNT if first else FROM_ZERO, float: POSITIVE, str: str}
        more["choices"] = m.choices.get(name)
        parser.add_argument(option, type=kinds.get(type(first), word), **more)


def word(text: str) -> int | float | str:
    """Read a value of a setting that has none by default."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def parse_args(m: Measurement, argv: list[str]) -> tuple[argparse.Namespace, Record]:
    """Return the common options, and the settings of the run."""
    parser = OneLineParser(
        prog=f"measure.py {m.name}", description=m.answers, conflict_handler="resolve"
    )
    add = parser.add_argument
    fallback = "cpu" if why_no_cuda() is not None and "cpu" in m.devices else m.devices[-1]
    add("--device", choices=m.devices, default=fallback, help="(default: %(default)s)")
    add("--quick", dest="size", action="store_const", const="quick", default="normal")
    add("--json", metavar="FILE", help="write the record there, not to build/measurements")
    add("--figure", metavar="FILE", help="draw the figure there (.svg, .png or .pdf)")
    add("--publish", action="store_true", help="write to docs/results and docs/images")
    add("--resume", action="store_true", help="keep the rows of an interrupted run")
    add("--redraw", action="store_true", help="measure nothing: table and figure of the records")
    add("--record", choices=(m.name, *m.records), default=m.name, help=argparse.SUPPRESS)
    known, _ = parser.parse_known_args([word for word in argv if word not in ("-h", "--help")])
    add_settings(parser, m, known.device)
    args = parser.parse_args(argv)
    if args.publish and args.size == "quick":
        parser.error("--publish takes the published size; leave out --quick")
    settings = settings_of(m, args.device, args.size, args.record)
    given = {name: value for name, value in vars(args).items() if name in settings}
    return args, settings | {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}


def run(m: Measurement, argv: list[str]) -> int:
    """Run a measurement from its command line; return the exit code: 130 if it was interrupted."""
    own_rank = rank()
    if (
        "cuda" in m.devices and m.with_ranks and own_rank is not None
    ):  # each process sees its GPU only, before CUDA starts
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[own_rank]
    args, settings = parse_args(m, argv)
    if args.redraw:
        return show_stored(m, args)
    if m.with_ranks and own_rank is None:
        measure = [sys.executable, str(PROJECT / "measure.py"), m.name, *argv]
        # On the CPU each rank has a core.
        threads = ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS") if args.device == "cpu" else ()
        command = [mpiexec(), "-n", str(settings["ranks"] or os.cpu_count()), *measure]
        return subprocess.call(command, env=os.environ | dict.fromkeys(threads, "1"))
    if not m.with_ranks and args.device == "cuda" and (missing := why_no_cuda()) is not None:
        sys.exit(missing)
    folder = m.folder or records.folder_of(args.device)
    path = Path(args.json or BUILD / folder / f"{args.record}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    words = [word for word in argv if word not in ("--record", args.record)]
    places = ("--json", "--figure")
    line = records.command_line("project/measure.py", [args.record, *words], places)
    own = Run(m, args.device, args.size, settings, line, None if own_rank else path)
    if args.resume:
        own.rows, own.resumed = stored_rows(path), True
    code = 0
    try:
        code = int(own.measure(m.cases(own)) > 0)
    except KeyboardInterrupt:
        print(f"interrupted: {len(own.rows)} rows are done; --resume goes on", file=sys.stderr)
        own.note(interrupted=True)
        code = 130
    except Unavailable as error:  # of the whole measurement
        sys.exit(f"{m.name}: {error}")
    own.write()
    if own_rank:  # the first one writes the record
        return code
    record = records.read_record(path)
    print(f"\n{origin_of(record)}\n\n{listed(record) if code else m.shown(record)}")
    if code:  # tables, bounds and figures are those of complete records
        print(f"\nrecord: {path}")
        return code
    # A bound is one for the published size.
    found = [replace(f, is_judged=f.is_judged and not own.is_quick) for f in m.figures(record)]
    if found:
        print("\n" + markdown(["figure", "reached", "must", "aim", ""], [f.cells() for f in found]))
    if args.publish:
        path = publish(path, records.RESULTS / folder / f"{args.record}.json")
    print(f"\nrecord: {path}")
    if m.draw is not None and record["rows"]:
        fresh = plots.Result(record, folder, fresh=True)
        draw(m, plots.beside(fresh, m.name), args)
    return int(any(one.holds is False for one in found))


def origin_of(record: Record) -> str:
    """Return where a record was made, and how its times were read."""
    versions = ", ".join(f"{key} {value}" for key, value in record["versions"].items())
    line = f"{record['device']}, {record['cores']} cores, {record['date']}; {versions}"
    return "\n".join([line, *(record[key] for key in ("timing", "note") if record.get(key))])


def publish(path: Path, target: Path) -> Path:
    """Put a record among the published ones, unless that has more rows; return where it is."""
    before, after = (
        len(json.loads(file.read_text()).get("rows", ())) if file.exists() else 0
        for file in (target, path)
    )
    if after < before:
        print(f"{after} of {before} rows: the published record stays", file=sys.stderr)
        return path
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
    return target


def draw(m: Measurement, results: list[plots.Result], args: argparse.Namespace) -> None:
    """Draw the figure of a measurement, and print where it is."""
    images = plots.IMAGES if args.publish else BUILD
    picture = Path(args.figure or images / f"{m.name}.svg")
    why_not = plots.draw(m, results, picture)
    print(f"figure: {picture}" if why_not is None else why_not)


def stored_rows(path: Path) -> list[Record]:
    """Return the rows of a record that a run adds to; exit with one line if it is no record."""
    try:
        return records.read_record(path)["rows"] if path.exists() else []
    except ValueError as error:
        sys.exit(str(error))


def show_stored(m: Measurement, args: argparse.Namespace) -> int:
    """Print the tables of the published records, and draw their figure."""
    try:
        results = plots.stored(m.name)
    except ValueError as error:
        sys.exit(str(error))
    for result in results:
        print(f"{origin_of(result.record)}\n\n{m.shown(result.record)}\n")
    if m.draw is not None:
        draw(m, results, args)
    return 0


def load_all() -> dict[str, Measurement]:
    """Return all measurements by the names of their records."""
    found: dict[str, Measurement] = {}
    for folder in FOLDERS:
        for path in sorted((PROJECT / folder).glob("*.py")):
            if "\nMEASUREMENT" in path.read_text(encoding="utf-8"):
                module = importlib.import_module(f"{folder}.{path.stem}")
                for one in getattr(module, "MEASUREMENTS", None) or (module.MEASUREMENT,):
                    found |= dict.fromkeys((one.name, *one.records), one)
    return found


def load(name: str) -> Measurement:
    """Return a measurement by its name, or by that of one of its records."""
    found = load_all()
    if name not in found:
        raise ValueError(f"there is no measurement {name!r}; there are {', '.join(found)}")
    return found[name]
