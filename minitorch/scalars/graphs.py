"""Walk a recorded graph in either direction: gradients back to chosen variables, tangents forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..autodiff import History, Variable, backpropagate, topological_sort

#: Pairs each input of a variable with its gradient, given the gradient of the variable.
Chain = Callable[[Any, Any], Iterable[tuple[Any, Any]]]


class _Outputs:
    """The variable that stands for several outputs: each of them is one of its parents.

    Args:
        outputs: The variables.
        gradients: The gradient that each starts from.
    """

    unique_id = 0  # scalars and tensors count from 1, joint variables from -1

    def __init__(self, outputs: Sequence[Any], gradients: Sequence[Any] = ()):
        self.parents, self.gradients = outputs, gradients

    def is_leaf(self) -> bool:
        """Return False: it passes derivatives on."""
        return False

    def is_constant(self) -> bool:
        """Return False: some output may take part in differentiation."""
        return False

    def chain_rule(self, d_output: Any) -> Iterable[tuple[Any, Any]]:
        """Pair each output with its gradient."""
        return zip(self.parents, self.gradients, strict=True)

    def accumulate_derivative(self, x: Any) -> None:
        """Never called, because only a leaf collects its derivative."""


class _Node:
    """A variable as :func:`backpropagate` meets it on the way to the targets of a :class:`_Walk`."""

    def __init__(self, variable: Any, walk: _Walk):
        self.variable, self.walk, self.unique_id = variable, walk, variable.unique_id

    @property
    def parents(self) -> list[_Node]:
        """The parents of the variable."""
        return [_Node(parent, self.walk) for parent in self.variable.parents]

    def is_leaf(self) -> bool:
        """Tell whether the user made the variable."""
        return self.variable.is_leaf()

    def is_constant(self) -> bool:
        """Tell whether the variable leads to no target."""
        return self.unique_id not in self.walk.needed

    def accumulate_derivative(self, x: Any) -> None:
        """Keep the gradient of a target, or add it to the leaf if there are no targets."""
        if self.unique_id in self.walk.found:
            self.walk.found[self.unique_id] = x
        else:
            self.variable.accumulate_derivative(x)

    def chain_rule(self, d_output: Any) -> Iterable[tuple[_Node, Any]]:
        """Pair each parent with its gradient, given that of the variable, which is complete."""
        if self.unique_id in self.walk.found:
            self.walk.found[self.unique_id] = d_output
            if not any(parent.unique_id in self.walk.needed for parent in self.variable.parents):
                return
        inner = type(self.variable) is not _Outputs
        pairs = self.walk.chain if inner else _Outputs.chain_rule
        for parent, gradient in pairs(self.variable, d_output):
            yield _Node(parent, self.walk), gradient


class _Walk:
    """What a walk back needs to know.

    Args:
        root: The outputs.
        targets: The variables whose gradients are wanted; None for all leaves.
        chain: The chain rule.
    """

    def __init__(self, root: _Outputs, targets: Sequence[Any] | None, chain: Chain):
        self.chain = chain
        self.found: dict[int, Any] = {target.unique_id: None for target in targets or ()}
        self.needed: set[int] = set()
        for variable in reversed([*topological_sort(root)]):  # inputs before what uses them
            ends = variable.is_leaf() if targets is None else variable.unique_id in self.found
            # A constant has no parents to ask for, and is in no order.
            if ends or any(parent.unique_id in self.needed for parent in _parents(variable)):
                self.needed.add(variable.unique_id)


def _parents(variable: Variable) -> Iterable[Variable]:
    return () if variable.is_leaf() else variable.parents


def _first_order(variable: Any, d_output: Any) -> Iterable[tuple[Any, Any]]:
    return variable.chain_rule(d_output)


def pull(
    outputs: Sequence[Any],
    gradients: Sequence[Any],
    targets: Sequence[Any] | None = None,
    chain: Chain | None = None,
) -> list[Any]:
    """Carry gradients from outputs back to other variables, by :func:`minitorch.backpropagate`.

    Args:
        outputs: The variables to start from.
        gradients: The gradient of each.
        targets: The variables whose gradients are wanted; None adds to the derivatives of all leaves.
        chain: The chain rule of one variable; that of first derivatives if None.

    Returns:
        The gradient of each target, None where no output depends on it.
    """
    root = _Outputs(outputs, gradients)
    walk = _Walk(root, targets, chain or _first_order)
    if root.unique_id in walk.needed:
        backpropagate(_Node(root, walk), None)
    return [walk.found[target.unique_id] for target in targets or ()]


def push(
    outputs: Sequence[Any],
    tangents: dict[int, Any],
    rule: Callable[[History, tuple[Any, ...]], Any],
) -> list[Any]:
    """Carry tangents forward through the graph that was recorded, in the order of its computation.

    Args:
        outputs: The variables whose tangents are wanted.
        tangents: The tangent of each variable that has one, by its id.
        rule: Returns the tangent of a function's result, given how the result was computed and the
            tangent of each input, or None for an input that does not move.

    Returns:
        The tangent of each output, None for one that does not move.
    """
    known = dict(tangents)
    for variable in reversed([*topological_sort(_Outputs(outputs))][1:]):
        history: History = variable.history  # type: ignore[attr-defined]
        if variable.unique_id not in known and history.last_fn is not None:
            given = tuple(known.get(getattr(x, "unique_id", None)) for x in history.inputs)  # type: ignore[call-overload]
            if any(tangent is not None for tangent in given):
                known[variable.unique_id] = rule(history, given)
    return [known.get(output.unique_id) for output in outputs]
