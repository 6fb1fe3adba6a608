"""Tasks 4.1 to 4.4: convolution loops and layers on small operands, whose mistakes have names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import minitorch
from minitorch import TensorData, nn, tensor
from minitorch.fast_conv import tensor_conv1d, tensor_conv2d

from ..strategies import result_of
from ..support.mistakes import assert_close_or_explain, filled

# --- tasks 4.1 and 4.2: convolution -------------------------------------------------------------


def convolved(
    image: Any, weight: Any, size: Sequence[int], reverse: bool, *,
    steps: Sequence[int] | None = None, limits: Sequence[int] | None = None, low: int = 0,
    channels: int | None = None, exchanged: bool = False,
) -> Any:  # fmt: skip
    """Convolve element by element, as a loop over positions does; the options are mistakes.

    Args:
        image: (batch, in_channels, …).
        weight: (out_channels, in_channels, …).
        size: Of the output.
        reverse: Anchor the kernel at its end.
        steps: 1 or -1 for each dimension: how the place in the image follows the kernel's.
        limits: Places from here on count as 0; the size of the image.
        low: Places before this count as 0.
        channels: How many channels are added up.
        exchanged: The first two dimensions of the weight are exchanged.
    """
    by: Sequence[int] = steps or [-1 if reverse else 1] * len(size)
    ends: Sequence[int] = limits or image.shape[2:]
    flat, strides = image.reshape(-1), np.array(image.strides) // image.itemsize
    by_flat, of_weight = weight.reshape(-1), np.array(weight.strides) // weight.itemsize
    out = np.zeros((len(image), len(weight), *size))
    for b, o, *place in np.ndindex(*out.shape):
        for i, *k in np.ndindex(channels or image.shape[1], *weight.shape[2:]):
            at = [p + step * n for p, step, n in zip(place, by, k, strict=True)]
            if not all(low <= x < limit for x, limit in zip(at, ends, strict=True)):
                continue
            position = int(np.dot((b, i, *at), strides))
            first = (i, o) if exchanged else (o, i)
            own = int(np.dot((*first, *k), of_weight))
            if not (-len(flat) <= position < len(flat) and own < len(by_flat)):
                return np.full(out.shape, np.nan)
            out[(b, o, *place)] += flat[position] * by_flat[own]
    return out


def check_convolution(
    loop: Callable[..., Any], size: tuple[int, ...], kernel: tuple[int, ...]
) -> None:
    """Convolve both ways: same size, fewer outputs than inputs, and a kernel beyond the image."""
    rng = np.random.default_rng(1)
    image = rng.uniform(0.5, 2.0, (2, 3, *size))
    weight = rng.uniform(0.5, 2.0, (3, 3, *kernel))
    for shape, reverse in itertools.product((size, tuple(n - 1 for n in size)), (False, True)):
        out = TensorData(np.full(6 * int(np.prod(shape)), 7.0), (2, 3, *shape))
        a, w = (TensorData(x.reshape(-1).copy(), x.shape) for x in (image, weight))
        what = f"input {image.shape}, weight {weight.shape}, out {out.shape}, reverse={reverse}"
        got = filled(
            what,
            lambda out, a, w, reverse: loop(*out.tuple(), out.size, *a.tuple(), *w.tuple(), reverse),
            out, a, w, reverse,
        )  # fmt: skip

        def of(reverse: bool = reverse, shape: tuple[int, ...] = shape, **mistake: Any) -> Any:
            return convolved(image, weight, shape, reverse, **mistake)

        sign = -1 if reverse else 1
        mistakes = {
            "out is added to what it held: write the sum": 7.0 + of(),
            "reverse is not used: with it the place in the input is w - k, not w + k": of(
                steps=[-sign] * len(size)
            ),
            "places before the beginning of the input count: they must be 0 or more": of(low=-9),
            "place 0 of the input does not count: the places are 0 and more": of(low=1),
            "places beyond the end of the input count": of(limits=[n + 9 for n in size]),
            "the place in the input is compared with the size of out, not that of the input": of(
                limits=shape
            ),
            "the channels of the weight are exchanged: (out, in)": of(exchanged=True),
            "not all channels are added up": of(channels=1),
        }
        if len(size) == 2:
            mistakes |= {
                "reverse is not used for rows": of(steps=[-sign, sign]),
                "reverse is not used for columns": of(steps=[sign, -sign]),
                "columns are compared with the height of the input": of(limits=[size[0]] * 2),
                "rows are compared with the width of the input": of(limits=[size[1]] * 2),
            }
        assert_close_or_explain(got, of(), what, mistakes)


@pytest.mark.task4_1
@pytest.mark.parametrize(("size", "kernel"), [(5, 2), (3, 4)])
def test_the_loop_of_one_dimension(size: int, kernel: int) -> None:
    check_convolution(tensor_conv1d, (size,), (kernel,))


@pytest.mark.task4_2
@pytest.mark.parametrize(("size", "kernel"), [((3, 4), (2, 3)), ((4, 2), (3, 3))], ids=str)
def test_the_loop_of_two_dimensions(size: tuple[int, int], kernel: tuple[int, int]) -> None:
    check_convolution(tensor_conv2d, size, kernel)


# --- task 4.3: pooling --------------------------------------------------------------------------

IMAGE = np.arange(48.0).reshape(1, 2, 4, 6) ** 2


@pytest.mark.task4_3
@pytest.mark.parametrize("kernel", [(2, 3), (4, 2)], ids=str)
def test_tiles_and_their_mean(kernel: tuple[int, int]) -> None:
    rows, cols = (n // k for n, k in zip((4, 6), kernel, strict=True))
    split = IMAGE.reshape(1, 2, rows, kernel[0], cols, kernel[1])
    shape = 1, 2, rows, cols, kernel[0] * kernel[1]
    expected = split.transpose(0, 1, 2, 4, 3, 5).reshape(shape)
    tiles, height, width = result_of(f"tile(image, {kernel})", nn.tile, tensor(IMAGE), kernel)
    assert (height, width) == (rows, cols), (
        f"tile of 4 x 6 pixels by {kernel} says {(height, width)} tiles, expected {(rows, cols)}"
    )
    mistakes = {
        "view alone cuts no tiles: bring the two dimensions of a tile last": IMAGE.reshape(shape),
        "rows and columns of tiles are exchanged": (
            split.transpose(0, 1, 4, 2, 3, 5).reshape(shape)
        ),
        "rows and columns within a tile are exchanged": (
            split.transpose(0, 1, 2, 4, 5, 3).reshape(shape)
        ),
    }
    assert_close_or_explain(tiles.to_numpy(), expected, f"tiles of {kernel}", mistakes)
    mean = result_of("avgpool2d", nn.avgpool2d, tensor(IMAGE), kernel).to_numpy()
    mistakes = {
        "these are sums: divide by the number of pixels of a tile": expected.sum(-1),
        "the dimension of size 1 that mean leaves is still there: view it away": (
            expected.mean(-1, keepdims=True)
        ),
        "a tile has kh kw pixels, and not always four": expected.sum(-1) / 4.0,
        "these are maxima": expected.max(-1),
    }
    assert_close_or_explain(mean, expected.mean(-1), f"avgpool2d by {kernel}", mistakes)


# --- task 4.4: maximum, softmax, dropout ----------------------------------------------------------


@pytest.mark.task4_4
@pytest.mark.parametrize("dim", [0, 1])
def test_the_maximum_and_its_gradient(dim: int) -> None:
    array = np.array([[3.0, 1.0, 2.0], [0.5, 4.0, 5.0]])
    x = minitorch.tensor(array, requires_grad=True)
    largest = array.max(dim, keepdims=True)
    y = result_of(f"max(x, {dim})", nn.max, x, dim)
    whole = np.full(largest.shape, array.max())
    smallest = array.min(dim, keepdims=True)
    mistakes = {"it is the maximum of the whole tensor": whole, "it is the minimum": smallest}
    assert_close_or_explain(y.to_numpy(), largest, f"max over {dim}", mistakes)
    marks = result_of(f"argmax(x, {dim})", nn.argmax, x, dim).to_numpy()
    mistakes = {"the maximum of the whole tensor is marked": array == array.max()}
    assert_close_or_explain(marks, (array == largest) * 1.0, f"argmax over {dim}", mistakes)
    y.backward(minitorch.tensor(np.full(largest.shape, 2.0)))
    assert x.grad is not None, "the gradient of max does not arrive at x"
    mistakes = {
        "the gradient goes to every element: only the maximum gets it": np.full((2, 3), 2.0),
        "the gradient that is passed in is not used": (array == largest) * 1.0,
    }
    assert_close_or_explain(
        x.grad.to_numpy(), (array == largest) * 2.0, f"gradient of max over {dim}", mistakes
    )


@pytest.mark.task4_4
def test_max_pooling_takes_the_maximum_of_a_tile() -> None:
    tiles = IMAGE.reshape(1, 2, 2, 2, 2, 3).transpose(0, 1, 2, 4, 3, 5).reshape(1, 2, 2, 2, 6)
    got = result_of("maxpool2d", nn.maxpool2d, tensor(IMAGE), (2, 3)).to_numpy()
    mistakes = {
        "these are means: take the maximum of each tile": tiles.mean(-1),
        "the dimension of size 1 that max leaves is still there": tiles.max(-1, keepdims=True),
    }
    assert_close_or_explain(got, tiles.max(-1), "maxpool2d by (2, 3)", mistakes)


SCORES = np.array([[1.0, 2.0, 4.0], [0.0, -1.0, 3.0]])
LARGE = np.array([[1000.0, 0.0, 999.0], [-1000.0, -1001.0, -1002.0]])


def softmaxed(x: Any, dim: int) -> Any:
    e = np.exp(x - x.max(dim, keepdims=True))
    return e / e.sum(dim, keepdims=True)


@pytest.mark.task4_4
@pytest.mark.parametrize("dim", [0, 1])
def test_softmax_and_its_logarithm(dim: int) -> None:
    for x, kind in ((SCORES, "small"), (LARGE, "large")):
        expected = softmaxed(x, dim)
        p = result_of("softmax", nn.softmax, tensor(x), dim).to_numpy()
        if not np.isfinite(p).all():
            pytest.fail(
                f"softmax of {kind} numbers is {p}: subtract the maximum, _shift, from x first"
            )
        mistakes = {"the sum goes over the other dimension": softmaxed(x, 1 - dim)}
        assert_close_or_explain(p, expected, f"softmax of {kind} numbers over {dim}", mistakes)
        log = result_of("logsoftmax", nn.logsoftmax, tensor(x), dim).to_numpy()
        wanted = x - x.max(dim, keepdims=True)
        wanted = wanted - np.log(np.exp(wanted).sum(dim, keepdims=True))
        mistakes = {
            "log of a softmax: small probabilities are lost; take x - shift - log of the sum": (
                np.log(expected + 1e-6)
            )
        }
        assert_close_or_explain(log, wanted, f"logsoftmax of {kind} numbers over {dim}", mistakes)


@pytest.mark.task4_4
def test_softmax_of_a_row_of_minus_infinity_is_zero() -> None:
    x = tensor(np.array([[-np.inf, -np.inf], [0.0, -np.inf]]))
    p = result_of("softmax", nn.softmax, x, 1).to_numpy()
    assert p.tolist() == [[0.0, 0.0], [1.0, 0.0]], (
        f"softmax of a row of -inf is {p[0]}, expected 0: -inf - (-inf) and 0 / 0 are NaN; _shift is "
        "finite, and a sum of 0 is not to be divided by"
    )


@pytest.mark.task4_4
def test_dropout_sets_a_part_to_zero_and_leaves_the_rest() -> None:
    x = tensor(np.full(2000, 3.0))
    for rate in (0.25, 0.9):
        minitorch.manual_seed(1)
        y = result_of(f"dropout(x, {rate})", nn.dropout, x, rate).to_numpy()
        kept = y[y != 0.0]
        assert kept.size == 0 or (kept == 3.0).all(), (
            f"dropout of 3.0 by {rate} leaves {kept[0]}: here what is kept is unchanged, not scaled"
        )
        assert abs((y == 0.0).mean() - rate) < 0.05, (
            f"dropout by {rate} drops {(y == 0.0).mean():.0%} of the elements, expected {rate:.0%}"
        )
    for rate, ignore in ((0.0, False), (0.9, True)):
        y = result_of(f"dropout(x, {rate}, {ignore})", nn.dropout, x, rate, ignore).to_numpy()
        assert (y == 3.0).all(), f"dropout with rate={rate}, ignore={ignore} must change nothing"
    y = result_of("dropout(x, 1.0)", nn.dropout, x, 1.0).to_numpy()
    assert (y == 0.0).all(), "dropout with rate=1.0 must drop everything"
