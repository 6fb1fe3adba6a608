"""The processes of one training: who reads what, and what they agree on."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partialmethod
from typing import Any, NoReturn

import numba
import numpy as np
from tqdm import tqdm

import minitorch
from minitorch.distributed import (
    GradientAverage,
    ShardedOptimizer,
    check_same,
    grid,
    positions,
    spread_sequence,
    world,
)
from minitorch.distributed.nccl_group import on_devices
from minitorch.training.model_files import CheckpointError

#: Where MPICH and Open MPI say how many processes they have started.
LAUNCHED = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


def check_launch(size: int) -> None:
    """Exit with one line if a training of one process runs in each of several that a launcher has started.

    Args:
        size: Number of ranks of the training.
    """
    started = max(int(os.environ.get(name, 1)) for name in LAUNCHED)
    if started > 1 == size:
        sys.exit(
            f"mpiexec has started {started} processes, each of which would train alone; add "
            f"--data-parallel {started} or --ring {started}"
        )


class Ranks:
    """The ranks that ``mpiexec`` has started, in ``data`` rings of ``ring`` ranks; or one process alone.

    All ranks draw the same batches, and each reads its rows of them (``data``) and its positions of the
    rows (``ring``).  Rank 0 prints and writes; the others are silent.

    Args:
        data: Number of rings.
        ring: Number of ranks that share a sequence.
        on_gpus: Whether they train on GPUs, of which each takes one if there are as many.

    Attributes:
        is_first: Whether this process prints and writes.
        size: Number of ranks.
    """

    def __init__(self, data: int = 1, ring: int = 1, on_gpus: bool = False):
        self.is_first, self.size, self._shares, self._average = True, data * ring, data, None
        self._steps = 0
        self._times = np.zeros(3)  # of the steps, of waiting, of operations under way
        self._join: Callable[[], None] = lambda: None
        if self.size == 1:
            return
        wrong = (
            f"--data-parallel {data} --ring {ring}: {{}}; start it with mpiexec -n {self.size}, or pass "
            "other numbers (with --resume they are those of the checkpoint unless given)"
        )
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
        self._group = on_devices(self._world) if on_gpus else self._world
        try:
            self._grid = grid(self._group, data, ring)
        except ValueError as error:
            self._refuse(wrong.format(error))
        if not self.is_first:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # until the end
            tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)  # type: ignore[method-assign]
        # A launcher that has to name a killed process knows its number only.
        print(", ".join(f"rank {i}: {x}" for i, x in enumerate(self._world.waiting.processes)))
        if on_gpus and self._group is self._world:
            print(
                "ranks share GPUs and exchange arrays through the host: there is no NCCL (pip install "
                "'minitorch-flash[nccl]'), or a machine has fewer GPUs than ranks"
            )

    def _refuse(self, reason: str) -> NoReturn:
        """End all ranks for a reason that all of them have found."""
        if not self.is_first:
            self._world.barrier()  # until rank 0 has said it, once
        if self._world.size == 1:
            sys.exit(reason)
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
            self._average = GradientAverage(model.parameters(), self._group)
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

    def can_capture(self, dropout: float) -> bool:
        """Tell whether graphs can hold the steps: not messages of the host, nor seeds of another rank."""
        if self.size == 1:
            return True
        return not (self._group.on_host or (dropout and self._grid.ring.size > 1))

    def during_backward(self) -> AbstractContextManager[None]:
        """Return the context in which gradients become those of all ranks."""
        return nullcontext() if self._average is None else self._average.during_backward()

    def optimizer(self, model: minitorch.DecoderLM, **options: Any) -> minitorch.Optimizer:
        """Return the optimiser, of whose state each rank keeps a share; see :class:`minitorch.AdamW`."""
        parameters = model.parameters()
        if self.size == 1:
            return minitorch.AdamW(parameters, **options)
        return ShardedOptimizer(parameters, self._group, minitorch.AdamW, **options)

    def save_parts(self, save: Callable[[int, int], str]) -> list[str]:
        """Let every rank but the first save its part; return what it has returned on each of them.

        Args:
            save: Saves a part, given its number and how many there are.

        Raises:
            CheckpointError: On all ranks, if a part cannot be saved.
        """
        digest = np.zeros(64, np.uint8)
        if not self.is_first:
            try:
                digest[:] = bytearray(save(self._world.rank, self.size), "ascii")
            except CheckpointError as error:
                print(error, file=sys.stderr)
        if self.size == 1:
            return []
        every = np.empty((self.size, 64), np.uint8)
        self._world.all_gather(digest, every).wait()
        found = [bytes(row).decode("ascii") for row in every[1:]]
        for rank, each in enumerate(found, 1):
            if not each.isalnum():
                raise CheckpointError(f"rank {rank} could not save its part")
        return found

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure a step."""
        before = self._clocks()
        yield
        self._times += self._clocks() - before
        self._steps += 1

    def _clocks(self) -> Any:
        if self.size == 1:
            return np.zeros(3)
        waiting = self._world.waiting
        return np.array([time.perf_counter(), waiting.seconds, waiting.under_way])

    def times(self) -> list[dict[str, float]]:
        """Return what a step takes each rank on average, in ms; nothing for one process.

        ``compute`` is the time in which the rank did not wait, ``waiting`` that in which it did, and
        ``overlapped`` the time in which operations were under way while it computed.
        """
        if self.size == 1 or not self._steps:
            return []
        every = np.empty((self.size, 3))
        self._world.all_gather(self._times * (1e3 / self._steps), every).wait()
        return [
            {"compute": step - waiting, "waiting": waiting, "overlapped": under_way - waiting}
            for step, waiting, under_way in every.tolist()
        ]

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
