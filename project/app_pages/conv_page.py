"""Module 4: a convolution and a pooling of one image, and where each number comes from."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import streamlit as st
from matplotlib.patches import Rectangle

import minitorch
from app_pages.pictures import colour_legend, matrix, show_panels
from app_pages.widgets import choose, own

KERNELS: dict[str, list[list[float]]] = {
    "blur": [[1 / 9] * 3] * 3,
    "vertical edges": [[-1, 0, 1]] * 3,
    "horizontal edges": [[-1, -1, -1], [0, 0, 0], [1, 1, 1]],
    "sharpen": [[0, -1, 0], [-1, 5, -1], [0, -1, 0]],
    "shift": [[0, 0, 0], [0, 0, 0], [0, 0, 1]],
}
SIZE = 8


def images() -> dict[str, Any]:
    """Return images of 8 x 8, drawn here: nothing need be loaded."""
    y, x = np.mgrid[:SIZE, :SIZE]
    distance = np.hypot(x - 3.5, y - 3.5)
    return {
        "ring": ((distance > 1.5) & (distance < 3.6)).astype(float),
        "square": ((abs(x - 3.5) < 2.5) & (abs(y - 3.5) < 2.5)).astype(float),
        "diagonal": (abs(x - y) < 1.5).astype(float),
        "slope": x / (SIZE - 1.0),
    }


def page(hide_source: bool = False) -> None:
    """Show the page."""
    found = images()
    image = found[choose("image", found, "image")]
    start = KERNELS[choose("kernel", KERNELS, "kernel")]
    weight = np.array(start, np.float64)
    weight[1, 1] += st.slider(
        "added to the kernel's middle", -2.0, 2.0, 0.0, 0.1, key=own("middle")
    )
    row = st.slider("row of the output", 0, SIZE - 1, 3, key=own("row"))
    col = st.slider("column of the output", 0, SIZE - 1, 3, key=own("col"))
    tensors = [minitorch.tensor(x[None, None].tolist()) for x in (image, weight)]
    output = minitorch.Conv2dFun.apply(*tensors)
    values = output.to_numpy()[0, 0]

    def window(axes: Any) -> None:
        matrix(axes, image, "input (black is 1), and a window", "", cmap="gray_r")
        axes.add_patch(Rectangle((col - 0.5, row - 0.5), 3, 3, fill=False, ec="#f59e0b", lw=3))

    def result(axes: Any) -> None:
        matrix(axes, values, "output")
        axes.add_patch(Rectangle((col - 0.5, row - 0.5), 1, 1, fill=False, ec="#f59e0b", lw=3))

    show_panels(window, lambda axes: matrix(axes, weight, "kernel"), result, size=3.4)
    colour_legend(values.dtype)
    padded = np.pad(image, (0, 2))[row : row + 3, col : col + 3]
    terms = " + ".join(
        f"{a:g}·{b:.2g}" for a, b in zip(padded.ravel(), weight.ravel(), strict=True) if a
    )
    st.metric(f"output[{row}, {col}]", f"{values[row, col]:.4g}")
    st.caption(f"the window times the kernel: {terms or '0'}; beyond the edge are zeros")
    tile = st.select_slider("tile of the pooling", (1, 2, 4, 8), 2, key=own("tile"))
    pooled = {
        "avgpool2d": minitorch.avgpool2d(output, (tile, tile)),
        "maxpool2d": minitorch.maxpool2d(output, (tile, tile)),
    }
    show_panels(
        *(partial(matrix, values=x.to_numpy()[0, 0], title=name) for name, x in pooled.items()),
        size=3.0,
    )
