"""Activation checkpointing: drop a function's intermediates after the forward pass, and recompute them.

What remains is the outline of the graph: which function computed which variable from which others,
without data.  The backward pass walks the outline as it would walk the graph, and calls the functions of
the recomputed graph.  Sums of gradients thus have the same order and the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..autodiff import Context, History, Variable
from ..backends.matmul_precision import get_matmul_precision, matmul_precision
from ..backends.writes import check_unwritten_values
from ..functions import derivatives
from ..functions.base import Function, chain_rule, is_tensor, is_variable
from ..functions.several import Joint
from ..scalars.modes import is_recording, recording, writes
from ..tensor import next_id


class Outline(Joint):
    """A tensor of the graph without its data, with the interface that the chain rule uses.

    Args:
        like: The tensor, or its outline.
        history: How it was computed, in terms of outlines.
    """

    def __init__(self, like: Any, history: History):
        super().__init__(history)
        self.shape, self.dtype, self.backend = like.shape, like.dtype, like.backend

    def chain_rule(self, d_output: Any) -> Iterable[tuple[Variable, Any]]:
        """Pair each input with its gradient, given the gradient of this variable."""
        return chain_rule(self.history, d_output)


class Again(Function):
    """The function of every variable in an outline; it delegates to the recomputed function."""

    checks_itself = True

    @staticmethod
    def backward(ctx: Context, *grad_outputs: Any) -> tuple[Any, ...]:
        """Return the gradients of the function, recomputing the segment if necessary."""
        segment, place = ctx.saved_values
        return segment.gradients(place, grad_outputs, chain_rule)

    @staticmethod
    def vjp(history: History, *grad_outputs: Any) -> tuple[Any, ...]:
        """Do the same for derivatives of higher order, which keep what is recomputed."""
        segment, place = (history.ctx or Context()).saved_values
        return segment.gradients(place, grad_outputs, derivatives.chain_rule)

    @staticmethod
    def jvp(history: History, tangents: tuple[Any, ...]) -> Any:
        """Return the tangent of the recomputed function."""
        segment, place = (history.ctx or Context()).saved_values
        return derivatives.jvp(segment.taken(place), tangents)


#: The function that computed a variable, and the identity of each argument that has a gradient.
Step = tuple[Any, tuple[Any, ...]]


class Segment:
    """A call that is repeated when its gradients are needed.

    Args:
        fn: The function.
        inputs: Its arguments.
    """

    def __init__(self, fn: Callable[..., Any], inputs: tuple[Any, ...]):
        self.fn, self.inputs = fn, inputs
        self.random = random.getstate(), np.random.get_state()
        self.precision = get_matmul_precision()
        self.steps: list[Step] = []
        #: The tensors from outside that the call used, and the number of writes when it had ended.
        self.given: list[Any] = []
        self.saved_at = 0
        #: The variables of the second call, by position; each is removed after its gradients are computed.
        self.histories: dict[int, History] = {}

    def first(self) -> Any:
        """Call the function, and return the results with the outline as their history."""
        before = next_id()
        results, nodes, self.steps = self._called()
        read = [x for node in nodes for x in node.history.inputs if is_tensor(x)]
        self.given = [x for x in read if x.unique_id < before]
        self.saved_at = writes.count
        returned = {x.unique_id for x in _listed(results) if is_tensor(x)}
        made: dict[int, Any] = {}  # the outline of each variable, by its id

        def stand_in(x: Any) -> Any:
            return made.get(x.unique_id, x) if _is_variable(x) else None

        for place, node in enumerate(nodes):
            ctx = Context(saved_values=(self, place))
            history = History(Again, ctx, tuple(map(stand_in, node.history.inputs)))
            if type(node) is Joint:
                found: Any = Joint(history)
            elif node.unique_id in returned:
                found = node.detach()
                found.history = history
            else:
                found = Outline(node, history)
            made[node.unique_id] = found
        outlined = tuple(made.get(x.unique_id, x) if is_tensor(x) else x for x in _listed(results))
        return outlined if isinstance(results, (tuple, list)) else outlined[0]

    def taken(self, place: int) -> History:
        """Return how one function was applied, recomputing the segment if necessary."""
        if place not in self.histories:
            self.histories = self._again()
        return self.histories.pop(place)

    def gradients(self, place: int, grad_outputs: tuple[Any, ...], rule: Any) -> tuple[Any, ...]:
        """Return the gradients of one function's arguments by a chain rule, None for those without one."""
        history = self.taken(place)
        found = iter(rule(history, *grad_outputs))
        return tuple(next(found)[1] if _is_variable(x) else None for x in history.inputs)

    def _called(self) -> tuple[Any, list[Any], list[Step]]:
        """Call the function; return the results, the variables it created, and how each was computed."""
        last = next_id(), Joint(History()).unique_id  # tensors count up, joints down

        def is_new(x: Any) -> bool:
            return x.unique_id > last[0] or x.unique_id < last[1]

        results = self.fn(*self.inputs)
        nodes = _made(filter(is_tensor, _listed(results)), is_new)
        places = {node.unique_id: place for place, node in enumerate(nodes)}

        def described(x: Any) -> Any:
            if not _is_variable(x):
                return None
            if is_new(
                x
            ):  # otherwise a leaf that the function created itself, a new one in each call
                return "made", places.get(x.unique_id)
            return "given", x.unique_id

        steps = [
            (node.history.last_fn, tuple(map(described, node.history.inputs))) for node in nodes
        ]
        return results, nodes, steps

    def _again(self) -> dict[int, History]:
        """Repeat the call with the same random numbers; return how each variable was computed."""
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        check_unwritten_values(f"checkpoint({name}, ...)", self.given, self.saved_at)
        now = random.getstate(), np.random.get_state()
        random.setstate(self.random[0])
        np.random.set_state(self.random[1])
        try:
            with recording(), matmul_precision(self.precision):
                _, nodes, steps = self._called()
        finally:
            random.setstate(now[0])
            np.random.set_state(now[1])
        if steps != self.steps:
            raise RuntimeError(
                f"checkpoint called {name} again for its gradients, and its computation differed from "
                "the first call; it must depend only on its inputs, on tensors and parameters that do not "
                "change before the backward pass, and on random numbers of minitorch.manual_seed"
            )
        return {place: node.history for place, node in enumerate(nodes)}


