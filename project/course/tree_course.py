"""Grade this tree, or run its tests.

    python project/course.py grade .                 task by task
    python project/course.py grade . --task 3.2
    python project/course.py test . -n 2             all tests of this module, with pytest's options

The course that made the tree gives the points. Where it is not, the tests of each task decide. Name its
folder with --course DIR or MINITORCH_COURSE if it has moved.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path


def environment(tree: Path, emulated: bool) -> dict[str, str]:
    """Return the environment of tests: compiled without optimisation, the first failing example shown."""
    # Numba's cache does not distinguish optimised from unoptimised code.
    cache = str((tree / "build" / "numba").resolve())
    own = {"MINITORCH_SHRINK": "0", "NUMBA_OPT": "0", "NUMBA_CACHE_DIR": cache}
    return os.environ | own | ({"MINITORCH_EMULATE": "check"} if emulated else {})


def main() -> int:
    """Grade and return the exit code: 0 if nothing failed, 1 if something did, 2 for no grading."""
    parser = argparse.ArgumentParser(
        prog="course.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["grade", "test"])
    parser.add_argument("dir", type=Path, nargs="?", default=Path("."))
    parser.add_argument("--task", action="append", metavar="3.2", help="may be repeated")
    parser.add_argument("--course", default=os.environ.get("MINITORCH_COURSE"), metavar="DIR")
    args, options = parser.parse_known_args()
    if not (args.dir / "course.json").is_file():
        parser.error(f"{args.dir} is not a tree of the course: it has no course.json")
    stamp = json.loads((args.dir / "course.json").read_text(encoding="utf-8"))
    pytest = [sys.executable, "-m", "pytest"]
    if args.command == "test":
        failed = 0
        for emulated in (False, True):
            own = [f"({how[1]})" for how in stamp["tasks"].values() if how[2] == emulated]
            run, settings = [*pytest, "-m", " or ".join(own)], environment(args.dir, emulated)
            if own:  # what fails first does not keep the rest from running
                failed |= subprocess.call([*run, *options], cwd=args.dir, env=settings)
        return failed
    course = Path(args.course or stamp["course"] or "")
    if (course / "project" / "course" / "grader.py").is_file():
        options += [word for task in args.task or () for word in ("--task", task)]
        script = course / "project" / "course.py"
        return subprocess.call([sys.executable, str(script), "grade", str(args.dir), *options])
    if args.course:
        parser.error(f"{course} is not the course: it has no project/course/grader.py")
    if stamp["course"]:
        print(f"The course is not in {course}; name its folder with --course DIR.", flush=True)
    print("Without the course there are no points; the tests of each task decide.", flush=True)
    tasks = {name: how for name, how in stamp["tasks"].items() if name in (args.task or [name])}
    if options or not tasks:
        parser.error(f"without the course, only --task with one of {', '.join(stamp['tasks'])}")
    failed = False
    for name, (title, marks, emulated) in tasks.items():
        run = [*pytest, "-m", marks, "--tb=line", "--disable-warnings"]
        settings = environment(args.dir, emulated)
        done = subprocess.run(run, cwd=args.dir, env=settings, capture_output=True, text=True)
        print(f"{name:5} {title:32} {'failed' if done.returncode else 'passed'}", flush=True)
        if done.returncode:
            failed = True
            lines = done.stdout.splitlines() or done.stderr.splitlines() or [""]
            causes = [line for line in lines if re.search(r"^\S+:\d+: ", line)]
            shown = [*list(dict.fromkeys(causes))[:5], lines[-1]]
            print("".join(f"      {line}\n" for line in shown), end="")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
