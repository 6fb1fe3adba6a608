"""Wrong calls: each says what it was given, what it expects and what to do, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import kernels
import minitorch as mt
from kernels import launch
from kernels.targets import why_no_cuda
from minitorch import (
    FastBackend,
    IndexingError,
    Parameter,
    SimpleBackend,
    Tensor,
    TensorData,
    from_numpy,
    tensor,
)

from .tensor_strategies import on_backends


class Operands:
    """Tensors to call things with, and what they looked like."""

    def __init__(self, backend: Any) -> None:
        self.matrix = from_numpy(np.arange(6.0).reshape(2, 3), backend, requires_grad=True)
        self.flipped = from_numpy(np.arange(6.0).reshape(2, 3).T, backend)  # (3, 2), permuted
        self.vector = from_numpy(np.ones(4), backend)
        self.image = from_numpy(np.ones((1, 2, 3, 3)), backend)
        self.ids = from_numpy(np.array([[0, 1, 5]]), backend)
        self.floats: Any = (2.5,)
        self.before = self.state()

    def state(self) -> dict[str, Any]:
        return {
            name: (t.shape, t.to_numpy().tolist(), t.dtype, t.backend, t.history, t.grad)
            for name, t in vars(self).items()
            if isinstance(t, Tensor)
        }


class Wrong(NamedTuple):
    """A wrong call, what it raises, and the words that its message must hold."""

    call: Callable[[Any], Any]
    error: type[Exception] | tuple[type[Exception], ...]
    words: tuple[str, ...]


def wrong(
    call: Callable[[Any], Any], error: type[Exception] | tuple[type[Exception], ...], *words: str
) -> Wrong:
    return Wrong(call, error, words)


# AssertionError and IndexingError are what the published course raises, and its tests expect.
WRONG = {
    # shapes
    "add": wrong(lambda o: o.matrix + o.vector, IndexingError, "(2, 3)", "(4,)", "view or permute"),
    "less": wrong(lambda o: o.matrix < o.vector, IndexingError, "(2, 3)", "(4,)"),
    "product": wrong(
        lambda o: o.matrix @ o.matrix, AssertionError, "(2, 3)", "3 columns", "2 rows", "permute"
    ),
    "product with a vector": wrong(
        lambda o: o.matrix @ o.vector, AssertionError, "(2, 3)", "(4,)", "two dimensions", "view"
    ),
    "product of batches": wrong(
        lambda o: o.image @ from_numpy(np.ones((5, 3, 3)), o.image.backend),
        IndexingError, "(1, 2, 3, 3) and (5, 3, 3)", "(1, 2) and (5,)", "broadcast",
    ),
    "map into a smaller tensor": wrong(
        lambda o: o.matrix.f.neg_map(o.matrix, o.vector), IndexingError, "(2, 3)", "(4,)"
    ),
    "conv channels": wrong(
        lambda o: mt.conv2d(o.image, from_numpy(np.ones((1, 3, 1, 1)), o.image.backend)),
        AssertionError, "2 channels", "weight 3", "(1, 2, 3, 3)",
    ),
    "conv dimensions": wrong(
        lambda o: mt.conv1d(o.image, o.image), AssertionError, "3 dimensions", "(1, 2, 3, 3)"
    ),
    "pool": wrong(lambda o: mt.maxpool2d(o.image, (2, 2)), AssertionError, "(2, 2)", "(3, 3)", "pad"),
    "pool of no image": wrong(
        lambda o: mt.avgpool2d(o.matrix, (1, 1)), AssertionError, "height", "(2, 3)", "view"
    ),
    "linear": wrong(
        lambda o: mt.Linear(4, 2, True, o.matrix.backend)(o.matrix), AssertionError, "(2, 3)", "(4, 2)"
    ),
    "layer norm": wrong(
        lambda o: mt.LayerNorm1d(2, 1e-5, o.matrix.backend)(o.matrix),
        (ValueError, IndexingError),
        "(2, 3)", "(2,)",
    ),
    "loss": wrong(
        lambda o: mt.softmax_loss(o.matrix, np.zeros(3, int)), ValueError, "(2, 3)", "(3,)", "view"
    ),
    "loss of a vector": wrong(
        lambda o: mt.softmax_loss(o.vector, np.zeros(4, int)), ValueError, "(rows, classes)", "(4,)"
    ),
    "attention layer": wrong(
        lambda o: mt.MultiHeadAttention(4, 2, backend=o.matrix.backend)(o.matrix),
        ValueError, "(batch, seq, 4)", "(2, 3)",
    ),
    "attention": wrong(
        lambda o: o.matrix.flash_attention(o.vector, o.vector), ValueError, "q (2, 3)", "k (4,)"
    ),
    "composed attention": wrong(
        lambda o: mt.naive_attention(o.matrix, o.vector, o.vector), ValueError, "q (2, 3)", "k (4,)"
    ),
    # dimensions, sizes, indices
    "sum": wrong(lambda o: o.matrix.sum(2), IndexingError, "dim 2", "(2, 3)", "use -2 to 1"),
    "mean": wrong(lambda o: o.matrix.mean(-3), IndexingError, "dim -3", "(2, 3)"),
    "all": wrong(lambda o: o.matrix.all(7), IndexingError, "dim 7", "(2, 3)"),
    "max": wrong(lambda o: mt.max(o.matrix, 4), IndexingError, "dim 4", "(2, 3)"),
    "softmax": wrong(lambda o: mt.softmax(o.matrix, 2), IndexingError, "dim 2", "(2, 3)"),
    "logsoftmax": wrong(lambda o: mt.logsoftmax(o.matrix, -3), IndexingError, "dim -3", "(2, 3)"),
    "sum over two": wrong(
        lambda o: o.matrix.sum((0, 1)), TypeError, "one whole number", "(0, 1)", "once for each"
    ),
    "sum over half": wrong(lambda o: o.matrix.sum(0.5), TypeError, "one whole number", "0.5"),
    "permute twice": wrong(
        lambda o: o.matrix.permute(0, 0), AssertionError, "0 to 1 once", "(0, 0)", "(2, 3)"
    ),
    "permute a tuple": wrong(
        lambda o: o.matrix.permute((1, 0)), TypeError, "one by one", "((1, 0),)", "permute(1, 0)"
    ),
    "view": wrong(lambda o: o.matrix.view(4), AssertionError, "(2, 3)", "6 elements", "(4,)"),
    "view without a size": wrong(lambda o: o.matrix.view(-1), AssertionError, "(2, 3)", "(-1,)"),
    "view of two negatives": wrong(lambda o: o.matrix.view(-2, -3), AssertionError, "(-2, -3)"),
    "view a tuple": wrong(lambda o: o.matrix.view((3, 2)), TypeError, "one by one", "view(2, 3)"),
    "view permuted": wrong(
        lambda o: o.flipped.view(6), AssertionError, "(3, 2)", "strides (1, 3)", "contiguous() first"
    ),
    "index short": wrong(lambda o: o.matrix[0], IndexingError, "(0,)", "(2, 3)", "for each"),
    "index outside": wrong(lambda o: o.matrix[5, 0], IndexingError, "(5, 0)", "(2, 3)"),
    "index negative": wrong(lambda o: o.matrix[-1, 0], IndexingError, "(-1, 0)", "negative"),
    "index of a slice": wrong(lambda o: o.matrix[:, 1], TypeError, "slice", "to_numpy()"),
    "index a float": wrong(lambda o: o.matrix[0, 1.5], TypeError, "(0, 1.5)"),
    "set outside": wrong(
        lambda o: o.matrix.__setitem__((0, 3), 1.0), IndexingError, "(0, 3)", "(2, 3)"
    ),
    "item": wrong(lambda o: o.matrix.item(), AssertionError, "one element", "(2, 3)"),
    # kinds of operands
    "add a string": wrong(lambda o: o.matrix + "1", TypeError, "got str", "minitorch.tensor"),
    "multiply a list": wrong(lambda o: o.matrix * [1, 2, 3], TypeError, "got list"),
    "add an array": wrong(lambda o: np.ones(3) + o.matrix, TypeError, "got ndarray", "from_numpy"),
    "less than nothing": wrong(lambda o: o.matrix < None, TypeError, "got NoneType"),
    "attention to an array": wrong(
        lambda o: o.matrix.flash_attention(np.ones((2, 3)), o.matrix), TypeError, "k", "ndarray"
    ),
    "attention of integers": wrong(
        lambda o: o.ids.flash_attention(o.ids, o.ids), TypeError, "int64", "float32"
    ),
    "a function of numbers": wrong(
        lambda o: mt.Add.apply(1.0, 2.0), TypeError, "Add.apply", "float, float", "minitorch.tensor"
    ),
    "a tensor of strings": wrong(lambda o: tensor(["a"]), ValueError, "needs numbers", "['a']"),
    "a tensor of nothing": wrong(lambda o: tensor([1.0, None]), ValueError, "needs numbers", "None"),
    "a tensor of ragged lists": wrong(lambda o: tensor([[1], [2, 3]]), ValueError, "equal lengths"),
    "a tensor of no data": wrong(
        lambda o: Tensor(o.floats, backend=SimpleBackend), AssertionError, "TensorData", "tuple"
    ),
    "a tensor of no backend": wrong(
        lambda o: Tensor(TensorData([1.0], (1,))), AssertionError, "SimpleBackend"
    ),
    "a negative shape": wrong(lambda o: mt.rand((2, -1)), ValueError, "none below 0", "(2, -1)"),
    "a broken shape": wrong(lambda o: mt.zeros(o.floats), ValueError, "whole numbers", "(2.5,)"),
    "to a name": wrong(lambda o: o.matrix.to("gpu"), TypeError, "FastBackend", "'gpu'"),
    "to nothing": wrong(lambda o: o.matrix.to(None), TypeError, "dtype", "None"),
    # values
    "token": wrong(
        lambda o: mt.Embedding(5, 2, o.ids.backend)(o.ids), ValueError, "from 0 to 4", "0 to 5"
    ),
    "class": wrong(lambda o: mt.one_hot(o.ids, 3), ValueError, "from 0 to 2", "0 to 5"),
    "target": wrong(
        lambda o: mt.softmax_loss(o.matrix, np.array([0, 3])), ValueError, "from 0 to 2", "0 to 3"
    ),
    "half a target": wrong(
        lambda o: mt.softmax_loss(o.matrix, np.array([0.5, 1])), TypeError, "whole numbers"
    ),
    "dropout": wrong(lambda o: mt.dropout(o.matrix, 1.5), ValueError, "from 0 to 1", "1.5"),
    "dropout layer": wrong(lambda o: mt.Dropout(1.0), ValueError, "[0, 1)", "1.0"),
    "heads": wrong(lambda o: mt.MultiHeadAttention(5, 2), ValueError, "5", "2", "equal share"),
    "attention by name": wrong(
        lambda o: mt.MultiHeadAttention(4, 2, attention="fast"), ValueError, "'flash'", "'fast'"
    ),
    "default dtype": wrong(lambda o: mt.set_default_dtype("int32"), TypeError, "float64", "int32"),
    # gradients and training
    "backward": wrong(lambda o: (o.matrix * 1).backward(), AssertionError, "(2, 3)", "sum() first"),
    "backward of another shape": wrong(
        lambda o: (o.matrix * 1).backward(o.vector), AssertionError, "(2, 3)", "(4,)"
    ),
    "gradient of integers": wrong(
        lambda o: o.ids.requires_grad_(True), TypeError, "int64", "to(numpy.float32)"
    ),
    "adam of scalars": wrong(
        lambda o: mt.Adam([Parameter(mt.Scalar(1.0))]).step(), TypeError, "Scalar", "SGD"
    ),
    "call a bare module": wrong(lambda o: mt.Module()(), TypeError, "Module", "forward"),
}  # fmt: skip


@on_backends()
@pytest.mark.parametrize("name", list(WRONG))
def test_a_wrong_call(name: str, backend: Any) -> None:
    operands = Operands(backend)
    case = WRONG[name]
    with pytest.raises(case.error) as raised:
        case.call(operands)
    message = str(raised.value)
    missing = [word for word in case.words if word not in message]
    assert not missing, f"{missing} missing in: {message}"
    assert operands.state() == operands.before


def test_layer_norm_reads_nothing_beyond_its_weights() -> None:
    # The kernel would: weights of one size, rows of another.
    for dim in (2, 4):
        layer = mt.LayerNorm1d(dim, 1e-5, FastBackend)
        with pytest.raises(ValueError, match=rf"shape \(2, 3\) .* shape \(3,\), got \({dim},\)"):
            layer(from_numpy(np.ones((2, 3))))


def test_adam_writes_nothing_beyond_its_moments() -> None:
    parameter = Parameter(from_numpy(np.zeros(3)))
    optimiser = mt.Adam([parameter])
    parameter.value.grad = from_numpy(np.ones(2))
    with pytest.raises(ValueError, match=r"\(3,\) has a gradient of shape \(2,\)"):
        optimiser.step()
    parameter.value.grad = from_numpy(np.ones(3))
    optimiser.step()
    parameter.update(from_numpy(np.zeros(5000)))
    parameter.value.grad = from_numpy(np.ones(5000))
    with pytest.raises(ValueError, match=r"\(5000,\).* past gradients of shape \(3,\)"):
        optimiser.step()


def test_a_language_model_names_what_it_was_given() -> None:
    model = mt.DecoderLM(5, 4, 2, 3, n_layer=1, middle_dim=4)
    for call, words in (
        (lambda: model(np.zeros((1, 4), int)), r"holds 3 tokens, got 4; pass the last"),
        (lambda: model(np.array([1])), r"\(batch, seq\), got \(1,\)"),
        (lambda: model(np.array([[5]])), r"from 0 to 4, got 5"),
        (lambda: model.generate([], 1), r"at least one token"),
        (lambda: model.generate([1], 1, -1.0), r"negative, got -1.0"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.simulator
def test_nothing_moves_between_host_and_device_unseen() -> None:
    host = from_numpy(np.arange(6.0).reshape(2, 3))
    there = from_numpy(np.ones((3, 2)), mt.CudaBackend)
    for call in (
        lambda: host + there.permute(1, 0),
        lambda: there.permute(1, 0) + host,
        lambda: host @ there,
        lambda: there @ host,
        lambda: there.permute(1, 0) < host,
        lambda: host * from_numpy(np.ones(1), mt.CudaBackend),
    ):
        with pytest.raises(TypeError, match=r"two places.*the host.*with cuda\(\) or cpu\(\)"):
            call()
    with pytest.raises(TypeError, match=r"one backend, got FastOps, CudaOps, CudaOps"):
        host.flash_attention(there, there)
    assert host.backend is FastBackend and there.backend is mt.CudaBackend
    # A number may be written as a tensor, as published code does.
    assert (there * tensor([2.0])).to_numpy().tolist() == [[2.0, 2.0]] * 3


@on_backends()
def test_the_rung_of_a_whole_run(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (from_numpy(np.ones((1, 2, 3)), backend) for _ in range(3))
    expected = q.flash_attention(k, v, rung="naive").to_numpy()
    picked: list[str] = []
    pick = launch.Target.pick

    def spy(*args: Any) -> Any:
        rung = pick(*args)
        picked.append(rung.name)
        return rung

    monkeypatch.setattr(launch.Target, "pick", spy)
    for name, rung in (("naive", "naive"), ("auto", "flash2"), ("", "flash2")):
        monkeypatch.setenv("MINITORCH_RUNG", name)
        np.testing.assert_allclose(q.flash_attention(k, v).to_numpy(), expected)
        q.flash_attention(k, v, rung="flash2")  # a call that names one has it
        assert picked[-2:] == [rung, "flash2"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            "flash1",
            "cannot run this call: the cpu target has no such rung; use 'auto' or one of 'flash2', "
            "'naive'",
        ),
        ("warp9", "the rungs are .*'flash2', 'flash1', 'naive', and 'auto'"),
    ],
)
def test_a_rung_that_is_not_to_be_had(
    asked: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = from_numpy(np.ones((2, 3)))
    with pytest.raises(ValueError, match=words) as by_call:
        q.flash_attention(q, q, rung=asked)
    if asked == "warp9":  # the composed baseline takes any name that there is
        with pytest.raises(ValueError, match=words):
            mt.naive_attention(q, q, q, rung=asked)
    monkeypatch.setenv("MINITORCH_RUNG", asked)
    with pytest.raises(ValueError, match=words) as by_run:
        q.flash_attention(q, q)
    assert f"{asked!r} (from MINITORCH_RUNG)" in str(by_run.value)
    assert f"{asked!r}" in str(by_call.value) and "MINITORCH_RUNG" not in str(by_call.value)
    assert asked == "warp9" or asked in kernels.available_rungs()


@pytest.mark.skipif(why_no_cuda() is None, reason="there is a GPU, or its simulator")
def test_without_a_gpu_the_way_out_is_named() -> None:
    a = tensor([1.0])
    for call in (a.cuda, lambda: mt.zeros((2,), mt.CudaBackend), lambda: a.to(mt.CudaBackend)):
        with pytest.raises(RuntimeError, match=r"fast backend, or set NUMBA_ENABLE_CUDASIM=1"):
            call()
    assert a.to_numpy().tolist() == [1.0]
