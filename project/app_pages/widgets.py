"""Widgets that several pages share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import streamlit as st

T = TypeVar("T")


def choose(
    label: str,
    options: Iterable[T],
    key: str,
    where: Any = st,
    index: int = 0,
    names: Callable[[T], str] = str,
) -> T:
    """Show a list of which one entry is chosen, and return it."""
    return where.selectbox(label, list(options), index=index, key=key, format_func=names)


def refuse(message: str, where: Any = st) -> None:
    """Show an error as it is: Markdown would read some of its characters as marks."""
    where.error(re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", " ".join(message.split())))
