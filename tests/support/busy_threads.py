"""Which threads of this process compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil


def busy_threads(run: Callable[[], Any]) -> int:
    """Return the number of threads that compute while a function runs again and again."""
    counts = []
    # Threads of earlier work may still wait for more of it.
    while 1 not in counts and len(counts) < 4:
        before = {x.id: x.user_time for x in psutil.Process().threads()}
        stop = time.process_time() + 0.3
        while time.process_time() < stop:
            run()
        spent = [x.user_time - before.get(x.id, 0.0) for x in psutil.Process().threads()]
        counts.append(sum(x > 0.2 * max(spent) for x in spent))
    return min(counts)
