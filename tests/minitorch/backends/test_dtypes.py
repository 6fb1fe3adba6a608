"""Dtypes and memory: what a tensor holds, what every operation keeps, what NumPy shares with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis.strategies import DataObject, data, permutations

import minitorch
from kernels.runtime.dtypes import FLOAT_DTYPES, acc_dtype
from minitorch import (
    FastBackend,
    SimpleBackend,
    Tensor,
    TensorBackend,
    from_numpy,
    get_default_dtype,
    set_default_dtype,
    tensor,
)

from ...support.tolerances import assert_close_arrays
from ...tensor_strategies import lattice, on_backends, shapes


@pytest.fixture
def float32_by_default() -> Iterator[None]:
    before = get_default_dtype()
    set_default_dtype(np.float32)
    yield
    set_default_dtype(before)


# --- factories -------------------------------------------------------------------------------

FACTORIES: dict[str, Callable[..., Tensor]] = {
    "tensor": lambda **kw: tensor([[1.0, 2.0, 3.0]], **kw),
    "tensor of ints": lambda **kw: tensor([1, 2], **kw),
    "zeros": lambda **kw: minitorch.zeros((2, 3), **kw),
    "ones": lambda **kw: minitorch.ones((2, 3), **kw),
    "full": lambda **kw: minitorch.full((2, 3), 0.1, **kw),
    "rand": lambda **kw: minitorch.rand((2, 3), **kw),
    "randn": lambda **kw: minitorch.randn((2, 3), **kw),
}
factories = pytest.mark.parametrize("make", list(FACTORIES.values()), ids=list(FACTORIES))


@factories
@on_backends()
def test_factories_make_float64_unless_told(
    make: Callable[..., Tensor], backend: TensorBackend
) -> None:
    assert make(backend=backend).dtype == np.float64
    assert make(backend=backend, dtype=np.float32).dtype == np.float32
    assert make(backend=backend, dtype="float32").dtype == np.float32
    assert make(backend=backend).backend is backend
    assert not make(backend=backend).requires_grad()
    assert make(backend=backend, requires_grad=True).is_leaf()


def test_everything_made_of_numbers_follows_the_default(float32_by_default: None) -> None:
    assert minitorch.TensorData([1.0], (1,)).dtype == np.float32
    assert minitorch.one_hot(tensor([0, 1]), 2).dtype == np.float32
    assert minitorch.tensor_from_numpy(np.zeros(2)).dtype == np.float32
    assert minitorch.zeros_tensor_from_numpy((2,)).dtype == np.float32
    assert minitorch.ones_tensor_from_numpy((2,)).dtype == np.float32
    layer = minitorch.Linear(2, 3)
    assert {p.value.dtype for p in layer.parameters()} == {np.dtype(np.float32)}
    assert all(make().dtype == np.float32 for make in FACTORIES.values())
    ids = from_numpy(np.array([1, 2]), SimpleBackend)
    assert (ids + 0.5).dtype == ids.sum().dtype == (ids * ids).dtype == np.float32
    assert from_numpy(np.zeros(2)).dtype == np.float64  # made of an array


def test_one_seed_gives_the_same_numbers_in_both_dtypes() -> None:
    for make in (minitorch.rand, minitorch.randn):
        minitorch.manual_seed(7)
        wide = make((3, 4), dtype=np.float64)
        minitorch.manual_seed(7)
        narrow = make((3, 4), dtype=np.float32)
        np.testing.assert_array_equal(narrow.to_numpy(), wide.to_numpy().astype(np.float32))


# --- operations ------------------------------------------------------------------------------

# Each takes a tensor of shape (2, 2, 4, 4) and gives a tensor that depends on it.
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers": lambda a: (2 - a * 3 + 1) / 2.5 - np.float64(0.5) * a,
    "powers": lambda a: (a * a + 1.0) ** 0.5,
    "maps": lambda a: a.relu() + a.sigmoid() + a.exp() + a.tanh() + (a * a).log(),
    "comparisons": lambda a: a * (a < 0.5) + a * (a > 0.0) + a * (a == a) + a * (a != 1.0),
    "reductions": lambda a: a.sum(1) + a.mean(2) + a.var(3) + a.sum() + a.mean(),
    "views": lambda a: a.permute(3, 1, 0, 2).contiguous().view(4, 16),
    "product": lambda a: a @ a.permute(0, 1, 3, 2),
    "product with a vector of one": lambda a: a @ a.sum(3),
    "maximum": lambda a: minitorch.max(a, 2),
    "softmax": lambda a: minitorch.softmax(a, 3) + minitorch.softmax(a, 1),
    "logsoftmax": lambda a: minitorch.logsoftmax(a, 3) + minitorch.logsumexp(a, 3),
    "gelu": minitorch.GELU,
    "loss": lambda a: minitorch.softmax_loss(a.view(16, 4), np.arange(16) % 4),
    "pooling": lambda a: minitorch.maxpool2d(a, (2, 2)) + minitorch.avgpool2d(a, (2, 2)),
    "dropout": lambda a: minitorch.dropout(a, 0.5),
    "conv1d": lambda a: minitorch.conv1d(a.view(4, 2, 8), a.view(8, 2, 4)),
    "conv2d": lambda a: minitorch.conv2d(a, a),
    "attention": lambda a: a.flash_attention(a, a, is_causal=True),
    "composed attention": lambda a: minitorch.naive_attention(a, a, a, is_causal=True),
    "linear": lambda a: minitorch.Linear(4, 3, True, a.backend, dtype=a.dtype)(a),
    "layer norm": lambda a: minitorch.LayerNorm1d(4, 1e-5, a.backend, dtype=a.dtype)(a),
    "dropout layer": lambda a: minitorch.Dropout(0.5)(a),
}


@on_backends()
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("operation", list(OPERATIONS.values()), ids=list(OPERATIONS))
def test_operations_and_their_gradients_keep_the_dtype(
    operation: Callable[[Tensor], Tensor], dtype: npt.DTypeLike, backend: TensorBackend
) -> None:
    numbers = np.random.default_rng(0).uniform(0.1, 1.0, (2, 2, 4, 4)).astype(dtype)
    found = []
    for kind in (np.dtype(np.float64), np.dtype(dtype)):
        a = from_numpy(numbers.astype(kind), backend, requires_grad=True)
        minitorch.manual_seed(0)
        out = operation(a)
        assert out.dtype == kind
        out.sum().backward()
        assert a.grad is not None and (a.grad.dtype, a.grad.shape) == (kind, a.shape)
        found.append((out.to_numpy(), a.grad.to_numpy()))
    for exact, own in zip(*found, strict=True):
        assert_close_arrays(own, exact, dtype, size=8.0 + float(np.abs(exact).max()))


@on_backends()
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_layers_and_optimisers_keep_the_dtype(backend: TensorBackend, dtype: npt.DTypeLike) -> None:
    model = minitorch.DecoderLM(
        5, 4, 2, 3, 0.1, backend=backend, n_layer=1, middle_dim=4, dtype=dtype
    )
    ids = np.array([[0, 4, 2]])
    for optimiser in (
        minitorch.Adam(model.parameters(), weight_decay=0.1), minitorch.SGD(model.parameters(), 0.1)
    ):  # fmt: skip
        loss = model.loss(ids, ids)
        assert loss.dtype == acc_dtype(np.dtype(dtype))  # a sum
        optimiser.zero_grad()
        loss.backward()
        assert {p.value.grad.dtype for p in model.parameters()} == {np.dtype(dtype)}
        optimiser.step()
        assert {p.value.dtype for p in model.parameters()} == {np.dtype(dtype)}


@on_backends()
def test_the_wider_dtype_wins_and_gradients_come_back_narrow(backend: TensorBackend) -> None:
    narrow = from_numpy(np.ones((2, 2), np.float32), backend, requires_grad=True)
    wide = from_numpy(np.ones((2, 2)), backend, requires_grad=True)
    out = narrow * wide + narrow @ wide
    assert out.dtype == np.float64
    out.sum().backward()
    assert narrow.grad is not None
    assert wide.grad is not None
    assert (narrow.grad.dtype, wide.grad.dtype) == (np.float32, np.float64)


# --- integers --------------------------------------------------------------------------------


@on_backends()
def test_integers_stay_integers_until_they_are_computed_with(backend: TensorBackend) -> None:
    ids = from_numpy(np.array([[3, 1, 2], [5, 4, 0]]), backend)
    truth = from_numpy(np.array([[True], [False]]), backend)
    assert truth.dtype == bool
    assert (
        ids.dtype == ids.permute(1, 0).dtype == ids.view(6).dtype == ids.detach().dtype == np.int64
    )
    assert ids.permute(1, 0).contiguous().dtype == np.int64
    assert ids[1, 0] == 5
    for result, expected in (
        (ids + 0.5, [[3.5, 1.5, 2.5], [5.5, 4.5, 0.5]]),
        (0.5 * ids, [[1.5, 0.5, 1.0], [2.5, 2.0, 0.0]]),
        (ids / 2, [[1.5, 0.5, 1.0], [2.5, 2.0, 0.0]]),
        (-ids, [[-3.0, -1.0, -2.0], [-5.0, -4.0, 0.0]]),
        (ids < 2.5, [[0.0, 1.0, 1.0], [0.0, 0.0, 1.0]]),
        (ids == ids, [[1.0] * 3] * 2),
        (ids.sum(1), [[6.0], [9.0]]),
        (ids.mean(), [2.5]),
        (ids @ ids.permute(1, 0), [[14.0, 19.0], [19.0, 41.0]]),
        (ids * truth, [[3.0, 1.0, 2.0], [0.0, 0.0, 0.0]]),
        (1 - truth, [[0.0], [1.0]]),
        (truth.sum(), [1.0]),
    ):
        assert_close_arrays(result, np.array(expected), np.float64)


# --- memory shared with NumPy ----------------------------------------------------------------


@given(data())
def test_a_permuted_array_is_shared(data: DataObject) -> None:
    stored = data.draw(lattice(data.draw(shapes())))
    array = stored.transpose(data.draw(permutations(range(stored.ndim))))
    a = from_numpy(array)
    assert np.shares_memory(a.to_numpy(), array)
    np.testing.assert_array_equal(a.to_numpy(), array)
    array[(0,) * array.ndim] = 77.0
    assert a[(0,) * array.ndim] == 77.0
    a[(-0,) * array.ndim] = 78.0
    assert array[(0,) * array.ndim] == 78.0


GRID = np.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(GRID[:, ::2], id="every other column"),
        pytest.param(GRID[1:3, 1:3], id="a window"),
        pytest.param(GRID[::-1], id="reversed"),
        pytest.param(np.broadcast_to(np.arange(3.0), (2, 3)), id="broadcast"),
        pytest.param(GRID.astype(">f8"), id="of the other byte order"),
        pytest.param(np.frombuffer(bytes(25), "f8", 3, 1), id="misaligned"),
        pytest.param([[1.0, 2.0], [3.0, 4.0]], id="a list"),
    ],
)
def test_an_array_that_no_strides_can_describe_is_copied(array: Any) -> None:
    a = from_numpy(array)
    assert a.dtype == np.asarray(array).dtype.newbyteorder("=")
    np.testing.assert_array_equal(a.to_numpy(), array)
    assert not np.shares_memory(a.to_numpy(), array)
    assert_close_arrays(-a, -np.asarray(array), np.float64)


def test_a_read_only_array_is_shared_and_stays_read_only() -> None:
    array = np.arange(3.0)
    array.flags.writeable = False
    a = from_numpy(array)
    assert np.shares_memory(a.to_numpy(), array)
    with pytest.raises(ValueError, match="read-only"):
        a[0] = 1.0
    assert (a + 1.0).to_numpy().tolist() == [1.0, 2.0, 3.0]


def test_to_numpy_and_asarray_share_the_memory_of_the_tensor() -> None:
    a = tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    for seen in (a, a.permute(1, 0), a.detach(), a.view(6)):
        assert np.shares_memory(seen.to_numpy(), a._tensor._storage)
        assert np.shares_memory(np.asarray(seen), a._tensor._storage)
        np.testing.assert_array_equal(np.asarray(seen), seen.to_numpy())
    assert not np.shares_memory(np.array(a), a._tensor._storage)
    assert np.asarray(a, dtype=np.float32).dtype == np.float32
    with pytest.raises(ValueError, match="copy"):
        a.__array__(np.float32, copy=False)
    assert np.stack([a, a]).shape == (2, 2, 3)  # pyright: ignore[reportArgumentType]


# --- moving and converting -------------------------------------------------------------------


def test_to_what_it_is_already_changes_nothing() -> None:
    a = tensor([1.0, 2.0])
    assert a.to(SimpleBackend) is a.to(np.float64) is a.cpu() is a


def test_a_tensor_moves_between_backends_on_its_memory() -> None:
    a = tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    b = a.permute(1, 0).to(FastBackend)
    assert (b.backend, a.backend) == (FastBackend, SimpleBackend)
    assert np.shares_memory(b.to_numpy(), a.to_numpy())
    (b * b).sum().backward()
    assert a.grad is not None
    assert a.grad.backend is SimpleBackend
    assert_close_arrays(a.grad, 2.0 * a.to_numpy(), np.float64)


def test_a_conversion_to_integers_ends_the_graph() -> None:
    a = tensor([1.0, 2.7], requires_grad=True)
    ids = a.to(np.int64)
    assert (ids.dtype, ids.to_numpy().tolist(), ids.is_constant()) == (np.int64, [1, 2], True)


def test_operands_of_two_backends_meet_on_the_left_ones() -> None:
    left, right = tensor([1.0], FastBackend), tensor([2.0], SimpleBackend)
    assert (left + right).backend is FastBackend
