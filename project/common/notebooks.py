"""What scripts do in a notebook that they do not do in a terminal."""

from __future__ import annotations

import os
import sys
from typing import Any


def _shell() -> Any:
    """Return the notebook's shell, or None in a terminal and where IPython is not even imported."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell if hasattr(shell, "kernel") else None


def without_bar() -> bool | None:
    """Return tqdm's ``disable``: no bar in a file, which a notebook looks like to tqdm, but is not."""
    return False if _shell() else None


def show_picture(path: str | os.PathLike[str]) -> None:
    """Show a PNG file below the cell that ran a script; elsewhere do nothing."""
    if _shell():
        from IPython.display import Image, display

        display(Image(filename=os.fspath(path)))
