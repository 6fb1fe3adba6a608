"""The table of operations: which function serves a name on a backend."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

from .unique import Unique

Operation = TypeVar("Operation", bound=Callable[..., Any])
#: The folder that places in printed tables are relative to.
_ROOT = Path(__file__).resolve().parents[2]


class Operations(dict[str, Callable[..., Any]]):
    """The functions that replace operations on the backends of one kind, by the name of the operation.

    An operation without an entry is served by the function of that name.  A printed table has a line for
    each operation: its name, the function that serves it, and the place of that function.

    Args:
        owner: The subclass of ``TensorOps`` whose backends the table serves.

    Attributes:
        loops: Whose loops serve the backends: the owner's, or those of a subclass.
        kernels: The fused kernels that the entries launch, or None.
        backends: The backends, which lift operators anew when the loops change.
    """

    #: The functions that :func:`operation` marked, which serve backends without an entry.
    plain: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init__(self, owner: Any):
        self.owner = self.loops = owner
        self.kernels: Any = None
        self.backends = WeakSet[Any]()

    def serve(self, loops: Any, entries: dict[str, Callable[..., Any]]) -> None:
        """Replace the functions that serve operations.

        Args:
            loops: A subclass of the owner, or itself.
            entries: The functions of other operations.
        """
        self.clear()
        self.update(entries)
        self.loops = loops
        for backend in self.backends:
            backend.lift()

    def __missing__(self, name: str) -> Callable[..., Any]:
        function = self.plain.get(name)
        return self.loops.served()[name] if function is None else function

    def __repr__(self) -> str:
        lines = []
        for name in sorted({*self, *self.plain, *self.loops.served()}, key=str.lower):
            function = self[name]
            code = inspect.unwrap(function).__code__
            path = Path(code.co_filename)
            place = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path
            lines.append(
                f"{name:30} {function.__qualname__:30} {place.as_posix()}:{code.co_firstlineno}"
            )
        return "\n".join(lines)


def operation(function: Operation) -> Operation:
    """Mark a function or method that a table may replace: its first argument, which has a backend, chooses.

    Args:
        function: What serves a backend whose table has no entry for the function's qualified name.
    """
    name, names = function.__qualname__, [*inspect.signature(function).parameters]
    place = int(names[0] == "self")
    Operations.plain[name] = function

    @wraps(function)
    def serve(*args: Any, **kwargs: Any) -> Any:
        x = args[place] if len(args) > place else kwargs.get(names[place])
        backend = getattr(x, "backend", None)
        if isinstance(backend, Unique):
            return backend.ops[name](*args, **kwargs)  # type: ignore[attr-defined]
        return function(*args, **kwargs)  # which names what it needs

    return serve  # type: ignore[return-value]
