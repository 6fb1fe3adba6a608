"""Hand out the course and grade it.

    python project/course.py start 3 my-module-3              a starter tree of module 3
    python project/course.py start 3 my-module-3 --from my-module-2
    python project/course.py grade my-module-3                task by task: passed, failed, blocked
    python project/course.py grade . --task 3.2 --json result.json
    python project/course.py grade --all submissions --csv points.csv --jobs 2
    python project/course.py release 3 module-3               what students get, and an autograder
    python project/course.py lessons DIR PACKAGES             modules 0 and 1 in a browser, for make docs

``grade`` ends with 0 if nothing failed, 1 if something did, 2 if it could not be run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from course.batch import grade_folder
from course.browser_lessons import write_lessons
from course.grader import grade
from course.markers import CourseError
from course.options import Options
from course.release import release
from course.starter_trees import left_behind, start
from course.tasks import find_task


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="course.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("start", help="write the starter tree of a module")
    one.add_argument("module", type=int, metavar="MODULE", help="0 to 5")
    one.add_argument("dir", type=Path, metavar="DIR", help="a new or an empty folder")
    one.add_argument(
        "--from", dest="earlier", type=Path, metavar="DIR2",
        help="take earlier modules from this tree of yours, and not from the solutions",
    )  # fmt: skip
    two = commands.add_parser("grade", help="run the tests of each task")
    two.add_argument("dir", type=Path, nargs="?", default=Path("."), metavar="DIR")
    two.add_argument(
        "--task", action="append", metavar="3.2", help="only this one; may be repeated"
    )
    two.add_argument(
        "--module", type=int, help="the tasks of this module; that of the tree if not given"
    )
    two.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    two.add_argument("--gpu", action="store_true", help="run CUDA tasks on the GPU, not emulated")
    two.add_argument(
        "--all", type=Path, metavar="DIR", help="grade every submission in this folder; needs --csv"
    )
    two.add_argument(
        "--csv",
        type=Path,
        metavar="FILE",
        help="with --all: the table; reports go to a folder beside it",
    )
    two.add_argument(
        "--jobs", type=int, default=2, help="tasks, with --all submissions, at the same time"
    )
    two.add_argument("--seconds", type=int, help="time limit of each task")
    two.add_argument("--memory-mb", type=int, help="memory limit of each task")
    three = commands.add_parser("release", help="write what students get, and an autograder")
    three.add_argument("module", type=int, metavar="MODULE", help="0 to 5")
    three.add_argument("dir", type=Path, metavar="DIR", help="a new or an empty folder")
    four = commands.add_parser(
        "lessons", help="write modules 0 and 1 as pages that run in a browser"
    )
    four.add_argument("dir", type=Path, metavar="DIR", help="a folder; what is there is replaced")
    four.add_argument("packages", type=Path, help="has node_modules/pyodide and wheels: make docs")
    args = parser.parse_args(argv)
    try:
        if args.command == "start":
            start(args.module, args.dir, args.earlier)
            print(f"module {args.module} is in {args.dir}; its README.md lists the tasks")
            if args.earlier and (left := left_behind(args.earlier)):
                print(
                    f"of {args.earlier} only the bodies between the markers were taken; if they need any "
                    f"of this, copy it by hand:\n  " + "\n  ".join(left)
                )
            return 0
        if args.command == "lessons":
            write_lessons(args.dir, args.packages)
            return 0
        if args.command == "release":
            release(args.module, args.dir)
            print(f"{args.dir}/student is for students, {args.dir}/autograder.zip for Gradescope")
            return 0
        if args.jobs < 1:
            raise CourseError(f"--jobs must be 1 or more, got {args.jobs}")
        options = Options(
            tuple(find_task(name) for name in args.task or ()), args.module, args.gpu, args.seconds,
            args.memory_mb, args.jobs,
        )  # fmt: skip
        if args.all is not None:
            if args.csv is None or args.json is not None or args.dir != Path("."):
                raise CourseError(
                    "--all DIR goes with --csv FILE, and without --json and another DIR"
                )
            return grade_folder(args.all, args.csv, options)
        return grade(args.dir, options, args.json)
    except (CourseError, ValueError, OSError) as error:
        print(f"course.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("course.py: interrupted", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
