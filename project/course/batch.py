"""Grades a folder of submissions, a few at a time, and can go on where it was interrupted."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from course.markers import ROOT, CourseError
from course.report import refuse_unwritable, replace_file


def grade_folder(folder: Path, table: Path, jobs: int, options: list[str]) -> int:
    """Grade each submission of a folder; write a report for each and a table of points.

    The reports are ``NAME.json`` and ``NAME.txt`` in a folder beside the table, of its name without
    ``.csv``. A submission that has a report is not graded again: delete the report to have it graded.

    Args:
        folder: With a folder for each submission.
        table: Becomes a CSV file: a row for each submission, a column for each task.
        jobs: Submissions that are graded at the same time.
        options: Of ``course.py grade``, for each.

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

    def grade(name: str) -> dict[str, Any]:
        result = reports / f"{name}.json"
        error = ""
        if not result.exists():
            command = [
                sys.executable,
                str(ROOT / "project" / "course.py"),
                "grade",
                str(folder / name),
            ]
            command += ["--json", str(result), "--jobs", "1", *options]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            (reports / f"{name}.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
            error = done.stderr.strip()
        try:
            summary = json.loads(result.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            summary = {"points": "", "possible": "", "tasks": [], "error": error or "no result"}
        print(f"{name:30} {summary['points']}/{summary['possible']} {summary.get('error', '')}")
        sys.stdout.flush()
        return summary

    with ThreadPoolExecutor(jobs) as pool:
        summaries = list(pool.map(grade, names))
    tasks = sorted(
        {task["task"] for s in summaries for task in s["tasks"]},
        key=lambda name: [int(part) for part in name.split(".")],
    )
    rows = [["submission", *tasks, "points", "possible", "refused", "error"]]
    for name, summary in zip(names, summaries, strict=True):
        points = {task["task"]: str(task["points"]) for task in summary["tasks"]}
        ends = [str(summary.get(name, "")) for name in rows[0][-4:]]
        # A spreadsheet takes a name that begins so for a formula.
        safe = f"'{name}" if name[0] in "=+-@" else name
        rows.append([safe, *(points.get(task, "") for task in tasks), *ends])
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    replace_file(table, text.getvalue())
    return 2 if any(s.get("error") for s in summaries) else 0
