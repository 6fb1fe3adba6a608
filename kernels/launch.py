"""Plans: the first call of a kind determines how all calls of this kind run.

The kind of a call consists of its problem without the dropout seed, its tile, and the layout of its arrays.
The first call of a kind picks the rung, runs, and leaves a :class:`Plan`; later calls look it up, allocate
results and launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kernels.problem.argument_types import check_tile
from kernels.problem.float8 import check_float8_gradient
from kernels.problem.operands import Operands, own_mask
from kernels.problem.question import Problem
from kernels.rungs import CPU as CPU
from kernels.rungs import CUDA as CUDA
from kernels.rungs import NUMPY as NUMPY
from kernels.rungs import RUNGS as RUNGS
from kernels.rungs import TARGETS as TARGETS
from kernels.rungs import Rung as Rung
from kernels.rungs import Target as Target
from kernels.rungs import Tile as Tile
from kernels.rungs import check_rung as check_rung
from kernels.runtime.memory import Memory
from kernels.scores.mods import check_derivative


class Wanted(NamedTuple):
    """What a call computes: gradients if ``backward`` is set, otherwise out and lse.

    Attributes:
        backward: Compute the gradients of q, k and v.
        mask: Also compute the gradient of a floating mask.
        sink: Also compute the gradient of the sinks.
    """

    backward: bool = False
    mask: bool = False
    sink: bool = False


_FORWARD = Wanted()


class Plan:
    """A plan, which determines how calls of one kind run.

    Args:
        target: The target of the operands.
        problem: The checked call.
        tile: (block_q, block_k); the rung's own when None.
        wanted: What the call computes.

    Attributes:
        target: The target, as given.
        problem: The problem, as given.
        wanted: What the call computes, as given.
        rung: The rung that runs the calls.
        tile: (block_q, block_k) of its kernels.
        run: A function of ``(problem, operands)`` with the results of :func:`forward` or :func:`backward`.
        repeat: A function that repeats the launches of the first call, or None if there is none.

    Raises:
        ValueError: If no rung can run the call; see ``Target.pick``.
    """

    def __init__(self, target: Target, problem: Problem, tile: Tile | None, wanted: Wanted):
        self.target, self.problem, self.wanted = target, problem, wanted
        self.rung = target.pick(problem, tile)
        own_tile = self.rung.backward_tile if wanted.backward else self.rung.tile
        self.tile = tile or own_tile(self._taken(problem))
        self.run: Callable[[Problem, Operands], Any] = self._first
        self.repeat: Any = None

    def _first(self, problem: Problem, operands: Operands) -> Any:
        """Run the first call in full, and find out how the others run with less work around them."""

        def run(arrays: Sequence[Any], seed: int) -> Any:
            own = problem.with_seed(seed) if problem.dropout_p else problem
            return self.direct(own, Operands(*arrays))

        memory = self.target.memory
        result, repeat = memory.noted(run, operands, problem.seed)
        if repeat is not None:
            self.repeat = repeat
            make: Any = Gradients._make if self.wanted.backward else tuple
            self.run = lambda problem, operands: make(repeat(operands, problem.seed))
        elif memory.may_note():
            self.run = self._short(problem, operands, result) or self.direct
        return result

    def direct(self, problem: Problem, operands: Operands) -> Any:
        """Run a call without the shortcuts of a prepared plan."""
        return (
            _backward(self, problem, operands)
            if self.wanted.backward
            else _forward(self, problem, operands)
        )

    def _short(self, problem: Problem, operands: Operands, result: Any) -> Any:
        """Return the function that runs later calls, or None if they run in full, too."""
        prepare = self.rung.prepare_backward if self.wanted.backward else self.rung.prepare_forward
        asked = problem.sinkless if self.wanted.backward else problem
        taken = self._taken(asked)
        as_it_is = taken.dtype == asked.dtype and not (self.wanted.mask or self.wanted.sink)
        if prepare is None or not as_it_is:
            return None
        return prepare(taken, self.tile, self.target.memory, operands, result)

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


#: The maximum number of plans that a target keeps.
MOST_PLANS = 1024


def plan_of(
    target: Target,
    problem: Problem,
    operands: Operands,
    tile: Any = None,
    wanted: Wanted = _FORWARD,
) -> Plan:
    """Return the plan of a call; the first call of a kind makes it.

    Args:
        target: The target of the operands.
        problem: The checked call.
        operands: The operands of :func:`forward`, or of :func:`backward`.
        tile: (block_q, block_k); the rung's own when None.
        wanted: What the call computes.

    Raises:
        TypeError: As in :func:`forward`.
        ValueError: As in :func:`forward`, or if gradients are wanted and the problem has a ``score_mod``
            without its derivative, or float8 products.
    """
    tile = None if tile is None else check_tile(tile)
    if wanted.backward:
        check_derivative(problem.score_mod)
        check_float8_gradient(problem)
    memory = target.memory
    kind = problem.unseeded, tile, wanted, memory.device(), memory.layouts(operands)
    try:
        plan = target.plans.get(kind)
    except TypeError:  # of a function that cannot be remembered
        return Plan(target, problem, tile, wanted)
    if plan is None:
        plan = Plan(target, problem, tile, wanted)
        keep_plan(target, kind, plan)
    return plan


def keep_plan(target: Target, kind: Any, plan: Plan) -> None:
    """Keep the plan of a kind; if there are :data:`MOST_PLANS` already, drop them all first."""
    if len(target.plans) >= MOST_PLANS:
        target.plans.clear()
    target.plans[kind] = plan


def forward(
    target: Target, problem: Problem, operands: Operands, tile: Tile | None = None
) -> tuple[Any, Any, Any]:
    """Compute attention.

    Args:
        target: The target of the operands.
        problem: The checked call.
        operands: q, k, v, and mask and slopes if the call has them, with any leading dimensions.
        tile: (block_q, block_k); the rung's own when None.

    Returns:
        out (…, heads, seq_q, value_dim), lse (…, heads, seq_q), which is float32 for 16-bit operands, and
        lse_rest, shaped like lse; see ``Operands``.
        The dimensions of out have the same order in memory as those of q.  If q repeats elements by a
        stride of 0, or has fewer dimensions, out is row-major.

    Raises:
        TypeError: If the tile is not a pair of integers.
        ValueError: If the tile is out of range, or no rung can run the call; see ``Target.pick``.
    """
    return plan_of(target, problem, operands, tile).run(problem, operands)


def _forward(plan: Plan, problem: Problem, operands: Operands) -> tuple[Any, Any, Any]:
    """Do what :func:`forward` says, by the rung of a plan."""
    memory = plan.target.memory
    taken, own = plan.taken(problem, operands)
    out = _like(memory, own.q, problem, problem.out_shape, taken.dtype)
    lse, rest = (memory.empty(problem.lse_shape, problem.acc_dtype) for _ in range(2))
    viewed = own.having(out=out, lse=lse, lse_rest=rest).viewed(memory, problem)
    plan.rung.forward_of(taken)(taken, plan.tile, viewed)
    return memory.laid_as(memory.convert(out, problem.dtype), operands.q), lse, rest


def _like(
    memory: Memory, operand: Any, problem: Problem, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Any:
    """Return the array that a kernel writes a result to, laid out as its operand if that can be viewed."""
    if len(problem.lead) > 2 or problem.groups > 1:  # their four dimensions could be a copy
        return memory.empty(shape, dtype)
    return memory.empty_as(operand, shape, dtype)


class Gradients(NamedTuple):
    """The gradients that :func:`backward` returns.

    Attributes:
        dq: The gradient of q, of the broadcast shape ``problem.q_shape``.
        dk: The gradient of k, of the broadcast shape ``problem.k_shape``.
        dv: The gradient of v, of the broadcast shape ``problem.v_shape``.
        dmask: The gradient of the mask, of the mask's own shape, or None.
        dsink: The gradient of the sinks, (heads,), of the dtype of lse, or None.
    """

    dq: Any
    dk: Any
    dv: Any
    dmask: Any = None
    dsink: Any = None


def backward(
    target: Target,
    problem: Problem,
    operands: Operands,
    tile: Tile | None = None,
    with_mask: bool = False,
    with_sink: bool = False,
) -> Gradients:
    """Compute the gradients of attention.

    The dimensions of each gradient have the same order in memory as those of its operand, as in
    :func:`forward`.

    Args:
        target: The target of the operands.
        problem: The checked call.
        operands: The operands of :func:`forward`, its results, of which lse_rest may be missing, dout, and
            dlse or None.
        tile: (block_q, block_k); the rung's own when None.
        with_mask: Also compute the gradient of the floating mask.
        with_sink: Also compute the gradient of the sinks.

    Raises:
        TypeError: As in :func:`forward`.
        ValueError: As in :func:`forward`, or for a ``score_mod`` without its derivative.
    """
    plan = plan_of(target, problem, operands, tile, Wanted(True, with_mask, with_sink))
    return plan.run(problem, operands)


def _backward(plan: Plan, problem: Problem, operands: Operands) -> Gradients:
    """Do what :func:`backward` says, by the rung of a plan."""
    target, memory = plan.target, plan.target.memory
    operands = operands.with_rest(memory, problem)
    taken, own = plan.taken(problem.sinkless, operands)
    dq = _like(memory, own.q, problem, problem.q_shape, taken.dtype)
    # A head of k and v that several query heads share gets a gradient from each.
    dk, dv = (
        _like(memory, operand, problem, (*problem.grouped_lead, *shape[-2:]), taken.dtype)
        for operand, shape in ((own.k, problem.k_shape), (own.v, problem.v_shape))
    )
    viewed = own.having(dq=dq, dk=dk, dv=dv).viewed(memory, problem)
    plan.rung.backward(taken, plan.tile, viewed)
    if problem.groups > 1:
        dk, dv = (
            memory.sum_to(gradient, (*problem.key_lead, 1, *shape[-2:])).reshape(shape)
            for gradient, shape in ((dk, problem.k_shape), (dv, problem.v_shape))
        )
    dmask = dsink = None
    if plan.wanted.mask:
        dmask = memory.empty(tuple(operands.mask.shape), problem.acc_dtype)
        if taken.dtype != problem.acc_dtype:
            taken = replace(problem.sinkless, dtype=problem.acc_dtype)
            viewed = operands.converted(memory, taken.dtype).viewed(memory, problem)
        target.mask_gradient(taken, viewed, own_mask(memory, problem, dmask)[0])
        dmask = memory.laid_as(memory.convert(dmask, problem.dtype), operands.mask)
    if plan.wanted.sink:
        dsink = memory.empty((math.prod(problem.lead),), problem.acc_dtype)
        target.sink_gradient(problem, operands.viewed(memory, problem), dsink)
        dsink = memory.sum_to(dsink.reshape(problem.lead or (1,)), problem.lead[-1:] or (1,))
    dq, dk, dv = (
        memory.laid_as(memory.convert(gradient, problem.dtype), operand)
        for gradient, operand in ((dq, operands.q), (dk, operands.k), (dv, operands.v))
    )
    return Gradients(dq, dk, dv, dmask, dsink)
