"""One attention call, step by step, from a recording of the real kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import streamlit as st
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from app_pages.pictures import colour_legend, matrix, show_panels
from app_pages.recording import MASKS, Recording, RunSettings, Step, record
from app_pages.tile_view import Story, TileView
from app_pages.tile_words import sentence
from app_pages.widgets import choose, choose_step, own, refuse, show_source
from kernels.traffic.formulas import TRAFFIC, HeadShape, total

#: With the task that a student writes it in.
RUNGS = {"naive": "", "flash1": "task 5.4", "flash2": "task 5.7, and task 5.9 for masks of blocks"}
#: flash1 has the options of the paper of 2022, and of these masks no others.
MASKS_OF_FLASH1 = ("none", "causal")
TILE_SIZES = (4, 8, 16)
#: The width of a tile's picture, in inches: three are side by side.
WIDTH = 2.9
#: What has become of a tile: name and colour, in the order of ``Story.progress``.
STATES = {
    "never visited": "#e5e7eb", "to come": "#ffffff", "done": "#93c5fd", "in shared memory": "#f59e0b",
}  # fmt: skip


def rungs_of(mask: str) -> tuple[str, ...]:
    """Return the rungs that have a mask."""
    return tuple(name for name in RUNGS if name != "flash1" or mask in MASKS_OF_FLASH1)


@st.cache_resource(show_spinner="the kernels run on the emulated GPU …", max_entries=32)
def recordings(seq: int, dim: int, block_q: int, block_k: int, mask: str) -> list[Recording]:
    """Record one call with each of the rungs that have the mask."""
    return record(*(RunSettings(rung, seq, dim, block_q, block_k, mask) for rung in rungs_of(mask)))


def controls() -> tuple[str, tuple[int, int, int, int, str]]:
    """Show the sliders; return the rung and the other settings."""
    side = st.sidebar
    mask = choose("mask", MASKS, "mask", 1, side)
    rungs = rungs_of(mask)
    rung = choose("kernel", rungs, "rung", len(rungs) - 1, side)
    seq = side.slider("N, rows and columns", 8, 48, 16, 4, key=own("N"))
    dim = side.slider("d, head_dim", 4, 16, 8, 4, key=own("d"))
    block_q = side.select_slider("B_r, query rows a tile", TILE_SIZES, 4, key=own("block_q"))
    block_k = side.select_slider("B_c, key columns a tile", TILE_SIZES, 4, key=own("block_k"))
    return rung, (seq, dim, block_q, block_k, mask)


def overview(axes: Any, story: Story, number: int) -> None:
    """Draw which tiles of the scores have been visited, a row for each query tile."""
    states, colours = story.progress(number), [*STATES.values()]
    axes.imshow(states, cmap=ListedColormap(colours), vmin=0, vmax=len(colours) - 1)
    for letter, axis, count in zip("QK", (axes.yaxis, axes.xaxis), states.shape, strict=True):
        axis.set_ticks(range(count), [f"{letter}_{i}" for i in range(count)])
        axis.set_ticks(np.arange(count + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="grey")
    axes.tick_params(which="minor", length=0)
    axes.set_title("tiles of S = τ Q Kᵀ", fontsize=10)
    patches = [Patch(facecolor=c, edgecolor="grey", label=name) for name, c in STATES.items()]
    axes.figure.legend(handles=patches, loc="outside lower center", ncols=2, fontsize=9)


#: What the tile in hand consists of: name → title and the format of its numbers.
PARTS = {
    "Q": ("Q_{i}  (shared)", "{:.2f}"),
    "K": ("K_{j}  (shared)", "{:.2f}"),
    "V": ("V_{j}  (shared)", "{:.2f}"),
    "O": ("accumulator O", "{:.2f}"),
    "S": ("S of the tile", "{:.2f}"),
    "P": ("P of the tile", "{:.3f}"),
    "m, l": ("row_max | row_sum | rescale", "{:.3f}"),
}


def parts_of(view: TileView) -> dict[str, Any]:
    """Return the matrix of each of PARTS at a step, None for one that is not known yet."""
    statistics = [view.row_max, view.row_sum, view.rescale]
    known = [np.full(len(view.q_tile), np.nan) if x is None else x for x in statistics]
    values = view.q_tile, view.k_tile, view.v_tile, view.acc, view.scores, view.probs
    return dict(zip(PARTS, (*values, np.stack(known, axis=1)), strict=True))


def tile_pictures(view: TileView) -> None:
    """Draw the tiles of a visit: operands, then scores, probabilities and statistics, then the output."""
    values = parts_of(view)
    for names in (("Q", "K", "V"), ("S", "P", "m, l"), ("O",)):
        panels = [partial(tile_panel, view=view, name=name, values=values[name]) for name in names]
        rows, cols = max(np.shape(values[name]) or (1, 8) for name in names)
        where = st if len(names) > 1 else st.columns(3)[0]
        show_panels(*panels, where=where, size=WIDTH, height=min(WIDTH * rows / cols, WIDTH) + 0.3)


def tile_panel(axes: Any, view: TileView, name: str, values: Any) -> None:
    """Draw one of PARTS."""
    title = PARTS[name][0].format(i=view.visit[0], j=view.visit[1])
    numbers = "{:.1f}" if name in "QKVO" else "{:.2g}"
    matrix(axes, values, title if values is not None else f"{title}: not yet", numbers)


def zoomed(view: TileView, name: str) -> None:
    """Show the numbers of one part of a tile."""
    values = parts_of(view)[name]
    if values is None:
        st.caption(f"{name} is not known at this step")
        return
    title, numbers = PARTS[name]
    st.caption(title.format(i=view.visit[0], j=view.visit[1]))
    st.dataframe([{str(j): numbers.format(x) for j, x in enumerate(row)} for row in values])


def naive_pictures(step: Step, seq: int) -> None:
    """Draw the arrays in global memory while the naive rung runs."""
    names = {"scores": "S, then P, in global memory", "out": "O in global memory"}
    written = {title: step.written.get(name) for name, title in names.items()}
    show_panels(*(
        partial(matrix, values=None if x is None else x.reshape(seq, -1), title=title, numbers="")
        for title, x in written.items()
    ))  # fmt: skip


def counters(step: Step, before: Step | None) -> None:
    """Show what has travelled so far, in all and array by array."""
    now = total(step.counts)
    last = total(before.counts) if before else total({})
    reads, writes = st.columns(2)
    reads.metric("elements read", f"{now.reads:,}", f"{now.reads - last.reads:+,} in this step")
    writes.metric(
        "elements written", f"{now.writes:,}", f"{now.writes - last.writes:+,} in this step"
    )
    rows = [
        {"array": name, "read": traffic.reads, "written": traffic.writes}
        for name, traffic in step.counts.items()
    ]
    st.dataframe(rows, hide_index=True)


def comparison(recording: Recording, found: list[Recording], number: int) -> None:
    """Draw the running totals of all rungs, and say how far the chosen one is."""
    moved = {x.settings.rung: [total(step.counts).moved for step in x.steps] for x in found}
    points = [
        {"% of all steps": 100 * i / max(len(values) - 1, 1), "elements read and written": value,
         "kernel": f"{rung}: {values[-1]:,}"}
        for rung, values in moved.items() for i, value in enumerate(values)
    ]  # fmt: skip
    x, y = [*points[0]][:2]
    st.line_chart(points, x=x, y=y, color="kernel")
    own = moved[recording.settings.rung]
    st.caption(
        f"{recording.settings.rung}: {100 * number / max(len(own) - 1, 1):.0f} % of the steps"
    )


def formula_line(recording: Recording) -> str:
    """Say what the formula of a rung gives for a whole call, where there is one for it."""
    s = recording.settings
    if s.mask.startswith("blocks") or (s.rung == "naive" and s.mask != "none"):
        return "There is no formula here for this mask; the counters count what the kernels do."
    round_up = 16 if s.rung == "naive" else 1  # the products' own tiles
    tile = tuple(-(-block // round_up) * round_up for block in (s.block_q, s.block_k))
    shape = HeadShape(s.seq, s.seq, s.head_dim, s.head_dim, recording.lower, recording.upper)
    expected = total(TRAFFIC[s.rung](shape, tile)).moved  # type: ignore[arg-type]
    counted = total(recording.steps[-1].counts).moved
    sign = "=" if expected == counted else "≠"
    return f"The whole call: counted {counted:,} {sign} {expected:,} by the formula."


def page(hide_source: bool = False) -> None:
    """Show the page."""
    rung, settings = controls()
    try:
        found = recordings(*settings)
    except RuntimeError as error:
        refuse(str(error))
        return
    recording = next((each for each in found if each.settings.rung == rung), None)
    if recording is None:
        refuse(f"{rung} is not written yet: it is {RUNGS[rung]}; choose another kernel")
        return
    story = Story(recording)
    number = choose_step(len(recording.steps), story.last_steps(), "tile")
    step = recording.steps[number]
    before = recording.steps[number - 1] if number else None
    st.markdown(
        f"**{step.kernel}**, block {step.block}: {step.comment or 'a barrier'}"
        f" — step {number} of {len(recording.steps) - 1}"
    )
    if words := sentence(story, number):
        st.markdown(f"> {words}")
    if rung == "naive":
        naive_pictures(step, recording.settings.seq)
    else:
        view = story.tiles(number)
        zoom = choose("numbers of", ["the whole tile", *PARTS], "zoom")
        if view is None:
            st.caption("between two visits: nothing is computed")
        elif zoom == "the whole tile":
            tile_pictures(view)
        else:
            zoomed(view, zoom)
    colour_legend(recording.q.dtype)
    left, right = st.columns(2)
    with left:
        counters(step, before)
        if rung != "naive":
            show_panels(partial(overview, story=story, number=number), size=3.4)
    with right:
        comparison(recording, found, number)
        st.caption(formula_line(recording))
    if not hide_source:
        show_source(recording.sources[step.kernel], step.line)
