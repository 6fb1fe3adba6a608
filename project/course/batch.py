"""Grades a folder of submissions, a few at a time, and can go on where it was interrupted."""

from __future__ import annotations

import csv
import io
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from course.copies import copies
from course.expected import Session
from course.grader import grade
from course.markers import CourseError
from course.options import Options
from course.report import refuse_unwritable, replace_file
from course.scratch import scratch_folder


def grade_folder(folder: Path, table: Path, options: Options) -> int:
    """Grade each submission of a folder; write a report for each, a table of points and one of copies.

    The reports are ``NAME.json`` and ``NAME.txt`` in a folder beside the table, of its name without
    ``.csv``; there is ``copies.csv`` too, see :mod:`course.copies`. A submission that has a report is not
    graded again: delete the report to have it graded.

    Args:
        folder: With a folder for each submission.
        table: Becomes a CSV file: a row for each submission, a column for each task.
        options: For each submission, but ``jobs`` are submissions that are graded at the same time.

    Returns:
        0 if every submission has been graded, else 2.

    Raises:
        CourseError: If the folder has no submission, or the table cannot be written.
    """
    names = sorted(path.name for path in folder.iterdir() if (path / "minitorch").is_dir())
    if not names:
        raise CourseError(
            f"{folder} has no submission; each is a folder in it, with a folder minitorch"
        )
    refuse_unwritable(table)
    reports = table.with_suffix("")
    reports.mkdir(exist_ok=True)
    with scratch_folder() as place:
        session, pool = Session(place), ThreadPoolExecutor(1 if options.gpu else options.jobs)
        one = replace(options, jobs=1)
        try:
            found = pool.map(lambda name: _graded(folder / name, reports, one, session), names)
            summaries = list(found)
        finally:  # after an interrupt too
            pool.shutdown(wait=False, cancel_futures=True)
            session.close()
            pool.shutdown()
    _write(table, _points(names, summaries))
    pairs = list(copies(folder, names))
    heading = ["submission", "and", "in common", "functions"]
    _write(
        reports / "copies.csv", [heading, *([*map(_safe, pair[:2]), *pair[2:]] for pair in pairs)]
    )
    print(f"{len(pairs)} pairs have much in common: {reports / 'copies.csv'}")
    return 2 if any(s.get("error") for s in summaries) else 0


def _graded(tree: Path, reports: Path, options: Options, session: Session) -> dict[str, Any]:
    """Grade a submission unless there is a report; return what the report says, or an error."""
    result, lines = reports / f"{tree.name}.json", list[str]()
    error = ""
    if not result.exists():
        try:
            grade(tree, options, result, session, lines.append)
        except (CourseError, ValueError, OSError) as failure:
            error = f"course.py: {failure}"
            lines.append(error)
        (reports / f"{tree.name}.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    try:
        summary = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = {"points": "", "possible": "", "tasks": [], "error": error or "no result"}
    print(
        f"{tree.name:30} {summary['points']}/{summary['possible']} {summary.get('error', '')}",
        flush=True,
    )
    return summary


def _points(names: list[str], summaries: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table of points."""
    tasks = sorted(
        {task["task"] for s in summaries for task in s["tasks"]},
        key=lambda name: [int(part) for part in name.split(".")],
    )
    rows = [["submission", *tasks, "points", "possible", "refused", "error"]]
    for name, summary in zip(names, summaries, strict=True):
        points = {task["task"]: str(task["points"]) for task in summary["tasks"]}
        ends = [str(summary.get(name, "")) for name in rows[0][-4:]]
        rows.append([_safe(name), *(points.get(task, "") for task in tasks), *ends])
    return rows


def _safe(name: str) -> str:
    """Return a name that a spreadsheet does not take for a formula."""
    return f"'{name}" if name[0] in "=+-@" else name


def _write(path: Path, rows: list[list[str]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    replace_file(path, text.getvalue())
