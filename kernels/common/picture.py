"""A picture as SVG: plain text, no library, the same bytes on every machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

INK, PALE, BLUE, GREEN, RED, AMBER = "#222", "#eee", "#bcd8f5", "#bfe3c5", "#f3c1bb", "#f8e0a8"


class Picture:
    """A picture in pixels that grows to the right and downwards, with a title for screen readers."""

    def __init__(self, width: int, height: int, title: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="sans-serif">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0,0 8,4 0,8z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def box(
        self, x: float, y: float, w: float, h: float, text: str = "", fill: str = "white"
    ) -> None:
        """Draw a rectangle with a text in its middle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" stroke="{INK}"/>'
        )
        if text:
            self.text(x + w / 2, y + h / 2 + 5, text)

    def area(self, x: float, y: float, w: float, h: float, fill: str) -> None:
        """Fill a rectangle, without a border."""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}"/>')

    def text(self, x: float, y: float, text: str, size: int = 14, anchor: str = "middle") -> None:
        """Write a line of text; y is its base line."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{INK}">'
            f"{escape(text)}</text>"
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> None:
        """Draw an arrow from the first point to the second."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}"{dash} '
            'marker-end="url(#head)"/>'
        )

    def path(self, points: Sequence[tuple[float, float]], colour: str, width: float) -> None:
        """Draw a line through points."""
        places = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(
            f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>'
        )

    def grid(
        self, x: float, y: float, rows: int, cols: int, cell: float,
        label: Callable[[int, int], str] = lambda r, c: "",
        fill: Callable[[int, int], str] = lambda r, c: "white",
    ) -> None:  # fmt: skip
        """Draw a matrix of cells."""
        for r in range(rows):
            for c in range(cols):
                self.box(x + c * cell, y + r * cell, cell, cell, label(r, c), fill(r, c))

    def svg(self) -> str:
        """Return the text of the file."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"
