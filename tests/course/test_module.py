"""Module 0: the tree of modules and its parameters."""

import pytest
from hypothesis import given

from minitorch import Module, Parameter

from ..strategies import med_ints


class Leaf(Module):
    """Two parameters and a plain attribute."""

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.weight = Parameter(start)
        self.label = "leaf"
        self.bias = Parameter(start + 1.0)

    def forward(self, x: float, shift: float = 0.0) -> float:
        return self.weight.value * x + self.bias.value + shift


class Tree(Module):
    """A parameter of its own between two children, one of which has a child."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Leaf(1.0)
        self.scale = Parameter(10.0)
        self.second = Leaf(3.0)
        self.second.inner = Leaf(5.0)


NAMES = [
    "scale",
    *("first.weight", "first.bias"),
    *("second.weight", "second.bias", "second.inner.weight", "second.inner.bias"),
]


class Chain(Module):
    """As many children below each other as asked for, with one parameter each."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.p = Parameter(depth)
        if depth > 1:
            self.child = Chain(depth - 1)


# --- task 0.4: modules and parameters --------------------------------------------------------


@pytest.mark.task0_4
def test_named_parameters_give_own_ones_first_then_dotted_paths() -> None:
    named = Tree().named_parameters()
    names = [name for name, _ in named]
    assert names == NAMES, (
        f"named_parameters gives {names}, expected {NAMES}: first the module's own, then those of each "
        "child and all below it, the child's name and a dot in front"
    )
    assert [p.value for _, p in named] == [10.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


@pytest.mark.task0_4
def test_parameters_come_in_the_order_of_their_names() -> None:
    tree = Tree()
    assert len(tree.parameters()) == len(NAMES)
    for p, (_, q) in zip(tree.parameters(), tree.named_parameters(), strict=True):
        assert p is q


@pytest.mark.task0_4
@given(med_ints)
def test_a_chain_of_modules_is_collected_to_its_end(depth: int) -> None:
    names = [name for name, _ in Chain(depth).named_parameters()]
    assert names == ["child." * level + "p" for level in range(depth)]


@pytest.mark.task0_4
@given(med_ints)
def test_train_and_eval_reach_every_module(depth: int) -> None:
    def modes(module: Module) -> list[bool]:
        return [module.training] + [mode for child in module.modules() for mode in modes(child)]

    chain = Chain(depth)
    for switch in (chain.eval, chain.train):
        training = switch == chain.train
        assert switch() is None
        assert modes(chain) == [training] * depth, (
            f"after {switch.__name__}(), training is {modes(chain)} from the root of a chain of {depth} "
            f"modules down, expected {training} in each"
        )
