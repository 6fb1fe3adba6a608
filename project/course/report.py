"""What a grading prints, and what it writes for an autograder."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from course.confine import not_guaranteed
from course.markers import CourseError
from course.verdict import Verdict

#: Of the tests that failed after the first one, so many are listed.
LISTED = 8
HEAD = f"{'task':5} {'':32} {'status':8} {'points':>7} {'tests':>8} {'seconds':>8}"


def row_of(result: Verdict) -> str:
    """Return what became of a task, below :data:`HEAD`."""
    points = f"{result.points}/{result.possible}"
    tests = f"{result.passed}/{result.tests}"
    row = (
        f"{result.task:5} {result.title:32} {result.status:8} {points:>7} {tests:>8} "
        f"{result.seconds:8.1f}"
    )
    lines = result.message.splitlines() + result.also[:LISTED]
    if len(result.also) > LISTED:
        lines.append(f"and {len(result.also) - LISTED} more")
    lines += [f"refused: {', '.join(result.refused)}"] if result.refused else []
    return "\n      ".join([row, *lines])


def finish(results: list[Verdict], json_file: Path | None, say: Callable[[str], None]) -> int:
    """Print the sum, write the result as JSON if asked to, and return the exit code."""
    blocked = [result for result in results if result.status == "blocked"]
    waiting = [result for result in results if result.status == "waiting"]
    failed = [result for result in results if result.status in ("failed", "waiting")]
    points = sum(result.points for result in results)
    possible = sum(result.possible for result in results if result not in blocked)
    say(f"points {points} of {possible}")
    if waiting:
        say(f"WAITING for tasks that are not written yet: {', '.join(r.task for r in waiting)}")
    if blocked:
        open_ = sum(result.possible for result in blocked)
        say(f"BLOCKED, neither passed nor failed: {len(blocked)} tasks, {open_} points")
    if warning := not_guaranteed():
        say(f"NOT CONFINED: {warning}; grade in a container what you do not trust")
    if json_file is not None:
        summary = {
            "points": points,
            "possible": possible,
            "blocked": sum(result.possible for result in blocked),
            "refused": len({what for result in results for what in result.refused}),
            "not_guaranteed": warning,
            "all_passed": not failed and not blocked,
            "tasks": [asdict(result) for result in results],
        }
        replace_file(json_file, json.dumps(summary, indent=2) + "\n")
    if failed:
        return 1
    return 2 if len(blocked) == len(results) else 0


def refuse_unwritable(path: Path) -> None:
    """Refuse a place for the result before the work is done, not after it."""
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        what = "cannot be written to" if folder.is_dir() else "is no folder"
        raise CourseError(
            f"{folder}, where --json {path} would go, {what}; make it, or name another"
        )
    if path.is_dir():
        raise CourseError(f"--json {path} is a folder; name a file")


def replace_file(path: Path, text: str) -> None:
    """Write a file; a link of that name, which a submission may have left there, is not followed."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", newline="", dir=path.absolute().parent, delete=False
    ) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
