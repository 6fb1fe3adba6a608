"""How many examples a property test draws."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings


def at_most(count: int) -> Any:
    """Draw ``count`` examples, or fewer where ``MINITORCH_EXAMPLES`` asks for fewer of all tests."""
    return settings(max_examples=min(count, int(os.environ.get("MINITORCH_EXAMPLES", count))))
