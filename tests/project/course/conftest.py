"""What the tests of a process share: the tests and values that the course expects of every task."""

from __future__ import annotations

import pytest
from course.expected import Expected, expected_tests
from course.tasks import TASKS
from course.workplace import Workplace


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return expected_tests(Workplace(tmp_path_factory.mktemp("expected"), gpu=False), list(TASKS))
