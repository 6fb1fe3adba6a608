"""Backends, which ``copy`` and ``pickle`` do not duplicate, because operations compare them by identity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self


class Unique:
    """The base class of :class:`minitorch.TensorBackend`.

    Args:
        ops: The operations; a pickled backend becomes the first one that was made of them.
    """

    kind: Any
    _first: ClassVar[dict[Any, Any]] = {}

    def __new__(cls, ops: Any) -> Self:
        """Make a backend, and note it if it is the first one."""
        self = super().__new__(cls)
        cls._first.setdefault(ops, self)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Describe the backend for ``copy`` and ``pickle``."""
        return _first_of, (type(self), self.kind)


def _first_of(kind: Any, ops: Any) -> Any:
    return Unique._first.get(ops) or kind(ops)
