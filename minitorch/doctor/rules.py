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
#: The first CUDA whose driver reads a version of PTX, where the numbers do not follow a rule.
_CUDA_OF_PTX = {(8, 6): (12, 7), (8, 7): (12, 8), (8, 8): (12, 9)}
#: The oldest generation that the toolkits of CUDA 13 compile for.
_OLDEST_OF_13 = (7, 5)


def pip(*requirements: str, option: str = "") -> str:
    """Return the command that installs a package into the environment of this Python."""
    words = ["python -m pip install", option, *(f'"{each}"' for each in requirements)]
    return " ".join(filter(None, words))


# -- versions ---------------------------------------------------------------------------------------


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


def cuda_of_ptx(ptx: str) -> tuple[int, ...]:
    """Return the CUDA version whose drivers read a version of PTX.

    Source: PTX ISA, release history.
    """
    major, minor = (*numbers(ptx), 0)[:2]
    return _CUDA_OF_PTX.get((major, minor), (major + 4, minor))


def owner(file: str) -> str:
    """Return the package that provides ``numba.cuda``, from the imported file."""
    parts = re.split(r"[\\/]", file)[-5:]
    for folder in reversed(OWNERS):
        if folder in parts:
            return OWNERS[folder]
    return f"an unknown package ({file})"


def extra_for(facts: dict[str, Any]) -> str:
    """Return the optional dependency for CUDA that suits the driver."""
    of_driver = numbers(facts.get("driver", {}).get("driver") or "13")
    bounds = facts["ranges"].get("numba-cuda", "")
    return f"numba-cuda[cu{12 if of_driver[0] == 12 else 13}]{bounds}"


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
        wanted = (name + facts["ranges"].get(name, "") for name in missing)
        yield Finding(f"not installed: {', '.join(missing)}", pip(*wanted))
    for name, found in facts["packages"].items():
        bounds = facts["ranges"].get(name, "")
        installed, file = found.get("installed"), found.get("file")
        if file is None:
            continue
        if found.get("shadowed"):
            yield Finding(
                f"{file} is imported in place of the package {name}"
                + (f", and fails: {found['error']}" if "error" in found else ""),
                f"rename or move {file}, or take its folder off PYTHONPATH",
            )
        elif needs := re.search(r"Numba needs NumPy (\S+) or less", found.get("error", "")):
            yield Finding(
                f"numba {installed} is too old for NumPy {facts['packages']['numpy'].get('installed')}",
                f"{pip(name + bounds, option='--upgrade')}, or {pip(f'numpy<={needs.group(1)}.99')}",
            )
        elif "error" in found:
            yield Finding(
                f"{name} {installed or ''} cannot be imported: {found['error']}",
                pip(name + bounds, option="--force-reinstall"),
            )
        if installed and not is_within(installed, bounds):
            yield _wrong_version(name, installed, bounds)


def _wrong_version(name: str, installed: str, bounds: str) -> Finding:
    return Finding(f"{name} is {installed}; needed is {bounds}", pip(name + bounds))


def kernels(facts: dict[str, Any]) -> Iterator[Finding]:
    """Report another package named ``kernels`` that shadows, or is installed next to, this project's."""
    found = facts["kernels"]
    other = found.get("other_installed")
    if not found["is_ours"]:
        if found["file"] is None:
            what, remedy = (
                "the package kernels is missing",
                "install the project again: python -m pip install -e .",
            )
        elif other:
            what = f"Hugging Face's package kernels {other} is imported in place of ours"
            remedy = (
                "python -m pip uninstall kernels, then install the project again: "
                "python -m pip install --force-reinstall --no-deps -e ."
            )
        else:
            what = f"{found['file']} is imported in place of the project's package kernels"
            remedy = f"rename or move {found['file']}, or take its folder off PYTHONPATH"
        yield Finding(what, remedy)
    elif other:
        yield Finding(
            f"Hugging Face's package kernels {other} is installed too; one name serves one of them",
            "python -m pip uninstall kernels, or an environment of its own for this project",
        )
    elif found["file"] != found["expected"]:
        yield Finding(
            f"minitorch comes from one copy of the project and kernels from another: {found['file']}",
            f"take the other copy off PYTHONPATH, or start Python in {found['root']}",
        )


def cuda(facts: dict[str, Any]) -> Iterator[Finding]:
    """Report a ``numba.cuda`` that cannot be imported, or cannot compile though it is wanted."""
    found = facts.get("cuda", {})
    if "error" in found:
        mine = facts.get("installed", {}).get("numba-cuda")
        broken = extra_for(facts) if mine else "numba" + facts["ranges"].get("numba", "")
        named = re.search(r"\b(NUMBA|CUDA)_[A-Z_]+\b", found["error"])
        yield Finding(
            f"numba.cuda cannot be imported: {found['error']}",
            f"unset {named.group()}, or set it right"
            if named
            else pip(broken, option="--force-reinstall"),
        )
    elif "ptx_error" in found:
        wanted = owner(found["file"]) != OWNERS["numba"] or bool(_devices(facts))
        yield Finding(
            "CUDA kernels cannot be compiled (NVVM, their compiler, was not found or failed): "
            + found["ptx_error"],
            pip(extra_for(facts)) + ("" if wanted else ", if kernels are to be compiled here"),
            is_problem=wanted,
        )
    elif found and owner(found["file"]) == OWNERS["numba"] and _devices(facts):
        yield Finding(
            "there is a GPU, and no numba-cuda: kernels for tensor cores cannot run",
            pip(extra_for(facts)),
            is_problem=False,
        )


