"""float16 and bfloat16: stored in 16 bits, computed in float32, rounded once.

``tests/structure/cuda/test_half.py`` tests the device's conversions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import DataObject, data, integers, sampled_from

import kernels
import minitorch
from kernels import launch
from kernels.runtime.dtypes import (
    BFLOAT16,
    COMPUTE_DTYPES,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    FLOAT_DTYPES,
    HALF_DTYPES,
    lowest,
    rounded,
)
from minitorch import CudaBackend, FastBackend, SimpleBackend, Tensor, TensorBackend, from_numpy
from minitorch.training.model_files import load_parameters, read_checkpoint, save_checkpoint

from ...support.attention.on_cuda import RUNGS as CUDA_RUNGS
from ...support.attention.on_cuda import fitting, taken_by, tiny
from ...support.attention.on_cuda import run as run_on_device
from ...support.attention.strategies import FEATURES, Case, cases
from ...support.half_numbers import Array, beside_the_ties, every_number, on_halves, same_bits
from ...support.tolerances import assert_close_arrays
from ...tensor_strategies import laid_out, lattice, shapes

pytestmark = pytest.mark.usefixtures("quick_barriers")
on_host = pytest.mark.parametrize(
    "backend",
    [pytest.param(SimpleBackend, id="simple"), pytest.param(FastBackend, id="fast")],
)
on_every_backend = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(SimpleBackend, id="simple"),
        pytest.param(FastBackend, id="fast"),
        pytest.param(CudaBackend, id="cuda", marks=pytest.mark.simulator),
    ],
)


# --- conversions -----------------------------------------------------------------------------


@on_halves
@pytest.mark.parametrize("wide", COMPUTE_DTYPES, ids=str)
def test_every_number_survives_widening(dtype: Any, wide: Any) -> None:
    numbers = every_number(dtype)
    same_bits(rounded(rounded(numbers, wide), dtype), numbers)


@on_halves
def test_ties_go_to_the_even_number_and_nothing_is_rounded_twice(dtype: Any) -> None:
    numbers, nearest = beside_the_ties(dtype)
    same_bits(rounded(numbers, dtype), nearest)
    singles = numbers.astype(np.float32)
    exact = singles.astype(np.float64) == numbers
    same_bits(rounded(singles[exact], dtype), nearest[exact])


def test_what_the_libraries_round_once_is_rounded_as_they_do() -> None:
    numbers = np.random.default_rng(0).standard_normal(5000) * 10.0 ** np.arange(-25, 25).repeat(
        100
    )
    with np.errstate(over="ignore"):
        same_bits(rounded(numbers, FLOAT16), numbers.astype(np.float16))
        singles = numbers.astype(np.float32)
        same_bits(rounded(singles, BFLOAT16), singles.astype(ml_dtypes.bfloat16))


# --- tensors ---------------------------------------------------------------------------------

MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": lambda a: -a,
    "exp": Tensor.exp,
    "tanh": Tensor.tanh,
    "sigmoid": Tensor.sigmoid,
    "relu": Tensor.relu,
    "number": lambda a: a + 0.1,
    "times a number": lambda a: a * 0.3,
    "minus a number": lambda a: a - 0.1,
    "over a number": lambda a: a / 3.0,
    "power": lambda a: (a * a) ** 1.5 if a.dtype == FLOAT32 else _power(a),
    "less": lambda a: a < 0.5,
    "sum": lambda a: a.sum(a.dims - 1),
    "maximum": lambda a: minitorch.max(a, 0),
    "copy": lambda a: a.contiguous(),
}


def _power(a: Tensor) -> Tensor:
    """Return (a a)^1.5 in float32, rounded once, as one operation on 16 bits would."""
    wide = a.to(FLOAT32)
    return ((wide * wide) ** 1.5).to(a.dtype)


@on_every_backend
@on_halves
@pytest.mark.parametrize("operation", MAPS)
@given(data=data())
@settings(max_examples=4)
def test_an_operation_is_that_of_float32_rounded_once(
    operation: str, dtype: Any, backend: TensorBackend, data: DataObject
) -> None:
    array = rounded(data.draw(lattice(data.draw(shapes()))), dtype)
    a = data.draw(laid_out(array, backend))
    result = MAPS[operation](a)
    expected = MAPS[operation](a.to(FLOAT32)).to_numpy()
    assert (result.dtype, result.shape) == (dtype, expected.shape)
    same_bits(result.to_numpy(), rounded(expected, dtype))


ZIPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "equal": lambda a, b: a == b,
    "product": lambda a, b: a @ b.permute(1, 0),
}


@on_every_backend
@on_halves
@pytest.mark.parametrize("operation", ZIPS)
@given(data=data())
@settings(max_examples=4)
def test_an_operation_of_two_is_that_of_float32_rounded_once(
    operation: str, dtype: Any, backend: TensorBackend, data: DataObject
) -> None:
    shape = data.draw(integers(1, 4)), data.draw(integers(1, 9))
    one, other = (rounded(data.draw(lattice(shape)), dtype) for _ in range(2))
    a, b = (data.draw(laid_out(x, backend)) for x in (one, other))
    result = ZIPS[operation](a, b)
    expected = ZIPS[operation](a.to(FLOAT32), b.to(FLOAT32)).to_numpy()
    same_bits(result.to_numpy(), rounded(expected, dtype))


@on_host
@on_halves
def test_a_sum_of_many_is_kept_in_float32(dtype: Any, backend: TensorBackend) -> None:
    """In 16 bits it would stop growing at 256 (bfloat16) or 2048 (float16)."""
    ones = minitorch.ones((5000,), backend, dtype=dtype)
    assert ones.sum().item() == float(np.array(5000.0, dtype))
    assert (ones.view(1, 5000) @ ones.view(5000, 1)).item() == float(np.array(5000.0, dtype))


@on_every_backend
@on_halves
def test_dtypes_mix_as_the_wider_one(dtype: Any, backend: TensorBackend) -> None:
    a = from_numpy(np.array([1.0, 2.0], dtype), backend, requires_grad=True)
    for wide in COMPUTE_DTYPES:
        b = from_numpy(np.array([0.1, 0.2], wide), backend, requires_grad=True)
        out = a * b
        assert out.dtype == wide
        out.sum().backward()
        assert a.grad is not None and b.grad is not None
        assert (a.grad.dtype, b.grad.dtype) == (dtype, wide)
    other = BFLOAT16 if dtype == FLOAT16 else FLOAT16
    with pytest.raises(TypeError, match=r"float16 and bfloat16 has no dtype .* convert one"):
        _ = a + a.to(other)
    # What an integer holds is not rounded before it is computed with.
    big = from_numpy(np.array([2049, 257]), backend)
    same_bits((a.detach() * 0.5 * big).to_numpy(), np.array([1024.5, 257.0], dtype))


@on_every_backend
@on_halves
@pytest.mark.parametrize("source", FLOAT_DTYPES, ids=str)
def test_a_conversion_and_its_gradient(dtype: Any, source: Any, backend: TensorBackend) -> None:
    array = rounded(np.random.default_rng(3).standard_normal((3, 4)), source)
    a = from_numpy(array.T, backend, requires_grad=True)
    for target in (dtype, dtype.name, dtype.type):
        b = a.to(target)
        assert b.dtype == dtype
        same_bits(b.to_numpy(), rounded(array.T, dtype))
    b = a.to(dtype)
    (b * b).sum().backward()
    assert a.grad is not None
    assert a.grad.dtype == source
    expected = 2.0 * rounded(array.T, dtype).astype(np.float64)
    assert_close_arrays(a.grad.to_numpy().astype(dtype), expected, dtype)


def test_dtypes_go_by_their_names() -> None:
    for name in ("float16", "bfloat16", "float32", "float64"):
        assert minitorch.zeros((2,), dtype=name).dtype.name == name
        assert minitorch.tensor([1.0], dtype=getattr(minitorch, name)).dtype.name == name
    assert minitorch.tensor(np.array([1.5], BFLOAT16), dtype="bfloat16").item() == 1.5
    for wrong in ("bfloat", "float8"):
        with pytest.raises(TypeError, match=f"got '{wrong}'"):
            minitorch.zeros((2,)).to(wrong)


@on_every_backend
@on_halves
def test_elements_are_read_and_written(dtype: Any, backend: TensorBackend) -> None:
    a = minitorch.zeros((2, 2), backend, dtype=dtype)
    a[0, 1] = 1.25
    assert a[0, 1] == 1.25 and a.to_numpy().tolist() == [[0.0, 1.25], [0.0, 0.0]]
    assert str(a).startswith("tensor([[0.  , 1.25],\n        [0.  , 0.  ]]")
    assert (a + a[0, 1]).dtype == dtype  # an element is a number
    assert a.sum().item() == 1.25


@on_host
@on_halves
def test_a_row_of_minus_infinity_has_a_softmax(dtype: Any, backend: TensorBackend) -> None:
    rows = np.array([[-np.inf, -np.inf], [0.0, -np.inf], [lowest(dtype), 0.0]], dtype)
    a = from_numpy(rows, backend, requires_grad=True)
    for dim, expected in ((1, [[0, 0], [1, 0], [0, 1]]), (0, [[0, 0], [1, 0], [0, 1]])):
        out = minitorch.softmax(a, dim)
        assert out.to_numpy().tolist() == expected
        out.sum().backward()
        assert a.grad is not None and np.isfinite(a.grad.to_numpy()).all()
        a.zero_grad_()


LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda a: a.view(6, 8) @ a.view(6, 8).permute(1, 0),
    "layer norm": lambda a: minitorch.LayerNorm1d(8, 1e-5, a.backend, a.dtype)(a),
    "softmax": lambda a: minitorch.softmax(a, 2),
    "log softmax": lambda a: minitorch.logsoftmax(a, 2),
    "cross entropy": lambda a: minitorch.softmax_loss(a.view(6, 8), np.arange(6)),
    "gelu": minitorch.GELU,
    "mean and variance": lambda a: a.mean(2) + a.var(2),
    "convolution": lambda a: minitorch.conv1d(a, a.detach()),
    "attention": lambda a: a.flash_attention(a, a, is_causal=True),  # type: ignore[dict-item]
}


@on_host
@on_halves
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_is_close_to_that_of_float64(
    layer: str, dtype: Any, backend: TensorBackend
) -> None:
    array = rounded(np.random.default_rng(4).standard_normal((2, 3, 8)), dtype)
    a = from_numpy(array, backend, requires_grad=True)
    exact = from_numpy(array.astype(np.float64), backend, requires_grad=True)
    out, expected = LAYERS[layer](a), LAYERS[layer](exact)
    weight = np.random.default_rng(5).integers(-2, 3, expected.shape).astype(np.float64)
    out.backward(from_numpy(weight.astype(dtype), backend))
    expected.backward(from_numpy(weight, backend))
    assert a.grad is not None and exact.grad is not None
    for what, got, wanted in (("value", out, expected), ("gradient", a.grad, exact.grad)):
        size = float(np.abs(wanted.to_numpy()).max())
        assert_close_arrays(got, wanted.to_numpy(), dtype, what=what, size=size)


@on_host
@on_halves
def test_a_model_of_16_bits_learns(dtype: Any, backend: TensorBackend) -> None:
    minitorch.manual_seed(1)
    layer = minitorch.Linear(4, 3, True, backend, dtype)
    x = from_numpy(np.random.default_rng(6).standard_normal((12, 4)).astype(dtype), backend)
    optimiser = minitorch.Adam(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(12):
        loss = minitorch.softmax_loss(layer(x), np.arange(12) % 3).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert {m.dtype for moments in optimiser.moments.values() for m in moments} == {FLOAT32}


@on_halves
def test_a_checkpoint_keeps_16_bits(dtype: Any, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    saved, other = (minitorch.Linear(3, 2, True, FastBackend, dtype) for _ in range(2))
    save_checkpoint(path, saved, {})
    arrays, _ = read_checkpoint(path)
    assert {array.dtype for array in arrays.values()} == {dtype}
    load_parameters(other, arrays)
    for one, two in zip(saved.parameters(), other.parameters(), strict=True):
        same_bits(two.value.to_numpy(), one.value.to_numpy())


@on_halves
def test_a_model_of_16_bits_writes_with_a_cache_as_without(dtype: Any) -> None:
    minitorch.manual_seed(3)
    model = minitorch.DecoderLM(
        7, 8, 2, 8, 0.0, backend=FastBackend, n_layer=2, middle_dim=8, dtype=dtype
    )
    model.eval()
    cache, ids = model.make_cache(), np.array([[1, 5, 2, 6]])
    assert {layer.dtype for layer in cache.layers} == {dtype}
    steps = [model(ids[:, i : i + 1], cache).to_numpy() for i in range(4)]
    whole = model(ids).to_numpy()
    assert_close_arrays(np.concatenate(steps, axis=1), whole.astype(np.float64), dtype)


# --- attention -------------------------------------------------------------------------------

TARGETS = {"numpy": launch.NUMPY, "cpu": launch.CPU}
HOST_RUNGS = [(target, rung.name) for target in TARGETS for rung in TARGETS[target].rungs]


@pytest.mark.parametrize(("target", "rung"), HOST_RUNGS)
@given(case=cases(HALF_DTYPES, features=FEATURES))
@settings(max_examples=20)
def test_every_rung_on_the_host_is_the_textbook(target: str, rung: str, case: Case) -> None:
    case.check(case.run(TARGETS[target], rung, case.tile), f"of {rung} on {target}")


@pytest.mark.simulator
@pytest.mark.parametrize("rung", CUDA_RUNGS)
@given(case=tiny(*HALF_DTYPES, features=("float mask", "alibi", "dlse")))
@settings(max_examples=4)
def test_every_rung_on_the_device_is_the_textbook(rung: str, case: Case) -> None:
    case = taken_by(rung, case)
    case.check(run_on_device(case, rung, fitting(rung, case.tile)), f"by {rung}")


def attended(operands: list[Array], dtype: Any, attend: Any, backend: TensorBackend) -> list[Array]:
    """Return out and the gradients of q, k and v in float64, computed in a dtype."""
    tensors = [from_numpy(x.astype(dtype), backend, requires_grad=True) for x in operands[:3]]
    out = attend(*tensors, is_causal=True)
    out.backward(from_numpy(operands[3].astype(dtype), backend))
    gradients = [t.grad for t in tensors if t.grad is not None]
    assert len(gradients) == 3 and all(gradient.dtype == dtype for gradient in gradients)
    return [x.to_numpy().astype(np.float64) for x in (out, *gradients)]


def composed_of_halves(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Attend, causal, by tensor operations that store scores and probabilities in 16 bits."""
    assert is_causal
    hidden = np.triu(np.full((q.shape[-2], k.shape[-2]), -np.inf), 1)
    penalty = minitorch.from_numpy(rounded(hidden, q.dtype), q.backend)
    scores = q @ k.permute(*range(k.dims - 2), k.dims - 1, k.dims - 2)
    return minitorch.softmax(scores * q.shape[-1] ** -0.5 + penalty, q.dims - 1) @ v


