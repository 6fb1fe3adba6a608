"""Arrays of other libraries in and out: the same memory, the same strides, alive as long as needed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import DrawFn, composite, integers, permutations, sampled_from

import kernels
import minitorch as mt
from kernels.cuda.runtime.arrays import device_pointer, to_device, to_host
from kernels.interop import dlpack
from kernels.runtime.dtypes import BFLOAT16
from kernels.runtime.targets import EMULATED, cuda, why_no_cuda
from minitorch import CudaBackend, FastBackend, Tensor
from minitorch.tensor_data import DTYPES

emulated = pytest.mark.skipif(not EMULATED, reason="the emulated GPU's device memory is the host's")
no_device = pytest.mark.skipif(why_no_cuda() is None, reason="there is a GPU, or the emulated one")


class Lender(np.ndarray):
    """An array that can be watched: one that lends its memory by DLPack."""


class Foreign:
    """What another library's array looks like from here: DLPack and nothing else."""

    def __init__(self, array: Any):
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.HOST, 0)


def lender_of(array: np.ndarray[Any, Any]) -> Foreign:
    """Return what lends an array; NumPy itself does not lend one of bfloat16."""
    return Foreign(mt.from_numpy(array) if array.dtype == BFLOAT16 else array)


class OnDevice:
    """What an array on a device looks like, where there is none."""

    def __init__(self, **changes: Any):
        self.__cuda_array_interface__ = {
            "shape": (2,), "strides": None, "typestr": "<f4", "data": (4096, False), "version": 3,
            **changes,
        }  # fmt: skip


@composite
def permuted(draw: DrawFn, dtypes: Iterable[Any] = DTYPES) -> np.ndarray[Any, Any]:
    """Draw an array of any dtype that fills its memory in some order of its dimensions."""
    shape = tuple(draw(integers(1, 3)) for _ in range(draw(integers(0, 4))))
    dtype = draw(sampled_from(sorted(dtypes, key=str)))
    stored = np.arange(1, 1 + int(np.prod(shape))).reshape(shape).astype(dtype)
    return stored.transpose(draw(permutations(range(len(shape)))))


def steps(array: np.ndarray[Any, Any]) -> list[int]:
    """Return the strides that matter: a dimension of size 1 may have any."""
    return [step for step, size in zip(array.strides, array.shape, strict=True) if size > 1]


