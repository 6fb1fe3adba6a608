"""One block of a student's kernel: its threads, its barriers and its shared memory, step by step."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import streamlit as st
from matplotlib.patches import Rectangle

from app_pages.block_recording import KERNELS, Moment, Recording, record
from app_pages.pictures import colour_legend, matrix, show_panels
from app_pages.widgets import choose, choose_step, own, refuse, show_source


@st.cache_resource(show_spinner="the kernel runs on the emulated GPU …", max_entries=32)
def recording(name: str, n: int, without: int | None) -> Recording:
    """Record a kernel, once."""
    return record(name, n, without)


def threads(found: Recording, number: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return a row for each thread, and the variables that are the same in all."""
    now, last = found.moments[number], dict[int, Moment]()
    variables: dict[int, dict[str, float]] = {}
    for moment in found.moments[: number + 1]:
        last[moment.thread] = moment
        variables[moment.thread] = moment.variables or variables.get(moment.thread, {})
    every = [variables.get(i, {}) for i in range(len(found.places))]
    begun = [x for x in every if x]
    names = [key for key in variables[now.thread] if len({x.get(key) for x in begun}) > 1]
    rows = []
    for i, place in enumerate(found.places):
        moment = last.get(i)
        where = "has not begun" if moment is None else "runs on"
        if moment is not None and moment.line is None:
            where = "has ended"
        elif moment is not None and moment.passed == now.passed:
            where = f"waits in line {moment.line}"
        rows.append({
            "threadIdx": ", ".join(map(str, place)), "": where + " ◀" * (i == now.thread),
            **{name: every[i].get(name) for name in names},
        })  # fmt: skip
    return rows, {key: x for key, x in variables[now.thread].items() if key not in names}


def changed(found: Recording, number: int) -> dict[str, Any]:
    """Return which elements of each shared array the thread of a step has written."""
    before = found.moments[number - 1].shared if number else {}
    return {
        name: ~((array == before[name]) | np.isnan(array)) if name in before else ~np.isnan(array)
        for name, array in found.moments[number].shared.items()
    }


def shared_picture(found: Recording, number: int) -> None:
    """Draw the shared arrays; the elements that the thread has just written have a frame."""
    now, writes = found.moments[number].shared, changed(found, number)

    def panel(axes: Any, name: str) -> None:
        # The kernel has memory for its largest block: what this one never writes is left out.
        used = np.argwhere(~np.isnan(found.moments[-1].shared[name]))
        part = tuple(slice(0, end + 1) for end in used.max(0, initial=0))
        values, frames = np.atleast_2d(now[name][part]), np.atleast_2d(writes[name][part])
        matrix(axes, values, f"{name}, {now[name].dtype}", "{:.3g}")
        for row, col in np.argwhere(frames):
            axes.add_patch(Rectangle((col - 0.5, row - 0.5), 1, 1, fill=False, color="black", lw=2))

    height = 0.8 if all(x.ndim == 1 for x in now.values()) else 3.4
    show_panels(*(partial(panel, name=name) for name in now), height=height)
    colour_legend(", ".join({str(x.dtype) for x in now.values()}))


def page(hide_source: bool = False) -> None:
    """Show the page."""
    name = choose("kernel", KERNELS, "block_kernel", where=st.sidebar)
    n = st.sidebar.slider("elements to sum over", 2, 16, 7, key=own("block_n"))
    found = recording(name, n, None)
    lines = sorted({moment.line for moment in found.moments if moment.line})
    label = {None: "none", **{line: f"line {line}" for line in lines}}
    without = choose("leave out the barrier in", label, "without", where=st.sidebar, show=label.get)
    if without is not None:
        found = recording(name, n, without)
    if found.error:
        refuse(found.error)
    if len(found.moments) < 2:
        return
    opens = [
        i
        for i, (x, y) in enumerate(zip(found.moments, found.moments[1:], strict=False), 1)
        if x.passed < y.passed
    ]
    number = choose_step(len(found.moments), opens, "barrier")
    now = found.moments[number]
    rows, same = threads(found, number)
    who = f"Thread ({', '.join(map(str, found.places[now.thread]))})"
    waiting = sum("waits" in row[""] for row in rows)
    if now.line is None:
        st.markdown(f"> {who} has ended.")
    elif waiting == len(rows):
        st.markdown(f"> {who} is the last to reach the barrier: now all {waiting} may run on.")
    else:
        st.markdown(f"> {who} waits at the barrier; {waiting} of {len(rows)} threads are there.")
    if now.shared:
        shared_picture(found, number)
    st.dataframe(rows, hide_index=True, height=320)
    st.caption("The same in all threads: " + ", ".join(f"{key} = {x:g}" for key, x in same.items()))
    if not hide_source:
        show_source(found.source, None if now.line is None else now.line - found.first)
