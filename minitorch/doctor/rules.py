"""The doctor's rules: from the facts about an environment to its problems and their remedies.

Rules depend on the facts alone, so that tests can describe any machine.  The files of this folder also run
on versions of Python that are too old for the rest, in order to report that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Finding(NamedTuple):
    """A statement about the environment, and its remedy.

    Attributes:
        what: The statement.
        remedy: How to fix it; empty if nothing needs to be done.
        is_problem: Whether it must be fixed.
    """

    what: str
    remedy: str = ""
    is_problem: bool = True


#: The package that provides ``numba.cuda``, by its folder.
OWNERS = {
    "numba": "numba's own deprecated target",
    "numba_cuda": "numba-cuda",
    "numba_cuda_mlir": "numba-cuda-mlir",
}


def pip(*requirements: str, option: str = "") -> str:
    """Return the command that installs a package into the environment of this Python."""
    words = ["python -m pip install", option, *(f'"{each}"' for each in requirements)]
    return " ".join(filter(None, words))


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version: (2, 4, 6) for "2.4.6"."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


def is_within(version: str, bounds: str) -> bool:
    """Tell whether a version is in a range.

    Args:
        version: Such as "2.4.6"; anything after the numbers is ignored.
        bounds: Such as ">=2.1.2,<2.6".

    Raises:
        ValueError: If a bound is not ``>=`` or ``<`` and a version.
    """
    mine = numbers(version)
    for bound in filter(None, (part.strip() for part in bounds.split(","))):
        match = re.fullmatch(r"(>=|<)\s*([\d.]+)", bound)
        if match is None:
            raise ValueError(f"a range of versions must consist of >= and < bounds, got {bounds!r}")
        limit = numbers(match.group(2))
        size = max(len(mine), len(limit))
        first, second = (part + (0,) * (size - len(part)) for part in (mine, limit))
        if (first < second) != (match.group(1) == "<"):
            return False
    return True


def owner(file: str) -> str:
    """Return the package that provides ``numba.cuda``, from the imported file."""
    parts = re.split(r"[\\/]", file)[-5:]
    for folder in reversed(OWNERS):
        if folder in parts:
            return OWNERS[folder]
    return f"an unknown package ({file})"


def needed(facts: dict[str, Any], name: str, extra: str = "") -> str:
    """Return a package with the range of its versions that the project supports."""
    return f"{name}{extra}{facts['ranges'].get(name, '')}"


# -- rules ------------------------------------------------------------------------------------------


def python(facts: dict[str, Any]) -> Iterator[Finding]:
    """Report a version of Python outside the supported range."""
    version, bounds = facts["python"]["version"], facts["ranges"].get("python", "")
    if not is_within(version, bounds):
        yield Finding(
            f"this is Python {version}; needed is {bounds}",
            "make the environment anew with a Python of that range: make test PYTHON=python3.12, or "
            "python3.12 -m venv .venv",
        )


def packages(facts: dict[str, Any]) -> Iterator[Finding]:
    """Report dependencies that are missing, shadowed, broken, or of an unsupported version."""
    missing = [name for name, found in facts["packages"].items() if found.get("file") is None]
    if missing:
        wanted = (needed(facts, name) for name in missing)
        yield Finding(f"not installed: {', '.join(missing)}", pip(*wanted))
    for name, found in facts["packages"].items():
        bounds, installed = facts["ranges"].get(name, ""), found.get("installed")
        if (file := found.get("file")) is None:
            continue
        if found.get("shadowed"):
            fails = f", and fails: {found['error']}" if "error" in found else ""
            yield Finding(
                f"{file} is imported in place of the package {name}{fails}",
                f"rename or move {file}, or take its folder off PYTHONPATH",
            )
        elif "error" in found:
            yield Finding(
                f"{name} {installed or ''} cannot be imported: {found['error']}",
                pip(name + bounds, option="--upgrade --force-reinstall"),
            )
        if installed and not is_within(installed, bounds):
            yield Finding(f"{name} is {installed}; needed is {bounds}", pip(name + bounds))


def combinations(facts: dict[str, Any]) -> Iterator[Finding]:
    """Report installed versions of two dependencies that do not work together."""
    for one in facts.get("conflicts", ()):
        yield Finding(
            f"{one['name']} {one['version']} needs {one['other']}{one['bounds']}, and {one['other']} is "
            f"{one['installed']}",
            pip(needed(facts, one["name"]), needed(facts, one["other"]), option="--upgrade"),
        )


def kernels(facts: dict[str, Any]) -> Iterator[Finding]:
    """Report another package named ``kernels`` that shadows, or is installed next to, this project's."""
    found = facts["kernels"]
    file, other = found["file"], found.get("other_installed")
    again = "install the project again: python -m pip install --force-reinstall --no-deps -e ."
    if file is None:
        yield Finding("the package kernels is missing", again)
    elif other:
        place = "is installed too; one name serves one of them"
        if not found["is_ours"]:
            place = "is imported in place of ours"
        yield Finding(
            f"Hugging Face's package kernels {other} {place}",
            f"python -m pip uninstall kernels, then {again}",
        )
    elif file != found["expected"]:
        yield Finding(
            f"{file} is imported in place of the project's package kernels",
            f"rename or move {file}, take its folder off PYTHONPATH, or start Python in {found['root']}",
        )


