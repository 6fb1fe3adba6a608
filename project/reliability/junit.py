"""How the tests of a run of pytest ended, from the report that ``--junitxml`` writes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree


class Ended(NamedTuple):
    """A test that has run."""

    test: str  # its module and name
    how: str  # passed, failed or skipped
    properties: dict[str, str]  # what ``record_property`` was given
    text: str  # of the failure


def tests_of(report: Path) -> list[Ended]:
    """Return the tests of a report."""
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [part for part in case if part.tag in ("failure", "error")]
        how = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        properties = {one.get("name", ""): one.get("value", "") for one in case.iter("property")}
        name, text = (
            f"{case.get('classname')}::{case.get('name')}",
            "".join(x.text or "" for x in bad),
        )
        found.append(Ended(name, how, properties, text))
    return found
