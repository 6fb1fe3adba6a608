"""The suite passes with the oldest and with the newest of everything that setup.py allows.

    make ends                                        both ends, an hour on two cores
    make ends ARGS="--ends oldest"                   one of them
    make ends OLDEST=/opt/python3.10/bin/python3     a Python that is not on the path

Each end has two environments of its own under build/ends, because the tests run without numba-cuda
too: one runs them, on the emulated GPU as well, the other compiles every CUDA kernel without a GPU.  The
oldest end has the lower bound of each range, core and extras, and the first CUDA 13; the newest what pip
finds today.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib.metadata import requires
from pathlib import Path
from typing import Any

from bench.kit import ROOT, Case, Figure, Measurement, Record, Run
from bench.records import RESULTS
from packaging.requirements import Requirement

from reliability.junit import tests_of

PLACE = ROOT / "build" / "ends"
#: What each part installs, and how pytest is called.
PARTS: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "tests": ("app,plot,test", [], {}),
    "emulated": ("app,plot,test", ["-m", "emulated"], {"MINITORCH_EMULATE": "1"}),
    "compile-only": ("cuda,test", [], {}),
}
#: The compiler of CUDA at the oldest end, else the newest of numba-cuda's range: this one lets
#: products wait for one another where newer ones do not.
FIRST_CUDA = ("cuda-toolkit==13.0.*", "cuda-bindings==13.0.*", "nvidia-nvjitlink==13.0.*")
EXTRAS = sorted({extra for extras, *_ in PARTS.values() for extra in extras.split(",")})


def requirements() -> list[Requirement]:
    """Return what the core and the extras of the parts need, each package once."""
    found: dict[str, Requirement] = {}
    for line in requires("minitorch-flash") or []:
        need = Requirement(line)
        wanted = not need.marker or any(need.marker.evaluate({"extra": e}) for e in EXTRAS)
        if wanted:
            found[need.name] = need
    return list(found.values())


def oldest(need: Requirement) -> str:
    """Return the constraint that holds a package at the lower bound of its range."""
    (low,) = (each.version for each in need.specifier if each.operator == ">=")
    return f"{need.name}=={low}"


def environment(end: str, extras: str, python: str) -> Path:
    """Make an environment of one end anew; return its Python."""
    folder = PLACE / f"{end}-{extras.split(',')[0]}"
    run([python, "-m", "venv", "--clear", str(folder)])
    inside = folder / "bin" / "python"
    constraints = PLACE / f"{end}.txt"
    lines = [*map(oldest, requirements()), *FIRST_CUDA] if end == "oldest" else []
    constraints.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    pip = [str(inside), "-m", "pip", "install", "--quiet", "--upgrade"]
    run([*pip, "--constraint", str(constraints), "--editable", f".[{extras}]"])
    return inside


def run(command: list[str], **variables: str) -> int:
    """Run a command in the checkout and return its exit code; a command that is no test must succeed."""
    print(f"$ {' '.join(command)}", flush=True)
    hidden = ("PIP_CONSTRAINT", "PYTHONPATH", "NUMBA_ENABLE_CUDASIM", "MINITORCH_EMULATE")
    known = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(command, cwd=ROOT, env={**known, **variables}, check=False)
    if done.returncode and "pytest" not in command:
        raise SystemExit(f"failed with code {done.returncode}: {' '.join(command)}")
    return done.returncode


def tested(python: Path, part: str, workers: int, only: tuple[str, ...]) -> dict[str, Any]:
    """Run one part with an environment and return what came of it."""
    _, options, variables = PARTS[part]
    compiled = ["tests/structure/compile_only"] if part == "compile-only" else []
    report, start = PLACE / f"{part}.xml", time.perf_counter()
    pytest = [str(python), "-m", "pytest", "-n", str(workers), "--dist", "loadfile"]
    code = run([*pytest, f"--junitxml={report}", *options, *(only or compiled)], **variables)
    tests = tests_of(report)
    count = Counter(one.how for one in tests)
    return {
        **{how: count[how] for how in ("passed", "skipped", "failed")},
        "failures": sorted(one.test for one in tests if one.how == "failed"),
        "exit_code": code, "seconds": round(time.perf_counter() - start),
    }  # fmt: skip


def versions(python: Path) -> dict[str, str]:
    """Return the version of each package that an end chooses and an environment has, and of its Python."""
    pip = [str(python), "-m", "pip", "list", "--format", "json"]
    code = [str(python), "-c", "import platform; print(platform.python_version())"]
    listed, version = (subprocess.check_output(command, text=True) for command in (pip, code))
    names = {*(Requirement(each).name for each in FIRST_CUDA), *(x.name for x in requirements())}
    found = {one["name"]: one["version"] for one in json.loads(listed) if one["name"] in names}
    return {"python": version.strip(), **found}


def cases(run: Run) -> Iterator[Case]:
    PLACE.mkdir(parents=True, exist_ok=True)
    file = RESULTS / "reliability" / "ends.json"
    known = json.loads(file.read_text(encoding="utf-8"))["ends"] if file.exists() else {}
    run.note(workers=run.workers, ends=known)
    for end in run.ends:
        today = datetime.date.today().isoformat()
        known[end] = {**known.get(end, {}), "date": today, "versions": {}}
        pythons: dict[str, Path] = {}
        for part in run.parts:
            yield {}, partial(measured, run, end, part, pythons, known[end])


def measured(run: Run, end: str, part: str, pythons: dict[str, Path], known: Record) -> None:
    """Run a part at an end in its environment, which is made anew for the first part that needs it."""
    extras = PARTS[part][0]
    if extras not in pythons:
        pythons[extras] = environment(end, extras, getattr(run, end))
        known["versions"].update(versions(pythons[extras]))
    known[part] = tested(pythons[extras], part, run.workers, run.files)
    print(f"{end}, {part}: {known[part]}", flush=True)


def figures(record: Record) -> list[Figure]:
    return [
        Figure(f"{end}, {part}: failed", found[part]["failed"], 0, is_most=True)
        for end, found in record["ends"].items()
        for part in PARTS
        if part in found
    ]


MEASUREMENT = Measurement(
    "ends", "Does the suite pass with the oldest and with the newest versions that setup.py allows?", cases,
    {"cpu": {"normal": {
        "oldest": "python3.10", "newest": "python3.13", "ends": ("oldest", "newest"),
        "parts": tuple(PARTS), "workers": 2, "files": ()}}},
    figures=figures, minutes={"cpu": 60}, paths=("setup.py", "kernels", "minitorch"),
    choices={"ends": ("oldest", "newest"), "parts": tuple(PARTS)}, folder="reliability",
)  # fmt: skip
