"""The memory of calls: how a call runs that was made before."""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakSet

#: Maximum number of calls that one memory keeps; when it is reached, all are dropped.
MOST_CALLS = 1024


class KnownCalls(dict[Any, Any]):
    """How calls run, by their keys."""

    _every: ClassVar[WeakSet[KnownCalls]] = WeakSet()
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self._every.add(self)

    def keep(self, key: Any, call: Any) -> None:
        """Keep how a call runs."""
        if len(self) >= MOST_CALLS:
            self.clear()
        self[key] = call

    @classmethod
    def cache_clear(cls) -> None:
        """Drop all calls of all memories, and the launches that they hold."""
        for calls in [*cls._every]:
            calls.clear()
