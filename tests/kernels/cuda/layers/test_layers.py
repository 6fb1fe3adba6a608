"""The layers of modules 4 and 5 on CUDA, on the emulated GPU or a real one: values, gradients, no copies.

The oracles are those of the CPU's tests.  On the emulated GPU the threads of a block run one at a time:
shapes are tiny, and divide no block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis.strategies import DataObject, data

import minitorch
from kernels.common.philox import PLAIN, drop_threshold
from kernels.cuda.device import half
from kernels.cuda.layers import fused
from kernels.cuda.runtime.arrays import empty_device, is_device_array
from kernels.cuda.runtime.kernel import Kernel
from kernels.runtime.dtypes import FLOAT16, HALF_DTYPES, rounded
from kernels.runtime.targets import EMULATED, cuda
from minitorch import CudaBackend, FastBackend, Parameter, Tensor, TensorData, from_numpy
from minitorch.accelerated.layers import Gelu, Lookup, SeededDropout

from ....course.test_conv import (
    Convolution,
    check_gradients,
    convolved,
    drawn_arrays,
    in_one_and_two_dimensions,
)
from ....minitorch.functions.test_fused import (
    check,
    check_adam,
    check_embedding,
    check_extremes,
    check_impossible_class,
    check_masked_scores,
    gelu_gradient,
    gelu_of,
    layers,
    small_inputs,
)
from ....support.examples import at_most
from ....support.tolerances import assert_close_arrays
from ....tensor_strategies import Array, laid_out, on_dtypes

pytestmark = pytest.mark.emulated

few = settings(max_examples=8 if EMULATED else 15)


def array_class() -> Any:
    """Return the class of device arrays."""
    return type(empty_device((1,), np.dtype(np.float32)))


def on_device(t: Tensor | None) -> Tensor:
    """Return a tensor, having made sure that it is on the device."""
    assert t is not None and is_device_array(t._tensor._storage)
    return t


# -- fused layers ------------------------------------------------------------------------------


@layers
@on_dtypes
@few
@given(data())
def test_small_tensors_in_any_layout(dtype: npt.DTypeLike, name: str, data: DataObject) -> None:
    x = data.draw(small_inputs(name, most=3))
    check(name, "fused", dtype, data, x, CudaBackend)


@layers
@pytest.mark.parametrize("shape", [(3, 9), (1, 1)], ids=str)
@at_most(1)
@given(data())
def test_rows_longer_and_shorter_than_a_block(
    shape: tuple[int, int], name: str, data: DataObject
) -> None:
    x = np.random.default_rng(0).standard_normal(shape)
    check(name, "fused", np.float32, data, x, CudaBackend)


@layers
@on_dtypes
def test_extreme_numbers_do_not_overflow(dtype: npt.DTypeLike, name: str) -> None:
    check_extremes(dtype, "fused", name, CudaBackend)


@on_dtypes
def test_scores_of_minus_infinity_weigh_nothing(dtype: npt.DTypeLike) -> None:
    check_masked_scores(dtype, "fused", CudaBackend)
    check_impossible_class(dtype, "fused", CudaBackend)


@on_dtypes
@few
@given(data())
def test_embedding(dtype: npt.DTypeLike, data: DataObject) -> None:
    check_embedding(dtype, CudaBackend, data)


def test_arrays_without_elements_launch_nothing() -> None:
    empty = cuda.to_device(np.empty((0, 3)))
    assert tuple(fused.softmax(empty).shape) == (0, 3)
    assert tuple(fused.gelu(empty).shape) == (0, 3)
    dx, dgamma, dbeta = fused.layer_norm_backward(
        empty, empty, cuda.to_device(np.ones(3)), *(cuda.to_device(np.empty(0)) for _ in range(2))
    )
    assert tuple(dx.shape) == (0, 3)
    assert dgamma.copy_to_host().tolist() == dbeta.copy_to_host().tolist() == [0.0] * 3
    looked_up = fused.embedding(
        cuda.to_device(np.ones((2, 3))), fused.place_ids(np.empty((0, 4), int)), (0, 4)
    )
    assert tuple(looked_up.shape) == (0, 4, 3)


# -- dropout -----------------------------------------------------------------------------------


@on_dtypes
@pytest.mark.parametrize("rate", [0.0, 0.4, 1.0])
def test_dropout_takes_its_noise_from_the_counter(rate: float, dtype: npt.DTypeLike) -> None:
    x = np.linspace(1.0, 2.0, 21, dtype=dtype).reshape(3, 7)
    seed = 2**62 + 12345
    dropped = fused.dropout(cuda.to_device(x), seed, rate, 1.25).copy_to_host()
    words = np.array([PLAIN.element_words(seed, block) for block in range(6)]).reshape(-1)[:21]
    keep = (words >= drop_threshold(rate)).reshape(3, 7)
    assert_close_arrays(dropped, np.where(keep, 1.25 * x, 0.0), dtype)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_layers_of_16_bits_read_and_write_them_as_they_are(
    dtype: np.dtype[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value in float32, and one rounding; nothing is converted before or after."""
    rng = np.random.default_rng(0)
    x, dout = (rounded(rng.standard_normal((5, 6)), dtype) for _ in range(2))
    ids = np.array([[1, 4], [1, 0], [1, 4]])
    dlooked = rounded(rng.standard_normal((3, 2, 6)), dtype)
    cases: list[tuple[Callable[[Tensor], Tensor], Array, Array, Array]] = []
    words = np.array([PLAIN.element_words(9, block) for block in range(8)]).reshape(-1)[:30]
    factor = (words >= drop_threshold(0.4)).reshape(5, 6) * np.float32(1.25)
    wide, wide_dout = x.astype(np.float64), dout.astype(np.float64)
    cases.append(
        (lambda t: SeededDropout.apply(t, 9, 0.4, 1.25), dout, wide * factor, wide_dout * factor)
    )
    cases.append((Gelu.apply, dout, gelu_of(wide), *gelu_gradient(wide_dout, wide)))
    summed = np.zeros((5, 6))
    np.add.at(summed, ids, dlooked.astype(np.float64))
    cases.append((lambda t: Lookup.apply(t, ids), dlooked, wide[ids], summed))
    conversions = _recorded(monkeypatch, half, "convert_kernel")
    for layer, gradient, expected, expected_gradient in cases:
        t = from_numpy(x, CudaBackend, True)
        out = layer(t)
        out.backward(from_numpy(gradient, CudaBackend))
        for found, wanted in ((out, expected), (t.grad, expected_gradient)):
            ulp = 2.0 ** (-11 if dtype == FLOAT16 else -8)
            np.testing.assert_allclose(
                on_device(found).to_numpy().astype(np.float64), wanted, rtol=1.01 * ulp, atol=1e-6
            )
    assert conversions == []


