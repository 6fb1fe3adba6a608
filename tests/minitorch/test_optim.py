"""Optimisers: which parameters move, how far, and that training goes downhill."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import DataObject, data, floats, just, lists, none, sampled_from

from minitorch import (
    SGD,
    Adam,
    AdamW,
    FastBackend,
    Parameter,
    Scalar,
    SimpleBackend,
    Tensor,
    TensorBackend,
    clip_grad_norm_,
    from_numpy,
    tensor,
)

from ..support.tolerances import assert_close_arrays
from ..tensor_strategies import laid_out, lattice, on_backends, shapes


def with_gradient(value: Tensor, gradient: Tensor | None) -> Parameter:
    parameter = Parameter(value)
    parameter.value.grad = gradient
    return parameter


@on_backends()
@given(data())
def test_sgd_steps_against_the_gradient(backend: TensorBackend, data: DataObject) -> None:
    start = data.draw(lattice(data.draw(shapes())))
    gradient = data.draw(lattice(start.shape))
    lr = data.draw(floats(0.0, 2.0))
    parameter = with_gradient(
        data.draw(laid_out(start, backend)), data.draw(laid_out(gradient, backend))
    )
    SGD([parameter], lr).step()
    assert_close_arrays(parameter.value, start - lr * gradient, np.float64, size=20.0)


def test_sgd_moves_scalars_too() -> None:
    parameter = Parameter(Scalar(3.0))
    optimiser = SGD([parameter], lr=0.5)
    (parameter.value * parameter.value).backward()
    optimiser.step()
    assert parameter.value.data == 3.0 - 0.5 * 6.0
    parameter.value.derivative = 2.0
    of_tensor = with_gradient(tensor([1.0]), tensor([1.0]))
    SGD([of_tensor, parameter, Parameter(None), Parameter(5.0)]).zero_grad()
    assert of_tensor.value.grad is None and parameter.value.derivative is None
    assert parameter.value.is_leaf()


@pytest.mark.parametrize("make", [SGD, Adam])
def test_a_parameter_without_a_gradient_stays(make: type[SGD] | type[Adam]) -> None:
    moving = with_gradient(tensor([1.0]), tensor([1.0]))
    resting, missing = with_gradient(tensor([1.0]), None), Parameter(None)
    before = resting.value
    make([moving, resting, missing], lr=0.1).step()
    assert resting.value is before
    assert missing.value is None
    assert moving.value.item() == pytest.approx(0.9)


@on_backends()
@pytest.mark.parametrize("make", [SGD, Adam])
def test_a_step_leaves_a_fresh_leaf_and_the_old_value(
    make: type[SGD] | type[Adam], backend: TensorBackend
) -> None:
    old = from_numpy(np.array([1.0, 2.0]), backend)
    parameter = with_gradient(old, from_numpy(np.array([1.0, -1.0]), backend))
    parameter.name = "w"
    make([parameter], lr=0.1).step()
    assert old.to_numpy().tolist() == [1.0, 2.0]  # who still holds it can compare
    assert parameter.value.is_leaf()
    assert parameter.value.grad is None
    assert (parameter.value.name, parameter.value.backend) == ("w", backend)


@on_backends()
@pytest.mark.parametrize("make", [SGD, Adam])
def test_a_parameter_of_no_dimension_keeps_its_shape(
    make: type[SGD] | type[Adam], backend: TensorBackend
) -> None:
    parameter = Parameter(from_numpy(np.array(2.0), backend))
    optimiser = make([parameter], lr=0.5)
    for _ in range(3):
        parameter.value.grad = from_numpy(np.array(4.0), backend)
        clip_grad_norm_([parameter], 1.0)
        assert parameter.value.grad.shape == () and parameter.value.grad.item() == 1.0
        optimiser.step()
    assert parameter.value.shape == () and parameter.value.item() == pytest.approx(0.5)


# -- clipping ------------------------------------------------------------------------------------


def gradients(parameters: list[Parameter]) -> list[Any]:
    grads = (getattr(p.value, "grad", None) for p in parameters)
    return [None if grad is None else grad.to_numpy() for grad in grads]


@on_backends()
@given(data())
def test_clipping_scales_all_gradients_by_one_number(
    backend: TensorBackend, data: DataObject
) -> None:
    drawn = data.draw(lists(none() | shapes().flatmap(lattice), min_size=1, max_size=4))
    dtype = data.draw(sampled_from([np.float32, np.float64]))
    size = data.draw(sampled_from([1e-3, 1.0, 1e30]))
    before = [None if array is None else (array * size).astype(dtype) for array in drawn]
    parameters = [
        with_gradient(from_numpy(np.zeros(2), backend), None)
        if array is None
        else with_gradient(
            from_numpy(np.zeros(array.shape, dtype), backend), data.draw(laid_out(array, backend))
        )
        for array in before
    ]
    limit = data.draw(floats(0.1, 10.0) | just(math.inf)) * size
    norm = clip_grad_norm_([*parameters, Parameter(None)], limit)
    wide = [array.astype(np.float64) for array in before if array is not None]
    expected = math.sqrt(sum(float((array * array).sum()) for array in wide))
    assert norm.shape == (1,) and norm.item() == pytest.approx(expected, rel=1e-12)
    for array, gradient in zip(before, gradients(parameters), strict=True):
        if array is None:
            assert gradient is None
        elif expected <= limit:
            assert gradient.dtype == dtype and gradient.tobytes() == array.tobytes()
        else:
            assert gradient.dtype == dtype
            wanted = array.astype(np.float64) * (limit / expected)
            np.testing.assert_allclose(gradient, wanted, rtol=1e-6)


def test_clipping_takes_backends_and_dtypes_together() -> None:
    parameters = [
        with_gradient(from_numpy(np.zeros(4, dtype), backend), from_numpy(np.full(4, 6e4, dtype), backend))
        for dtype in (np.float16, np.float32, np.float64)
        for backend in (SimpleBackend, FastBackend)
    ]  # fmt: skip
    assert clip_grad_norm_(parameters, 1.0).item() == pytest.approx(6e4 * math.sqrt(24.0))
    for p, gradient in zip(parameters, gradients(parameters), strict=True):
        assert gradient.dtype == p.value.dtype and p.value.grad.backend is p.value.backend
        np.testing.assert_allclose(gradient, 24.0**-0.5, rtol=1e-3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the same numbers
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_no_number_can_raise(bad: float) -> None:
    parameter = with_gradient(tensor([1.0, 1.0]), tensor([1.0, bad]))
    with pytest.raises(FloatingPointError, match="norm of the gradients is"):
        clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)
    np.testing.assert_array_equal(gradients([parameter])[0], [1.0, bad])
    assert not math.isfinite(clip_grad_norm_([parameter], 1.0).item())
    assert np.isnan(gradients([parameter])[0]).any()


# -- states --------------------------------------------------------------------------------------


@on_backends()
def test_a_state_is_a_copy_and_decides_the_steps_to_come(backend: TensorBackend) -> None:
    def make(*sizes: int, lr: float = 0.1) -> Adam:
        return Adam([Parameter(from_numpy(np.zeros(size), backend)) for size in sizes], lr)

    def step(optimiser: Adam, *values: float | None) -> list[Any]:
        for p, value in zip(optimiser.parameters, values, strict=True):
            p.value.grad = None if value is None else p.value.detach() * 0.0 + value
        optimiser.step()
        return [p.value.to_numpy().tolist() for p in optimiser.parameters]

    first, second = make(2, 3), make(2, 3, lr=5.0)
    step(first, None, 1.0)
    values, state = [p.value.detach() for p in first.parameters], first.state_dict()
    assert {key for key, value in state.items() if isinstance(value, Tensor)} == {"m.1", "v.1"}
    after = step(first, 2.0, -3.0)  # which leaves the state as it is
    step(second, 9.0, 9.0)
    for p, value in zip(second.parameters, values, strict=True):
        p.update(value)
    second.load_state_dict(state)
    assert step(second, 2.0, -3.0) == after
    for other in (make(2), make(2, 4), SGD(first.parameters)):
        with pytest.raises(ValueError, match=r"state of|moments"):
            other.load_state_dict(state)
        assert not isinstance(other, Adam) or not other.moments


# -- groups of parameters ------------------------------------------------------------------------

GROUPS = {
    "SGD": (SGD, {"lr": 0.3}),
    "Adam": (Adam, {"lr": 0.2, "beta2": 0.9, "weight_decay": 0.1}),
    "AdamW": (AdamW, {"lr": 0.2, "eps": 1e-3, "weight_decay": 0.0}),
}


@on_backends()
@pytest.mark.parametrize(("make", "rates"), GROUPS.values(), ids=[*GROUPS])
@given(data())
def test_a_group_moves_as_under_an_optimiser_with_its_rates(
    backend: TensorBackend, make: Any, rates: dict[str, float], data: DataObject
) -> None:
    starts = [data.draw(lattice((2, 2))) for _ in range(3)]
    gradient = tensor(data.draw(lattice((2, 2))).tolist(), backend)

    def parameters() -> list[Parameter]:
        return [with_gradient(tensor(start.tolist(), backend), gradient) for start in starts]

    grouped, apart = parameters(), parameters()
    groups = [{"params": grouped[:1], **rates}, {"params": grouped[1:]}]
    optimisers = [make(groups), make(apart[:1], **rates), make(apart[1:])]
    assert optimisers[0].parameters == grouped
    for lr in (0.5, 0.125):
        optimisers[0].param_groups[0]["lr"] = optimisers[1].param_groups[0]["lr"] = lr
        for optimiser in optimisers:
            optimiser.step()
            for p in optimiser.parameters:
                p.value.grad = gradient
    for found, expected in zip(grouped, apart, strict=True):
        np.testing.assert_array_equal(found.value.to_numpy(), expected.value.to_numpy())
    assert optimisers[0].param_groups[1]["lr"] == optimisers[2].lr
    again = make([{"params": grouped[:1], **rates}, {"params": grouped[1:]}])
    again.load_state_dict(optimisers[0].state_dict())
    assert again.param_groups[0]["lr"] == 0.125 and again.lr == optimisers[0].lr
    with pytest.raises(ValueError, match="does not fit"):
        make(grouped).load_state_dict(optimisers[0].state_dict())
