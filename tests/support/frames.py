"""How many functions of ours a call enters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_FLOORS = tuple(str(ROOT / floor) for floor in ("kernels", "minitorch"))


def entered(call: Callable[[], Any]) -> list[str]:
    """Return the functions of ``kernels`` and ``minitorch`` that a call enters, in order."""
    names = list[str]()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_FLOORS):
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names
