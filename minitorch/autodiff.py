"""Automatic differentiation for any kind of variable, scalar or tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import (
    dataclass,
    field,  # beyond module 5
)
from typing import Any, Protocol

from .scalars.modes import writes  # beyond module 5

# Part of the published interface, unused here: Scalar and Tensor each number their own variables.
variable_count = 1


def central_difference(
    f: Callable[..., Any], *vals: Any, arg: int = 0, epsilon: float = 1e-6
) -> Any:
    """Estimate the derivative of a function with respect to one of its arguments, by calling it twice.

    Args:
        f: A function of as many arguments as there are values.
        *vals: The point: numbers, or scalars of this library.
        arg: The position of the argument to vary.
        epsilon: Half the distance between the two points.

    Returns:
        (f(.., x + epsilon, ..) - f(.., x - epsilon, ..)) / (2 epsilon), of the type that f returns.
    """
    # TASK 1.1: Copy vals twice, move entry arg by ± epsilon, call f on both.
    above, below = list(vals), list(vals)
    above[arg] = vals[arg] + epsilon
    below[arg] = vals[arg] - epsilon
    return (f(*above) - f(*below)) / (2.0 * epsilon)
    # END TASK 1.1


class Variable(Protocol):
    """The interface of a variable that backpropagation uses; Scalar and Tensor implement it.

    There are three kinds. A leaf was made by the user and collects its derivative, an inner
    variable is the result of a function and only passes derivatives on, and a constant takes no
    part.
    """

    @property
    def unique_id(self) -> int:
        """A number that no other variable of the graph has."""
        ...

    @property
    def parents(self) -> Iterable[Variable]:
        """The inputs of the function that made this variable."""
        ...

    def is_leaf(self) -> bool:
        """Tell whether this variable was made by the user instead of by a function."""
        ...

    def is_constant(self) -> bool:
        """Tell whether this variable takes no part in differentiation."""
        ...

    def accumulate_derivative(self, x: Any) -> None:
        """Add x to the derivative of this leaf."""
        ...

    def chain_rule(self, d_output: Any) -> Iterable[tuple[Variable, Any]]:
        """Pair each parent with its derivative, given the derivative of this variable."""
        ...


def wrap_tuple(x: Any) -> tuple[Any, ...]:
    """Turn a single value into a tuple of one; leave a tuple alone."""
    return x if isinstance(x, tuple) else (x,)


def topological_sort(variable: Variable) -> Iterable[Variable]:
    """Order the graph so that every variable precedes the ones it was computed from.

    Args:
        variable: The right-most variable, the result of the whole computation.

    Returns:
        Each variable that is not a constant, once, beginning with the right-most one; nothing if
        the right-most variable is a constant.
    """
    # TASK 1.4: Depth first from the result; note unique_ids; a long chain breaks recursion.
    if variable.is_constant():
        return []
    finished: list[Variable] = []
    # Variables define == to build graphs, so they cannot be hashed: remember their ids instead.
    seen = {variable.unique_id}
    # Depth-first on a stack of our own: a recursive walk fails on a chain of a thousand operations.
    path: list[tuple[Variable, Iterator[Variable]]] = [(variable, iter(variable.parents))]
    while path:
        current, parents_left = path[-1]
        for parent in parents_left:
            if not parent.is_constant() and parent.unique_id not in seen:
                seen.add(parent.unique_id)
                path.append((parent, iter(parent.parents)))
                break  # its ancestors come first; parents_left remembers where to go on
        else:
            finished.append(current)  # after everything that it was computed from
            path.pop()
    finished.reverse()
    return finished
    # END TASK 1.4


def backpropagate(variable: Variable, deriv: Any) -> None:
    """Add to each leaf the derivative of the result with respect to that leaf.

    Args:
        variable: The right-most variable, the result of the whole computation.
        deriv: The derivative to start from: a number for a scalar, a tensor of the same shape
            for a tensor.
    """
    # TASK 1.4: A dict of derivatives by unique_id; in this order each sum is complete when met.
    derivatives = {variable.unique_id: deriv}
    for current in topological_sort(variable):
        # Everything that uses `current` has been visited, so its sum is complete. Taking it out
        # of the dict frees an inner derivative, as large as its tensor, once it is passed on.
        d_output = derivatives.pop(current.unique_id)
        if current.is_leaf():
            current.accumulate_derivative(d_output)
            continue
        for parent, d_parent in current.chain_rule(d_output):
            if parent.is_constant():
                continue  # it is not in the order, so its derivative would never be taken out
            key = parent.unique_id
            # A variable used more than once gets a share from each use. Not +=: that could write
            # into a derivative that is shared with another variable.
            derivatives[key] = derivatives[key] + d_parent if key in derivatives else d_parent
    # END TASK 1.4


@dataclass
class Context:
    """The values that a function's `forward` saves for its `backward`.

    Attributes:
        no_grad: True when there will be no backward pass, so that nothing needs to be saved.
        saved_values: The values that `save_for_backward` saved.
        needs_input_grad: Which arguments of `forward` require a gradient; a function of tensors sets it.
    """

    no_grad: bool = False
    saved_values: tuple[Any, ...] = ()
    needs_input_grad: tuple[bool, ...] = ()
    # Where the function was called, and the number of writes into tensors when values were saved, or 0.
    site: Any = field(default=None, init=False, compare=False)  # beyond module 5
    saved_at: int = field(default=0, init=False, compare=False)  # beyond module 5

    def save_for_backward(self, *values: Any) -> None:
        """Keep values for the backward pass, in place of any kept before."""
        if not self.no_grad:
            self.saved_values = values
            self.saved_at = writes.count  # beyond module 5

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The saved values; another name for ``saved_values``."""
        return self.saved_values


@dataclass
class History:
    """How a variable, scalar or tensor, was computed; an empty history marks a leaf.

    Attributes:
        last_fn: The function class that made the variable, or None for a leaf.
        ctx: The context that its `forward` filled.
        inputs: The variables that it was applied to.
    """

    last_fn: Any = None
    ctx: Context | None = None
    inputs: tuple[Any, ...] = ()
