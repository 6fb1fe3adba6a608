"""The rungs of each target, the fastest first, and which of them runs a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

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
from kernels.cuda.attention.flash3_wgmma.float8 import launch as flash3_float8
from kernels.cuda.attention.flash3_wgmma.forward import launch as flash3_wgmma
from kernels.cuda.attention.options.listed_mods import on_device
from kernels.cuda.device import per_device
from kernels.cuda.device.memory import DeviceMemory
from kernels.cuda.runtime.sizes import SIZES
from kernels.problem.float8 import FLOAT8, why_not_float8
from kernels.problem.listed_mods import Evaluate, listed, on_host
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.problem.rungs import unknown_rung, unusable_rung
from kernels.reference import attention as reference
from kernels.reference import float8
from kernels.runtime.dtypes import COMPUTE_DTYPES, FLOAT32, HALF_DTYPES
from kernels.runtime.memory import HostMemory, Memory

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
        backward_tile: (block_q, block_k) of the backward pass.
        why_not: The reason why this rung cannot run a problem with a tile (None: its own), or None.
        dtypes: What it takes q, k, v, out and dout in, and writes its results in; others are converted
            before and after.  A floating mask, lse and slopes are always of the accumulator's dtype.
        reads_masks: It reads a floating mask in the mask's own dtype, which is then not converted.
        why_no_device: The reason why the target's device cannot run this rung at all, or None.
        prepare_forward: ``(problem, tile, memory, operands, result)`` of a call that has run: returns
            ``(problem, operands)`` that runs other calls of its kind with less work around the kernel, or
            None.
        prepare_backward: The same for the backward pass.
        evaluate: Evaluates a ``mask_mod`` into a block mask, once for each kind of call; None: the kernels
            evaluate it for each element.
        forward_float8: ``forward`` with float8 products, or None if it has none.
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
    prepare_forward: Callable[..., Any] | None = None
    prepare_backward: Callable[..., Any] | None = None
    evaluate: Evaluate | None = None
    forward_float8: Callable[..., None] | None = None

    def taken(self, problem: Problem) -> Problem | None:
        """Return a problem as this rung takes it, or None if there is no dtype for it.

        Operands of 16 bits go to a rung that does not know them as float32.  Operands of float32 go as 16
        bits to a rung that knows those, if the call's precision allows it.
        """
        problem = problem if self.evaluate is None else listed(problem, self.evaluate)
        own, half = problem.dtype, _HALF_BY_NAME.get(problem.precision)
        if half is not None and half in self.dtypes:
            return problem if half == own else replace(problem, dtype=half)
        if own in self.dtypes:
            return problem
        sums = problem.acc_dtype
        return replace(problem, dtype=sums) if sums in self.dtypes else None

    def forward_of(self, problem: Problem) -> Callable[..., None]:
        """Return the function that fills out and lse of a problem."""
        own = self.forward_float8 if problem.precision in FLOAT8 else self.forward
        assert own is not None, "Target.pick returns a rung that can run the problem"
        return own

    def reason(self, problem: Problem, tile: Tile | None) -> str | None:
        """Return why this rung cannot run a problem with a tile (None: its own), or None."""
        if problem.precision in FLOAT8:
            missing = None if self.forward_float8 else "it has no float8 products"
            if (reason := missing or why_not_float8(problem)) is not None:
                return reason
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
            head), the same for every rung; it takes any dtype.
        plans: Of the kinds of calls that there have been; see ``launch.Plan``.
    """

    name: str
    memory: Memory
    rungs: tuple[Rung, ...]
    mask_gradient: Callable[[Problem, Operands, Any], None]
    sink_gradient: Callable[[Problem, Operands, Any], None] = reference.sink_gradient
    plans: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def pick(self, problem: Problem, tile: Tile | None = None) -> Rung:
        """Return the rung asked for, or the fastest that can run the problem.

        Raises:
            ValueError: If no rung has that name, or the named one is not here or cannot run the
                problem, or the target's memory is not available.
        """
        check_rung(problem)
        missing = self.memory.why_not()
        if missing is not None:
            raise ValueError(f"no rung of the {self.name} target runs here: {missing}")
        for rung in self.rungs:
            if problem.rung in ("auto", rung.name) and rung.reason(problem, tile) is None:
                return rung
        reasons = {rung.name: rung.reason(problem, tile) for rung in self.rungs}
        usable = [rung for rung in self.rungs if reasons[rung.name] is None]
        known = {"auto": "; ".join(f"{name}: {reason}" for name, reason in reasons.items())}
        why = {**known, **reasons}.get(problem.rung) or f"the {self.name} target has no such rung"
        raise unusable_rung(problem.rung, why, self.name, [rung.name for rung in usable])


def _rung(
    name: str, forward: Any, backward: Any, tile: Tile, why_not: Any = _anything, **more: Any
) -> Rung:
    """Return a rung with one tile for every problem and both passes."""
    return Rung(
        name, forward, backward, lambda problem: tile, lambda problem: tile, why_not, **more
    )


def _numpy_rung(name: str, forward: Any, backward: Any, tile: Tile) -> Rung:
    """Return a rung of NumPy functions."""
    return _rung(name, forward, backward, tile, forward_float8=float8.rounding(forward))


_HOST = HostMemory()
_NAIVE = _numpy_rung("naive", reference.attention, reference.attention_backward, (1, 1))

#: NumPy on the host: the readable form.
NUMPY = Target(
    "numpy",
    _HOST,
    (
        _numpy_rung(
            "flash2", reference.tiled_attention, reference.tiled_attention_backward, (64, 64)
        ),
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
            prepare_forward=cpu_flash2.prepare,
            prepare_backward=cpu_flash2_backward.prepare,
            evaluate=on_host,
            forward_float8=float8.rounding(cpu_flash2.forward),
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
                evaluate=on_device,
                forward_float8=forward_float8,
            )
            for name, module, gradients, dtypes, forward_float8 in (
                (
                    "flash3_wgmma",
                    flash3_wgmma,
                    flash3_wgmma_backward,
                    HALF_DTYPES,
                    flash3_float8.forward,
                ),
                ("flash2_mma", flash2_mma, flash2_mma, (*HALF_DTYPES, FLOAT32), None),
            )
        ),
        Rung(
            "flash2",
            cuda_flash2.forward,
            flash2_backward.backward,
            cuda_flash2.tile,
            flash2_backward.tile,
            flash2_backward.why_not,
            evaluate=on_device,
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

#: Target by name.
TARGETS = {target.name: target for target in (CUDA, CPU, NUMPY)}
#: Every name that a rung has on some target, the fastest first.
RUNGS = tuple(dict.fromkeys(rung.name for target in TARGETS.values() for rung in target.rungs))


def check_rung(problem: Problem) -> None:
    """Check that some target has the rung that a call asks for.

    Raises:
        ValueError: If none has one of that name.
    """
    if problem.rung not in ("auto", *RUNGS):
        raise unknown_rung(problem.rung, RUNGS)
