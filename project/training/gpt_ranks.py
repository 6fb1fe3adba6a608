"""The processes of one training: who reads what, and what they agree on."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partialmethod
from typing import Any, NoReturn

import numba
import numpy as np
from tqdm import tqdm

import minitorch
from minitorch.distributed import (
    GradientAverage,
    check_same,
    grid,
    positions,
    spread_sequence,
    world,
)


class Ranks:
    """The ranks that ``mpiexec`` has started, in ``data`` rings of ``ring`` ranks; or one process alone.

    All ranks draw the same batches, and each reads its rows of them (``data``) and its positions of the
    rows (``ring``).  Rank 0 prints and writes; the others are silent.

    Args:
        data: Number of rings.
        ring: Number of ranks that share a sequence.

    Attributes:
        is_first: Whether this process prints and writes.
        size: Number of ranks.
    """

    def __init__(self, data: int = 1, ring: int = 1):
        self.is_first, self.size, self._shares, self._average = True, data * ring, data, None
        self._join: Callable[[], None] = lambda: None
        if self.size == 1:
            return
        wrong = f"--data-parallel {data} --ring {ring}: {{}}; start it with mpiexec -n {self.size}"
        try:
            self._world = world()
        except (ImportError, ValueError) as error:
            sys.exit(wrong.format(error))
        self.is_first = self._world.rank == 0
        versions = {each.__name__: each.__version__ for each in (minitorch, np, numba)}
        self.check(
            {
                "--data-parallel": data,
                "--ring": ring,
                "Python": platform.python_version(),
                **versions,
            }
        )
        try:
            self._grid = grid(self._world, data, ring)
        except ValueError as error:
            self._refuse(wrong.format(error))
        if not self.is_first:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # until the end
            tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)  # type: ignore[method-assign]
        # A launcher that has to name a killed process knows its number only.
        print(", ".join(f"rank {i}: {x}" for i, x in enumerate(self._world.waiting.processes)))

    def _refuse(self, reason: str) -> NoReturn:
        """End all ranks for a reason that all of them have found."""
        if not self.is_first:
            self._world.barrier()  # until rank 0 has said it, once
        self._world.abort(reason)

    def check(self, facts: Mapping[str, Any]) -> None:
        """Check that all ranks have the same facts; exit with one line if they do not."""
        if self.size == 1:
            return
        try:
            check_same(self._world, facts)
        except ValueError as error:
            self._refuse(str(error))

    def spread(self, model: minitorch.DecoderLM) -> None:
        """Let a model read parts of the sequences, and check that it is the same on all ranks."""
        if self.size == 1:
            return
        try:
            self._average = GradientAverage(model.parameters(), self._world)
        except ValueError as error:
            self._refuse(str(error))
        if self._grid.ring.size > 1:
            self._join = spread_sequence(model, self._grid.ring)

    def join(self) -> None:
        """Let the model read whole sequences again."""
        self._join()

    def rows(self, array: Any, parts: int) -> Any:
        """Return this rank's rows of each of the equal parts of a batch, (rows, context)."""
        if self._shares == 1:
            return array
        cut = array.reshape(parts, self._shares, -1, array.shape[-1])
        return cut[:, self._grid.data.rank].reshape(-1, array.shape[-1])

    def columns(self, array: Any) -> Any:
        """Return this rank's positions of each row, (rows, context)."""
        if self.size == self._shares:
            return array
        return np.ascontiguousarray(array[:, positions(array.shape[-1], self._grid.ring)])

    def during_backward(self) -> AbstractContextManager[None]:
        """Return the context in which gradients become those of all ranks."""
        return nullcontext() if self._average is None else self._average.during_backward()

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the means over the ranks of equally many numbers."""
        if self.size == 1 or not values:
            return [*values]
        sums = np.array(values, np.float64)
        self._world.all_reduce(sums).wait()
        return (sums / self.size).tolist()

    def largest(self, value: float) -> float:
        """Return the largest of the ranks' numbers, which is the same on all of them."""
        if self.size == 1:
            return value
        number = np.array([value], np.float64)
        self._world.all_reduce(number, "max").wait()
        return float(number[0])

    def wait(self) -> None:
        """Wait for all ranks, which then see what rank 0 has written."""
        if self.size > 1:
            self._world.barrier()

    def end(self, code: Any) -> None:
        """End all ranks if this one ends with an error, since the others would wait for it."""
        if self.size > 1 and code:
            self._world.abort(str(code))
