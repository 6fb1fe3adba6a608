"""What is done again and again leaves nothing behind: no object, no memory, no graph."""

from __future__ import annotations

import gc
import tracemalloc
import weakref

import numpy as np
import pytest
from reliability import leaks

import minitorch
from kernels.cpu.runtime import memory_pool as cpu_pool
from kernels.cuda.runtime.arrays import pool


def objects_after(step: leaks.Step, first: int, steps: int) -> int:
    """Take steps and return how many objects there are then."""
    for number in range(first, first + steps):
        step(number)
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("kind", ["training", "writing", "models", "refused"])
def test_a_step_leaves_no_object_behind(kind: str) -> None:
    step = leaks.KINDS[kind][0]("cpu")
    before = objects_after(step, 0, 8)
    assert objects_after(step, 8, 24) - before < 24, "an object for each step"


def array_bytes() -> int:
    """Return how many bytes NumPy's arrays have that were made since tracemalloc was started."""
    own = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    traces = tracemalloc.take_snapshot().filter_traces([own]).traces
    return sum(trace.size for trace in traces)


def test_a_step_leaves_no_array_behind() -> None:
    step = leaks.training("cpu")
    objects_after(step, 0, 5)
    tracemalloc.start()
    try:
        objects_after(step, 5, 5)  # weights and moments are arrays of these steps now
        before = array_bytes()
        objects_after(step, 10, 20)
        assert 0 < array_bytes() <= before
    finally:
        tracemalloc.stop()


def test_a_graph_goes_without_the_collector_when_its_result_goes() -> None:
    """A cycle of references would keep each step's arrays until the collector comes by."""
    model = leaks.make_model("cpu")
    gc.collect()
    gc.disable()
    try:
        loss = model.loss(np.ones((2, 9), np.int64), np.ones((2, 9), np.int64))
        loss.backward()
        inner = [weakref.ref(v) for v in minitorch.topological_sort(loss) if not v.is_leaf()]
        assert len(inner) > 10
        del loss
        assert [reference() for reference in inner if reference() is not None] == []
    finally:
        gc.enable()


def test_what_the_pool_keeps_is_bounded() -> None:
    """Results of ever other sizes: what nobody uses any more is let go beyond the limit."""
    for size in range(40):
        cpu_pool.empty((5 + size) << 18, np.dtype(np.float64))
        assert cpu_pool.unused_bytes() <= cpu_pool.KEPT_MOST
    cpu_pool.release()
    assert cpu_pool.unused_bytes() == 0


@pytest.mark.cuda
def test_steps_leave_no_memory_of_a_gpu_behind() -> None:
    memory = pool()
    assert memory is not None
    for kind in ("training", "attention", "writing"):
        step = leaks.KINDS[kind][0]("cuda")
        objects_after(step, 0, 300)
        before = memory.in_use()
        objects_after(step, 300, 300)
        assert memory.in_use() <= 1.01 * before, kind
