"""Odd arrays of other libraries: each is taken for what it is, or refused in words, and never changed."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest

import kernels
import minitorch as mt
from kernels.interop import dlpack
from minitorch import FastBackend, SimpleBackend

from ...support.fuzzing.buffers import placed
from ...support.tolerances import assert_close_arrays
from .test_interchange import Foreign


class Subclass(np.ndarray):
    """An array of somebody's own."""


class Series:
    """What pandas has: ``__array__``, a shape and a dtype."""

    def __init__(self, array: Any):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.array, dtype)


def memory_mapped(array: Any, mode: Any) -> Any:
    with tempfile.NamedTemporaryFile() as file:  # the mapping outlives the name
        file.write(array.tobytes())
        file.flush()
        return np.memmap(file.name, array.dtype, mode, shape=array.shape)


def read_only(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


#: The same numbers, in every way that an array may lie.
ODD_LAYOUTS: dict[str, Any] = {
    "read-only": read_only,
    "misaligned": lambda x: placed(x, misaligned=True),
    "byte-swapped": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "misaligned and byte-swapped": lambda x: placed(
        x.astype(x.dtype.newbyteorder(">")), misaligned=True
    ),
    "columns first": np.asfortranarray,
    "backwards": lambda x: np.ascontiguousarray(x[::-1, ::-1, ::-1])[::-1, ::-1, ::-1],
    "with gaps": lambda x: np.repeat(x, 3, axis=-1)[..., ::3],
    "repeated": lambda x: np.broadcast_to(x[None], (1, *x.shape))[0],
    "of a subclass": lambda x: x.view(Subclass),
    "mapped": lambda x: memory_mapped(x, "r+"),
    "mapped read-only": lambda x: memory_mapped(x, "r"),
    "pinned": lambda x: Pinned(x),
    "lent": Foreign,
}
LIST_OF_ODD = list(ODD_LAYOUTS)


class Pinned(Foreign):
    """Memory of the host that a device may read too, as PyTorch's ``pin_memory`` gives."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.PINNED, 0)


def bytes_of(array: Any) -> Any:
    array = getattr(array, "array", array)
    return array.strides, array.flags.writeable, np.asarray(array).tobytes()


@pytest.mark.parametrize("layout", LIST_OF_ODD)
def test_attention_takes_an_array_however_it_lies(layout: str) -> None:
    dtype = np.float32
    rng = np.random.default_rng(0)
    plain = [rng.standard_normal((2, 5, 4)).astype(dtype) for _ in range(4)]
    bias = rng.standard_normal((2, 5, 5)).astype(dtype)
    odd = [ODD_LAYOUTS[layout](x) for x in plain]
    odd_bias = ODD_LAYOUTS[layout](bias)
    before = [bytes_of(x) for x in (*odd, odd_bias)]
    results = []
    for (*operands, dout), mask in ((plain, bias), (odd, odd_bias)):
        out, lse = kernels.flash_attention_forward(*operands, mask)
        gradients = kernels.flash_attention_backward(
            dout, *operands, out, lse, mask, mask_gradient=True
        )
        results.append((out, lse, *gradients))
    for expected, got in zip(*results, strict=True):
        assert type(got) is np.ndarray and got.dtype == dtype
        assert_close_arrays(got, expected, dtype)
    assert [bytes_of(x) for x in (*odd, odd_bias)] == before


@pytest.mark.parametrize("layout", LIST_OF_ODD)
@pytest.mark.parametrize("backend", [SimpleBackend, FastBackend], ids=["simple", "fast"])
def test_a_tensor_takes_an_array_however_it_lies(layout: str, backend: Any) -> None:
    array = np.random.default_rng(0).standard_normal((2, 5, 4))
    odd = ODD_LAYOUTS[layout](array)
    before = bytes_of(odd)
    makers = [mt.from_dlpack] if isinstance(odd, Foreign) else [mt.from_numpy, mt.tensor]
    for make in makers:
        made = make(odd) if make is mt.from_dlpack else make(odd, backend)  # type: ignore[call-arg]
        assert made.dtype == np.float64 and made._tensor._storage.flags.aligned
        np.testing.assert_array_equal(made.to_numpy(), array)
        np.testing.assert_allclose((made * 2.0 + made.sum(1)).to_numpy()[0, 0, 0],
                                   2.0 * array[0, 0, 0] + array[0, :, 0].sum())  # fmt: skip
    assert bytes_of(odd) == before


def test_a_matrix_and_a_series_are_arrays() -> None:
    x = np.arange(6.0).reshape(2, 3)
    for like in (x.view(np.matrix), Series(x), x.data):
        assert mt.from_numpy(like).to_numpy().tolist() == x.tolist()
    with pytest.raises(TypeError, match=r"got Series; convert them with numpy\.asarray"):
        kernels.flash_attention_forward(Series(x), Series(x), Series(x))


class Keeps(Foreign):
    """An owner that does not lend."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("not this one")


class Broken(Foreign):
    """An owner that returns no capsule."""

    def __dlpack__(self, **options: Any) -> Any:
        return None


def test_what_no_kernel_reads_is_refused_in_words() -> None:
    x = np.ones((2, 5, 4), np.float32)
    for call, error, words in (
        (lambda: mt.from_dlpack(Keeps(x)), BufferError, r"not export .*pass a copy"),
        (lambda: mt.from_dlpack(Broken(x)), ValueError, "NumPy cannot read the result"),
    ):
        with pytest.raises(error, match=words):
            call()
