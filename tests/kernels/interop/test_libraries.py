"""Results of attention are arrays of the library that the operands came from."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import kernels
import minitorch as mt
from kernels.interop import libraries

SHAPE = (2, 3, 5, 4)


class Array:
    """An array of a library that has no more than DLPack."""

    def __init__(self, array: Any):
        self.array = np.asarray(array)

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


Array.__module__ = "some_library.core"


def operands(dtype: Any = np.float32) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(SHAPE).astype(dtype) for _ in range(3)]


def test_arrays_of_any_library_with_dlpack_come_back_as_such() -> None:
    module = ModuleType("some_library")
    module.from_dlpack = lambda lent: Array(np.from_dlpack(lent))  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as modules, patch.dict(libraries._LIBRARIES):
        modules.setitem(sys.modules, "some_library", module)
        for dtype in (np.float32, np.float64):
            q, k, v = operands(dtype)
            expected = kernels.flash_attention_forward(q, k, v)
            given = [Array(x) for x in (q, k, v)]
            actual = kernels.flash_attention_forward(*given)
            gradients = kernels.flash_attention_backward(given[0], *given, *actual)
            wanted = kernels.flash_attention_backward(q, q, k, v, *expected)
            for one, other in zip((*actual, *gradients), (*expected, *wanted), strict=True):
                assert type(one) is Array
                np.testing.assert_array_equal(one.array, other)


def test_operands_in_several_places_are_named() -> None:
    class Elsewhere(SimpleNamespace):
        __cuda_ndarray__ = True
        strides = ()

    q, k, _ = operands()
    with pytest.raises(TypeError, match=r"ndarray on the host; Elsewhere on a CUDA device"):
        kernels.flash_attention_forward(q, k, Elsewhere(shape=SHAPE, dtype=q.dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_tensors_of_pytorch_come_back_as_such_in_any_layout(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    tensors = [torch.from_numpy(x).to(kind) for x in operands()]
    for layout in (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)):
        q, k, v = map(layout, tensors)
        out, lse = kernels.flash_attention_forward(q, k, v, is_causal=True)
        gradients = kernels.flash_attention_backward(out, q, k, v, out, lse, is_causal=True)
        assert (out.dtype, out.stride()) == (kind, q.stride())
        assert lse.dtype == (torch.float64 if dtype == "float64" else torch.float32)
        assert [(x.dtype, x.stride()) for x in gradients] == [(kind, q.stride())] * 3
        plain = torch.nn.functional.scaled_dot_product_attention
        wanted = plain(*(x.double() for x in (q, k, v)), is_causal=True)
        bound = 2e-2 if out.element_size() == 2 else 1e-5
        torch.testing.assert_close(out.double(), wanted, atol=bound, rtol=bound)


def test_packed_tensors_of_pytorch_come_back_as_such() -> None:
    torch = pytest.importorskip("torch")
    packed, bounds = torch.randn(9, 2, 4), torch.tensor([0, 4, 9])
    out, lse = kernels.flash_attention_varlen_forward(packed, packed, packed, bounds, bounds)
    gradients = kernels.flash_attention_varlen_backward(
        out, packed, packed, packed, out, lse, bounds, bounds
    )
    assert {type(x) for x in (out, lse, *gradients)} == {torch.Tensor}
    assert [x.shape for x in (out, *gradients)] == [packed.shape] * 4


def test_results_of_pytorch_share_memory_with_no_copy() -> None:
    torch = pytest.importorskip("torch")
    made: list[Any] = []
    q, k, v = (torch.randn(SHAPE) for _ in range(3))
    original = torch.from_numpy
    with patch.object(torch, "from_numpy", lambda x: made.append(x) or original(x)):
        results = kernels.flash_attention_forward(q, k, v)
    assert [x.data_ptr() for x in results] == [x.ctypes.data for x in made]


def test_what_pytorch_cannot_lend_is_refused_in_words() -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(SHAPE)
    for tensor, error, words in (
        (x.clone().requires_grad_(), ValueError, r"requires grad.*or pass x\.detach\(\)"),
        (torch.nn.Parameter(x), ValueError, "requires grad"),
        (x.to(torch.complex64), TypeError, r"got torch\.complex64"),
        (x.to_sparse(), TypeError, "sparse"),
        (x.to("meta"), TypeError, "device meta"),
    ):
        with pytest.raises(error, match=words):
            kernels.flash_attention_forward(tensor, x, x)
        with pytest.raises(error, match=words):
            mt.from_dlpack(tensor)
    with pytest.raises(TypeError, match="float32"):
        kernels.flash_attention_forward(x, x.double(), x)


def test_a_tensor_of_pytorch_is_refused_with_the_way_to_convert_it() -> None:
    torch = pytest.importorskip("torch")
    x, t = mt.ones((2, 2)), torch.ones(2, 2)
    for call in (lambda: x + t, lambda: x @ t, lambda: t * x, lambda: mt.softmax(t, 0)):
        with pytest.raises(TypeError, match=r"torch\.Tensor; .*from_dlpack\(x\.detach\(\)\)"):
            call()