@on_every_backend
@on_halves
@given(seed=integers(0, 1000), scale=sampled_from([0.3, 1.0, 2.0]))
@settings(max_examples=3)
def test_attention_errs_no_more_than_its_composed_form(
    dtype: Any, backend: TensorBackend, seed: int, scale: float
) -> None:
    """Composed, scores and probabilities are rounded to 16 bits too; the sums of both are float32.

    Errors are root mean squares over several heads: the largest of few is a matter of chance, most of
    all in dq and dk where one key wins, for there the composed form subtracts a number from itself.
    """
    rng = np.random.default_rng(seed)
    shape = (4, 7, 4) if backend is not FastBackend else (2, 3, 40, 16)
    operands = [rounded(rng.standard_normal(shape) * scale, dtype) for _ in range(4)]
    exact = attended(operands, FLOAT64, minitorch.naive_attention, FastBackend)
    composed = attended(operands, dtype, composed_of_halves, backend)
    fused = attended(operands, dtype, Tensor.flash_attention, backend)
    half_unit = 2.0**-11 if dtype == FLOAT16 else 2.0**-8
    for name, got, other, wanted in zip(
        ("out", "dq", "dk", "dv"), fused, composed, exact, strict=True
    ):
        error, allowed = (np.sqrt(np.mean((x - wanted) ** 2)) for x in (got, other))
        # By chance the composed form may round a few elements well; half a unit nobody can avoid.
        allowed = max(allowed, half_unit * np.sqrt(np.mean(wanted**2)))
        assert error <= (2 if name == "out" else 3) * allowed, f"{name}: {error} of {allowed}"


