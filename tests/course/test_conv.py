"""Module 4: convolution in one and two dimensions, against sums over a padded NumPy array."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis.strategies import DataObject, data, integers

from minitorch import Conv1dFun, Conv2dFun, FastBackend, TensorBackend, from_numpy

from ..support.tolerances import assert_close_arrays
from ..tensor_strategies import Array, laid_out, lattice, on_backends, on_dtypes

few = settings(max_examples=15)


class Convolution(NamedTuple):
    """A convolution, and how many dimensions an image has."""

    function: Any
    spatial: int


ONE_D = Convolution(Conv1dFun, 1)
TWO_D = Convolution(Conv2dFun, 2)
in_one_and_two_dimensions = pytest.mark.parametrize(
    "conv",
    [
        pytest.param(ONE_D, id="1d", marks=pytest.mark.task4_1),
        pytest.param(TWO_D, id="2d", marks=pytest.mark.task4_2),
    ],
)


def convolved(image: Array, weight: Array) -> Array:
    """Convolve by definition: for each offset of the kernel, a product of channels.

    Args:
        image: (batch, in_channels, ...).
        weight: (out_channels, in_channels, ...).
    """
    kernel, size = weight.shape[2:], image.shape[2:]
    padded = np.pad(image, [(0, 0), (0, 0), *((0, k - 1) for k in kernel)])
    out = np.zeros((len(image), len(weight), *size))
    for offset in np.ndindex(*kernel):
        window = tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))
        out += np.einsum("bi...,oi->bo...", padded[(..., *window)], weight[(..., *offset)])
    return out


def drawn_arrays(data: DataObject, spatial: int, most: int = 5) -> tuple[Array, Array]:
    """Draw an image of ``most`` pixels at the most along each side, and a weight.

    The kernel may be larger than the image.
    """
    batch, channels, out_channels = (data.draw(integers(1, 3)) for _ in range(3))
    size = tuple(data.draw(integers(1, most)) for _ in range(spatial))
    kernel = tuple(data.draw(integers(1, 4)) for _ in range(spatial))
    image = data.draw(lattice((batch, channels, *size)))
    return image, data.draw(lattice((out_channels, channels, *kernel)))


@in_one_and_two_dimensions
@on_backends()
@on_dtypes
@few
@given(data())
def test_convolution(
    dtype: npt.DTypeLike, backend: TensorBackend, conv: Convolution, data: DataObject
) -> None:
    image, weight = (x.astype(dtype) for x in drawn_arrays(data, conv.spatial))
    out = conv.function.apply(
        data.draw(laid_out(image, backend)), data.draw(laid_out(weight, backend))
    )
    assert out.backend is backend
    assert_close_arrays(out, convolved(image, weight), dtype, "convolution", 1000.0)


@in_one_and_two_dimensions
@on_dtypes
@few
@given(data())
def test_gradients(dtype: npt.DTypeLike, conv: Convolution, data: DataObject) -> None:
    check_gradients(dtype, conv, data, FastBackend)


def check_gradients(
    dtype: npt.DTypeLike, conv: Convolution, data: DataObject, backend: TensorBackend, most: int = 5
) -> None:
    image, weight = (x.astype(dtype) for x in drawn_arrays(data, conv.spatial, most))
    on_tensors = [data.draw(laid_out(x, backend)) for x in (image, weight)]
    for operand in on_tensors:
        operand.requires_grad_(True)
    out = conv.function.apply(*on_tensors)
    dout = np.linspace(-1.0, 2.0, out.size).reshape(out.shape)
    out.backward(data.draw(laid_out(dout.astype(dtype), backend)))
    # Convolution is linear in each operand: the slope in an element is what becomes of a unit there.
    units = np.eye(image.size).reshape(image.size, *image.shape)
    d_image = [(convolved(unit, weight) * dout).sum() for unit in units]
    units = np.eye(weight.size).reshape(weight.size, *weight.shape)
    d_weight = [(convolved(image, unit) * dout).sum() for unit in units]
    for operand, expected in zip(on_tensors, (d_image, d_weight), strict=True):
        expected = np.array(expected).reshape(operand.shape)
        assert_close_arrays(operand.grad, expected, dtype, "gradient", 1000.0)


@in_one_and_two_dimensions
def test_sizes_beyond_one_block(conv: Convolution) -> None:
    rng = np.random.default_rng(3)
    image = rng.standard_normal((3, 5, *(37,) * conv.spatial))
    weight = rng.standard_normal((7, 5, *(3,) * conv.spatial))
    out = conv.function.apply(from_numpy(image), from_numpy(weight))
    assert_close_arrays(out, convolved(image, weight), np.float64, "convolution", 50.0)
