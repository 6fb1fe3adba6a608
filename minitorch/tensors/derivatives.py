"""Derivatives as functions: of every order, in reverse and in forward mode, of scalars and of tensors.

Reverse mode walks the recorded graph from the result to the inputs, and forward mode walks the same graph
in the order of its computation, so that both are made of the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from kernels.common.arguments import flag

from ..autodiff import topological_sort
from ..functions.base import is_tensor
from ..scalar import Scalar
from ..scalars.graphs import pull, push
from ..scalars.modes import is_recording, no_grad, recording
from .factories import from_numpy
from .joining import stack
from .kinds import SCALARS, kind_of


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    create_graph: bool = False,
    allow_unused: bool = False,
) -> Any:
    """Return the gradients of outputs with respect to inputs, and leave the ``grad`` of leaves alone.

    Args:
        outputs: A tensor or Scalar, or a sequence of them, whose gradients are added.
        inputs: A tensor or Scalar that outputs were computed from, a leaf or not, or a sequence of them.
        grad_outputs: The gradient to start from for each output, of its shape; by default 1 for Scalars and
            for tensors of shape (1,).
        create_graph: Record how the gradients are computed, so that they can be differentiated again.
        allow_unused: Return None for an input that no output depends on.

    Returns:
        The gradient of the input, of its shape, or a tuple of those of a sequence.

    Raises:
        TypeError: If an output or an input is neither a tensor nor a Scalar.
        ValueError: If a gradient to start from is missing or has another shape, or no output depends on an
            input.
        RuntimeError: If an output or an input is a constant, a value that is needed has been written to, or
            ``create_graph`` meets a function with first derivatives only.
    """
    ys, xs = _listed("outputs", outputs), _listed("inputs", inputs)
    for name, variables in (("output", ys), ("input", xs)):
        for i, x in enumerate(variables):
            if x.is_constant():
                raise RuntimeError(
                    f"{name} {i} of grad is a constant, which has no derivatives; compute it from, or make "
                    "it, a variable that requires a gradient. A gradient is a constant unless it was "
                    "computed with create_graph=True"
                )
    seeds = _seeds(ys, grad_outputs)
    found = _pulled(ys, seeds, xs, flag("create_graph", create_graph))
    for i, gradient in enumerate(found):
        if gradient is None and not flag("allow_unused", allow_unused):
            raise ValueError(
                f"no output depends on input {i} of grad; pass allow_unused=True to get None for it, or "
                "check that the output was computed from this very variable"
            )
    return _as_given(inputs, found)


def vjp(function: Callable[..., Any], primals: Any, grad_outputs: Any = None) -> tuple[Any, Any]:
    """Return the value of a function, and the product of a vector with its Jacobian.

    Args:
        function: A function of tensors or Scalars that returns one, or a tuple of them.
        primals: Its argument, or a tuple of its arguments.
        grad_outputs: The vector: a gradient for each result, as for :func:`grad`.

    Returns:
        The value, and the gradient of each primal.  They record how they were computed if a primal, or
        another variable that the function uses, requires a gradient.

    Raises:
        TypeError: If a primal or a result is neither a tensor nor a Scalar.
        ValueError: As :func:`grad`.
    """
    call = _Call(function, primals)
    seeds = _seeds(call.results, grad_outputs)
    found = _pulled(call.results, seeds, call.own, call.is_recorded(seeds))
    values, gradients = call.finished(call.results, _or_zeros(found, call.own))
    return _as_given(call.returned, values), _as_given(primals, gradients)


def jvp(function: Callable[..., Any], primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Return the value of a function, and its derivative in the direction of the tangents.

    Args:
        function: A function of tensors or Scalars that returns one, or a tuple of them.
        primals: Its argument, or a tuple of its arguments.
        tangents: The direction: a tensor of the shape of each primal, or a Scalar.

    Returns:
        The value, and the tangent of each result; as for :func:`vjp`, they may be differentiated.

    Raises:
        TypeError: If a primal, a tangent or a result is neither a tensor nor a Scalar.
        ValueError: If a tangent has another shape than its primal.
    """
    call = _Call(function, primals)
    directions = _checked("tangent", "primal", tangents, call.own)
    moved = {x.unique_id: t for x, t in zip(call.own, directions, strict=True)}
    with nullcontext() if call.is_recorded(directions) else no_grad():
        found = push(call.results, moved, call.kind.jvp)
    values, found = call.finished(call.results, _or_zeros(found, call.results))
    return _as_given(call.returned, values), _as_given(call.returned, found)


