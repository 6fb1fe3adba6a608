"""The names of rungs in a call, and the errors for rungs that cannot run it."""

from __future__ import annotations

import os
from collections.abc import Sequence

#: The environment variable that names the rung of a whole run, for calls with "auto".
RUNG_VARIABLE = "MINITORCH_RUNG"


def rung_of_run() -> str:
    """Return the rung of calls with "auto"."""
    return os.environ.get(RUNG_VARIABLE) or "auto"


def unknown_rung(rung: str, names: Sequence[str]) -> ValueError:
    """Return the error for an unknown rung."""
    return ValueError(
        f"no rung is named {rung!r}{_source(rung)}; the rungs are {', '.join(map(repr, names))}, and "
        "'auto' takes the fastest that can run the call"
    )


def unusable_rung(rung: str, why: str, target: str, usable: Sequence[str]) -> ValueError:
    """Return the error for a requested rung that cannot run a call, given the usable ones of its target."""
    way_out = (
        f"use 'auto' or one of {', '.join(map(repr, usable))}"
        if usable
        else f"no rung of the {target} target can; use smaller heads, or none of the options named"
    )
    return ValueError(f"rung {rung!r}{_source(rung)} cannot run this call: {why}; {way_out}")


def _source(rung: str) -> str:
    return f" (from {RUNG_VARIABLE})" if rung == rung_of_run() != "auto" else ""
