"""The JVP and the double backward on tensor cores, in 16 bits: layouts and launches.

The double backward is the JVP of the backward pass.  Each block adds up only its own rows of a result, so
that results are bitwise equal on every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels.cuda.attention.delta import delta_of
from kernels.cuda.attention.flash2.forward import Results
from kernels.cuda.attention.flash2.tangents.forward import ResultTangents
from kernels.cuda.attention.flash2.tangents.scores import Inputs, RowTangents
from kernels.cuda.attention.flash2_mma.launch import bytes_by_rows, call_of_halves, picked
from kernels.cuda.attention.flash2_mma.pipeline import GradientInputs
from kernels.cuda.attention.flash2_mma.tangents.dkdv import dkdv_tangent_kernel, dkdv_tangent_tiles
from kernels.cuda.attention.flash2_mma.tangents.dq import dq_tangent_kernel, dq_tangent_tiles
from kernels.cuda.attention.flash2_mma.tangents.forward import jvp_kernel, jvp_tiles
from kernels.cuda.attention.flash2_mma.tiles import HALF, MmaKeyLayout, MmaLayout
from kernels.cuda.attention.options.visits import grid_of
from kernels.cuda.device.half import as_bits
from kernels.cuda.runtime.kernel import why_too_large
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.targets import dynamic_shared_memory_bytes

_JVP_WIDE = {
    256: (MmaLayout(64, 16, 4, parts=2), MmaLayout(16, 16, 1, parts=2)),
    512: (MmaLayout(32, 16, 2, parts=4), MmaLayout(16, 16, 1, parts=4)),
}
_DQ_WIDE = {
    256: (MmaLayout(64, 16, 4), MmaLayout(16, 16, 1)),
    512: (MmaLayout(16, 16, 1, parts=2),),
}
_ROWS_WITH_OPTIONS = {128: (MmaLayout(128, 16, 8), MmaLayout(64, 16, 4))}
#: Kernel → its layouts without and with options, by the largest head_dim or value_dim; see ``Layouts``.
LAYOUTS: dict[str, tuple[dict[int, tuple[Any, ...]], ...]] = {
    "jvp": (
        {
            64: (MmaLayout(128, 64, 8), MmaLayout(64, 32, 4)),
            128: (MmaLayout(128, 32, 8), MmaLayout(64, 16, 4)),
            **_JVP_WIDE,
        },
        {**_ROWS_WITH_OPTIONS, **_JVP_WIDE},
    ),
    "dq": (
        {128: (MmaLayout(128, 32, 8), MmaLayout(64, 16, 4)), **_DQ_WIDE},
        {**_ROWS_WITH_OPTIONS, **_DQ_WIDE},
    ),
    "dkdv": (
        {
            128: (MmaKeyLayout(16, 128, 8, 16), MmaKeyLayout(16, 64, 4, 16)),
            256: (
                MmaKeyLayout(16, 64, 4, 16, step=32, parts=2),
                MmaKeyLayout(16, 16, 1, 16, step=32, parts=2),
            ),
            512: (
                MmaKeyLayout(16, 32, 2, 16, step=64, parts=4),
                MmaKeyLayout(16, 16, 1, 16, step=64, parts=4),
            ),
        },
    ),
}
_TILES: dict[str, Any] = {"jvp": jvp_tiles, "dq": dq_tangent_tiles, "dkdv": dkdv_tangent_tiles}


def _bytes(name: str, problem: Problem) -> Callable[[Any], int]:
    return lambda layout: bytes_by_rows(_TILES[name], layout, problem, HALF)


def _layout(name: str, problem: Problem) -> Any:
    return picked(LAYOUTS[name], problem, _bytes(name, problem))


def tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the JVP kernel."""
    layout = _layout("jvp", problem)
    return layout.block_q, layout.block_k


def backward_tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the kernel of the tangent of dq."""
    layout = _layout("dq", problem)
    return layout.block_q, layout.block_k


def why_not(problem: Problem, tile: tuple[int, int] | None) -> str | None:
    """Return why a block of a kernel has too little shared memory for a problem, or None."""
    limit, layouts = dynamic_shared_memory_bytes(), {n: _layout(n, problem) for n in LAYOUTS}
    reasons = (
        why_too_large((one.block_q, one.block_k), _bytes(name, problem)(one), limit)
        for name, one in layouts.items()
    )
    return next(filter(None, reasons), None)


def _tangents_of(operands: Operands) -> Inputs:
    return Inputs(*(as_bits(getattr(operands, f"{x}_tangent")) for x in "qkv"))


def jvp(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill out, lse, lse_rest and the tangents of out and lse of a call in 16 bits."""
    layout, tangents = _layout("jvp", problem), _tangents_of(operands)
    out, out_tangent = as_bits(operands.out), as_bits(operands.out_tangent)
    call = call_of_halves(problem, operands, (*tangents, out, out_tangent))
    inputs, extras = Inputs(*call.tensors[:3]), call.extras(layout)
    tiles, lines = grid_of(inputs.q, out.shape[2], layout.block_q, extras)
    launch = jvp_kernel(call.variant(layout))[(tiles * layout.parts, lines), layout.threads]
    results = Results(out, operands.lse, operands.lse_rest)
    moved = ResultTangents(out_tangent, operands.lse_tangent)
    launch(inputs, tangents, results, moved, call.scale, extras)


def double_backward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill dq, dk and dv with their tangents, from the results of :func:`jvp`; allocates D and Ḋ."""
    tangents = _tangents_of(operands)
    dq, dk, dv = results = tuple(as_bits(x) for x in (operands.dq, operands.dk, operands.dv))
    # D = rowsum(dO ∘ O) - dL     Ḋ = rowsum(dO ∘ Ȯ)
    delta = delta_of(problem, operands)
    delta_tangent = delta_of(problem, operands.having(out=operands.out_tangent, dlse=None))
    call = call_of_halves(problem, operands, (*tangents, *results), delta)
    q, k, v, dout = call.tensors
    read = GradientInputs(dout, q, k, v, operands.lse, operands.lse_rest, delta)
    inputs = read, tangents, RowTangents(operands.lse_tangent, delta_tangent)
    for name, kernel_of, written in (
        ("dq", dq_tangent_kernel, (dq,)),
        ("dkdv", dkdv_tangent_kernel, (dk, dv)),
    ):
        layout, by_keys = _layout(name, problem), name == "dkdv"
        extras, array = call.extras(layout, by_keys), k if by_keys else q
        block = layout.block_k if by_keys else layout.block_q
        tiles, lines = grid_of(array, array.shape[2], block, extras)
        launch = kernel_of(call.variant(layout))[(tiles * layout.parts, lines), layout.threads]
        launch(*inputs, *written, call.scale, extras)
