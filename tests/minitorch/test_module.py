"""Module 0: the tree of modules and its parameters."""

import copy
import pickle
from typing import Any

import pytest

from minitorch import Module, Parameter, Scalar, tensor

from ..course.test_module import NAMES, Leaf, Tree


def test_an_unknown_dunder_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="__deepcopy__"):
        Leaf().__deepcopy__  # noqa: B018


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_module_can_be_copied_and_pickled(duplicate) -> None:
    tree = Tree()
    twin = duplicate(tree)
    tree.scale.update(-1.0)
    assert [name for name, _ in twin.named_parameters()] == NAMES
    assert twin.scale.value == 10.0


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_of_a_scalar_is_another_variable(duplicate) -> None:
    x = Scalar(3.0)
    twin = duplicate(x)
    (x * twin * twin).backward()
    assert (x.derivative, twin.derivative) == (9.0, 18.0)


def test_an_attribute_of_any_kind_can_be_deleted() -> None:
    tree: Any = Tree()
    del tree.first, tree.scale, tree.second.label
    assert [name for name, _ in tree.named_parameters()] == [n for n in NAMES if n[:6] == "second"]
    assert tree.first is tree.scale is tree.second.label is None
    with pytest.raises(AttributeError, match="nothing"):
        del tree.nothing


def test_a_name_holds_only_what_was_assigned_last() -> None:
    """Else an optimizer goes on training a parameter that the model no longer has."""
    leaf: Any = Leaf()
    leaf.bias = None
    assert leaf.bias is None
    assert [name for name, _ in leaf.named_parameters()] == ["weight"]
    leaf.bias = Parameter(7.0)
    assert leaf.bias.value == 7.0
    leaf.weight = Leaf()
    assert leaf.weight.label == "leaf"
    assert [name for name, _ in leaf.named_parameters()] == ["bias", "weight.weight", "weight.bias"]


def test_parameters_in_a_list_are_not_seen_but_added_ones_are() -> None:
    module = Module()
    module.hidden = [Parameter(1.0), Leaf()]
    assert module.parameters() == []
    added = module.add_parameter("weight_0", 2.5)
    assert isinstance(added, Parameter)
    assert module.weight_0 is added
    assert (added.name, added.value) == ("weight_0", 2.5)
    assert [name for name, _ in module.named_parameters()] == ["weight_0"]


def test_a_parameter_makes_a_computed_scalar_a_leaf() -> None:
    """Else the gradient of `Parameter(2 * x)` would be collected by x."""
    x, t = Scalar(2.0), tensor([1.0])
    assert Parameter(t, "weight").value.name == "weight" and t.requires_grad()
    p = Parameter(2.0 * x, name="w")
    (p.value * 3.0).backward()
    assert p.value.derivative == 3.0
    assert x.derivative is None
    assert p.value.name == "w"
