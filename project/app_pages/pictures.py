"""Drawing that several pages share: pictures of panels, matrices with their numbers."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import streamlit as st
from matplotlib.figure import Figure
from training.script_helpers import Panel

#: Sizes of the numbers in a matrix, in points; cells that are too small for the first have none.
SMALLEST, LARGEST = 5, 12
#: The width of a character, with some room beside it, as a part of its height.
CHARACTER = 0.75
#: The number at which a colour is at its darkest.
MOST = 3.0
#: The usual width and height of a panel, in inches.
SIZE = 4.4
#: Dots per inch: enough for a screen.
DPI = 120


def png(panel: Panel, width: float, height: float) -> bytes:
    """Return a picture of one panel; the size is in inches."""
    # Not pyplot's figure, which one thread at a time may use.
    figure, picture = Figure(figsize=(width, height), layout="constrained"), BytesIO()
    panel(figure.subplots())
    figure.savefig(picture, format="png", dpi=DPI)
    return picture.getvalue()


def show_panels(
    *panels: Panel, where: Any = st, size: float = SIZE, height: float | None = None
) -> None:
    """Show panels side by side, or one below the other on a narrow screen."""
    for panel, column in zip(panels, where.columns(len(panels)), strict=True):
        column.image(png(panel, size, height or size))


def matrix(axes: Any, values: Any, title: str, numbers: str = "{:.2g}", **options: Any) -> None:
    """Draw a matrix, or a vector as a column, its numbers in the cells where there is room."""
    axes.set_title(title, fontsize=10)
    axes.set(xticks=[], yticks=[])
    if values is None:
        axes.set_axis_off()
        return
    values = np.asarray(values, np.float64)
    values = values[:, None] if values.ndim == 1 else values
    finite = np.where(np.isfinite(values), values, np.nan)
    axes.imshow(finite, **{"cmap": "RdBu_r", "vmin": -MOST, "vmax": MOST, **options})
    texts = [numbers.format(x).replace("-inf", "-∞").replace("nan", "–") for x in values.ravel()]
    cell = 72 * min(axes.figure.get_size_inches() / values.shape[::-1])
    size = min(LARGEST, cell / (CHARACTER * max(map(len, texts), default=1) or 1))
    if not numbers or size < SMALLEST:
        return
    for (row, col), text in zip(np.ndindex(values.shape), texts, strict=True):
        is_dark = 0.7 * MOST < abs(values[row, col]) < np.inf
        style = {"ha": "center", "va": "center", "fontsize": size}
        axes.text(col, row, text, color="white" if is_dark else "black", **style)


def colour_legend(dtype: Any) -> None:
    """Say below matrices what their colours mean."""
    st.caption(
        f"Numbers are {dtype}, without a unit. Blue is negative, white is 0 and red is positive; "
        f"numbers beyond ±{MOST:g} have the darkest colours."
    )
