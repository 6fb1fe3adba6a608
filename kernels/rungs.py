"""The rungs (attention kernels) of each target, fastest first, and the choice of one for a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial  # beyond module 5
from typing import Any, NamedTuple

import numpy as np

from kernels.cpu.attention import flash2 as cpu_flash2  # beyond module 5
from kernels.cpu.attention import flash2_backward as cpu_flash2_backward  # beyond module 5
from kernels.cpu.attention import mask_gradient as cpu_mask_gradient  # beyond module 5
from kernels.cuda.attention import flash1
from kernels.cuda.attention import naive as cuda_naive
from kernels.cuda.attention import sink_gradient as cuda_sink_gradient  # beyond module 5
from kernels.cuda.attention.flash2 import backward as flash2_backward
from kernels.cuda.attention.flash2 import forward as cuda_flash2
from kernels.cuda.attention.flash2 import mask_gradient as flash2_mask_gradient  # beyond module 5
from kernels.cuda.attention.flash2.tangents import launch as flash2_tangents  # beyond module 5
from kernels.cuda.attention.flash2_mma import launch as flash2_mma  # beyond module 5
from kernels.cuda.attention.flash2_mma.tangents import launch as mma_tangents  # beyond module 5
from kernels.cuda.attention.flash2_split import launch as flash2_split  # beyond module 5
from kernels.cuda.attention.flash3_wgmma.backward import (  # beyond module 5
    launch as flash3_wgmma_backward,
)
from kernels.cuda.attention.flash3_wgmma.float8 import launch as flash3_float8  # beyond module 5
from kernels.cuda.attention.flash3_wgmma.forward import launch as flash3_wgmma  # beyond module 5
from kernels.cuda.attention.options.listed_mods import on_device  # beyond module 5
from kernels.cuda.attention.options.table_gradient import learning  # beyond module 5
from kernels.cuda.device import per_device  # beyond module 5
from kernels.cuda.device.memory import DeviceMemory
from kernels.cuda.runtime.sizes import SIZES
from kernels.problem.float8 import FLOAT8, why_not_float8  # beyond module 5
from kernels.problem.listed_mods import Evaluate, listed, on_host  # beyond module 5
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.problem.rungs import unknown_rung, unusable_rung
from kernels.reference import attention as reference
from kernels.reference import float8, tangents  # beyond module 5
from kernels.runtime.dtypes import COMPUTE_DTYPES, FLOAT32, HALF_DTYPES
from kernels.runtime.memory import Memory

Tile = tuple[int, int]
_HALF_BY_NAME = {dtype.name: dtype for dtype in HALF_DTYPES}


def _anything(problem: Problem, tile: Tile | None) -> str | None:
    return None


def _no_tangents(problem: Problem, tile: Tile | None) -> str | None:  # beyond module 5
    return "it has no JVP and no double backward"


class Tangents(NamedTuple):  # beyond module 5
    """The functions of a rung that differentiate its two passes along tangents of q, k and v."""

    #: A function of ``(problem, tile, operands)`` that fills out, lse, lse_rest and the tangents of out and
    #: lse, from q, k, v and their tangents.
    jvp: Callable[..., Any] = _anything
    #: A function of ``(problem, tile, operands)`` that fills dq, dk and dv with the tangents of these
    #: gradients, from what ``jvp`` reads and fills, dout, and dlse or None.  They are also the gradients of
    #: the sum of dq, dk and dv times the tangents of q, k and v.
    double_backward: Callable[..., Any] = _anything
    #: Default tiles of the two, as those of the rung.
    tile: Callable[[Problem], Tile] = lambda problem: (1, 1)
    backward_tile: Callable[[Problem], Tile] = lambda problem: (1, 1)
    #: As that of the rung, for both; the rung must also be able to run the problem.
    why_not: Callable[[Problem, Tile | None], str | None] = _anything


def _tangents(module: Any) -> Tangents:  # beyond module 5
    """Return the derivatives of a rung that a module computes."""
    return Tangents(
        module.jvp, module.double_backward, module.tile, module.backward_tile, module.why_not
    )


_NO_TANGENTS = Tangents(why_not=_no_tangents)  # beyond module 5


@dataclass(frozen=True)
class Rung:
    """One implementation of attention (rung) on one target."""

    name: str  #: The name that selects it, as in ``rung="flash2"``.
    #: A function of ``(problem, tile, operands)`` that fills out and lse.  On the CPU it may return a
    #: function that binds the call to other arrays; see ``memory.Bind``.
    forward: Callable[..., Any]
    #: A function of ``(problem, tile, operands)`` that fills dq, dk and dv; it returns the same.
    backward: Callable[..., Any]
    #: A function that returns the default tile, (block_q, block_k), for a problem.
    tile: Callable[[Problem], Tile]
    backward_tile: Callable[[Problem], Tile]  #: The same for the backward pass.
    #: A function of ``(problem, tile)`` that returns why the rung cannot run the problem, or None if it
    #: can.  If the tile is None, the rung's own tile is meant.
    why_not: Callable[[Problem, Tile | None], str | None] = _anything
    #: The dtypes of q, k, v, out, dout and results that the rung supports.  Others are converted before
    #: and after the call.  A floating mask, lse and slopes have the accumulator's dtype.
    dtypes: tuple[np.dtype[Any], ...] = COMPUTE_DTYPES
    #: Whether the rung reads a floating mask in the mask's own dtype, without conversion.
    reads_masks: bool = False
    #: A function that returns why the target's device cannot run the rung, or None.
    why_no_device: Callable[[], str | None] = lambda: None
    #: A function that converts a ``mask_mod`` to a block mask, once for each kind of call.  If it is
    #: None, the kernels evaluate the ``mask_mod`` for each element.
    evaluate: Evaluate | None = None  # beyond module 5
    #: Like ``forward``, with float8 products; None if the rung has none.
    forward_float8: Callable[..., None] | None = None  # beyond module 5
    has_table: bool = False  #: Whether a ``score_mod`` may read a table.  # beyond module 5
    #: Another name that selects it for calls that the rung of that name cannot run.
    alias: str = ""
    #: The derivatives of its passes along a direction.
    tangents: Tangents = _NO_TANGENTS  # beyond module 5

    def taken(self, problem: Problem) -> Problem | None:
        """Return the problem in a dtype that this rung supports, or None if there is none.

        16-bit operands are converted to float32 for a rung that does not support them.  float32 operands
        are converted to 16 bits if the call's precision allows it and the rung supports that dtype.
        """
        if self.evaluate is not None:  # beyond module 5
            problem = listed(problem, self.evaluate)
        own, half = problem.dtype, _HALF_BY_NAME.get(problem.precision)
        if half is not None and half in self.dtypes:
            return problem if half == own else replace(problem, dtype=half)
        if own in self.dtypes:
            return problem
        sums = problem.acc_dtype
        return replace(problem, dtype=sums) if sums in self.dtypes else None

    def forward_of(self, problem: Problem) -> Any:
        """Return the function that fills out and lse of a problem."""
        if problem.precision in FLOAT8:  # beyond module 5
            return self.forward_float8
        return self.forward

    def reason(self, problem: Problem, tile: Tile | None, tangent: bool = False) -> str | None:
        """Return why this rung cannot run a problem, or None if it can; a tile of None means its own.

        With ``tangent``, the passes are those of ``tangents``.
        """
        if problem.precision in FLOAT8:  # beyond module 5
            missing = None if self.forward_float8 else "it has no float8 products"
            if (reason := missing or why_not_float8(problem)) is not None:
                return reason
        if problem.score_table and not self.has_table:  # beyond module 5
            return "it has no score_table"
        taken = self.taken(problem)
        if taken is not None:
            reason = self.why_not(taken, tile)
            if reason is None and tangent:  # beyond module 5
                reason = self.tangents.why_not(taken, tile)
            return reason
        names = " and ".join(map(str, self.dtypes))
        return f"it takes operands of {names}, or a precision that allows them, not {problem.dtype}"


@dataclass(frozen=True)
class Target:
    """A place where kernels run, such as the CPU or a GPU, with its rungs."""

    name: str  #: The name used in error messages.
    memory: Memory  #: The memory of the operands.
    rungs: tuple[Rung, ...]  #: The rungs, fastest first.
    #: A function of ``(problem, operands, gradient)`` that fills the gradient of an array that is added
    #: to scores, such as a floating mask, in a separate pass, the same for every rung. It is (batches,
    #: heads or 1, seq_q or 1, seq_k or 1), with the batches of the call or of the mask.  It supports
    #: float32 and float64.
    mask_gradient: Callable[[Problem, Operands, Any], None] = reference.mask_gradient
    #: A function of ``(problem, operands, dsink)`` that fills the gradient of the sinks for each
    #: (batch, head), the same for every rung.  It supports any dtype.
    sink_gradient: Callable[[Problem, Operands, Any], None] = reference.sink_gradient
    #: The same for the table that a ``score_mod`` reads; its gradient has the shape of the table.
    table_gradient: Any = reference.table_gradient  # beyond module 5
    #: A function of a rung's ``backward`` and ``backward_tile`` that returns a backward pass that also
    #: fills dtable, in place of ``table_gradient``; None if there is none.
    learning: Any = None  # beyond module 5

    def pick(self, problem: Problem, tile: Tile | None = None, tangent: bool = False) -> Rung:
        """Return the rung that the problem names, or the fastest that can run it; see ``Rung.reason``.

        Raises:
            ValueError: If the target has no rung of that name, the rung cannot run the problem, or the
                target's memory is not available.
        """
        check_rung(problem)
        missing = self.memory.why_not()
        if missing is not None:
            raise ValueError(f"no rung of the {self.name} target runs here: {missing}")
        for rung in self.rungs:
            asked = problem.rung in ("auto", rung.name, rung.alias)
            if asked and rung.reason(problem, tile, tangent) is None:
                return rung
        reasons = {rung.name: rung.reason(problem, tile, tangent) for rung in self.rungs}
        usable = [rung for rung in self.rungs if reasons[rung.name] is None]
        known = {"auto": "; ".join(f"{name}: {reason}" for name, reason in reasons.items())}
        why = {**known, **reasons}.get(problem.rung) or f"the {self.name} target has no such rung"
        raise unusable_rung(problem.rung, why, self.name, [rung.name for rung in usable])


def _rung(name: str, forward: Any, backward: Any, tile: Tile, **more: Any) -> Rung:
    """Return a rung with one tile for every problem and both passes."""
    return Rung(name, forward, backward, lambda problem: tile, lambda problem: tile, **more)


def _numpy_rung(name: str, forward: Any, backward: Any, side: int, **more: Any) -> Rung:
    """Return a rung of NumPy functions with square tiles."""
    more["forward_float8"] = float8.rounding(forward)  # beyond module 5
    more["has_table"] = True  # beyond module 5
    return _rung(name, forward, backward, (side, side), **more)


_HOST = Memory()
_NAIVE = _numpy_rung(
    "naive",
    reference.attention,
    reference.attention_backward,
    1,
    tangents=Tangents(tangents.jvp, tangents.double_backward),  # beyond module 5
)
_TILED = _numpy_rung("flash2", reference.tiled_attention, reference.tiled_attention_backward, 64)

#: The readable implementation in NumPy, on the host.
NUMPY = Target("numpy", _HOST, (_TILED, _NAIVE))
#: Compiled loops on the host, parallel over heads and tiles.
CPU = Target(
    "cpu",
    _HOST,
    (
        Rung(  # beyond module 5
            "flash2",
            cpu_flash2.forward,
            cpu_flash2_backward.backward,
            cpu_flash2.tile,
            cpu_flash2_backward.backward_tile,
            cpu_flash2.why_not,
            evaluate=on_host,
            forward_float8=float8.rounding(cpu_flash2.forward),
            tangents=Tangents(
                cpu_flash2.jvp,
                cpu_flash2_backward.double_backward,
                cpu_flash2.jvp_tile,
                cpu_flash2_backward.backward_tile,
            ),
            has_table=True,
        ),
        _NAIVE,
    ),
    mask_gradient=cpu_mask_gradient.mask_gradient,  # beyond module 5
    table_gradient=cpu_mask_gradient.table_gradient,  # beyond module 5
)
#: Kernels on a GPU, or on the emulated one.
CUDA = Target(
    "cuda",
    DeviceMemory(),
    (
        *(  # beyond module 5
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
                alias="flash2_mma" if module is flash2_split else "",
                has_table=module is not flash3_wgmma,
                tangents=_tangents(mma_tangents) if module is flash2_mma else _NO_TANGENTS,
            )
            for name, module, gradients, dtypes, forward_float8 in (
                (
                    "flash3_wgmma",
                    flash3_wgmma,
                    flash3_wgmma_backward,
                    HALF_DTYPES,
                    flash3_float8.forward,
                ),
                ("flash2_mma", flash2_mma, flash2_mma, HALF_DTYPES, None),
                ("flash2_split", flash2_split, flash2_split, (FLOAT32,), None),
            )
        ),
        Rung(
            "flash2",
            cuda_flash2.forward,
            flash2_backward.backward,
            cuda_flash2.tile,
            flash2_backward.tile,
            flash2_backward.why_not,
            evaluate=on_device,  # beyond module 5
            has_table=True,  # beyond module 5
            tangents=_tangents(flash2_tangents),  # beyond module 5
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
            "naive",
            cuda_naive.forward,
            cuda_naive.backward,
            SIZES.product_tile,
            why_not=cuda_naive.why_not,
        ),
    ),
    flash2_mask_gradient.mask_gradient,  # beyond module 5
    cuda_sink_gradient.sink_gradient,  # beyond module 5
    learning=learning,  # beyond module 5
)

#: The targets by name.
TARGETS = {target.name: target for target in (CUDA, CPU, NUMPY)}
#: The names of all rungs of all targets, fastest first.
RUNGS = tuple(dict.fromkeys(rung.name for target in TARGETS.values() for rung in target.rungs))


def check_rung(problem: Problem) -> None:
    """Check that some target has the rung that a problem names; otherwise raise a ValueError."""
    if problem.rung not in ("auto", *RUNGS):
        raise unknown_rung(problem.rung, RUNGS)
