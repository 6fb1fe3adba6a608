"""Run the scripts of ``project/`` in this process."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from typing import Any

import pytest


def refused(main: Callable[[list[str]], Any], *args: Any) -> str:
    """Call the ``main`` of a script; return the one line with which it ends."""
    errors = io.StringIO()
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stderr(errors):
        main([str(arg) for arg in args])
    code = ended.value.code
    assert code, f"{args} are taken"
    text = code if isinstance(code, str) else errors.getvalue()
    lines = [line for line in re.split(r"[\r\n]+", text) if line.strip() and "%|" not in line]
    assert len(lines) == 1, lines
    return lines[0].strip()
