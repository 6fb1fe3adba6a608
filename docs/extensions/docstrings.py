"""Docstrings are plain text for ``help``; this makes of them what the site's parser reads as meant."""

from __future__ import annotations

import re
from typing import Any

LITERAL = re.compile(r"(``.+?``|`.+?`)")
#: The fields of a kernel's header; see docs/architecture.md.
FIELD = re.compile(
    r"^(Computes|Source|Grid|Block|One thread does|Shared|Registers|Global traffic|Needs):(?= )"
)


def as_rst(lines: list[str]) -> list[str]:
    """Return lines in which stars and bars are themselves, and a kernel's header is a list of fields."""
    is_kernel = any(line.startswith("Computes: ") for line in lines)
    result = []
    code = -1  # the indentation of the line before a block of code, or -1 outside of one
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if code >= 0 and (indent > code or not line.strip()):
            result.append(line)
            continue
        code = indent if line.endswith("::") else -1
        parts = LITERAL.split(line)
        parts[::2] = [re.sub(r"([*|])", r"\\\1", text) for text in parts[::2]]
        line = "".join(parts)
        result.append(FIELD.sub(r":\1:", line) if is_kernel else line)
    return result


def _process(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = as_rst(lines)
    if what in ("attribute", "data", "property"):
        lines.insert(0, "")  # napoleon takes what is before a colon of the first line for a type


def _skips(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Leave out fields of named tuples, whose docstrings say nothing."""
    return True if (getattr(thing, "__doc__", "") or "").startswith("Alias for field") else None


def setup(app: Any) -> dict[str, Any]:
    """Run before napoleon, which reads the sections."""
    app.connect("autodoc-process-docstring", _process, priority=100)
    app.connect("autodoc-skip-member", _skips)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
