"""Drawing that several pages share: figures of panels, matrices with their numbers."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import streamlit as st
from matplotlib.figure import Figure
from training.script_helpers import Panel

#: Matrices up to so many elements show their numbers.
MOST_NUMBERS = 100
#: The number at which a colour is at its darkest.
MOST = 3.0
#: Dots per inch: enough for a screen.
DPI = 120


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure; not pyplot's, which one thread at a time may use."""
    return Figure(figsize=(width, height), layout="constrained")


def show(figure: Figure, where: Any = st) -> None:
    """Put a figure on the page."""
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=DPI)
    where.image(picture.getvalue())


def show_panels(*panels: Panel, where: Any = st, size: float = 4.4) -> None:
    """Draw panels side by side."""
    figure = new_figure(size * len(panels), size)
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        panel(axes)
    show(figure, where)


def matrix(axes: Any, values: Any, title: str, numbers: str = "{:.2g}", **options: Any) -> None:
    """Draw a matrix, or a vector as a column, its numbers in the cells where there is room."""
    axes.set_title(title, fontsize=9)
    axes.set(xticks=[], yticks=[])
    if values is None:
        axes.set_axis_off()
        return
    values = np.asarray(values, np.float64)
    values = values[:, None] if values.ndim == 1 else values
    finite = np.where(np.isfinite(values), values, np.nan)
    axes.imshow(finite, **{"cmap": "RdBu_r", "vmin": -MOST, "vmax": MOST, **options})
    if numbers and values.size <= MOST_NUMBERS:
        for (row, col), value in np.ndenumerate(values):
            text = numbers.format(value).replace("-inf", "-∞").replace("nan", "–")
            is_dark = 0.7 * MOST < abs(value) < np.inf
            style = {"ha": "center", "va": "center", "fontsize": 8}
            axes.text(col, row, text, color="white" if is_dark else "black", **style)
