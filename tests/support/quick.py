"""Lint, types and the tests of the packages that a change touches, in about a minute: ``make quick``.

    python -m tests.support.quick [BASE]

A change is every difference from the commit BASE (HEAD by default), and every untracked file.  The tests of
a file are those in the folder of tests/ nearest to its package, those in the folder of tests/structure
named after its package, and those named after its module.  Property tests draw five examples.
``make test`` and ``make test ONLY=slow`` run everything.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .packages import FLOORS, ROOT, Package, declared, package_of

#: Packages whose kernels the emulated GPU runs.
EMULATED = ("kernels/cuda", "minitorch/backends")
#: Tests that need the emulated GPU, or a GPU.
ON_DEVICE = "tests/kernels/cuda/"
#: Folders of tests that take minutes; ``make test`` runs them.
SLOW = (
    "tests/structure/emulated",
    "tests/structure/compile_only",
    "tests/reliability",
    "tests/course",
)


def changed(base: str) -> list[str]:
    """Return the Python files that differ from a commit or are new."""
    commands = (
        ["git", "diff", "--name-only", "--diff-filter=d", base],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    output = [subprocess.check_output(command, cwd=ROOT, text=True) for command in commands]
    return sorted({name for text in output for name in text.split() if name.endswith(".py")})


def tests_of(path: str, packages: list[Package]) -> set[str]:
    """Return the test files of a source file, or a test that has changed."""
    if path.startswith("tests/"):
        return {path} if Path(path).name.startswith("test_") else set()
    if path.split("/")[0] not in FLOORS:
        return set()
    package, named = package_of(path, packages), _files("tests", f"**/test_{Path(path).stem}.py")
    folder = Path(package.folder) if package else Path(path).parent
    inner = folder.parts[1:]
    structure = _files(Path("tests/structure", *inner), "test_*.py") if inner else set()
    place = "tests" / folder
    while place != Path("tests") and not _files(place, "test_*.py"):
        place = place.parent
    # At the root of a floor there are tests of every module: the one that is named after it will do.
    if named and len(place.parts) < 3:
        return structure | named
    return structure | named | _files(place, "test_*.py")


def _files(folder: str | Path, pattern: str) -> set[str]:
    return {file.relative_to(ROOT).as_posix() for file in (ROOT / folder).glob(pattern)}


def run(*command: str, **environment: str) -> bool:
    """Run a command; return whether it succeeded."""
    print("+", *command, flush=True)
    env = {**os.environ, **environment}
    # 5: no test was collected
    return subprocess.run(command, cwd=ROOT, env=env).returncode in (0, 5)


def main() -> int:
    files = changed(*(sys.argv[1:] or ["HEAD"]))
    if not files:
        print("no Python file has changed")
        return 0
    python = sys.executable
    packages = declared()
    tests = {"tests/repository/test_floors.py"}.union(*(tests_of(path, packages) for path in files))
    tests = {test for test in tests if test in files or not test.startswith(SLOW)}
    pytest = [python, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "worksteal"]
    bin_ = Path(python).parent
    on_host = sorted(test for test in tests if not test.startswith(ON_DEVICE))
    passed = [
        run(str(bin_ / "ruff"), "check", *files),
        run(str(bin_ / "ruff"), "format", "--check", *files),
        run(str(bin_ / "pyright"), "--pythonpath", python, *files),
        run(*pytest, *on_host, MINITORCH_EXAMPLES="5"),
    ]
    if any(path.startswith(EMULATED) for path in files):
        command = [*pytest, "-m", "emulated", *sorted(tests)]
        passed.append(run(*command, MINITORCH_EXAMPLES="1", MINITORCH_EMULATE="1"))
    return int(not all(passed))


if __name__ == "__main__":
    raise SystemExit(main())
