"""What a step of a recording means: the tiles, the statistics and the accumulator of one visit.

A recording holds the variables of a kernel; each rung keeps them elsewhere.  flash1 has all but O, l and m
in shared memory, flash2 has tiles in one shared vector and the rest in the registers of its threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from app_pages.recording import Recording, Step
from kernels.common.geometry import ceil_div
from kernels.cuda.device.vector import VECTOR

Array = npt.NDArray[Any]
Visit = tuple[int, int]

#: What has been done when the threads meet at the first, second, … barrier in a kernel's source.
STAGES = {
    "flash1_forward": (
        "start", "loaded", "scores", "maximum", "probs", "sums", "dropped", "next keys",
    ),
    "flash2_forward": ("start", "loaded", "probs"),
}  # fmt: skip


@dataclass(frozen=True)
class TileView:
    """One query tile and one key tile, at one step; what is not known yet is None."""

    visit: Visit  # number of the query tile and of the key tile
    first_row: int  # row of the call at which the query tile begins
    first_col: int  # column at which the key tile begins
    q_tile: Array  # (rows, head_dim)
    k_tile: Array  # (cols, head_dim)
    v_tile: Array  # (cols, head_dim)
    scores: Array | None = None  # (rows, cols), natural logarithms
    #: (rows, cols); flash1 takes exponentials relative to the tile's own maximum.
    probs: Array | None = None
    row_max: Array | None = None  # (rows,)
    row_sum: Array | None = None  # (rows,)
    rescale: Array | None = None  # (rows,), what the old sum and the old output are multiplied by
    #: (rows, head_dim), the output so far: normalised in flash1, not yet in flash2.
    acc: Array | None = None


class Story:
    """A recording and where its visits are."""

    def __init__(self, recording: Recording):
        self.recording, self.settings = recording, recording.settings
        self._barriers = {
            name: [n for n, text in enumerate(source.splitlines()) if "cuda.syncthreads" in text]
            for name, source in recording.sources.items()
        }

    def stage(self, step: Step) -> str:
        """Return what has been done at a step; see STAGES."""
        if step.line is None or step.kernel not in STAGES:
            return "end"
        return STAGES[step.kernel][self._barriers[step.kernel].index(step.line)]

    @cached_property
    def visits(self) -> list[Visit | None]:
        """The visit that each step belongs to, None for steps between visits."""
        found: list[Visit | None] = []
        for step in self.recording.steps:
            inside = self.stage(step) not in ("end", "start", "next keys")
            found.append(self._place(step) if inside else None)
        return found

    def _place(self, step: Step) -> Visit:
        numbers, settings = step.numbers, self.settings
        return int(numbers["row"]) // settings.block_q, int(numbers["col"]) // settings.block_k

    @property
    def shape(self) -> tuple[int, int]:
        """Tiles along the rows and along the columns."""
        seq, settings = self.settings.seq, self.settings
        return ceil_div(seq, settings.block_q), ceil_div(seq, settings.block_k)

    @property
    def has_tiles(self) -> bool:
        """Whether the rung goes tile by tile."""
        return any(visit is not None for visit in self.visits)

    def before(self, number: int) -> Array | None:
        """Return (rows,), the running maxima before the visit of a step; None between visits."""
        visit = self.visits[number]
        if visit is None:
            return None
        view = self.tiles(self._back_to("loaded", number))
        return None if view is None else view.row_max

    def _back_to(self, stage: str, number: int) -> int:
        """Return the last step up to one at which a stage was reached."""
        return next(
            n for n in range(number, -1, -1) if self.stage(self.recording.steps[n]) == stage
        )

    def progress(self, number: int) -> Array:
        """Return (query tiles, key tiles): 0 never visited, 1 still to come, 2 done, 3 now."""
        states = np.zeros(self.shape, np.int64)
        now = self.visits[number]
        for i, visit in enumerate(self.visits):
            if visit is not None and states[visit] != 2:
                states[visit] = 2 if i <= number else 1
        if now is not None:
            states[now] = 3
        return states

    def last_steps(self) -> list[int]:
        """Return the last step of each visit, at which most is known of it."""
        pairs = zip(self.visits, [*self.visits[1:], None], strict=True)
        return [i for i, (now, later) in enumerate(pairs) if now is not None and now != later]

    def tiles(self, number: int) -> TileView | None:
        """Return the tiles at a step, or None between visits."""
        step, visit = self.recording.steps[number], self.visits[number]
        if visit is None:
            return None
        take = self._of_flash1 if step.kernel == "flash1_forward" else self._of_flash2
        return take(number, step, visit)

    def _sizes(self, visit: Visit) -> tuple[int, int, int, int, int]:
        """Return first row, first column, rows, columns and head_dim of a visit."""
        s = self.settings
        row, col = visit[0] * s.block_q, visit[1] * s.block_k
        return row, col, min(s.block_q, s.seq - row), min(s.block_k, s.seq - col), s.head_dim

    def _of_flash1(self, number: int, step: Step, visit: Visit) -> TileView:
        row, col, rows, cols, dim = self._sizes(visit)
        shared, stage = step.shared, self.stage(step)
        done = STAGES[step.kernel].index(stage)
        s = shared["s"][:rows, :cols]
        view = {
            "q_tile": shared["q_tile"][:rows, :dim],
            "k_tile": shared["k_tile"][:cols, :dim],
            "v_tile": shared["v_tile"][:cols, :dim],
            "row_max": step.written["row_max"][0, 0, row : row + rows],
            "row_sum": step.written["row_sum"][0, 0, row : row + rows],
            "acc": shared["o_tile"][:rows, :dim],
        }
        if stage in ("scores", "maximum"):
            view["scores"] = s
        if done >= STAGES[step.kernel].index("probs"):
            view |= {"probs": s, "scores": self._before(number, "scores", visit)}
        if done >= STAGES[step.kernel].index("sums"):
            old_sum = self._before(number, "row_sum", visit)
            # The kernel has e^(m - m_new) l in one number.
            old = np.where(old_sum == 0, 1, old_sum)
            view["rescale"] = shared["old_weight"][:rows] / old
        return TileView(visit, row, col, **view)

    def _before(self, number: int, name: str, visit: Visit) -> Any:
        """Return a part of the visit's tiles at the step after which the kernel overwrites it."""
        number = self._back_to({"scores": "maximum", "row_sum": "loaded"}[name], number)
        view = self._of_flash1(number, self.recording.steps[number], visit)
        return getattr(view, name)

    def _of_flash2(self, number: int, step: Step, visit: Visit) -> TileView:
        row, col, rows, cols, dim = self._sizes(visit)
        at, flat = step.numbers, step.shared["shared"]
        names = ["q_tile", "k_tile", "v_tile", "p_tile"]
        starts = [int(at[name]) for name in names]
        heights = [self.settings.block_q, self.settings.block_k, self.settings.block_k]
        tiles = [
            flat[start:stop].reshape(height, -1)
            for start, stop, height in zip(starts, starts[1:], heights, strict=False)
        ]
        scale = float(at["scale"])
        view: dict[str, Any] = {
            "q_tile": tiles[0][:rows, :dim] / scale,  # as it was before it was loaded
            "k_tile": tiles[1][:cols, :dim],
            "v_tile": tiles[2][:cols, :dim],
        }
        maximum = self._rows(step, step.registers["row_max"])[:rows]  # (rows, lanes)
        view["row_max"] = maximum[:, 0]
        view["row_sum"] = self._rows(step, step.registers["row_sum"])[:rows].sum(1)
        view["acc"] = self._output(step)[:rows, :dim]
        if self.stage(step) == "probs":
            before = self.recording.steps[self._back_to("loaded", number)]
            old = self._rows(step, before.registers["row_max"])[:rows, 0]
            shift = np.where(np.isfinite(maximum[:, 0]), maximum[:, 0], 0)
            view["rescale"] = np.exp(old - shift)
            view["scores"] = self._scores(step)[:rows, :cols]
            stride = self.settings.block_k + VECTOR
            p = flat[starts[3] : starts[3] + self.settings.block_q * stride]
            view["probs"] = p.reshape(-1, stride)[:rows, :cols]
        return TileView(visit, row, col, **view)

    def _threads(self, step: Step) -> Any:
        """Return lanes, threads along a column, and tx and ty of each thread."""
        at, own = step.numbers, step.registers
        lanes, thread = int(at["lanes"]), own["thread"]
        height = self.settings.block_q // int(at["own_rows"])
        return lanes, height, thread % lanes, thread // lanes

    def _rows(self, step: Step, values: Array) -> Array:
        """Arrange (threads, own rows) as (block_q, lanes)."""
        lanes, height, tx, ty = self._threads(step)
        found = np.zeros((self.settings.block_q, lanes))
        for thread, own in enumerate(values):
            for i, value in enumerate(own):
                found[int(ty[thread]) + i * height, int(tx[thread])] = value
        return found

    def _scores(self, step: Step) -> Array:
        """Arrange the scores in registers as (block_q, block_k)."""
        lanes, height, tx, ty = self._threads(step)
        found = np.zeros((self.settings.block_q, self.settings.block_k))
        for thread, own in enumerate(step.registers["s"]):
            found[int(ty[thread]) :: height, int(tx[thread]) :: lanes] = own
        return found

    def _output(self, step: Step) -> Array:
        """Arrange the accumulators in registers as (block_q, columns), as ``store_tile`` does."""
        lanes, height, tx, ty = self._threads(step)
        acc = step.registers["acc"]  # (threads, own_rows, own_width)
        found = np.zeros((self.settings.block_q, lanes * acc.shape[2]))
        for thread, own in enumerate(acc):
            for n in range(acc.shape[2]):
                col = (n // VECTOR * lanes + int(tx[thread])) * VECTOR + n % VECTOR
                found[int(ty[thread]) :: height, col] = own[:, n]
        return found
