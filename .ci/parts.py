"""Say how the browser test and those of the starter trees ended, of the report of a run of all tests.

python .ci/parts.py build/tests.xml
"""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

PARTS = {
    "browser": r"test_app_browser\b",
    "starter trees": r"tests\.project\.course\b",
    "all other tests": "",
}
#: What pytest calls a test that has not passed.
KINDS = ("failure", "error")


def part_of(case: ElementTree.Element) -> str:
    """Return which part a test belongs to."""
    name = f"{case.get('classname')} {case.get('name')}"
    return next(part for part, pattern in PARTS.items() if re.search(pattern, name))


def main(file: str) -> None:
    """Print a line for each part, as .ci/run does for its own."""
    root = ElementTree.parse(file).getroot() if Path(file).exists() else ElementTree.Element("none")
    cases = list(root.iter("testcase"))
    for part in PARTS:
        mine = [case for case in cases if part_of(case) == part]
        skipped = sum(case.find("skipped") is not None for case in mine)
        failed = sum(any(case.find(kind) is not None for kind in KINDS) for case in mine)
        state = "FAILED" if failed or not mine else "passed" if len(mine) > skipped else "skipped"
        seconds = sum(float(case.get("time", 0)) for case in mine)
        count = f"{len(mine) - skipped - failed} passed, {skipped} skipped, {failed} failed"
        print(f"{state:<7} {seconds:5.0f} s  {part}, on one core: {count}")


if __name__ == "__main__":
    main(*sys.argv[1:])
