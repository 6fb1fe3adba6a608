"""The text of a tensor."""

from __future__ import annotations

import numpy as np
import pytest

import minitorch
from minitorch import FastBackend, from_numpy, tensor


def test_the_text_says_shape_dtype_backend_and_the_function_that_made_it() -> None:
    x = tensor([1.0, 1e-9], FastBackend, dtype="float32", requires_grad=True)
    about = "shape=(2,), dtype=float32, backend=FastOps"
    assert repr(x) == f"tensor([1.e+00, 1.e-09], {about}, requires_grad=True)"
    assert repr(x + x) == f"tensor([2.e+00, 2.e-09], {about}, grad_fn=Add)"
    assert repr(x.detach()) == f"tensor([1.e+00, 1.e-09], {about})"


def test_the_text_of_rows_is_aligned() -> None:
    lines = repr(tensor([[1.0, 20.0], [3.0, 4.0]])).splitlines()
    assert lines == [
        "tensor([[ 1., 20.],",
        "        [ 3.,  4.]],",
        "       shape=(2, 2), dtype=float64, backend=SimpleOps)",
    ]


def test_the_text_of_many_numbers_is_shortened_as_numpys() -> None:
    x = minitorch.rand((100, 100))
    assert len(repr(x)) < 1000 and "..." in repr(x)
    with np.printoptions(precision=2, threshold=10**6):
        assert "..." not in repr(x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int64", "bool"])
def test_every_dtype_has_a_text(dtype: str) -> None:
    text = repr(from_numpy(np.array([1, 0])).to(dtype))
    assert text.startswith("tensor([") and f"dtype={dtype}" in text


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 1)])
def test_every_shape_has_a_text(shape: tuple[int, ...]) -> None:
    assert f"shape={shape}" in repr(minitorch.zeros(shape))
