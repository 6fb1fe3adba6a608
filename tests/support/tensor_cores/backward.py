"""Launches of the backward kernels of attention on tensor cores, with layouts of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kernels.common.geometry import ceil_div
from kernels.cuda.attention.flash2_mma.dkdv import dkdv_kernel
from kernels.cuda.attention.flash2_mma.dkdv_wide_heads import roles_kernel
from kernels.cuda.attention.flash2_mma.dq import dq_kernel
from kernels.cuda.attention.flash2_mma.dq_atomics import DqSums, dq_end_kernel, dq_sums, slots_of
from kernels.cuda.attention.flash2_mma.tiles import MmaKeyLayout, MmaRoleLayout
from kernels.cuda.device.memory import fill
from kernels.cuda.runtime.kernel import Kernel

from .attention import Call


class Gradients(NamedTuple):
    """One backward call.

    Attributes:
        call: The forward call; its layout is that of the kernel by query rows.
        layout: Of the kernel by keys.
        parts: Blocks that share the columns of one key tile.
        is_wide: Four sums of dQ are added at a time.
    """

    call: Call
    layout: MmaKeyLayout
    parts: int = 1
    is_wide: bool = True

    @property
    def widths(self) -> tuple[int, int]:
        """What kernels are compiled for."""
        roles = isinstance(self.layout, MmaRoleLayout)
        step = 256 * self.layout.warps // self.layout.block_q if roles else 16 * self.parts
        sizes = [max(self.call.sizes[2:])] * 2 if roles else self.call.sizes[2:]
        head, value = (step * ceil_div(dim, step) for dim in sizes)
        return head, value

    @property
    def kind(self) -> tuple[Any, ...]:
        """Widths, dtype, and whether rows are whole pieces."""
        return (*self.widths, self.call.dtype, all(dim % 8 == 0 for dim in self.call.sizes[2:]))

    @property
    def sums(self) -> DqSums:
        """How those of dQ lie."""
        return dq_sums(self.layout, self.widths[0] // self.parts, self.is_wide)


def backward_launches(
    case: Gradients, given: list[Any], atomics: bool, place: Any, launch: Any = None
) -> dict[str, Callable[[], Any]]:
    """Return the launches of a call by name, in their order; each returns what it has written.

    Args:
        case: The call.
        given: dout, q, k, v, lse, its rest and delta, where kernels run.
        atomics: One kernel, or one by rows and one by keys.
        place: Brings an array to where kernels run.
        launch: ``(kernel, grid, *arguments)``; that of a GPU when None.
    """
    call, layout, run = case.call, case.layout, launch or _on_device
    seq_q, seq_k, head_dim, value_dim = call.sizes
    own = {n: place(x) if isinstance(x, np.ndarray) else x for n, x in (call.options or {}).items()}
    extras = call._replace(options=own).extras
    heads = call.heads
    shapes = (seq_q, head_dim), (seq_k, head_dim), (seq_k, value_dim)
    dq, dk, dv = (place(np.full((1, heads, *shape), 0xFFFF, np.uint16)) for shape in shapes)
    scale, grid = call.scale, ceil_div(seq_k, layout.block_k) * case.parts
    if not atomics:
        by_rows = dq_kernel(call.layout, *case.kind, call.features)
        by_keys = _by_keys(case, None)

        def fill_dq() -> Any:
            run(by_rows, call.grid, *given, dq, scale, extras)
            return {"dq": dq}

        def fill_dk_dv() -> Any:
            run(by_keys, (grid, heads), *given, given[-1], dk, dv, scale, extras)
            return {"dk": dk, "dv": dv}

        return {"by rows": fill_dq, "by keys": fill_dk_dv}
    width, _, *kind = case.kind
    all_of = _by_keys(case, case.sums)
    end = dq_end_kernel(layout, width, *kind, case.sums, call.features, case.parts)
    slots = slots_of(seq_q, layout.block_q, 1)
    sums = place(np.zeros((heads, slots, layout.block_q * width), np.float32))

    def add() -> Any:
        sums.fill(0.0) if launch else fill(sums, 0.0)
        run(all_of, (grid, heads), *given, sums, dk, dv, scale, extras)
        q_tiles = ceil_div(seq_q, layout.block_q)
        run(end, (q_tiles, heads), sums, given[1], given[2], dq, scale, extras)
        return {"dq": dq, "dk": dk, "dv": dv}

    return {"by atomics": add}


def _by_keys(case: Gradients, sums: DqSums | None) -> Kernel:
    if isinstance(case.layout, MmaRoleLayout):
        return roles_kernel(case.layout, *case.kind[1:], sums, case.call.features)
    return dkdv_kernel(case.layout, *case.kind, sums, case.call.features, case.parts)


def _on_device(kernel: Any, grid: tuple[int, int], *args: Any) -> None:
    kernel[grid, kernel.threads](*args)
