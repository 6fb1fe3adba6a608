"""Trade time for memory: what a function computes is dropped after the forward pass and computed again.

What stays is the *outline* of the graph: which function made which variable out of which others, without a
number.  The backward pass walks it as it would have walked the graph itself, and asks the functions of the
graph that is made anew; so every sum of gradients has its terms in the same order, and the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..autodiff import Context, History, Switch, Variable, is_recording
from ..backends.matmul_precision import get_matmul_precision, matmul_precision
from ..functions.base import Function, Joint, chain_rule, is_tensor
from ..tensor import next_id


class recording(Switch):
    """Within the context functions of tensors record how they were applied, whatever is around it."""

    mode, value = "recording", True


class Outline(Joint):
    """A tensor of the graph without its numbers; it has what the chain rule asks a tensor for.

    Args:
        like: The tensor, or its outline.
        history: How it was made, of outlines too.
    """

    def __init__(self, like: Any, history: History):
        super().__init__(history)
        self.shape, self.dtype, self.backend = like.shape, like.dtype, like.backend

    def chain_rule(self, d_output: Any) -> Iterable[tuple[Variable, Any]]:
        """Pair each input with its gradient, given the gradient of this variable."""
        return chain_rule(self.history, d_output)

    def expand(self, other: Any) -> Any:
        """Return a gradient as it is: the tensor itself has brought it to its shape."""
        return other

    def _ensure_tensor(self, b: Any) -> Any:
        return b


class Again(Function):
    """In an outline it stands for every function: its gradient is that of the one it stands for."""

    checks_itself = True

    @staticmethod
    def backward(ctx: Context, *grad_outputs: Any) -> tuple[Any, ...]:
        """Return the gradients of the function, which is computed again if it must be."""
        segment, place = ctx.saved_values
        return segment.gradients(place, grad_outputs)


#: How a variable was made: by which function; and of each argument that has a gradient, what it is.
Step = tuple[Any, tuple[Any, ...]]


class Segment:
    """A call that is made again when its gradients are asked for.

    Args:
        fn: What is called.
        inputs: With what.
    """

    def __init__(self, fn: Callable[..., Any], inputs: tuple[Any, ...]):
        self.fn, self.inputs = fn, inputs
        self.random = random.getstate(), np.random.get_state()
        self.precision = get_matmul_precision()
        self.steps: list[Step] = []
        #: Of the second call, by place; each leaves when its gradients have been computed.
        self.histories: dict[int, History] = {}

    def first(self) -> Any:
        """Call, and return the results with the outline for their history."""
        results, nodes, self.steps = self._called()
        returned = {x.unique_id for x in _listed(results) if is_tensor(x)}
        made: dict[int, Any] = {}  # what stands for each variable, by its id

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

    def gradients(self, place: int, grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the gradients of the arguments of one function, None for what has none."""
        if place not in self.histories:
            self.histories = self._again()
        history = self.histories.pop(place)
        found = iter(chain_rule(history, *grad_outputs))
        return tuple(next(found)[1] if _is_variable(x) else None for x in history.inputs)

    def _called(self) -> tuple[Any, list[Any], list[Step]]:
        """Call; return the results, the variables that it made, and how it made each."""
        last = next_id(), Joint(History()).unique_id  # tensors count up, joints down

        def is_new(x: Any) -> bool:
            return x.unique_id > last[0] or x.unique_id < last[1]

        results = self.fn(*self.inputs)
        nodes = _made(filter(is_tensor, _listed(results)), is_new)
        places = {node.unique_id: place for place, node in enumerate(nodes)}

        def described(x: Any) -> Any:
            if not _is_variable(x):
                return None
            if is_new(x):  # or else a leaf that it has made itself, each time another
                return "made", places.get(x.unique_id)
            return "given", x.unique_id

        steps = [
            (node.history.last_fn, tuple(map(described, node.history.inputs))) for node in nodes
        ]
        return results, nodes, steps

    def _again(self) -> dict[int, History]:
        """Call as the first time, with the same random numbers; return how each variable was made."""
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
            name = getattr(self.fn, "__name__", type(self.fn).__name__)
            raise RuntimeError(
                f"checkpoint called {name} again for its gradients, and it computed something else than "
                "the first time; what it does may depend on its inputs, on tensors and parameters that "
                "stay what they are until the backward pass, and on random numbers that "
                "minitorch.manual_seed decides"
            )
        return {place: node.history for place, node in enumerate(nodes)}


def _listed(results: Any) -> Any:
    return results if isinstance(results, (tuple, list)) else (results,)


def _is_variable(x: Any) -> bool:
    return is_tensor(x) and x.requires_grad()


def _made(results: Iterable[Any], is_new: Callable[[Any], bool]) -> list[Any]:
    """Return the variables that functions have made, each after those that it was computed from.

    Args:
        results: From which the others are found, depth first.
        is_new: Tells whether a variable was made since then.
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
    """Return ``fn(*inputs)`` without keeping for the backward pass what it computes on the way.

    The backward pass calls it again, once, just before its gradients are needed: a layer's activations
    are in memory for one layer at a time, and the forward pass costs twice.  Gradients are those without
    it, bit for bit: dropout draws the same numbers, and sums have their terms in the same order.
    Parameters and tensors that the function takes from around it get their gradients too; calls may
    stand within calls.  Outside of recording (:class:`minitorch.no_grad`) it only calls.

    Args:
        fn: Returns a tensor, or a tuple or list of tensors and whatever else.  What it does depends on its
            inputs, on tensors that stay what they are until the backward pass, and on random numbers that
            ``manual_seed`` decides; a generator of its own would have gone on, and a mode such as
            ``model.eval()`` must not change.
        *inputs: Tensors, and what else it takes; they are kept.

    Returns:
        What ``fn`` returns; a tuple for a list.

    Raises:
        RuntimeError: In the backward pass, if the second call computes with other functions or other
            variables than the first.

    Source: Chen, Xu, Zhang and Guestrin (2016), Training deep nets with sublinear memory cost, section 3.

    Example:
        >>> hidden = minitorch.checkpoint(layer, hidden)
    """
    return Segment(fn, inputs).first() if is_recording() else fn(*inputs)
