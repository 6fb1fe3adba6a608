"""Calls on PyTorch's tensors on a device: in PyTorch's memory, on its current stream, on a short path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

import kernels
from kernels.bound_calls import find
from kernels.cuda.runtime.memory_pool import Pool
from kernels.interop import dlpack, libraries
from kernels.operand_types import DESCRIBE, as_operand
from kernels.runtime.targets import EMULATED

from ...support.device.fake_device import FakeDriver, fake_device
from ...support.device.fake_torch import FakeTorch, Tensor

pytestmark = pytest.mark.skipif(EMULATED, reason="the emulated GPU has no driver to record")

SHAPE = (1, 2, 40, 64)
#: Bytes of a tensor map.
TENSOR_MAP = 128


@contextmanager
def torch_on_a_device() -> Iterator[tuple[FakeTorch, FakeDriver, list[Any]]]:
    """Yield PyTorch, the driver, and pairs of streams of which one waited for the other."""
    fake, waits = FakeTorch(), list[Any]()

    with (
        pytest.MonkeyPatch.context() as modules,  # patch.dict would forget what is imported meanwhile
        patch.dict(DESCRIBE),
        patch.dict(libraries._LIBRARIES),
        patch.object(dlpack, "has_several_devices", lambda: False),
        patch.object(dlpack, "_make_wait", lambda *streams: waits.append(streams)),
        patch.object(dlpack.cuda, "external_stream", int),
        patch.object(dlpack.cuda, "default_stream", lambda: "legacy"),
        fake_device() as own,
    ):
        modules.setitem(sys.modules, "torch", fake)
        yield fake, own, waits


def no_allocation(pool: Pool, size: int) -> Any:
    """Stand for an allocation from our pool, but of a tensor map, which is made for each new address."""
    assert size == TENSOR_MAP, "a known call has its memory from PyTorch"
    return allocate(pool, size)


allocate = Pool.allocate


def test_a_known_call_runs_in_the_memory_and_in_the_order_of_pytorch() -> None:
    with torch_on_a_device() as (fake, _, waits):
        q, k, v = (fake.randn(*SHAPE) for _ in range(3))

        def call() -> list[Any]:
            out, lse = kernels.flash_attention_forward(q, k, v, is_causal=True)
            return [
                out, lse, *kernels.flash_attention_backward(q, q, k, v, out, lse, is_causal=True)
            ]  # fmt: skip

        for _ in range(2):
            call()
        assert not waits, "PyTorch's default stream is ours"
        fake.stream = 7
        with patch.object(Pool, "allocate", no_allocation):
            results = call()
        assert waits == [("legacy", 7), (7, "legacy")] * 2
        assert {type(x) for x in results} == {Tensor}
        assert {x.data_ptr() for x in results} <= set(fake.made)
        assert [x.shape for x in results] == [SHAPE, SHAPE[:3], SHAPE, SHAPE, SHAPE]
        assert [x.dtype for x in results] == ["float16", "float32"] + 3 * ["float16"]


def test_a_known_call_on_a_cache_runs_in_the_memory_of_pytorch() -> None:
    with torch_on_a_device() as (fake, *_):
        q, cache, new = fake.randn(2, 4, 1, 64), fake.randn(9, 2, 16, 64), fake.randn(2, 2, 1, 64)
        call: dict[str, Any] = {
            "cache_seqlens": fake.randn(2, dtype="int32"),
            "block_table": fake.randn(2, 4, dtype="int32"),
        }

        def decode() -> Any:
            return kernels.flash_attention_with_cache(q, cache, cache, new, new, **call)

        for _ in range(2):
            decode()
        with patch.object(Pool, "allocate", no_allocation):
            out = decode()
        assert (out.shape, out.dtype) == (q.shape, "float16") and out.data_ptr() in fake.made


def test_a_call_in_full_on_another_stream_waits_both_ways() -> None:
    with torch_on_a_device() as (fake, _, waits):
        q, k, v = (fake.randn(*SHAPE) for _ in range(3))
        bias = fake.randn(*SHAPE[:3], SHAPE[2])
        fake.stream = 7
        results = list[Any]()
        for _ in range(2):
            waits.clear()
            results += kernels.flash_attention_forward(q, k, v, bias)
            assert type(results[0]) is Tensor
            assert waits == [("legacy", 7)] * 4 + [(7, "legacy")] * 2
        waits.clear()
        results.clear()  # PyTorch frees them
        assert waits == [("legacy", 7)] * 4, "their memory is free after the work of its stream"


def test_tensors_are_described_by_layout_and_address() -> None:
    with torch_on_a_device() as (fake, *_):
        q, other = fake.randn(*SHAPE), fake.randn(*SHAPE)
        as_operand(q)
        one = find([q, other], {})
        assert one is not None and one.starts == [q.data_ptr(), other.data_ptr()]
        shifted = Tensor(q.data_ptr() + 2, q.shape, q.stride(), q.dtype)  # not aligned
        for tensor in (shifted, fake.randn(*SHAPE, dtype="bfloat16"), fake.randn(1, 2, 64, 40)):
            found = find([tensor, other], {})
            assert found is not None and found.key != one.key
        assert find([fake.randn(*SHAPE, requires_grad=True), other], {}) is None


def test_a_captured_stream_is_refused() -> None:
    with torch_on_a_device() as (fake, *_):
        q, k, v = (fake.randn(*SHAPE) for _ in range(3))
        fake.stream, fake.is_capturing = 7, True
        for _ in range(3):
            with pytest.raises(RuntimeError, match="a CUDA graph cannot capture"):
                kernels.flash_attention_forward(q, k, v)
            fake.is_capturing = False
            kernels.flash_attention_forward(q, k, v)
            fake.is_capturing = True


def test_results_of_any_kind_of_call_are_tensors() -> None:
    with torch_on_a_device() as (fake, *_):
        q, k, v = (fake.randn(2, 4, 40, 64) for _ in range(3))
        shared = fake.randn(2, 2, 40, 64)
        packed = fake.randn(40, 4, 64)
        for _ in range(3):
            results = [
                *kernels.flash_attention_forward(q, shared, shared, enable_gqa=True),
                *kernels.flash_attention_forward(q, k, v, sink=fake.randn(4, dtype="float32")),
                *kernels.flash_attention_varlen_forward(
                    packed, packed, packed, [0, 9, 40], [0, 9, 40]
                ),
            ]
            assert {type(x) for x in results} == {Tensor}


def test_a_tensor_that_requires_grad_is_refused_by_known_calls_too() -> None:
    with torch_on_a_device() as (fake, *_):
        q, k, v = (fake.randn(*SHAPE) for _ in range(3))
        for _ in range(3):
            kernels.flash_attention_forward(q, k, v)
        recorded = fake.randn(*SHAPE, requires_grad=True)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"requires grad.*interop\.torch\.flash_attention"):
                kernels.flash_attention_forward(q, recorded, v)
