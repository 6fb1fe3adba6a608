"""``minitorch.set_num_threads`` limits every parallel loop on the CPU, from every Python thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import pytest

import minitorch
from kernels.runtime.targets import EMULATED
from minitorch import FastBackend, rand

from ...support.busy_threads import busy_threads

MOST = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
LOOPS: dict[str, Callable[[Any], Any]] = {
    "attention": lambda x: x.flash_attention(x, x),
    "elementwise": lambda x: x.exp() * x,
    "sum": lambda x: x.sum(3),
    "product": lambda x: x @ x.permute(0, 1, 3, 2),
    "softmax": lambda x: minitorch.softmax(x, 3),
}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    minitorch.set_num_threads(MOST)


@pytest.mark.skipif(MOST < 2 or EMULATED, reason="needs several threads")
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("from_another_thread", [False, True])
def test_no_loop_computes_on_more_threads_than_are_set(
    name: str, from_another_thread: bool
) -> None:
    x = rand((1, 4, 512, 32), FastBackend)
    minitorch.set_num_threads(1)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(busy_threads, lambda: LOOPS[name](x)).result if from_another_thread else (
            lambda: busy_threads(lambda: LOOPS[name](x))
        )  # fmt: skip
        assert run() == 1
    assert minitorch.get_num_threads() == 1


@pytest.mark.skipif(MOST < 2 or EMULATED, reason="needs several threads")
def test_the_most_threads_are_used_again_after_they_were_limited() -> None:
    x = rand((1, 4, 512, 32), FastBackend)
    minitorch.set_num_threads(1)
    limited = x.flash_attention(x, x)
    minitorch.set_num_threads(MOST)
    assert busy_threads(lambda: x.flash_attention(x, x)) > 1
    assert (x.flash_attention(x, x).to_numpy() == limited.to_numpy()).all()
