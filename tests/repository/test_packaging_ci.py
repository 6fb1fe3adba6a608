"""CI installs exact versions, all of them within the ranges, and names each part that fails."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from minitorch.doctor.command import ranges
from minitorch.doctor.rules import is_within

ROOT = Path(__file__).parents[2]
#: What CI does not install: what makes and uploads releases, and what runs on GPUs alone.
NOT_IN_CI = {"build", "nccl4py", "twine"}


def requirements() -> dict[str, str]:
    """Return the range of each package that requirements.txt or setup.py names."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            lines.append(node.value)
    found = (re.match(r"([\w-]+)(?:\[\w+\])?((?:[<>]=?[\d.]+,?)+)(;|$)", line) for line in lines)
    return {match.group(1): match.group(2) for match in found if match}


def test_what_ci_installs_lies_within_the_ranges_and_has_a_hash_and_no_place() -> None:
    lines = (ROOT / "requirements-ci.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    found = [
        re.fullmatch(r"([\w.-]+)==([\w.+]+) --hash=sha256:[0-9a-f]{64}", line) for line in pinned
    ]
    version = {match[1].lower(): match[2] for match in found if match}
    assert len(version) == len(pinned), "each line has a version and its hash: run make lock"
    for name, bounds in requirements().items():
        if name not in NOT_IN_CI:
            assert is_within(version[name.lower()], bounds), f"{name}: run make lock"


#: By package: the oldest and the newest release of the window of SPEC 0 in November 2026.
WINDOW = {
    "python": ("3.13.0", "3.15.0"),
    "numpy": ("2.2.0", "2.5.0"),
    "scipy": ("1.15.0", "1.17.0"),
}


@pytest.mark.parametrize("name", WINDOW)
def test_the_ranges_contain_the_window_of_the_scientific_packages(name: str) -> None:
    assert all(is_within(version, ranges()[name]) for version in WINDOW[name])


#: In place of make: fails where it is told to.
MAKE = """#!/usr/bin/env bash
case "$*" in *"$FAILS"*) exit 2 ;; esac
"""
NAMES = [
    "install", "lint", "docs", "install-others", "tests", "slow", "emulated", "torch", "compile-only",
]  # fmt: skip


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("fails", "named"),
    [
        ("make nothing fail", []),
        ("docs", ["docs"]),
        ("ptx", ["compile-only"]),
        ("ONLY=cpu", ["tests"]),
        ("ONLY", ["tests", "slow", "emulated", "torch"]),
    ],
)
def test_a_part_that_fails_is_named_and_the_others_run(
    fails: str, named: list[str], tmp_path: Path
) -> None:
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "bin").mkdir()
    for name in ("make", "chromium"):  # so that none is installed
        (tmp_path / "bin" / name).write_text(MAKE, encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {
        **os.environ, "FAILS": fails,
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    done = subprocess.run(
        [str(tmp_path / ".ci" / "run")], env=variables, capture_output=True, text=True, check=False
    )
    summary = done.stdout.rpartition(" in all\n")[2]
    ended = {name: state for state, name in re.findall(r"(\w+) +\d+ s  ([\w -]+)", summary)}
    assert sorted(ended) == sorted(NAMES), done.stdout + done.stderr
    assert [name for name in NAMES if ended[name] == "FAILED"] == named
    assert done.returncode == bool(named)
