"""Widgets that several pages share."""

from __future__ import annotations

import re
from typing import Any

import streamlit as st


def refuse(message: str, where: Any = st) -> None:
    """Show an error as it is: Markdown would read some of its characters as marks."""
    where.error(re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", " ".join(message.split())))