@on_every_backend
def test_scores_beyond_float16_are_right_in_both_forms(backend: TensorBackend) -> None:
    """q · k is 102,400, and the largest float16 65,504."""
    q = minitorch.from_numpy(np.full((1, 4, 64), 40, FLOAT16), backend)
    values = np.random.default_rng(0).standard_normal((1, 4, 64)).astype(FLOAT16)
    v = minitorch.from_numpy(values, backend)
    for attend in (Tensor.flash_attention, minitorch.naive_attention):
        out, lse = attend(q, q, v, return_lse=True)
        assert (out.dtype, lse.dtype) == (FLOAT16, FLOAT32)
        mean = values.astype(np.float64).mean(axis=1)
        np.testing.assert_allclose(out.to_numpy()[0], mean.repeat(4, 0), 2e-3, 1e-3)
        np.testing.assert_allclose(lse.to_numpy(), 12800 + np.log(4), 1e-6)


@on_halves
def test_sums_of_attention_are_float32(dtype: Any) -> None:
    rng = np.random.default_rng(7)
    q, k, v, dout = (rng.standard_normal((2, 5, 4)).astype(dtype) for _ in range(4))
    problem = kernels.make_problem(q, k, v)
    assert (problem.dtype, problem.acc_dtype, problem.precision) == (dtype, FLOAT32, dtype.name)
    out, lse = kernels.flash_attention_forward(q, k, v, alibi_slopes=[0.5, 0.25])
    assert (out.dtype, lse.dtype) == (dtype, FLOAT32)
    gradients = kernels.flash_attention_backward(dout, q, k, v, out, lse, dlse=0 * lse)
    assert {gradient.dtype for gradient in gradients} == {dtype}
    wrong: list[dict[str, Any]] = [{"lse": lse.astype(dtype)}, {"out": out.astype(np.float32)}]
    for change in wrong:
        given_ = {"out": out, "lse": lse, **change}
        (name,) = change
        wanted = FLOAT32 if name == "lse" else dtype
        with pytest.raises(
            TypeError, match=f"{name} must be {wanted} where q, k and v are {dtype}"
        ):
            kernels.flash_attention_backward(dout, q, k, v, given_["out"], given_["lse"])
    tensors = [from_numpy(x, FastBackend, requires_grad=True) for x in (q, k, v)]
    for attend in (Tensor.flash_attention, minitorch.naive_attention):
        out_t, lse_t = attend(*tensors, return_lse=True)  # type: ignore[misc, arg-type]
        assert (out_t.dtype, lse_t.dtype) == (dtype, FLOAT32)
        lse_t.sum().backward()
        assert tensors[0].grad is not None and tensors[0].grad.dtype == dtype


# --- precision -------------------------------------------------------------------------------

PRECISIONS = ("float32", "tf32", "bfloat16", "float16")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_precision_is_a_permission(precision: str) -> None:
    rng = np.random.default_rng(8)
    q, k, v = (rng.standard_normal((2, 9, 4)).astype(np.float32) for _ in range(3))
    assert kernels.make_problem(q, k, v, precision=precision).precision == precision
    for rung in ("flash2", "naive"):  # they have no use for it
        allowed = kernels.flash_attention_forward(q, k, v, precision=precision, rung=rung)
        plain = kernels.flash_attention_forward(q, k, v, rung=rung)
        for one, other in zip(allowed, plain, strict=True):
            np.testing.assert_array_equal(one, other)
