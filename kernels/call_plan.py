"""The execution plan of an attention call, in readable form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.launch import BoundCall, Tile
from kernels.problem.listed_mods import evaluated
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.launch_notes import Launched, Loop, launches_noted
from kernels.sparsity.block_mask import FULL, HIDDEN


@dataclass(frozen=True, repr=False)
class CallPlan:
    """The execution plan of an attention call, which prints as a table.

    Attributes:
        target: The device of the arrays: "cpu" or "cuda".
        rung: The selected rung.
        tile: (block_q, block_k), query rows and keys per tile.
        backward: Whether this is the backward pass.
        launches: In order, the kernels on a GPU with grid, block, shared memory and registers, or the loops
            on the CPU with work items and threads.
        flop: Floating-point operations of the matrix products, for the (row, column) pairs within the
            bounds of ``is_causal`` and ``window_size``.
        moved_bytes: Bytes of all operands and results, each counted once: a lower bound on the traffic.
        passed_over: Faster rungs, and why they cannot run the call.
        mask_mod: How ``mask_mod`` is evaluated, as text; "" if there is none.
    """

    target: str
    rung: str
    tile: Tile
    backward: bool
    launches: tuple[Launched | Loop, ...]
    flop: int
    moved_bytes: int
    passed_over: dict[str, str]
    mask_mod: str = ""

    def __repr__(self) -> str:
        lines = [
            f"{'backward' if self.backward else 'forward'} on {self.target} by {self.rung}",
            f"  tile         {self.tile[0]} query rows x {self.tile[1]} key columns",
            f"  products     {self.flop:,} FLOP",
            f"  least bytes  {self.moved_bytes:,}, if each element moves once",
        ]
        if self.mask_mod:
            lines.append(f"  mask_mod     {self.mask_mod}")
        lines += [f"  launch       {launch}" for launch in self.launches]
        lines += [f"  not {name}: {reason}" for name, reason in self.passed_over.items()]
        return "\n".join(lines)


def plan_by_running(plan: BoundCall, problem: Problem, operands: Operands) -> CallPlan:
    """Return the plan of a call, which is run once to record its launches."""
    with launches_noted() as launches:
        results = plan.in_full(problem, operands)
    arrays = [x for x in (*operands, *results) if x is not None and x is not operands.mask_batch]
    rungs = plan.target.rungs
    return CallPlan(
        target=plan.target.name,
        rung=plan.rung.name,
        tile=plan.tile,
        backward=plan.wanted.backward,
        launches=tuple(launches),
        flop=_flop(problem, plan.wanted.backward),
        moved_bytes=sum(_bytes(array) for array in arrays),
        passed_over={
            rung.name: rung.reason(problem, None) or f"the call asks for {plan.rung.name}"
            for rung in rungs[: rungs.index(plan.rung)]
        },
        mask_mod=_mask_mod(plan, problem),
    )


def _mask_mod(plan: BoundCall, problem: Problem) -> str:
    """Describe how ``mask_mod`` is evaluated, in words."""
    if problem.mask_mod is None:
        return ""
    evaluate = plan.rung.evaluate
    found = None if evaluate is None else evaluated(problem, evaluate)
    if found is None:
        return "evaluated for each element"
    mask, patterns = found.mask, len(found.mask.patterns)
    hidden, full = (float(np.mean(mask.states == state)) for state in (HIDDEN, FULL))
    text = f"evaluated once: {hidden:.0%} of the blocks are hidden, {full:.0%} full"
    if not found.is_exact:
        return f"{text} or partial, and again for each element of those"
    return f"{text}, the others have {patterns} pattern{'s' * (patterns != 1)}"


def _bytes(array: Any) -> int:
    """Return the bytes of an array's elements; elements repeated by a stride of 0 count once."""
    sizes = [
        1 if step == 0 else size for size, step in zip(array.shape, array.strides, strict=True)
    ]
    return int(np.prod(sizes, dtype=np.int64)) * array.dtype.itemsize


def _flop(problem: Problem, backward: bool) -> int:
    """Return the operations of the matrix products, of which there are two forward and five backward."""
    rows = np.arange(problem.seq_q)
    first = np.maximum(rows + problem.lower, 0)
    last = np.minimum(rows + problem.upper, problem.seq_k - 1)
    pairs = int(np.maximum(last - first + 1, 0).sum())
    lead = int(np.prod(problem.lead, dtype=np.int64))
    head, value = (3, 2) if backward else (1, 1)
    return 2 * lead * pairs * (head * problem.head_dim + value * problem.value_dim)
