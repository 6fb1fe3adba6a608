"""Widgets that several pages share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeVar

import streamlit as st

T = TypeVar("T")


def choose(label: str, options: Iterable[T], key: str, index: int = 0, where: Any = st) -> T:
    """Show a list of which one entry is chosen, and return it."""
    return where.selectbox(label, list(options), index, key=key)


def refuse(message: str, where: Any = st) -> None:
    """Show an error as it is: Markdown would read some of its characters as marks."""
    where.error(re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", " ".join(message.split())))