def _listed(results: Any) -> Any:
    return results if isinstance(results, (tuple, list)) else (results,)


def _is_variable(x: Any) -> bool:
    return is_variable(x) and x.requires_grad()


def _made(results: Iterable[Any], is_new: Callable[[Any], bool]) -> list[Any]:
    """Return the variables that functions computed, each after its inputs.

    Args:
        results: The results, from which the others are found, depth first.
        is_new: Tells whether a variable was created by the call.
    """
    found: list[Any] = []
    seen: set[int] = set()

    def enters(x: Any) -> bool:
        enters = _is_variable(x) and not x.is_leaf() and x.unique_id not in seen and is_new(x)
        if enters:
            seen.add(x.unique_id)
        return enters

    for result in results:
        path = [(result, iter(result.parents))] if enters(result) else []
        while path:
            current, parents_left = path[-1]
            parent = next(filter(enters, parents_left), None)
            if parent is None:
                found.append(current)
                path.pop()
            else:
                path.append((parent, iter(parent.parents)))
    return found


def checkpoint(fn: Callable[..., Any], *inputs: Any) -> Any:
    """Return ``fn(*inputs)`` without storing its intermediate results for the backward pass.

    The backward pass calls the function again, once, just before its gradients are needed.  Applied to each
    layer, it keeps the activations of only one layer in memory, and the forward pass is computed twice.
    Gradients are the same bit for bit: dropout draws the same mask, and sums have the same order.
    Parameters and tensors that the function closes over receive gradients too, and calls may be nested.
    Within :class:`minitorch.no_grad` it only calls the function.

    Args:
        fn: Returns a tensor, or a tuple or list of tensors and other values.  It must depend only on its
            inputs, on tensors that do not change before the backward pass, and on random numbers of
            ``manual_seed``.  It must not use its own generator, and a mode such as ``model.eval()`` must
            not change between its two calls.
        *inputs: The arguments of ``fn``, tensors and others, which are kept.

    Returns:
        The result of ``fn``; a tuple for a list.

    Raises:
        RuntimeError: In the backward pass, if the second call applies different functions or uses different
            variables from the first.

    Source: Chen, Xu, Zhang and Guestrin (2016), Training deep nets with sublinear memory cost, section 3.

    Example:
        >>> hidden = minitorch.checkpoint(layer, hidden)
    """
    return Segment(fn, inputs).first() if is_recording() else fn(*inputs)