# -- convolution, pooling, maxima --------------------------------------------------------------


@in_one_and_two_dimensions
@on_dtypes
@few
@given(data())
def test_convolution(dtype: npt.DTypeLike, conv: Convolution, data: DataObject) -> None:
    image, weight = (x.astype(dtype) for x in drawn_arrays(data, conv.spatial, most=3))
    operands = [data.draw(laid_out(x, CudaBackend)) for x in (image, weight)]
    out = on_device(conv.function.apply(*operands))
    assert_close_arrays(out, convolved(image, weight), dtype, "convolution", 1000.0)


@in_one_and_two_dimensions
@at_most(2)
@given(data())
def test_gradients_of_convolution(conv: Convolution, data: DataObject) -> None:
    check_gradients(np.float64, conv, data, CudaBackend, most=3)


@pytest.mark.parametrize("name", ["avgpool2d", "maxpool2d", "max", "logsumexp", "softmax"])
def test_functions_of_module_4_agree_with_the_fast_backend(name: str) -> None:
    array, results = np.random.default_rng(0).permutation(24).reshape(1, 2, 2, 6) / 10.0, []
    for backend in (FastBackend, CudaBackend):
        x = from_numpy(array, backend, True)
        out = getattr(minitorch, name)(x, (2, 3) if "pool" in name else 1)
        weights = np.linspace(-1.0, 2.0, out.size).reshape(out.shape)
        (out * from_numpy(weights, backend)).sum().backward()
        results.append((out, x.grad))
    for found, expected in zip(results[1], results[0], strict=True):
        assert_close_arrays(on_device(found), expected.to_numpy(), np.float64, name, 5.0)


# -- optimisers --------------------------------------------------------------------------------


@on_dtypes
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam(weight_decay: float, dtype: npt.DTypeLike) -> None:
    check_adam((3, 7), weight_decay, dtype, (CudaBackend,))


