"""The tensors that the property tests draw: small, of one to four dimensions, seldom contiguous."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis.extra.numpy import arrays
from hypothesis.strategies import (
    DrawFn,
    SearchStrategy,
    composite,
    floats,
    integers,
    lists,
    permutations,
    tuples,
)

from minitorch import (
    CudaBackend,
    FastBackend,
    SimpleBackend,
    Tensor,
    TensorBackend,
    TensorData,
    UserIndex,
    UserShape,
    from_numpy,
    tensor,
)

from .strategies import small_floats, small_ints

Array = npt.NDArray[Any]

# -- the published strategies ------------------------------------------------------------------


@composite
def vals(draw: DrawFn, size: int, number: SearchStrategy[float]) -> Tensor:
    """Draw a tensor of one dimension."""
    return tensor(draw(lists(number, min_size=size, max_size=size)))


def shapes() -> SearchStrategy[tuple[int, ...]]:
    """Draw a shape: one to four dimensions, each of size one to three."""
    return lists(small_ints, min_size=1, max_size=4).map(tuple)


@composite
def tensor_data(
    draw: DrawFn,
    numbers: SearchStrategy[float] | None = None,
    shape: UserShape | None = None,
) -> TensorData:
    """Draw the data of a tensor; stored in one order of its dimensions and seen in another."""
    seen = tuple(draw(shapes()) if shape is None else shape)
    numbers = floats() if numbers is None else numbers
    # Dimension i of the storage is dimension order[i] of what is seen.
    order = draw(permutations(range(len(seen))))
    stored = tuple(seen[dim] for dim in order)
    size = int(np.prod(stored))
    storage = draw(lists(numbers, min_size=size, max_size=size))
    return TensorData(storage, stored).permute(*np.argsort(order).tolist())


def indices(layout: TensorData) -> SearchStrategy[UserIndex]:
    """Draw an index that lies in a tensor."""
    return tuples(*(integers(0, size - 1) for size in layout.shape))


def tensors(
    numbers: SearchStrategy[float] = small_floats,
    backend: TensorBackend | None = None,
    shape: UserShape | None = None,
) -> SearchStrategy[Tensor]:
    """Draw a tensor of floats."""
    on = SimpleBackend if backend is None else backend
    return tensor_data(numbers, shape).map(lambda data: _moved(data, on))


def _moved(data: TensorData, backend: TensorBackend) -> Tensor:
    if backend.cuda:
        data.to_cuda_()
    return Tensor(data, backend=backend)


# -- tensors for comparison with NumPy ---------------------------------------------------------


def lattice(
    shape: Sequence[int], first: float = 0.03, low: int = -50, high: int = 50
) -> SearchStrategy[Array]:
    """Draw a float64 array of numbers 0.1 apart, from ``first + low / 10`` on.

    Where a function jumps or bends or has a pole, its slope cannot be measured, and hypothesis
    finds such points.  All those of our functions are multiples of 0.1, so 0.03 keeps a distance
    from them; two operands, from 0.03 and from 0.06 on, keep one from each other too.
    """
    numbers = arrays(np.int64, tuple(shape), elements=integers(low, high))
    return numbers.map(lambda n: n / 10.0 + first)


@composite
def laid_out(draw: DrawFn, array: Array, backend: TensorBackend = SimpleBackend) -> Tensor:
    """Draw a tensor of these elements: the order of its dimensions in memory is drawn."""
    order = draw(permutations(range(array.ndim)))
    stored = np.array(array.transpose(order), order="C", copy=True)
    return from_numpy(stored.transpose(np.argsort(order)), backend)


def sum_to(array: Array, shape: Sequence[int]) -> Array:
    """Add up an array to the shape of an operand that was broadcast to it."""
    array = array.sum(axis=tuple(range(array.ndim - len(shape))))
    broadcast = tuple(d for d, size in enumerate(shape) if size == 1 and array.shape[d] != 1)
    return array.sum(axis=broadcast, keepdims=True)


# -- backends ----------------------------------------------------------------------------------


def backends(
    fast: pytest.MarkDecorator | None = None, cuda: pytest.MarkDecorator | None = None
) -> list[Any]:
    """Return the simple and the fast backend as parameters; the CUDA backend too if it has a task.

    Args:
        fast: The course task that the fast backend is part of.
        cuda: The course task that the CUDA backend is part of.
    """
    found = [
        pytest.param(SimpleBackend, id="simple"),
        pytest.param(FastBackend, id="fast", marks=[fast] if fast else []),
    ]
    if cuda is not None:
        found.append(pytest.param(CudaBackend, id="cuda", marks=[pytest.mark.cuda, cuda]))
    return found


def on_backends(
    fast: pytest.MarkDecorator | None = None, cuda: pytest.MarkDecorator | None = None
) -> Callable[[Any], Any]:
    """Run a test on each of :func:`backends`."""
    return pytest.mark.parametrize("backend", backends(fast, cuda))


on_every_backend = pytest.mark.parametrize(
    "backend",
    [*backends(), pytest.param(CudaBackend, id="cuda", marks=pytest.mark.emulated)],
)


def on_dtypes(test: Any) -> Any:
    """Run a test in both floating dtypes."""
    return pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])(
        test
    )
