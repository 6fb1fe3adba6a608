"""A plug-in of pytest that records which functions each test calls, and ends a run after its budget.

``project/reliability/mutations.py`` loads it in the processes that it starts.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from types import CodeType
from typing import Any

#: Packages whose functions are recorded.
FLOORS = ("kernels", "minitorch")
BUDGET = "the budget of seconds is used up"
#: Of sys.monitoring: a number that no debugger, coverage or profiler uses.
TOOL = 4


class Touched:
    """The plug-in; variables of the environment name its file, its seconds and its part of the tests."""

    def __init__(self) -> None:
        self.found: dict[int, CodeType] = {}
        self.record = os.environ.get("MUTATIONS_RECORD")
        self.end = time.monotonic() + float(os.environ.get("MUTATIONS_SECONDS", "inf"))
        if self.record and sys.version_info >= (3, 12):
            sys.monitoring.use_tool_id(TOOL, "mutations")
            sys.monitoring.register_callback(TOOL, sys.monitoring.events.PY_START, self._started)
            sys.monitoring.set_events(TOOL, sys.monitoring.events.PY_START)

    def _started(self, code: CodeType, offset: int) -> Any:
        self.found[id(code)] = code
        return sys.monitoring.DISABLE if sys.version_info >= (3, 12) else None

    def _called(self, frame: Any, event: str, argument: Any) -> None:
        self.found[id(frame.f_code)] = frame.f_code

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave out the tests of other parts: "2/8" keeps every eighth, from the third on."""
        part, _, parts = os.environ.get("MUTATIONS_PART", "0/1").partition("/")
        items[:] = items[int(part) :: int(parts)]

    def pytest_runtest_logstart(self) -> None:
        """Forget what the test before has called."""
        self.found.clear()
        if self.record and sys.version_info >= (3, 12):
            sys.monitoring.restart_events()
        elif self.record:  # several times slower
            threading.settrace(self._called)
            sys.settrace(self._called)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write a line with a test that has passed, and the functions that it has called."""
        if self.record and report.when == "call" and report.passed:
            tree = os.getcwd() + os.sep
            ours = tuple(tree + floor for floor in FLOORS)
            places = {
                f"{code.co_filename.removeprefix(tree)}:{code.co_firstlineno}"
                for code in [*self.found.values()]
                if code.co_filename.startswith(ours) and code.co_name != "<module>"
            }
            with open(self.record, "a", encoding="utf-8") as file:
                print(json.dumps([report.nodeid, sorted(places)]), file=file)

    def pytest_runtest_teardown(self, item: Any) -> None:
        """End the run after its seconds."""
        if time.monotonic() > self.end:
            item.session.shouldstop = BUDGET


def pytest_configure(config: Any) -> None:
    """Register the plug-in."""
    config.pluginmanager.register(Touched())
