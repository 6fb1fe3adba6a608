"""Run a checked attention call: pick a rung and a tile, convert and view arrays, allocate the results."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any

import numpy as np

from kernels.bound_calls import BoundLoops, CallLookup, arrays_of  # beyond module 5
from kernels.cuda.runtime.recorder import active  # beyond module 5
from kernels.cuda.runtime.repeated import noted  # beyond module 5
from kernels.problem.float8 import check_float8_gradient  # beyond module 5
from kernels.problem.operands import IN_DTYPE, OF_ROWS, Operands, own_mask, view_of
from kernels.problem.options import AXES, WITH_GRADIENT, field_of
from kernels.problem.question import Problem
from kernels.problem.shapes import check_tile
from kernels.rungs import CPU as CPU
from kernels.rungs import CUDA as CUDA
from kernels.rungs import NUMPY as NUMPY
from kernels.rungs import RUNGS as RUNGS
from kernels.rungs import TARGETS as TARGETS
from kernels.rungs import Rung as Rung
from kernels.rungs import Target as Target
from kernels.rungs import Tile as Tile
from kernels.rungs import check_rung as check_rung
from kernels.runtime.memory import Memory, start_of
from kernels.scores.mods import check_derivative  # beyond module 5

#: The fields of the options that receive a gradient.
_LEARNT = [*map(field_of, WITH_GRADIENT)]


_COMPUTED = ["backward", *_LEARNT, "tangent"]


class Wanted(namedtuple("Wanted", _COMPUTED, defaults=[False] * len(_COMPUTED))):
    """What a call computes: gradients if ``backward`` is set, otherwise out and lse.

    With ``tangent``, it computes the derivative of that pass along the tangents of q, k and v.  The other
    fields, those of the options in ``WITH_GRADIENT``, tell whether to compute their gradients.
    """


#: What a forward pass computes.
FORWARD = Wanted()


class BoundCall:
    """How all calls of one key run: by a rung with its tile, and if possible by repeating the first call.

    The tile is (block_q, block_k), the rung's own when None.

    Raises:
        TypeError: If the tile is not a pair of integers.
        ValueError: If the tile is out of range, or no rung can run the call; see ``Target.pick``.  If
            gradients are wanted, also for a ``score_mod`` without a derivative, or float8 products.
    """

    def __init__(
        self, target: Target, problem: Problem, tile: Any = None, wanted: Wanted = FORWARD
    ):
        self.given_tile = tile = check_tile(tile)
        if order := wanted.backward + wanted.tangent:  # beyond module 5
            check_derivative(problem.score_mod, order)
            check_float8_gradient(problem)
        self.target, self.problem, self.wanted = target, problem.unseeded, wanted
        self.rung = target.pick(problem, tile, wanted.tangent)
        tiles: Any = self.rung.tangents if wanted.tangent else self.rung
        own_tile = tiles.backward_tile if wanted.backward else tiles.tile
        self.tile = tile or own_tile(self._taken(problem))
        # A BoundLoops or Repeat, which runs the loops or launches of the first call on other arrays; None
        # before it, or if every call runs in full.
        self.repeat: Any = None  # beyond module 5
        # Whether ``repeat`` takes the caller's own arrays, and returns the caller's results.
        self.reads_given = self._is_noted = False  # beyond module 5

    def run(self, problem: Problem, operands: Operands) -> Any:
        """Return the results of :func:`forward` or :func:`backward`; the first call is recorded."""
        if active() is None:  # beyond module 5
            if self.repeat is not None:
                starts, arrays = arrays_of(operands)
                if (found := self.repeat.arrays(starts, problem.seed, arrays)) is not None:
                    is_gradient = self.wanted.backward and not self.wanted.tangent
                    return Gradients(*found) if is_gradient else tuple(found)
            elif self.target is CUDA and not self._is_noted:
                return self._note(problem, operands)
        return self.in_full(problem, operands)

    def _note(self, problem: Problem, operands: Operands) -> Any:  # beyond module 5
        """Run a call in full and record its launches."""

        def run(arrays: Sequence[Any], seed: int) -> Any:
            own = problem.with_seed(seed) if problem.dropout_p else problem
            return self.in_full(own, Operands(*arrays))

        self._is_noted = True
        results, self.repeat = noted(run, operands, problem.seed)
        return results

    def in_full(self, problem: Problem, operands: Operands) -> Any:
        """Run a call without repeating another."""
        if self.wanted.backward and self.wanted.tangent:  # beyond module 5
            return _double_backward(self, problem, operands)
        return (_backward if self.wanted.backward else _forward)(self, problem, operands)

    def bind(  # beyond module 5
        self,
        bind: Any,
        taken: Problem,
        given: Operands,
        viewed: Operands,
        written: dict[str, Any],
        finish: Callable[..., Sequence[Any]] | None,
    ) -> None:
        """Bind later calls to the loops of this one.

        ``bind`` is what the rung returned, None if every call has to run in full, ``taken`` and
        ``viewed`` the problem, the operands and the results that it received, ``given`` the
        operands of the call, and ``written`` the results before they were viewed.  ``finish``
        returns the results of the call from these; None if they are the same.
        """
        if bind is None:
            return
        memory, names, copies = self.target.memory, list[str](), list[Any]()
        for name, array in zip(given._fields, given, strict=True):
            if array is None or name == "mask_batch":
                continue
            if start_of(array) != start_of(getattr(viewed, name)):
                if name not in IN_DTYPE:
                    return
                copies.append((len(names), partial(_copied, memory, taken, name)))
            names.append(name)
        self.repeat = BoundLoops(bind, names, copies, written, finish)

    def _taken(self, problem: Problem) -> Problem:
        taken = self.rung.taken(problem)
        assert taken is not None, "Target.pick returns a rung that takes the problem"
        return taken

    def taken(self, problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
        """Return a problem and its operands, converted to dtypes that the rung supports."""
        taken = self._taken(problem)
        is_ready = (
            operands.mask is None or problem.acc_dtype == problem.dtype or self.rung.reads_masks
        )
        if taken is problem and is_ready:
            return problem, operands
        return taken, operands.converted(self.target.memory, taken.dtype)


def run(
    lookup: CallLookup | None,
    target: Target,
    problem: Problem,
    operands: Operands,
    wanted: Wanted = FORWARD,
    tile: Any = None,
) -> Any:
    """Return the results of :func:`forward` or :func:`backward`, and keep how the call runs.

    ``lookup`` is the call as ``bound_calls.find`` has looked it up.
    """
    known = None if lookup is None else lookup.call
    call = known or BoundCall(target, problem, tile, wanted)
    results = call.run(problem, operands)
    if lookup is not None and known is None:  # beyond module 5
        # A gradient of a broadcast operand is still summed.
        shapes = problem.q_shape, problem.k_shape, problem.v_shape
        is_whole = not wanted.backward or shapes == tuple([x.shape for x in operands[:3]])
        lookup.keep(call, arrays_of(operands)[0] if is_whole else ())
    return results


def forward(
    target: Target, problem: Problem, operands: Operands, tile: Tile | None = None
) -> tuple[Any, Any, Any]:
    """Compute attention of operands with any leading dimensions: out, lse and lse_rest; see ``Operands``.

    The dimensions of out have the same order in memory as those of q.  If q repeats elements by a
    stride of 0, or has fewer dimensions, out is row-major.  The tile is the rung's own when None.
    Errors are those of :class:`BoundCall`.
    """
    return BoundCall(target, problem, tile).in_full(problem, operands)


def _forward(call: BoundCall, problem: Problem, operands: Operands) -> tuple[Any, ...]:
    """Do what :func:`forward` says, by the rung of a call."""
    memory, dtype = call.target.memory, problem.dtype
    taken, own = call.taken(problem, operands)
    names, run = ["out", "lse", "lse_rest"], call.rung.forward_of(taken)
    if call.wanted.tangent:  # beyond module 5
        own = own.with_tangents(memory, taken)
        names, run = [*names, "out_tangent", "lse_tangent"], call.rung.tangents.jvp
    written = {
        name: memory.empty(problem.lse_shape, problem.acc_dtype)
        if name in OF_ROWS
        else _like(memory, own.q, problem, problem.out_shape, taken.dtype)
        for name in names
    }
    viewed = own.having(**written).viewed(memory, problem)
    bind = run(taken, call.tile, viewed)

    def finish(*arrays: Any) -> tuple[Any, ...]:
        pairs = zip(names, arrays, strict=True)
        return tuple([x if name in OF_ROWS else memory.convert(x, dtype) for name, x in pairs])

    results = finish(*written.values())
    pairs = zip(names, results, strict=True)
    laid = [x if name in OF_ROWS else memory.laid_as(x, operands.q) for name, x in pairs]
    if all(map(is_, laid, results)):  # beyond module 5
        is_done = all(map(is_, results, written.values()))
        call.bind(bind, taken, operands, viewed, written, None if is_done else finish)
    return tuple(laid)


def _copied(  # beyond module 5
    memory: Memory, taken: Problem, name: str, array: Any
) -> Any:
    """Return an operand as the kernels take it; see ``Operands.viewed``."""
    return view_of(memory, taken, name, memory.convert(array, taken.dtype))


def _like(
    memory: Memory, operand: Any, problem: Problem, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Any:
    """Return the array that a kernel writes a result to, laid out as its operand if that can be viewed."""
    if len(problem.lead) > 2 or problem.groups > 1:  # their four dimensions could be a copy
        return memory.empty(shape, dtype)
    return memory.empty_as(operand, shape, dtype)


class Gradients(
    namedtuple(
        "Gradients", ["dq", "dk", "dv", *[f"d{x}" for x in _LEARNT]], defaults=[None] * len(_LEARNT)
    )
):
    """The gradients that :func:`backward` returns.

    dq, dk and dv have the broadcast shapes of q, k and v.  Those of options are None, or have the shape of
    the array, and the dtype of lse but for a mask.
    """


def backward(
    target: Target,
    problem: Problem,
    operands: Operands,
    tile: Tile | None = None,
    *wanted: bool,
) -> Gradients:
    """Compute the gradients of attention from the operands and results of :func:`forward`, dout, and dlse.

    lse_rest and dlse may be None.  The dimensions of each gradient have the same order in memory as
    those of its operand.  ``wanted`` tells for each option in ``WITH_GRADIENT`` whether to compute
    its gradient too.  Errors are those of :class:`BoundCall`.
    """
    return BoundCall(target, problem, tile, Wanted(True, *wanted)).in_full(problem, operands)


def _backward(call: BoundCall, problem: Problem, operands: Operands) -> Gradients:
    """Do what :func:`backward` says, by the rung of a call."""
    memory, given = call.target.memory, operands
    operands = operands.with_rest(memory, problem)
    taken, own = call.taken(problem.sinkless, operands)
    run = call.rung.backward
    if call.wanted.tangent:  # beyond module 5
        own, run = own.with_tangents(memory, taken), call.rung.tangents.double_backward
    if call.wanted.score_table and call.target.learning:  # beyond module 5
        own = own.having(dtable=memory.empty(tuple(own.score_table.shape), problem.acc_dtype))
        run = call.target.learning(run, call.rung.backward_tile)
    dq = _like(memory, own.q, problem, problem.q_shape, taken.dtype)
    # A head of k and v that several query heads share gets a gradient from each.
    dk, dv = (
        _like(memory, operand, problem, (*problem.grouped_lead, *shape[-2:]), taken.dtype)
        for operand, shape in ((own.k, problem.k_shape), (own.v, problem.v_shape))
    )
    viewed = own.having(dq=dq, dk=dk, dv=dv).viewed(memory, problem)
    bind = run(taken, call.tile, viewed)
    written, dtype = {"dq": dq, "dk": dk, "dv": dv}, problem.dtype
    lead, groups, shapes = problem.key_lead, problem.groups, (problem.k_shape, problem.v_shape)

    def finish(dq: Any, *of_keys: Any) -> tuple[Any, ...]:
        if groups > 1:
            of_keys = tuple(
                memory.sum_to(gradient, (*lead, 1, *shape[-2:])).reshape(shape)
                for gradient, shape in zip(of_keys, shapes, strict=True)
            )
        return tuple([memory.convert(gradient, dtype) for gradient in (dq, *of_keys)])

    results = finish(*written.values())
    pairs = zip(results, (operands.q, operands.k, operands.v), strict=True)
    laid = [memory.laid_as(gradient, operand) for gradient, operand in pairs]
    if not any(call.wanted[1:]) and all(map(is_, laid, results)):  # beyond module 5
        is_done = all(map(is_, results, written.values()))
        call.bind(bind, taken, given, viewed, written, None if is_done else finish)
    others = [
        _of_option(call.target, (problem, operands), (taken, viewed), name) if is_wanted else None
        for name, is_wanted in zip(_LEARNT, call.wanted[1:], strict=False)
    ]
    return Gradients(*laid, *others)


def _double_backward(  # beyond module 5
    call: BoundCall, problem: Problem, operands: Operands
) -> tuple[Any, ...]:
    """Return the gradients of the sum of dq, dk and dv times tangents, for q, k, v, dout and dlse.

    Second derivatives are symmetric: the first three are the tangents of dq, dk and dv, and the other two
    are those of out and lse.
    """
    same = replace(problem, rung=call.rung.name)  # whose scores are those of lse, bit for bit
    jvp = BoundCall(call.target, same, call.given_tile, Wanted(tangent=True))
    out, lse, rest, *tangents = jvp.in_full(same, operands)
    names = "out", "lse", "lse_rest", "out_tangent", "lse_tangent"
    found = dict(zip(names, (out, lse, rest, *tangents), strict=True))
    gradients = _backward(call, problem, operands.having(**found))
    return (*gradients[:3], *tangents)


def _of_option(
    target: Target, given: tuple[Problem, Operands], taken: tuple[Problem, Operands], name: str
) -> Any:
    """Return the gradient of the array in a field of ``Operands``, of the array's shape.

    ``given`` are the problem and its operands, ``taken`` those that the rung received.
    """
    if name == "score_table" and taken[1].dtable is not None:  # beyond module 5
        return taken[1].dtable
    (problem, operands), memory, sums = given, target.memory, given[0].acc_dtype
    array, axes = getattr(operands, name), AXES.get(name, "")
    shape = tuple(array.shape)
    sizes = (
        shape
        if name in ("mask", "score_table")
        else (*(problem.lead or (1,)), *shape[len(shape) - len(axes) :])
    )
    gradient = memory.empty(sizes, sums)
    if name == "sink":
        target.sink_gradient(problem, operands.viewed(memory, problem), gradient.reshape(-1))
        return memory.sum_to(gradient, shape)
    if taken[0].dtype != sums:
        wide = replace(problem.sinkless, dtype=sums)
        taken = wide, operands.converted(memory, sums).viewed(memory, problem)
    if name == "score_table":  # beyond module 5
        target.table_gradient(*taken, gradient)
        return gradient
    if name == "mask":
        target.mask_gradient(*taken, own_mask(memory, problem, gradient)[0])
        return memory.laid_as(memory.convert(gradient, array.dtype), array)
    target.mask_gradient(*taken, view_of(memory, problem, name, gradient))
    return memory.sum_to(gradient, shape)