def same_memory(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Tell whether two arrays are one."""
    one, other = ((x.ctypes.data, x.shape, x.dtype, steps(x)) for x in (a, b))
    return one == other


# -- the host --------------------------------------------------------------------------------------


@given(permuted())
def test_a_tensor_and_an_array_are_one_memory(array: np.ndarray[Any, Any]) -> None:
    for lender in (array, lender_of(array)):
        made = mt.from_dlpack(lender)
        assert made.backend is FastBackend and same_memory(made.to_numpy(), array)
        if array.dtype != BFLOAT16:  # which NumPy reads from no other library
            assert same_memory(np.from_dlpack(made), array)
        assert same_memory(mt.from_dlpack(made).to_numpy(), array)


def test_the_owner_may_go_first_and_goes_last() -> None:
    array = np.arange(6.0).reshape(2, 3).view(Lender)
    watched = weakref.ref(array)
    lent = dlpack.Read(array.__dlpack__())
    del array
    assert watched() is not None, "the reader still looks at it"
    del lent
    assert watched() is None, "the reader has given it back"

    def lend() -> Tensor:
        return mt.from_dlpack(Foreign(np.arange(6.0).reshape(2, 3).T))

    made = lend()
    gc.collect()
    assert made.to_numpy().tolist() == [[0, 3], [1, 4], [2, 5]]


# -- a device --------------------------------------------------------------------------------------


@emulated
@given(permuted())
def test_emulated_device_memory_is_lent(array: np.ndarray[Any, Any]) -> None:
    made = mt.from_numpy(array, CudaBackend)
    assert not hasattr(made, "__cuda_array_interface__")  # it is the host's after all
    # NumPy reads bfloat16 from no other library.
    read = dlpack.as_array(made) if array.dtype == BFLOAT16 else np.from_dlpack(made)
    assert steps(read) == steps(made.to_numpy())
    assert read.ctypes.data == made._tensor._storage._ary.ctypes.data  # type: ignore[attr-defined]
    again = mt.from_dlpack(made._tensor._storage)
    assert again.backend is CudaBackend
    np.testing.assert_array_equal(read, array)


@emulated
def test_what_is_lent_lives_until_it_is_given_back() -> None:
    made = mt.from_numpy(np.arange(6.0), CudaBackend)
    watched = weakref.ref(made._tensor._storage._ary)  # type: ignore[attr-defined]
    read = np.from_dlpack(made)
    del made
    gc.collect()
    assert watched() is not None and read.tolist() == [0, 1, 2, 3, 4, 5]
    del read
    gc.collect()
    assert watched() is None

    made = mt.from_numpy(np.arange(6.0), CudaBackend)
    watched, unread = weakref.ref(made._tensor._storage._ary), made.__dlpack__()  # type: ignore[attr-defined]
    del made
    gc.collect()
    assert watched() is not None, "whoever holds the capsule may still read it"
    del unread
    gc.collect()
    assert watched() is None, "nobody can read it any more"


@emulated
def test_emulated_kernels_reach_no_real_device() -> None:
    with pytest.raises(RuntimeError, match="unset MINITORCH_EMULATE"):
        mt.from_dlpack(OnDevice())


@no_device
def test_memory_of_a_device_needs_a_device() -> None:
    for call in (
        lambda: mt.from_dlpack(OnDevice()),
        lambda: kernels.flash_attention_forward(OnDevice(), OnDevice(), OnDevice()),
    ):
        with pytest.raises(RuntimeError, match="use the fast backend"):
            call()


def test_what_cannot_be_taken_is_named() -> None:
    for call, error, words in (
        (lambda: mt.from_dlpack(Foreign(np.ones(2, complex))), TypeError, "complex128"),
        (lambda: dlpack.Read(np.ones(2, complex).__dlpack__()), TypeError, "type 5 with 128"),
        (lambda: mt.from_numpy(OnDevice()), TypeError, r"use minitorch\.from_dlpack"),
        (lambda: dlpack.Read(None), ValueError, "PyCapsule"),
    ):
        with pytest.raises(error, match=words):
            call()


# -- a GPU -----------------------------------------------------------------------------------------


@pytest.mark.cuda
@given(permuted(DTYPES.keys() - {BFLOAT16}))
def test_a_device_array_and_a_tensor_are_one_memory(array: np.ndarray[Any, Any]) -> None:
    # Numba copies rows first or columns first, and no order between.
    columns_first = array.ndim > 1 and array.strides[0] < array.strides[-1]
    there = cuda.to_device(np.array(array, order="F" if columns_first else "C"))
    made = mt.from_dlpack(there)
    assert made.backend is CudaBackend and device_pointer(made._tensor._storage) == device_pointer(
        there
    )
    np.testing.assert_array_equal(made.to_numpy(), array)
    # Numba stands for any reader of __cuda_array_interface__, this file's own reader for DLPack.
    back = cuda.as_cuda_array(made)
    assert device_pointer(back) == device_pointer(there)
    np.testing.assert_array_equal(back.copy_to_host(), array)
    lent = dlpack.Read(made.__dlpack__(stream=1))
    assert lent.array.ctypes.data == device_pointer(there) and lent.device_type == dlpack.DEVICE
    described = OnDevice(**{**lent.array.__array_interface__, "typestr": lent.typestr})
    np.testing.assert_array_equal(cuda.as_cuda_array(described).copy_to_host(), array)


@pytest.mark.cuda
def test_memory_of_bfloat16_is_shared_by_both_protocols() -> None:
    array = np.arange(6.0).reshape(2, 3).astype(BFLOAT16)
    there = to_device(array)
    described = OnDevice(**dlpack.cuda_array_interface(there))
    assert described.__cuda_array_interface__["typestr"] == "<V2"
    lent = Foreign(mt.from_dlpack(there))
    lent.__dlpack_device__ = lambda: (dlpack.DEVICE, 0)  # type: ignore[method-assign]
    for lender in (there, described, lent):
        made = mt.from_dlpack(lender)
        assert (made.backend, made.dtype) == (CudaBackend, BFLOAT16)
        assert device_pointer(made._tensor._storage) == device_pointer(there)
        np.testing.assert_array_equal((made + 1.0).to_numpy(), np.arange(1.0, 7.0).reshape(2, 3))
    assert made.__cuda_array_interface__["typestr"] == "<V2"
    made[1, 2] = 9.5
    assert made[1, 2] == 9.5 and to_host(there)[1, 2] == 9.5


@pytest.mark.cuda
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_other_libraries_share_device_memory(library: str) -> None:
    other = pytest.importorskip(library)
    make = other.arange if library == "cupy" else (lambda n: other.arange(n, device="cuda"))
    theirs = (make(6) * 1.0).reshape(2, 3).T
    address = theirs.data.ptr if library == "cupy" else theirs.data_ptr()
    made = mt.from_dlpack(theirs, requires_grad=True)
    assert device_pointer(made._tensor._storage) == address and made._tensor.strides == (1, 3)
    del theirs
    gc.collect()
    (made * made).sum().backward()
    expected = np.arange(6.0).reshape(2, 3).T
    assert made.grad is not None
    np.testing.assert_array_equal(made.grad.to_numpy(), 2 * expected)
    read = other.from_dlpack(made)
    del made
    gc.collect()
    host = read.get() if library == "cupy" else read.cpu().numpy()
    np.testing.assert_array_equal(host, expected)
    for array in kernels.flash_attention_forward(read, read, read):
        assert type(array) is type(read)
