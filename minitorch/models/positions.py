"""Ranges of positions that a device keeps."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np


@lru_cache(maxsize=64)
def kept_range(start: int, stop: int, step: int = 1) -> Any:
    """Return a range as a read-only array, which is copied to a device once."""
    found = np.arange(start, stop, step)
    found.setflags(write=False)
    return found
