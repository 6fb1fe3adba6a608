"""``python -m minitorch doctor``: check everything that minitorch depends on, and report how to fix it.

Each library is tried in its own child process (see :mod:`minitorch.doctor.probes`), because a broken one
may raise any exception, crash or hang.  A missing GPU is reported, but is not a problem.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from minitorch.doctor.probes import ask, found_file
from minitorch.doctor.rules import Finding, diagnose, is_within, owner

ABOUT = "say what this environment has, what is wrong with it, and how to mend it"
ROOT = Path(__file__).resolve().parents[2]
#: Packages that change the behaviour of the others.
BESIDE = ("numba-cuda", "numba-cuda-mlir", "llvmlite", "kernels", "tbb", "icc-rt")
VARIABLES = (
    "NUMBA_ENABLE_CUDASIM", "NUMBA_DISABLE_JIT", "NUMBA_THREADING_LAYER", "NUMBA_NUM_THREADS",
    "NUMBA_CACHE_DIR", "NUMBA_CUDA_DRIVER", "MINITORCH_EMULATE", "MINITORCH_RUNG", "MINITORCH_PUBLISHED",
    "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "PYTHONPATH",
)  # fmt: skip
#: Import names of packages that can only be imported where NumPy can.
_ON_NUMPY = {"numba", "scipy", "ml_dtypes"}


# -- facts --------------------------------------------------------------------------------------


def ranges() -> dict[str, str]:
    """Return the range of versions of Python and of each dependency: "numpy" → ">=2.1.2,<2.6"."""
    found: dict[str, str] = {}
    if (ROOT / "requirements.txt").is_file() and (ROOT / "setup.py").is_file():
        lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
        setup = (ROOT / "setup.py").read_text(encoding="utf-8")
        lines += re.findall(r'"(numba-cuda\[[^"]*)"', setup)
        found["python"] = "".join(re.findall(r'python_requires="([^"]*)"', setup))
    else:
        try:
            installed = metadata.metadata("minitorch-flash")
        except metadata.PackageNotFoundError:
            return found
        lines = [
            line
            for line in installed.get_all("Requires-Dist") or []
            if "extra ==" not in line or line.startswith("numba-cuda[")
        ]
        found["python"] = installed["Requires-Python"] or ""
    for line in lines:
        match = re.match(r"([\w-]+)(?:\[[\w,]*\])?([^;]*)", line)
        if match and not line.startswith("#"):
            found[match.group(1)] = match.group(2).strip()
        if pythons := re.search(r"python_version (<) ['\"]([\d.]+)", line):
            found["numba-cuda's python"] = "".join(pythons.groups())
    return found


def conflicts(names: list[str]) -> list[dict[str, str]]:
    """Return what installed packages need of one another, by their own metadata, and do not get."""
    found = []
    have = {name: version for name in names if (version := installed_version(name))}
    for name, version in have.items():
        for line in metadata.requires(name) or ():
            need = re.match(r"([\w.-]+) *\(?([<>=!~\d., ]*)", line)
            if need is None or ";" in line or need[1] not in have:
                continue
            bounds = ",".join(re.findall(r"(?:>=|<)(?!=) *[\d.]+", need[2])).replace(" ", "")
            if not is_within(have[need[1]], bounds):
                found.append({
                    "name": name, "version": version, "other": need[1], "bounds": bounds,
                    "installed": have[need[1]],
                })  # fmt: skip
    return found


def installed_version(name: str) -> str | None:
    """Return the version of an installed package without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _versions(names: Iterable[str]) -> dict[str, str]:
    found = {name: installed_version(name) for name in names}
    return {name: version for name, version in found.items() if version}


def _shadowed(name: str, file: str) -> bool:
    """Tell whether another file would be imported than the installed package's."""
    try:
        folder = Path(str(metadata.distribution(name).locate_file("")))
    except metadata.PackageNotFoundError:
        return False
    spec = PathFinder.find_spec(name, [str(folder)])
    origin = spec and spec.origin
    return bool(origin) and Path(str(origin)).resolve() != Path(file).resolve()


def kernels_package() -> dict[str, Any]:
    """Return the file of the package ``kernels``, and whether another package of that name is installed."""
    file, expected = found_file("kernels"), ROOT / "kernels" / "__init__.py"
    is_ours = False
    if file is not None and Path(file).is_file() and (Path(file).parent / "launch.py").is_file():
        is_ours = "def flash_attention_forward" in Path(file).read_text(encoding="utf-8")
    return {
        "file": str(Path(file).resolve()) if file else None,
        "is_ours": is_ours,
        "expected": str(expected),
        "root": str(ROOT),
        "other_installed": installed_version("kernels"),
    }


