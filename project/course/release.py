"""Writes what a teacher hands out of a module, and the autograder that judges it.

A student gets a starter tree, with a workflow that runs the tests of each push on GitHub. The autograder
is a zip file for Gradescope: it has the course with its solutions, and is for the teacher alone.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from course.markers import PACKAGES, ROOT
from course.starter_trees import start

WORKFLOW = """# GitHub Classroom: the tests of each push, task by task. Your teacher's grader gives points.
name: grade
on: [push, workflow_dispatch]
jobs:
  grade:
    runs-on: ubuntu-latest
    timeout-minutes: 20
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
          cache: pip
          cache-dependency-path: setup.py
      - run: python -m pip install --editable '.[course]'
      - run: python project/course.py grade .
"""
#: Of Gradescope: installs what is needed, once.
SETUP = """#!/usr/bin/env bash
set -e
apt-get update && apt-get install --yes python3 python3-venv python3-pip
python3 -m venv /autograder/venv
/autograder/venv/bin/python -m pip install --editable '/autograder/source/course[course]'
"""
#: The script by which Gradescope grades a submission.
RUN = """#!/autograder/venv/bin/python
import json, subprocess, sys
from pathlib import Path

result, root = Path("/autograder/results/course.json"), Path("/autograder/submission")
trees = [library.parent for place in ("minitorch", "*/minitorch") for library in root.glob(place)]
tree = trees[0] if trees else root  # a student may have packed the folder and not what is in it
done = subprocess.run(
    [sys.executable, "/autograder/source/course/project/course.py", "grade", str(tree),
     "--module", "{module}", "--json", str(result)],
    capture_output=True, text=True,
)
if result.exists():
    tests = [
        {{"name": f"{{t['task']}} {{t['title']}}", "score": t["points"], "max_score": t["possible"],
          "output": "\\n".join([t["message"], *t["also"]])}}
        for t in json.loads(result.read_text())["tasks"]
    ]
    results = {{"tests": tests}}
else:
    results = {{"score": 0, "output": done.stdout + done.stderr}}
Path("/autograder/results/results.json").write_text(json.dumps(results))
"""
#: What the grader needs of the course.
GRADED = (*PACKAGES, "tests", "project")


def release(module: int, out: Path) -> None:
    """Write ``student``, a starter tree with a workflow, and ``autograder.zip`` to a new folder.

    Args:
        module: 0 to 5.
        out: A folder that does not exist, or is empty.
    """
    start(module, out / "student", here=False)
    workflow = out / "student" / ".github" / "workflows" / "grade.yml"
    workflow.parent.mkdir(parents=True)
    workflow.write_text(WORKFLOW, encoding="utf-8")
    with zipfile.ZipFile(out / "autograder.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in (("setup.sh", SETUP), ("run_autograder", RUN.format(module=module))):
            entry = zipfile.ZipInfo(name)
            entry.external_attr = 0o755 << 16
            file.writestr(entry, text)
        for path in (path for folder in GRADED for path in sorted((ROOT / folder).rglob("*.py"))):
            file.write(path, f"course/{path.relative_to(ROOT).as_posix()}")
        for name in (
            "setup.py",
            "pyproject.toml",
            "requirements.txt",
            ".gitignore",
            ".streamlit/config.toml",
        ):
            file.write(ROOT / name, f"course/{name}")