@pytest.mark.parametrize("make", [minitorch.SGD, minitorch.Adam])
def test_an_optimiser_launches_once_a_parameter_and_copies_nothing(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [np.arange(5.0), np.ones((2, 3), np.float32)]
    parameters = [Parameter(from_numpy(value, CudaBackend)) for value in values]
    optimiser = make(parameters, lr=0.1)

    def set_gradients() -> None:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.value.grad = from_numpy(np.ones_like(value), CudaBackend)

    set_gradients()
    optimiser.step()  # now the moments are there
    set_gradients()
    launches = _recorded(monkeypatch, Kernel, "__getitem__")
    to_host = _copies_to_the_host(monkeypatch)
    to_device = _recorded(monkeypatch, cuda, "to_device")
    to_pool = _recorded(monkeypatch, array_class(), "copy_to_device")
    optimiser.step()
    assert len(launches) == len(parameters)
    assert to_host == to_device == to_pool == []
    for parameter in parameters:
        on_device(parameter.value)


# -- the transformer ---------------------------------------------------------------------------

IDS = np.array([[1, 4, 1, 2]])


def tiny_model(backend: Any, attention: str = "flash", tied: bool = False) -> Any:
    minitorch.manual_seed(0)
    return minitorch.DecoderLM(
        5, 4, 2, 3, p_dropout=0.0, n_layer=1, middle_dim=5, backend=backend, attention=attention,
        tie_weights=tied, dtype=np.float64,
    )  # fmt: skip


def _recorded(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Record the arguments of each call of a function, in a list that grows."""
    function, calls = getattr(owner, name), []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, recorded)
    return calls


def _copies_to_the_host(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record the shape of whatever leaves the device, by whichever way, in a list that grows."""
    copies: list[tuple[int, ...]] = []

    def watch(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def watched(holder: Any, *args: Any, **kwargs: Any) -> Any:
            copies.append(tuple(holder.shape))
            return function(holder, *args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(array_class(), "copy_to_host")
    watch(TensorData, "get")
    watch(TensorData, "to_array")
    watch(Tensor, "item")
    return copies


@pytest.mark.parametrize(
    ("attention", "tied"), [("flash", False), ("naive", True)], ids=["flash", "naive, tied"]
)
def test_a_training_step_equals_that_of_the_fast_backend(
    attention: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [tiny_model(backend, attention, tied) for backend in (FastBackend, CudaBackend)]
    losses = []
    for model in models:
        optimiser = minitorch.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
        with monkeypatch.context() as watched:
            copies = _copies_to_the_host(watched) if model is models[1] else []
            loss = model.loss(IDS[:, :-1], IDS[:, 1:])
            loss.backward()
            gradients = {name: p.value.grad for name, p in model.named_parameters()}
            optimiser.step()
        assert copies == [], "numbers left the device during the step"
        losses.append((loss.item(), gradients))
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-12)
    for name, expected in losses[0][1].items():
        found = on_device(losses[1][1][name])
        assert_close_arrays(found, expected.to_numpy(), np.float64, f"gradient of {name}")
    pairs = zip(models[0].named_parameters(), models[1].named_parameters(), strict=True)
    for (name, expected), (_, found) in pairs:
        moved = on_device(found.value)
        # Where a gradient is nearly 0, Adam magnifies its rounding.
        np.testing.assert_allclose(
            moved.to_numpy(), expected.value.to_numpy(), atol=1e-6, err_msg=name
        )


def test_generate_copies_the_tokens_alone_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    model, copies = tiny_model(CudaBackend), _copies_to_the_host(monkeypatch)
    model.generate([1, 4, 2], 2, 0.0)
    # One copy a token, not of the 5 logits.  Each is noted as a tensor and as an array, and the one beyond
    # the model's context as an item too.
    assert {int(np.prod(shape)) for shape in copies} == {1} and len(copies) <= 5


# -- what only a GPU runs ----------------------------------------------------------------------


@pytest.mark.cuda
@layers
@on_dtypes
@pytest.mark.parametrize(
    "shape", [(1, 1), (65, 33), (129, 7), (5, 257), (3, 4099), (2, 50_257)], ids=str
)
@at_most(1)
@given(data())
def test_sizes_that_no_warp_or_block_divides(
    shape: tuple[int, int], dtype: npt.DTypeLike, name: str, data: DataObject
) -> None:
    check(name, "fused", dtype, data, np.random.default_rng(0).standard_normal(shape), CudaBackend)


@on_dtypes
@pytest.mark.parametrize("rows", [2, 3, 9])
def test_gradients_of_lookups(dtype: npt.DTypeLike, rows: int) -> None:
    rng = np.random.default_rng(3)
    ids = rng.integers(0, rows - 1, (4, 5))
    ids[:2] = 0  # half of one row, as padding; none of the last
    dout = rng.standard_normal((4, 5, 3)).astype(dtype)
    device_dout, placed = cuda.to_device(dout), fused.place_ids(ids)
    found = fused.embedding_backward(device_dout, ids, placed, rows).copy_to_host()
    expected = np.zeros((rows, 3))
    np.add.at(expected, ids, dout.astype(np.float64))
    assert_close_arrays(found, expected, dtype, "gradient of a lookup", ids.size**0.5)