def cache_folder() -> dict[str, Any]:
    """Return the folder of numba's cache, and why it cannot be written, in numba's order of search."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    wide = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    places = [Path(chosen)] if chosen else [ROOT / "kernels" / "__pycache__", Path(wide) / "numba"]
    folder, why_not = places[0], None
    for folder in places:
        why_not = _why_not_writable(folder)
        if why_not is None:
            break
    return {"folder": str(folder), "why_not": why_not}


def _why_not_writable(folder: Path) -> str | None:
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent  # a missing folder would be created
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return str(error)


def examine(seconds: float = 120.0) -> dict[str, Any]:
    """Return all facts about this environment.

    Args:
        seconds: Time limit of each probe, in seconds.

    Returns:
        Facts by name, in JSON types.  Probes that were skipped because a dependency failed are missing.
    """
    wanted = ranges()
    facts: dict[str, Any] = {
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "platform": f"{platform.system()} {platform.machine()}",
        },
        "minitorch": str(ROOT / "minitorch"),
        "ranges": wanted,
        "installed": _versions(BESIDE),
        "conflicts": conflicts([name for name in wanted if " " not in name] + [*BESIDE]),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "kernels": kernels_package(),
        "cache": cache_folder(),
    }
    names = [name for name in wanted if name != "python" and not name.startswith("numba-cuda")]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as workers:

        def asked(probes: dict[str, tuple[str, ...]]) -> dict[str, Any]:
            waiting = {n: workers.submit(ask, *p, seconds=seconds) for n, p in probes.items()}
            return {name: each.result() for name, each in waiting.items()}

        answers = asked({"numpy": ("package", "numpy")})
        broken = "error" in answers["numpy"]
        tried = [n for n in names if n != "numpy" and not (broken and n in _ON_NUMPY)]
        answers |= asked({name: ("package", name) for name in tried})
        facts["packages"] = {name: _package(name, answers.get(name)) for name in names}
        numba = facts["packages"].get("numba", {"error": "not installed"})
        if not numba.get("shadowed") and "error" not in numba and "numba" in answers:
            facts |= asked({name: (name,) for name in ("cuda", "launch", "parallel")})
            if not any(finding.is_problem for finding in diagnose(facts)):
                facts |= asked({"library": ("library",)})
    return facts


def _package(name: str, answer: dict[str, Any] | None) -> dict[str, Any]:
    file = (answer or {}).get("file") or found_file(name)
    return {
        **(answer or {}),
        "installed": installed_version(name),
        "file": file,
        "shadowed": file is not None and _shadowed(name, file),
    }


# -- the report ---------------------------------------------------------------------------------


def table(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the facts as a table, one name and sentence per line."""
    python, cuda, launched = facts["python"], facts.get("cuda", {}), facts.get("launch", {})
    rows = [
        ("Python", f"{python['version']}, {python['platform']}, {python['executable']}"),
        ("minitorch", facts["minitorch"]),
        ("kernels", facts["kernels"]["file"] or "missing"),
    ]
    for name, found in facts["packages"].items():
        state = found["installed"] or found.get("version") or "missing"
        rows.append((name, f"{state:<12} needs {facts['ranges'].get(name) or 'any version'}"))
    rows += facts["installed"].items()
    if "file" in cuda:
        switch = "on" if cuda["emulated"] else "where no CUDA driver is; MINITORCH_EMULATE=1: on"
        rows += [("numba.cuda", owner(cuda["file"])), ("emulated GPU", switch)]
    gpu = launched.get("gpu") or "none, which is no problem: the CPU and the emulated GPU need none"
    rows.append(("GPU", launched.get("error", gpu)))
    if "layer" in (used := facts.get("parallel", {})):
        rows.append(("threading layer", f"{used['layer']}, {used['threads']} threads"))
    cache = facts["cache"]
    state = "not writable" if cache["why_not"] else "writable"
    rows.append(("cache", f"{cache['folder']}, {state}"))
    if "seconds" in facts.get("library", {}):
        rows.append(("import minitorch", f"works, {facts['library']['seconds']:.1f} s"))
    return [*rows, *facts["environment"].items()]


def report(facts: dict[str, Any], findings: list[Finding]) -> str:
    """Return the report as text."""
    rows = table(facts)
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    for finding in findings:
        lines += ["", f"{'PROBLEM' if finding.is_problem else 'note'}: {finding.what}"]
        lines += [f"  what to do: {finding.remedy}"] * bool(finding.remedy)
    count = sum(finding.is_problem for finding in findings)
    lines += ["", f"{count} problem{'s' * (count > 1)}" if count else "no problems"]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Examine this environment and print the answer; return 0 if there is no problem, otherwise 1."""
    parser = argparse.ArgumentParser(prog="python -m minitorch", description=ABOUT)
    doctor = parser.add_subparsers(required=True).add_parser("doctor", help=ABOUT)
    doctor.add_argument("--json", action="store_true", help="write facts and findings as JSON")
    doctor.add_argument(
        "--seconds", type=float, default=120.0, help="how long one library may take to answer"
    )
    args = parser.parse_args(argv)
    facts = examine(args.seconds)
    findings = diagnose(facts)
    if args.json:
        found = [finding._asdict() for finding in findings]
        print(json.dumps({"findings": found, "facts": facts}, indent=1))
    else:
        print(report(facts, findings))
    return int(any(finding.is_problem for finding in findings))
