"""Sequences, lists and dictionaries of modules, and the states of modules."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minitorch
from minitorch import (
    FastBackend,
    Linear,
    Module,
    ModuleDict,
    ModuleList,
    Parameter,
    Scalar,
    Sequential,
    SimpleBackend,
    Tensor,
    from_numpy,
)

X = np.linspace(-1.0, 1.0, 6).reshape(2, 3)


def network(backend: Any = FastBackend, hidden: int = 4) -> Sequential:
    return Sequential(
        Linear(3, hidden, backend=backend), Tensor.relu, Linear(hidden, 2, backend=backend)
    )


def arrays(module: Module) -> dict[str, Any]:
    return {name: p.value.to_numpy().copy() for name, p in module.named_parameters()}


def test_a_sequence_applies_its_layers_in_order() -> None:
    model = network()
    first, activation, last = model
    x = from_numpy(X)
    np.testing.assert_array_equal(model(x).to_numpy(), last(first(x).relu()).to_numpy())
    assert [*arrays(model)] == ["0.weights", "0.bias", "2.weights", "2.bias"]
    assert "(1): Apply(relu)" in repr(model)
    assert [*model[:2]] == [first, activation] and model[-1] is last and len(model) == 3
    np.testing.assert_array_equal(model[:2](x).to_numpy(), first(x).relu().to_numpy())


def test_parameters_in_a_list_and_a_dictionary_are_those_of_the_model() -> None:
    model = Module()
    model.layers = ModuleList([Linear(3, 3), Linear(3, 3)])
    model.layers.append(Linear(3, 2))
    model.heads = ModuleDict({"value": Linear(2, 1, bias=False)})
    model.heads["policy"] = Linear(2, 4, bias=False)
    names = [name for name, _ in model.named_parameters()]
    assert names[:2] == ["layers.0.weights", "layers.0.bias"] and len(names) == 8
    assert names[-2:] == ["heads.value.weights", "heads.policy.weights"]
    assert [*model.heads] == ["value", "policy"] == [*dict(model.heads.items())]
    other = Linear(3, 3)
    model.layers[-2] = other
    del model.heads["value"]
    model.eval()
    assert model.layers[1] is other and not other.training and "value" not in model.heads


# -- states --------------------------------------------------------------------------------------


@given(st.integers(0, 9), st.booleans())
def test_a_state_restores_a_module_on_any_backend(seed: int, assign: bool) -> None:
    minitorch.manual_seed(seed)
    model, twin = network(), network(SimpleBackend)
    before, state = arrays(model), model.state_dict()
    for p in model.parameters():
        p.value.to_numpy()[...] = 7.0
    assert twin.load_state_dict(state, assign=assign) == ([], [])
    for name, p in twin.named_parameters():
        np.testing.assert_array_equal(p.value.to_numpy(), before[name])
        assert p.value.backend is SimpleBackend and p.value.requires_grad()
        assert not state[name].requires_grad()


def test_values_of_every_kind_are_restored() -> None:
    model = Module()
    model.of_scalar, model.of_number = Parameter(Scalar(2.0)), Parameter(3.0)
    state = model.state_dict()
    model.of_scalar.update(Scalar(0.0))
    model.of_number.update(0.0)
    model.load_state_dict(state)
    assert (model.of_scalar.value.data, model.of_number.value) == (2.0, 3.0)


def test_names_in_common_are_loaded_on_request() -> None:
    model, part = network(), Sequential(Linear(3, 4, backend=FastBackend))
    state = {**part.state_dict(), "other": from_numpy(X)}
    with pytest.raises(ValueError, match=r"lacks \['2.weights', '2.bias'\].*has \['other'\]"):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False) == (["2.weights", "2.bias"], ["other"])
    np.testing.assert_array_equal(arrays(model)["0.weights"], arrays(part)["0.weights"])


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        (from_numpy(X), ValueError, r"2.weights has shape \(2, 3\)"),
        (from_numpy(np.zeros((4, 2), np.float32)), ValueError, "2.weights has dtype float32"),
        (np.zeros((4, 2)), TypeError, "2.weights must be a Tensor, got ndarray"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(
    wrong: Any, error: type[Exception], match: str
) -> None:
    model = network()
    before = arrays(model)
    state = network().state_dict()
    with pytest.raises(error, match=match):
        model.load_state_dict({**state, "2.weights": wrong})
    for name, array in arrays(model).items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("make", [minitorch.SGD, minitorch.Adam, minitorch.AdamW])
def test_a_copy_of_a_model_and_its_optimiser_trains_as_they_do(duplicate: Any, make: Any) -> None:
    model = network()
    optimiser = make(model.parameters(), lr=0.1)

    def train(model: Module, optimiser: minitorch.Optimizer) -> None:
        optimiser.zero_grad()
        (model(from_numpy(X)) ** 2).sum().backward()
        optimiser.step()

    train(model, optimiser)
    twins = duplicate((model, optimiser))
    before = arrays(model)
    train(*twins)
    for name, array in arrays(model).items():
        np.testing.assert_array_equal(array, before[name])  # has its own memory
    train(model, optimiser)
    for name, array in arrays(twins[0]).items():
        np.testing.assert_array_equal(array, arrays(model)[name])
