"""Ring attention on GPUs launches little beside its attention kernels: seen on a device that is none."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import minitorch
from kernels.cuda.backend import element_strides, empty_device, merge_rows
from kernels.runtime.dtypes import BFLOAT16, FLOAT32
from kernels.runtime.targets import EMULATED
from minitorch.distributed import ring_attention

from ...support.device.fake_device import FakeDriver, fake_device

pytestmark = pytest.mark.skipif(EMULATED, reason="the emulated GPU has no driver to record")


def rank_of(rank: int, size: int) -> Any:
    """Return a group whose other ranks make the same calls, and whose transfers do nothing."""
    nothing = SimpleNamespace(wait=lambda: None)

    def all_gather(array: Any, out: Any) -> Any:
        out[...] = array
        return nothing

    group = SimpleNamespace(rank=rank, size=size, on_host=False, together=nullcontext)
    group.host, group.all_gather = group, all_gather
    group.send = group.receive = lambda array, other: nothing
    return group


def launches(own: FakeDriver, rank: int, size: int) -> tuple[Counter[str], Counter[str]]:
    """Return the kernels that a forward and a backward pass launch, bfloat16 and causal, by name."""
    one = minitorch.from_numpy(np.zeros(1, np.float32), minitorch.CudaBackend).to(BFLOAT16)
    q, k, v, dout = (one.empty((1, 16, 4096, 128)) for _ in range(4))
    count = 0
    for _ in range(2):  # the first call of a kind makes its plan
        for leaf in (q, k, v):
            leaf.requires_grad_(True)
            leaf.grad = None
        own.launches.clear()
        out: Any = ring_attention(q, k, v, rank_of(rank, size), is_causal=True, deterministic=False)
        count = len(own.launches)
        out.backward(dout)
    names = [launched.kernel for launched in own.launches]
    return Counter(names[:count]), Counter(names[count:])


def test_two_ranks_call_attention_once_for_each_and_merge_once() -> None:
    with fake_device() as own:
        for rank in range(2):
            forward, backward = launches(own, rank, 2)
            assert forward == {"flash3_forward": 2, "merge": 1}
            # In two shares of the heads; dq, dk and dv of each are merged once, and both are joined.
            assert backward.pop("merge") == backward.pop("map_id") == 6
            assert set(backward.values()) == {4}, backward


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_calls_attention_once_for_each_rank_and_share(rank: int) -> None:
    with fake_device() as own:
        forward, backward = launches(own, rank, 3)
        assert forward["flash3_forward"] == 2 * 3
        assert backward["flash3_dkdv"] == 2 * 3


def test_a_repeated_merge_has_the_addresses_of_its_own_call() -> None:
    with fake_device() as own:

        def launched(dtype: Any) -> list[Any]:
            sums, values = empty_device((2, 8, 64), FLOAT32), empty_device((2, 4, 64), BFLOAT16)
            out = sums if dtype == FLOAT32 else empty_device((2, 8, 64), dtype)
            lses = [empty_device((2, rows), FLOAT32) for rows in (8, 8, 4, 4)]
            own.launches.clear()
            merge_rows(out, values, range(2, 6), 0, sums, *lses)
            (one,) = own.launches
            places = [x.device_ctypes_pointer.value for x in (sums, values, out, *lses)]
            assert element_strides(out) == (512, 64, 1)
            assert [word for word in one.words if word in places] == places
            return [one.sizes, [word for word in one.words if word not in places]]

        for dtype in (FLOAT32, BFLOAT16):
            first, *others = (launched(dtype) for _ in range(4))
            assert others == [first] * 3