def hvp(function: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    """Return the product of the Hessian of a function with a vector: forward mode over reverse mode.

    Args:
        function: A function of tensors that returns a tensor of shape (1,), or of Scalars.
        primals: Its argument, or a tuple of its arguments.
        tangents: The vector: a tensor of the shape of each primal, or a Scalar.

    Returns:
        A tensor of the shape of each primal, or a Scalar.
    """
    return jvp(_gradient_of(function, primals), primals, tangents)[1]


def hessian(function: Callable[..., Any], primals: Any) -> Any:
    """Return the second derivatives of a function.

    Args:
        function: A function of tensors that returns a tensor of shape (1,), or of Scalars.
        primals: Its argument, or a tuple of its arguments.

    Returns:
        For one tensor, a tensor of its shape twice, ``(*shape, *shape)``; for one Scalar, a Scalar.  For a
        tuple of primals a tuple of tuples of such blocks: block [i][j] is for primals i and j.
    """
    call = _Call(_gradient_of(function, primals), primals)
    create_graph = call.is_recorded()
    blocks = call.finished(*(_rows(y, call.own, create_graph) for y in call.results))
    return _as_given(primals, [_as_given(primals, row) for row in blocks])


# -- parts ---------------------------------------------------------------------------------------


class _Call:
    """A call of a function on leaves that stand for the primals.

    Args:
        function: The function.
        primals: Its argument, or a tuple of its arguments.
    """

    def __init__(self, function: Callable[..., Any], primals: Any):
        function = _checked_function(function)
        self.primals = _listed("primals", primals)
        self.kind = kind_of(self.primals[0])
        self.own = [self.kind.stand_in(x) for x in self.primals]
        with recording():
            self.returned = function(*self.own)
        self.results = _listed("the results of the function", self.returned)

    def is_recorded(self, others: Sequence[Any] = ()) -> bool:
        """Tell whether anything but the stand-ins requires a gradient of what is computed."""
        ids = {x.unique_id for x in self.own}
        given = any(not x.is_constant() for x in (*self.primals, *others))
        leaves = (x for y in self.results for x in topological_sort(y) if x.is_leaf())
        self.recorded = is_recording() and (given or any(x.unique_id not in ids for x in leaves))
        return self.recorded

    def finished(self, *groups: Sequence[Any]) -> list[list[Any]]:
        """Join the stand-ins to the primals, and return what was computed, which may become constants."""
        for leaf, x in zip(self.own, self.primals, strict=True):
            self.kind.join(leaf, x)
        settle = (lambda x: x) if self.recorded else self.kind.constant
        return [[settle(x) for x in group] for group in groups]


def _checked_function(function: Any) -> Callable[..., Any]:
    """Return a function.

    Raises:
        TypeError: If what is given is none.
    """
    if callable(function):
        return function
    raise TypeError(
        f"function must be a function of tensors or Scalars, got {type(function).__name__}"
    )


def _listed(name: str, given: Any) -> list[Any]:
    """Return one variable, or a sequence of them, as a list.

    Raises:
        TypeError: If one is neither a tensor nor a Scalar.
        ValueError: If there is none.
    """
    found = [*given] if isinstance(given, (tuple, list)) else [given]
    for x in found:
        if not (is_tensor(x) or isinstance(x, Scalar)):
            raise TypeError(
                f"{name} must be tensors or Scalars, got {type(x).__name__}; pass one or a tuple of them"
            )
    if len({type(x) for x in found}) != 1:
        raise ValueError(
            f"{name} must be one or more variables of one kind, got {len(found)} of "
            f"{len({type(x) for x in found})} kinds; pass tensors or Scalars"
        )
    return found


def _as_given(given: Any, found: Sequence[Any]) -> Any:
    """Return a tuple for a sequence, and a single value otherwise."""
    return tuple(found) if isinstance(given, (tuple, list)) else found[0]


def _checked(name: str, of: str, given: Any, variables: Sequence[Any]) -> list[Any]:
    """Return a derivative for each variable, which has its shape.

    Raises:
        TypeError: If one is not of the kind of its variable.
        ValueError: If their number or a shape differs.
    """
    found = [*given] if isinstance(given, (tuple, list)) else [given]
    kind = kind_of(variables[0])
    if kind is SCALARS:
        found = [x if isinstance(x, Scalar) else Scalar(x, None) for x in found]
    found = _listed(f"{name}s", found)
    shapes, wanted = ([getattr(x, "shape", ()) for x in xs] for xs in (found, variables))
    if shapes != wanted:
        raise ValueError(
            f"each {of} needs a {name} of its shape, {', '.join(map(str, wanted))}, got "
            f"{', '.join(map(str, shapes))}"
        )
    if kind is not SCALARS:
        found = [t.to(x.backend).to(x.dtype) for t, x in zip(found, variables, strict=True)]
    return found


def _seeds(ys: Sequence[Any], given: Any) -> list[Any]:
    """Return the gradient that each output starts from."""
    if given is not None:
        return _checked("gradient", "output", given, ys)
    for y in ys:
        if getattr(y, "shape", (1,)) != (1,):
            raise ValueError(
                f"an output of shape {y.shape} needs the gradient to start from; pass grad_outputs, or sum "
                "the output"
            )
    return [kind_of(y).filled(y, 1.0) for y in ys]


def _pulled(
    ys: Sequence[Any], seeds: Sequence[Any], xs: Sequence[Any], create_graph: bool
) -> list[Any]:
    """Return the gradient of each input, None for one on which nothing depends."""
    kind = kind_of(ys[0])
    if create_graph:
        with recording():
            return pull(ys, seeds, xs, kind.chain)
    found = pull(ys, [kind.number(seed) for seed in seeds], xs)
    return [None if x is None else kind.constant(x) for x in found]


def _or_zeros(found: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Return derivatives with zeros in the place of None."""
    fill = kind_of(variables[0]).filled
    return [fill(x, 0.0) if d is None else d for d, x in zip(found, variables, strict=True)]


def _gradient_of(function: Callable[..., Any], primals: Any) -> Callable[..., Any]:
    """Return a function of the gradients of another's result, which record how they were computed.

    Raises:
        TypeError: If what is given is no function.
    """
    function = _checked_function(function)

    def gradient(*own: Any) -> Any:
        ys = _listed("the result", function(*own))
        return _as_given(primals, _or_zeros(_pulled(ys, _seeds(ys, None), own, True), own))

    return gradient


def _rows(y: Any, xs: Sequence[Any], create_graph: bool) -> list[Any]:
    """Return the derivatives of every element of y in every element of each x."""
    if isinstance(y, Scalar):
        return _or_zeros(_pulled([y], [Scalar(1.0, None)], xs, create_graph), xs)
    if not y.size:
        return [x.full((*y.shape, *x.shape), 0.0) for x in xs]
    units = np.eye(y.size, dtype=y.dtype).reshape(y.size, *y.shape)
    rows = [
        _or_zeros(_pulled([y], [from_numpy(unit, y.backend)], xs, create_graph), xs)
        for unit in units
    ]
    return [
        stack(own).reshape(*y.shape, *x.shape)
        for own, x in zip(zip(*rows, strict=True), xs, strict=True)
    ]
