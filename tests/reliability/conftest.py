"""What the tests that draw calls share: notes of what they draw, for the process that started them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from ..support.fuzzing.draws import Notes


@pytest.fixture(scope="module")
def notes() -> Iterator[Notes]:
    found = Notes()
    yield found
    path = os.environ.get("MINITORCH_FUZZ_COUNTS")
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(found.counts, file)
