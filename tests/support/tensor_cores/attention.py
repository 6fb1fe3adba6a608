"""The layouts that ``flash2_mma`` chooses from."""

from __future__ import annotations

from typing import Any


def layouts_for(table: Any, width: int) -> Any:
    """Return what a table of the rung says of a head width."""
    return next(choices for limit, choices in table.items() if width <= limit)
