"""The section of the guide that a page of the app belongs to."""

from __future__ import annotations

import re
from pathlib import Path

import streamlit as st

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"
FORMULA = re.compile(r"\$\$\n(.*?)\n\$\$", re.DOTALL)
#: Pictures, with their captions, and links lead to files that the app does not serve.
PICTURE = re.compile(r"^!\[.*\n(?:\n\*[^*\n].*\*\n)?", re.MULTILINE)
LINK = re.compile(r"(?<![!\w])\[([^\]]+)\]\((?!https?:)[^)]+\)")


def section(guide: str, heading: str) -> str:
    """Return a section of a guide as Markdown for Streamlit; "" if the guide has none."""
    path = GUIDES / f"{guide}.md"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    found = next((part for part in parts if part.startswith(f"## {heading}")), "")
    found = FORMULA.sub(lambda m: f"$$\n\\begin{{aligned}}{m[1]}\\end{{aligned}}\n$$", found)
    return LINK.sub(r"\1", PICTURE.sub("", found)).removeprefix("## ")


def show_guide(guide: str, heading: str) -> None:
    """Show a section of a guide, folded."""
    title, _, text = section(guide, heading).partition("\n")
    if title:
        with st.expander(f"Guide: {title} (docs/guides/{guide}.md)"):
            st.markdown(text)
