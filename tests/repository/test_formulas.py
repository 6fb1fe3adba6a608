"""The display formulas of the site in a browser: none is clipped, and no page scrolls sideways."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ..support.browser import browser as browser

ROOT = Path(__file__).parents[2]
DISPLAY = re.compile(r"^\$\$(.+?)\$\$", re.M | re.S)


def formulas() -> list[str]:
    """Return the source of every display formula."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return [found.strip() for page in pages for found in DISPLAY.findall(page.read_text())]


@pytest.mark.parametrize("width", [1280, 390])
def test_formulas_are_drawn_whole(browser: Any, width: int) -> None:
    math = pytest.importorskip("docutils.utils.math.latex2mathml")
    sources = formulas()
    assert len(sources) > 10
    style = (ROOT / "docs" / "static" / "site.css").read_text()
    boxes = []
    for source in sources:
        if "\\\\" in source or "&" in source:  # as docs/extensions/mathml.py
            source = f"\\begin{{aligned}}{source}\\end{{aligned}}"
        boxes.append(f'<div class="math">{math.tex2mathml(source, as_block=True)}</div>')
    view = browser.new_page(viewport={"width": width, "height": 800})
    # Furo gives the text of a page 46 em at most.
    view.set_content(
        f"<style>{style}</style><body style='max-width: 46em; margin: 1em'>{''.join(boxes)}</body>"
    )
    sizes = view.evaluate(
        """() => [...document.querySelectorAll("div.math")].map(box => {
            const drawn = box.querySelector("math").getBoundingClientRect();
            const own = box.getBoundingClientRect();
            return [drawn.top - own.top, own.bottom - drawn.bottom, drawn.width,
                    box.scrollWidth - box.clientWidth, box.offsetHeight - box.clientHeight];
        })"""
    )
    assert len(sizes) == len(sources)
    for source, (above, below, drawn, hidden, bar) in zip(sources, sizes, strict=True):
        assert above >= 0 and below >= 0 and drawn > 0, f"clipped: {source}"
        if width == 1280:
            assert hidden <= 0 and bar == 0, f"wider than the text, by {hidden} pixels: {source}"
    page = view.evaluate("document.documentElement.scrollWidth")
    assert page <= width, "the page scrolls sideways"
    view.close()