def gpu(facts: dict[str, Any]) -> Iterator[Finding]:
    """Report a driver that is too old for the compiled kernels, and kernels that fail."""
    driver, found, launch = (facts.get(name, {}) for name in ("driver", "cuda", "launch"))
    version, ptx = driver.get("driver"), found.get("ptx")
    if "error" in driver:
        yield Finding(
            f"the CUDA driver cannot be asked: {driver['error']}",
            "restart the machine, or install the driver again (nvidia-smi must work)",
        )
    has_run = bool(facts.get("launch") is not None and "error" not in launch)
    devices = _devices(facts)
    for device in devices[:1]:
        able = device["major"], device["minor"]
        if able < _OLDEST_OF_13 and numbers(ptx or "0") >= (9,):
            yield Finding(
                f"{device['name']} has compute capability {able[0]}.{able[1]}, for which CUDA 13 "
                "compiles nothing",
                f"python -m pip uninstall numba-cuda, then {pip('numba-cuda[cu12]')}",
            )
            return
    if version and ptx and cuda_of_ptx(ptx) > numbers(version) and not has_run:
        needs = ".".join(map(str, cuda_of_ptx(ptx)))
        yield Finding(
            f"the driver reads CUDA {version}, and kernels are compiled to PTX {ptx} of CUDA {needs}",
            _older_toolkit(facts, needs),
            is_problem=bool(devices),
        )
    elif "error" in launch:
        yield Finding(
            f"a kernel cannot run on the GPU: {launch['error']}",
            "check nvidia-smi; run the kernels on the CPU until it works (FastBackend)",
        )
    elif version and not devices:
        yield Finding(
            f"the driver ({version}) shows no GPU: {driver.get('reason', 'none is visible')}",
            "if there is one: check nvidia-smi, and that CUDA_VISIBLE_DEVICES does not hide it",
            is_problem=False,
        )


def _older_toolkit(facts: dict[str, Any], needs: str) -> str:
    update = f"update the driver to one of CUDA {needs} or newer"
    mine = facts["driver"]["driver"]
    if numbers(mine) < (12,):
        return update
    return f"{update}, or {pip(extra_for(facts), f'cuda-toolkit=={mine}.*')}"


def _devices(facts: dict[str, Any]) -> list[Any]:
    return facts.get("driver", {}).get("devices", [])


def blas(facts: dict[str, Any]) -> Iterator[Finding]:
    """Report that numba finds no BLAS: matrix products on the CPU then fail."""
    found = facts.get("blas", {})
    if "error" in found:
        yield Finding(
            f"numba finds no BLAS in SciPy: {found['error']}",
            pip("scipy" + facts["ranges"].get("scipy", ""), option="--force-reinstall"),
        )
    elif found and not found["libraries"]:
        yield Finding(
            "BLAS is none that threadpoolctl knows; its threads compete with numba's",
            "for speed install SciPy from PyPI or conda-forge, which bring OpenBLAS or MKL",
            is_problem=False,
        )


def threads(facts: dict[str, Any]) -> Iterator[Finding]:
    """Report that no parallel loop can run."""
    found = facts.get("parallel", {})
    if "error" in found:
        asked = facts["environment"].get("NUMBA_THREADING_LAYER")
        yield Finding(
            f"no parallel loop can run: {found['error']}",
            f"unset NUMBA_THREADING_LAYER, which asks for {asked}"
            if asked
            else f"{pip('tbb')}, or {pip('numba', option='--force-reinstall')}",
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
    if found["why_not"] is None:
        return
    if facts["environment"].get("NUMBA_CACHE_DIR"):
        what = f"NUMBA_CACHE_DIR names {found['folder']}, which cannot be written"
        remedy = "set NUMBA_CACHE_DIR to a folder of yours, or unset it"
    else:
        what = (
            f"no folder for compiled kernels can be written ({found['folder']}, the last one tried)"
        )
        remedy = "set the environment variable NUMBA_CACHE_DIR to a folder of yours"
    yield Finding(f"{what}: {found['why_not']}", remedy)


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
        place = found.get("place")
        yield Finding(
            f"import minitorch fails: {found['error']}",
            f"see {place}; if you have changed that file, that is where to look"
            if place
            else "run python -X faulthandler -c 'import minitorch'; the last line shows where",
        )


def _patient(finding: Finding) -> Finding:
    """Return a finding for a timeout, which does not prove that the library is broken."""
    if "no answer after" not in finding.what:
        return finding
    again = "if this machine is busy, ask again with --seconds 600; if it stays so: "
    return finding._replace(remedy=again + finding.remedy)


RULES: tuple[Callable[[dict[str, Any]], Iterator[Finding]], ...] = (
    python, packages, kernels, cuda, gpu, blas, threads, cache, environment, library,
)  # fmt: skip


def diagnose(facts: dict[str, Any]) -> list[Finding]:
    """Return the findings about an environment, problems first.

    Args:
        facts: As :func:`minitorch.doctor.command.examine` returns them.
    """
    found = [_patient(finding) for rule in RULES for finding in rule(facts)]
    return sorted(found, key=lambda finding: not finding.is_problem)
