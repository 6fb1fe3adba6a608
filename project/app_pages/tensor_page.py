"""Module 2: one storage, many views; where an index lies in the storage."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import streamlit as st
from matplotlib.patches import Rectangle

import minitorch
from app_pages.pictures import show_panels
from app_pages.widgets import choose, own, refuse
from minitorch.tensor_data import TensorData, index_to_position

HIGHLIGHT, PALE = "#f59e0b", "#dbeafe"
#: Cells of the storage on a line.
LINE = 10


def _cells(axes: Any, table: Any, marked: Any, title: str) -> None:
    """Draw a table of positions, one of its cells marked."""
    table = np.atleast_2d(table)
    rows, cols = table.shape
    for (row, col), position in np.ndenumerate(table):
        if position < 0:  # beyond the end
            continue
        colour = HIGHLIGHT if position == marked else PALE
        axes.add_patch(Rectangle((col, row), 1, 1, facecolor=colour, edgecolor="grey"))
        axes.text(col + 0.5, row + 0.5, str(position), ha="center", va="center", fontsize=9)
    axes.set(xlim=(0, cols), ylim=(rows, 0), aspect="equal", title=title)
    axes.set_axis_off()


def page(hide_source: bool = False) -> None:
    """Show the page."""
    columns = st.columns(3)
    sizes = [
        columns[i].slider(f"size of dimension {i}", 1, 5, start, key=own(f"size{i}"))
        for i, start in enumerate((2, 3, 4))
    ]
    orders = list(itertools.permutations(range(3)))
    order = choose("order of the dimensions: permute", orders, "order")
    count = sizes[0] * sizes[1] * sizes[2]
    view = TensorData(np.arange(count, dtype=np.float64), tuple(sizes)).permute(*order)
    shape, strides = view.shape, view.strides
    left, middle, right = st.columns(3)
    left.metric("shape", str(shape))
    middle.metric("strides", str(strides))
    right.metric("contiguous", str(view.is_contiguous()))
    index = [
        column.slider(f"index {i}", 0, size - 1, 0, key=own(f"index{i}")) if size > 1 else 0
        for i, (column, size) in enumerate(zip(st.columns(3), shape, strict=True))
    ]
    position = index_to_position(np.array(index), np.array(strides))
    terms = " + ".join(f"{i}·{stride}" for i, stride in zip(index, strides, strict=True))
    st.latex(f"position = {terms} = {position}".replace("·", r"\cdot "))
    st.metric("position in the storage", position)
    table = view.to_array().astype(int)
    panels = [
        lambda axes, i=i: _cells(axes, table[i], position, f"[{i}, :, :]") for i in range(shape[0])
    ]
    views, storage = st.columns(2)
    show_panels(*panels, where=views, size=2.4)
    storage.caption(
        "The storage, an array of float64 in which nothing moves. A cell shows its position, which is also "
        "its number; orange is the element at the index."
    )
    lines = np.full((-(-count // LINE), LINE), -1)
    lines.flat[:count] = np.arange(count)
    show_panels(lambda axes: _cells(axes, lines, position, "storage"), where=storage, height=2.4)
    st.header("Broadcasting")
    first, second = st.columns(2)
    shapes = [
        column.text_input(f"shape of {name}", start, key=own(f"shape_{name}"))
        for column, name, start in ((first, "a", "2, 3, 4"), (second, "b", "3, 1"))
    ]
    try:
        known = [tuple(int(size) for size in text.split(",") if size.strip()) for text in shapes]
        together = minitorch.shape_broadcast(*known)
    except (ValueError, IndexError, minitorch.IndexingError) as error:
        refuse(str(error))
        return
    st.metric("shape of a + b", str(tuple(together)))
