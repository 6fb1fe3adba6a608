"""The table of operations: which function serves a name on a backend."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, TypeVar

Operation = TypeVar("Operation", bound=Callable[..., Any])
#: The folder that places in printed tables are relative to.
_ROOT = Path(__file__).resolve().parents[2]


class Operations(dict[str, Callable[..., Any]]):
    """The functions that replace operations on the backends of one kind, by the name of the operation.

    An operation without an entry is served by the function of that name.  A printed table has a line for
    each operation: its name, the function that serves it, and the place of that function.

    Attributes:
        kernels: The fused kernels that the entries launch, or None.
    """

    #: The functions that :func:`operation` marked, which serve backends without an entry.
    plain: ClassVar[dict[str, Callable[..., Any]]] = {}
    kernels: Any = None

    def __missing__(self, name: str) -> Callable[..., Any]:
        return self.plain[name]

    def __repr__(self) -> str:
        lines = []
        for name in sorted({*self, *self.plain}, key=str.lower):
            function = self[name]
            code = inspect.unwrap(function).__code__
            path = Path(code.co_filename)
            place = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path
            lines.append(
                f"{name:30} {function.__qualname__:30} {place.as_posix()}:{code.co_firstlineno}"
            )
        return "\n".join(lines)


def operation(function: Operation) -> Operation:
    """Mark a function or method that a table may replace: its first tensor chooses the backend.

    Args:
        function: What serves a backend whose table has no entry for the function's qualified name.
    """
    name = function.__qualname__
    Operations.plain[name] = function

    @wraps(function)
    def serve(*args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()):
            if hasattr(type(x), "_ensure_tensor"):  # a tensor
                return x.backend.ops[name](*args, **kwargs)
        return function(*args, **kwargs)  # which names what it needs

    return serve  # type: ignore[return-value]
