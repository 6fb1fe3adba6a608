"""From the question to the kernel: pick a rung and a tile, allocate, call.  No arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from kernels.cpu.attention import flash2 as cpu_flash2
from kernels.cpu.attention import flash2_backward as cpu_flash2_backward
from kernels.cpu.attention import mask_gradient as cpu_mask_gradient
from kernels.cuda.attention import flash1
from kernels.cuda.attention import naive as cuda_naive
from kernels.cuda.attention import sink as cuda_sink
from kernels.cuda.attention.flash2 import backward as flash2_backward
from kernels.cuda.attention.flash2 import forward as cuda_flash2
from kernels.cuda.attention.flash2 import mask_gradient as flash2_mask_gradient
from kernels.cuda.attention.flash2_mma import launch as flash2_mma
from kernels.cuda.attention.flash3_wgmma.backward import launch as flash3_wgmma_backward
from kernels.cuda.attention.flash3_wgmma.forward import launch as flash3_wgmma
from kernels.cuda.device import per_device
from kernels.cuda.device.memory import DeviceMemory
from kernels.cuda.runtime.sizes import SIZES
from kernels.problem.argument_types import check_tile
from kernels.problem.operands import Operands, own_mask
from kernels.problem.question import Problem
from kernels.problem.rungs import unknown_rung, unusable_rung
from kernels.reference import attention as reference
from kernels.runtime.dtypes import COMPUTE_DTYPES, FLOAT32, HALF_DTYPES
from kernels.runtime.memory import HostMemory, Memory
from kernels.scores.mods import check_derivative

Tile = tuple[int, int]
_HALF_BY_NAME = {dtype.name: dtype for dtype in HALF_DTYPES}


def _anything(problem: Problem, tile: Tile | None) -> str | None:
    return None


@dataclass(frozen=True)
class Rung:
    """One step of the ladder on one target.

    Attributes:
        name: What a user asks for.
        forward: ``(problem, tile, operands)``, fills out and lse.
        backward: ``(problem, tile, operands)``, fills dq, dk and dv.
        tile: (block_q, block_k) for a problem, unless the caller asks for another.
        backward_tile: Likewise for the backward pass.
        why_not: The reason why this rung cannot run a problem with a tile (None: its own), or None.
        dtypes: What it takes q, k, v, out and dout in, and writes its results in; others are converted
            before and after.  A floating mask, lse and slopes are always of the accumulator's dtype.
        reads_masks: It reads a floating mask in the mask's own dtype, which is then not converted.
        why_no_device: The reason why the target's device cannot run this rung at all, or None.
    """

    name: str
    forward: Callable[..., None]
    backward: Callable[..., None]
    tile: Callable[[Problem], Tile]
    backward_tile: Callable[[Problem], Tile]
    why_not: Callable[[Problem, Tile | None], str | None] = _anything
    dtypes: tuple[np.dtype[Any], ...] = COMPUTE_DTYPES
    reads_masks: bool = False
    why_no_device: Callable[[], str | None] = lambda: None

    def taken(self, problem: Problem) -> Problem | None:
        """Return a problem in the dtype in which this rung takes it, or None if there is none.

        Operands of 16 bits go to a rung that does not know them as float32.  Operands of float32 go as 16
        bits to a rung that knows those, if the call's precision allows it.
        """
        own, half = problem.dtype, _HALF_BY_NAME.get(problem.precision)
        if half is not None and half in self.dtypes:
            return problem if half == own else replace(problem, dtype=half)
        if own in self.dtypes:
            return problem
        sums = problem.acc_dtype
        return replace(problem, dtype=sums) if sums in self.dtypes else None

    def reason(self, problem: Problem, tile: Tile | None) -> str | None:
        """Return why this rung cannot run a problem with a tile (None: its own), or None."""
        taken = self.taken(problem)
        if taken is not None:
            return self.why_not(taken, tile)
        names = " and ".join(map(str, self.dtypes))
        return f"it takes operands of {names}, or a precision that allows them, not {problem.dtype}"


@dataclass(frozen=True)
class Target:
    """Where kernels run, and the rungs that are there, fastest first.

    Attributes:
        name: For error texts.
        memory: Of the operands.
        rungs: The fastest first.
        mask_gradient: ``(problem, operands, dmask)``, fills the gradient of a floating mask; the same
            for every rung, for it needs a pass of its own.  It takes float32 or float64.
        sink_gradient: ``(problem, operands, dsink)``, fills the gradient of the sinks for each (batch,
            head), likewise; it takes any dtype.
    """

    name: str
    memory: Memory
    rungs: tuple[Rung, ...]
    mask_gradient: Callable[[Problem, Operands, Any], None]
    sink_gradient: Callable[[Problem, Operands, Any], None] = reference.sink_gradient

    def pick(self, problem: Problem, tile: Tile | None = None) -> Rung:
        """Return the rung asked for, or the fastest that can run the problem.

        Raises:
            ValueError: If no rung has that name, or the named one is not here or cannot run the
                problem, or the machine has no such memory.
        """
        check_rung(problem)
        missing = self.memory.why_not()
        if missing is not None:
            raise ValueError(f"no rung of the {self.name} target runs here: {missing}")
        try:
            return self._usable(problem.unseeded, tile, self.memory.device())
        except TypeError:  # what cannot be remembered
            return self._search(problem, tile)

    @cached_property
    def _usable(self) -> Callable[[Problem, Tile | None, int], Rung]:
        return lru_cache(maxsize=1024)(lambda problem, tile, device: self._search(problem, tile))

    def _search(self, problem: Problem, tile: Tile | None) -> Rung:
        """Return what :meth:`pick` returns; it is asked once for each kind of call."""
        for rung in self.rungs:
            if problem.rung in ("auto", rung.name) and rung.reason(problem, tile) is None:
                return rung
        reasons = {rung.name: rung.reason(problem, tile) for rung in self.rungs}
        usable = [rung for rung in self.rungs if reasons[rung.name] is None]
        known = {"auto": "; ".join(f"{name}: {reason}" for name, reason in reasons.items())}
        why = {**known, **reasons}.get(problem.rung) or f"the {self.name} target has no such rung"
        raise unusable_rung(problem.rung, why, self.name, [rung.name for rung in usable])


def _rung(name: str, forward: Any, backward: Any, tile: Tile, why_not: Any = _anything) -> Rung:
    """Return a rung with one tile for every problem and both passes."""
    return Rung(name, forward, backward, lambda problem: tile, lambda problem: tile, why_not)


_HOST = HostMemory()
_NAIVE = _rung("naive", reference.attention, reference.attention_backward, (1, 1))

#: NumPy on the host: the readable form.
NUMPY = Target(
    "numpy",
    _HOST,
    (
        _rung("flash2", reference.tiled_attention, reference.tiled_attention_backward, (64, 64)),
        _NAIVE,
    ),
    reference.mask_gradient,
)
#: Compiled loops on the host, parallel over heads and tiles.
CPU = Target(
    "cpu",
    _HOST,
    (
        Rung(
            "flash2",
            cpu_flash2.forward,
            cpu_flash2_backward.backward,
            cpu_flash2.tile,
            cpu_flash2_backward.backward_tile,
            cpu_flash2.why_not,
        ),
        _NAIVE,
    ),
    cpu_mask_gradient.mask_gradient,
)
#: Kernels on a GPU, or in numba's simulator.
CUDA = Target(
    "cuda",
    DeviceMemory(),
    (
        *(
            Rung(
                name,
                module.forward,
                gradients.backward,
                module.tile,
                gradients.backward_tile,
                module.why_not,
                dtypes,
                module is flash3_wgmma,
                partial(per_device.why_no_device, module.CAPABILITY),
            )
            for name, module, gradients, dtypes in (
                ("flash3_wgmma", flash3_wgmma, flash3_wgmma_backward, HALF_DTYPES),
                ("flash2_mma", flash2_mma, flash2_mma, (*HALF_DTYPES, FLOAT32)),
            )
        ),
        Rung(
            "flash2",
            cuda_flash2.forward,
            flash2_backward.backward,
            cuda_flash2.tile,
            flash2_backward.tile,
            flash2_backward.why_not,
        ),
        Rung(
            "flash1",
            flash1.forward,
            flash1.backward,
            flash1.tile,
            flash1.backward_tile,
            flash1.why_not,
        ),
        _rung(
            "naive", cuda_naive.forward, cuda_naive.backward, SIZES.product_tile, cuda_naive.why_not
        ),
    ),
    flash2_mask_gradient.mask_gradient,
    cuda_sink.sink_gradient,
)

#: Every name that a rung has on some target, the fastest first.
RUNGS = tuple(dict.fromkeys(rung.name for target in (CUDA, CPU, NUMPY) for rung in target.rungs))


def check_rung(problem: Problem) -> None:
    """Check that some target has the rung that a call asks for.

    Raises:
        ValueError: If none has one of that name.
    """
    if problem.rung not in ("auto", *RUNGS):
        raise unknown_rung(problem.rung, RUNGS)


def _as_taken(
    rung: Rung, memory: Memory, problem: Problem, operands: Operands
) -> tuple[Problem, Operands]:
    """Return a problem and its operands as a rung takes them."""
    taken = rung.taken(problem)
    assert taken is not None, "Target.pick returns a rung that takes the problem"
    is_ready = operands.mask is None or problem.acc_dtype == problem.dtype or rung.reads_masks
    if taken is problem and is_ready:
        return problem, operands
    return taken, operands.converted(memory, taken.dtype)


def _like(
    memory: Memory, operand: Any, problem: Problem, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Any:
    """Return the array that a kernel writes a result to, laid out as its operand if that can be viewed."""
    if len(problem.lead) > 2 or problem.groups > 1:  # their four dimensions could be a copy
        return memory.empty(shape, dtype)
    return memory.empty_as(operand, shape, dtype)


def forward(
    target: Target, problem: Problem, operands: Operands, tile: Tile | None = None
) -> tuple[Any, Any]:
    """Compute attention.

    Args:
        target: Where the operands are.
        problem: The checked call.
        operands: q, k, v, and mask and slopes where the call has them, with any leading dimensions.
        tile: (block_q, block_k); the rung's own when None.

    Returns:
        out (…, heads, seq_q, value_dim) and lse (…, heads, seq_q), which is float32 for operands of 16
        bits.  The dimensions of out are ordered in memory as those of q; likewise those of the gradients
        as their operands.  Results are row-major where an operand repeats elements by a stride of 0, or
        has fewer dimensions.

    Raises:
        TypeError: If the tile is no pair of whole numbers.
        ValueError: If it is beyond the limits, or no rung can run the call; see ``Target.pick``.
    """
    tile = check_tile(tile)
    rung, memory = target.pick(problem, tile), target.memory
    taken, own = _as_taken(rung, memory, problem, operands)
    out = _like(memory, own.q, problem, problem.out_shape, taken.dtype)
    lse = memory.empty(problem.lse_shape, problem.acc_dtype)
    viewed = own.having(out=out, lse=lse).viewed(memory, problem)
    rung.forward(taken, tile or rung.tile(taken), viewed)
    return memory.laid_as(memory.convert(out, problem.dtype), operands.q), lse


class Gradients(NamedTuple):
    """What :func:`backward` returns.

    Attributes:
        dq: Of the broadcast shape ``problem.q_shape``.
        dk: Of the broadcast shape ``problem.k_shape``.
        dv: Of the broadcast shape ``problem.v_shape``.
        dmask: Of the mask's own shape, or None.
        dsink: (heads,), of the dtype of lse, or None.
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

    Args:
        target: Where the operands are.
        problem: The checked call.
        operands: Those of :func:`forward`, its results, dout, and dlse or None.
        tile: As in :func:`forward`.
        with_mask: Also of the floating mask.
        with_sink: Also of the sinks.

    Raises:
        TypeError: As in :func:`forward`.
        ValueError: As in :func:`forward`, or for a ``score_mod`` without its derivative.
    """
    check_derivative(problem.score_mod)
    tile = check_tile(tile)
    rung, memory = target.pick(problem, tile), target.memory
    taken, own = _as_taken(rung, memory, problem.sinkless, operands)
    dq = _like(memory, own.q, problem, problem.q_shape, taken.dtype)
    # A head of k and v that several query heads share gets a gradient from each.
    dk, dv = (
        _like(memory, operand, problem, (*problem.grouped_lead, *shape[-2:]), taken.dtype)
        for operand, shape in ((own.k, problem.k_shape), (own.v, problem.v_shape))
    )
    viewed = own.having(dq=dq, dk=dk, dv=dv).viewed(memory, problem)
    rung.backward(taken, tile or rung.backward_tile(taken), viewed)
    if problem.groups > 1:
        dk, dv = (
            memory.sum_to(gradient, (*problem.key_lead, 1, *shape[-2:])).reshape(shape)
            for gradient, shape in ((dk, problem.k_shape), (dv, problem.v_shape))
        )
    dmask = dsink = None
    if with_mask:
        dmask = memory.empty(tuple(operands.mask.shape), problem.acc_dtype)
        if taken.dtype != problem.acc_dtype:
            taken = replace(problem.sinkless, dtype=problem.acc_dtype)
            viewed = operands.converted(memory, taken.dtype).viewed(memory, problem)
        target.mask_gradient(taken, viewed, own_mask(memory, problem, dmask)[0])
        dmask = memory.laid_as(memory.convert(dmask, problem.dtype), operands.mask)
    if with_sink:
        dsink = memory.empty((math.prod(problem.lead),), problem.acc_dtype)
        target.sink_gradient(problem, operands.viewed(memory, problem), dsink)
        dsink = memory.sum_to(dsink.reshape(problem.lead or (1,)), problem.lead[-1:] or (1,))
    dq, dk, dv = (
        memory.laid_as(memory.convert(gradient, problem.dtype), operand)
        for gradient, operand in ((dq, operands.q), (dk, operands.k), (dv, operands.v))
    )
    return Gradients(dq, dk, dv, dmask, dsink)
