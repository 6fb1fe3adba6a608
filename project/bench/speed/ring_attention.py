"""Time ring attention on the cores of this machine, one thread a rank, beside one rank that does it all.

NUMBA_NUM_THREADS=1 mpiexec -n 2 python -m project.bench.speed.ring_attention [seq] [heads] [layout]

It prints the efficiency, the time of one rank over that of all and their number, and the CPU time of the
ranks but for their waiting, the longest over the mean.  Both are timed in turn, forward and backward of
causal attention.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

import minitorch
from minitorch.distributed import MPIGroup, Transfer, positions, ring_attention, world

HEAD_DIM, ROUNDS = 64, 5
#: Seconds between two looks of a rank that has nothing to do: MPI's own waiting keeps a core busy.
LOOK = 0.002


class Watched(MPIGroup):
    """A group that adds up the CPU time of waiting for transfers."""

    waited = 0.0

    def send(self, array: Any, to: int) -> Transfer:
        """See ``Group.send``."""
        return self._watched(super().send(array, to))

    def receive(self, array: Any, source: int) -> Transfer:
        """See ``Group.receive``."""
        return self._watched(super().receive(array, source))

    def all_gather(self, array: Any, out: Any) -> Transfer:
        """See ``Group.all_gather``."""
        return self._watched(super().all_gather(array, out))

    def _watched(self, transfer: Any) -> Transfer:
        wait = transfer.wait

        def timed() -> None:
            start = time.process_time()
            wait()
            self.waited += time.process_time() - start

        transfer.wait = timed
        return transfer


def run(operands: Any, attend: Callable[..., Any]) -> None:
    """Compute attention and its gradients."""
    q, k, v, dout = (minitorch.from_numpy(x) for x in operands)
    for leaf in (q, k, v):
        leaf.requires_grad_(True)
    attend(q, k, v).backward(dout)


def main(seq: int, heads: int, layout: str) -> None:
    """Time one rank and all ranks in turn."""
    group = Watched(world().communicator)
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((4, 1, heads, seq, HEAD_DIM)).astype(np.float32)
    part = np.ascontiguousarray(whole[..., positions(seq, group, layout), :])
    ones, alls, works = [], [], []
    for _ in range(1 + ROUNDS):  # the first compiles
        start = time.perf_counter()
        if group.rank == 0:
            run(whole, lambda q, k, v: q.flash_attention(k, v, is_causal=True))
        ones.append(time.perf_counter() - start)
        here = group.communicator.Ibarrier()
        while not here.Test():
            time.sleep(LOOK)
        group.waited = 0.0
        start, used = time.perf_counter(), time.process_time()
        run(part, lambda q, k, v: ring_attention(q, k, v, group, is_causal=True, layout=layout))
        works.append(time.process_time() - used - group.waited)
        group.barrier()
        alls.append(time.perf_counter() - start)
    work = np.empty((group.size, 1))
    group.all_gather(np.array([min(works[1:])]), work).wait()
    if group.rank == 0:
        ratios = [one / every / group.size for one, every in zip(ones[1:], alls[1:], strict=True)]
        print(f"{layout}, {seq} rows, {heads} heads, {group.size} ranks")
        print(f"  seconds: one rank {min(ones[1:]):.3f}, all ranks {min(alls[1:]):.3f}")
        print(f"  efficiency: {median(ratios):.3f} (median of {ROUNDS}), best {max(ratios):.3f}")
        print(f"  work of a rank, longest / mean: {work.max() / work.mean():.3f}")


if __name__ == "__main__":
    seq, heads, layout, *_ = [*sys.argv[1:], *("16384", "4", "zigzag")[len(sys.argv) - 1 :]]
    main(int(seq), int(heads), layout)
