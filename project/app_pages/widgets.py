"""Widgets that several pages share."""

from __future__ import annotations

import re
import textwrap  # beyond module 2
from collections.abc import Iterable
from typing import Any, TypeVar

import streamlit as st

T = TypeVar("T")


def own(name: str) -> str:
    """Return the key of a widget or a value of this page, so that pages do not share settings."""
    return f"{st.session_state['page']}.{name}"


def choose(
    label: str, options: Iterable[T], key: str, index: int = 0, where: Any = st, show: Any = str
) -> T:
    """Show a list of which one entry is chosen, and return it."""
    return where.selectbox(label, list(options), index, key=own(key), format_func=show)


def choose_step(count: int, jumps: list[int], unit: str) -> int:  # beyond module 2
    """Show the slider and the buttons of the steps; return the number of the step.

    Args:
        count: Number of steps.
        jumps: The steps to which two buttons lead.
        unit: The name of what ends at these.
    """
    state, step = st.session_state, own("step")
    state[step] = min(state.get(step, jumps[0] if jumps else 0), count - 1)

    def go(number: int) -> None:
        state[step] = min(max(number, 0), count - 1)

    now = state[step]
    later, earlier = [n for n in jumps if n > now], [n for n in jumps if n < now]
    moves = {
        "first": ("|◀ start", 0),
        "jump_back": (f"◀◀ {unit}", earlier[-1] if earlier else 0),
        "back": ("◀ step", now - 1),
        "next": ("step ▶", now + 1),
        "jump_next": (f"{unit} ▶▶", later[0] if later else count - 1),
        "last": ("end ▶|", count - 1),
    }
    row = st.container(horizontal=True)
    for key, (label, number) in moves.items():
        row.button(label, key=own(key), on_click=go, args=(number,))
    return int(st.slider("step", 0, count - 1, key=step))


def show_source(text: str, line: int | None) -> None:  # beyond module 2
    """Show the lines of a kernel around one, from 0, which gets a mark; its last lines for None."""
    lines = text.splitlines()
    first, last = (len(lines) - 12, len(lines)) if line is None else (line - 12, line + 4)
    first = max(first, 0)
    shown = textwrap.dedent("\n".join(lines[first:last])).splitlines()
    marks = ["▶ " if n == line else "  " for n in range(first, first + len(shown))]
    st.code("\n".join(map(str.__add__, marks, shown)), language="python")


def refuse(message: str, where: Any = st) -> None:
    """Show an error as it is: Markdown would read some of its characters as marks."""
    where.error(re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", " ".join(message.split())))