def cuda(facts: dict[str, Any]) -> Iterator[Finding]:
    """Report a ``numba.cuda`` that cannot be imported or cannot compile, and kernels that fail."""
    found, launched = facts.get("cuda", {}), facts.get("launch", {})
    numba_cuda, installed = (
        needed(facts, "numba-cuda", "[cu13]"),
        facts["installed"].get("numba-cuda"),
    )
    bounds, version = facts["ranges"].get("numba-cuda", ""), facts["python"]["version"]
    if installed and not is_within(installed, bounds):
        yield Finding(f"numba-cuda is {installed}; needed is {bounds}", pip(numba_cuda))
    elif "error" in found:
        broken = numba_cuda if installed else needed(facts, "numba")
        named = re.search(r"\b(NUMBA|CUDA)_[A-Z_]+\b", found["error"])
        yield Finding(
            f"numba.cuda cannot be imported: {found['error']}",
            f"unset {named.group()}, or set it right"
            if named
            else pip(broken, option="--force-reinstall"),
        )
    elif "compile_error" in found:
        yield Finding(
            "CUDA kernels cannot be compiled (NVVM, their compiler, was not found or failed): "
            + found["compile_error"],
            f"{pip(numba_cuda)}, if kernels are to be compiled here",
            is_problem=owner(found["file"]) != OWNERS["numba"] or bool(launched.get("gpu")),
        )
    elif "error" in launched:
        older = pip(needed(facts, "numba-cuda", "[cu12]"))
        is_old = re.search("UNSUPPORTED_PTX_VERSION|INSUFFICIENT_DRIVER", launched["error"])
        why = ", because its driver is older than the CUDA toolkit" if is_old else ""
        yield Finding(
            f"a kernel cannot run on the GPU{why}: {launched['error']}",
            "check nvidia-smi; numba-cuda[cu13] needs driver 580 or newer and a GPU of compute capability "
            f"7.5 or newer, for others {older}; until it works, compute on the CPU (FastBackend)",
        )
    elif launched.get("gpu") and owner(found["file"]) == OWNERS["numba"]:
        pythons = facts["ranges"].get("numba-cuda's python", "")
        has_builds = is_within(version, pythons)
        yield Finding(
            "there is a GPU, and no numba-cuda: kernels for tensor cores cannot run",
            pip(numba_cuda)
            if has_builds
            else f"numba-cuda has no build for Python {version}: make the environment anew with Python "
            f"{pythons}, as make test PYTHON=python3.12 does",
            is_problem=False,
        )


def threads(facts: dict[str, Any]) -> Iterator[Finding]:
    """Report that no parallel loop can run, or no product by BLAS."""
    found = facts.get("parallel", {})
    if "error" in found:
        asked = facts["environment"].get("NUMBA_THREADING_LAYER")
        yield Finding(
            f"numba cannot run a parallel loop with BLAS: {found['error']}",
            f"unset NUMBA_THREADING_LAYER, which asks for {asked}"
            if asked
            else pip("tbb", needed(facts, "scipy"), needed(facts, "numba"), option="--upgrade"),
        )


def cache(facts: dict[str, Any]) -> Iterator[Finding]:
    """Report that compiled kernels cannot be cached: each process would compile them again."""
    found = facts["cache"]
    for reason in sorted({*facts.get("library", {}).get("refused", {}).values()}):
        yield Finding(
            f"compiled kernels are not kept on disk: {reason}, and could plant code there",
            "take that permission away (chmod go-w), or set NUMBA_CACHE_DIR to a folder that only you can "
            "write to",
        )
    if found["why_not"] is not None:
        yield Finding(
            f"compiled kernels cannot be kept on disk, in {found['folder']}: {found['why_not']}",
            "set the environment variable NUMBA_CACHE_DIR to a folder of yours",
        )


def environment(facts: dict[str, Any]) -> Iterator[Finding]:
    """Report environment variables that change which code runs, or prevent it from running."""
    if facts["environment"].get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        yield Finding(
            "NUMBA_DISABLE_JIT is set: kernels run as plain Python, if at all",
            "unset NUMBA_DISABLE_JIT",
        )
    rung, rungs = facts["environment"].get("MINITORCH_RUNG"), facts.get("library", {}).get("rungs")
    if rung and rungs and rung not in ("auto", *rungs):
        yield Finding(
            f"MINITORCH_RUNG is {rung!r}, and no kernel of attention is named so: every call fails",
            f"unset MINITORCH_RUNG, or set it to one of {', '.join(rungs)}",
        )


def library(facts: dict[str, Any]) -> Iterator[Finding]:
    """Report that ``import minitorch`` fails although its dependencies work."""
    found = facts.get("library", {})
    if "error" in found:
        yield Finding(
            f"import minitorch fails: {found['error']}",
            f"see {found['place']}; if you have changed that file, that is where to look"
            if found.get("place")
            else "run python -X faulthandler -c 'import minitorch'; the last line shows where",
        )


def _patient(finding: Finding) -> Finding:
    """Return a finding for a timeout, which does not prove that the library is broken."""
    if "no answer after" not in finding.what:
        return finding
    again = "if this machine is busy, ask again with --seconds 600; if it stays so: "
    return finding._replace(remedy=again + finding.remedy)


RULES: tuple[Callable[[dict[str, Any]], Iterator[Finding]], ...] = (
    python, packages, combinations, kernels, cuda, threads, cache, environment, library,
)  # fmt: skip


def diagnose(facts: dict[str, Any]) -> list[Finding]:
    """Return the findings about an environment, problems first.

    Args:
        facts: As :func:`minitorch.doctor.command.examine` returns them.
    """
    found = [_patient(finding) for rule in RULES for finding in rule(facts)]
    return sorted(found, key=lambda finding: not finding.is_problem)
