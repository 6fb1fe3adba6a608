"""Launches of the forward kernel of ``flash2_mma`` with any layout; operands are words of 16 bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kernels.common.geometry import ceil_div
from kernels.cuda.attention.flash2_mma.forward import forward_kernel
from kernels.cuda.attention.flash2_mma.tiles import MmaLayout
from kernels.cuda.attention.options.score_functions import Extras
from kernels.cuda.ptx.emulated.numbers import to_bits
from kernels.cuda.runtime.kernel import Kernel
from kernels.scores.program import PLAIN, Features

#: Beyond every row and column.
FAR = 1 << 20


class Call(NamedTuple):
    """One call.

    Attributes:
        layout: Of the kernel.
        sizes: seq_q, seq_k, head_dim, value_dim.
        bounds: Row sees from row + lower to row + upper.
        dtype: "float16" or "bfloat16".
        scale: Of the scores.
        heads: Of one batch.
        features: Options of the kernel.
        options: What they need in ``Extras``, by name.
    """

    layout: MmaLayout
    sizes: tuple[int, int, int, int]
    bounds: tuple[int, int] = (-FAR, FAR)
    dtype: str = "float16"
    scale: float = 0.125
    heads: int = 2
    features: Features = PLAIN
    options: Any = None

    @property
    def kernel(self) -> Kernel:
        """What is launched."""
        _, _, *dims = self.sizes
        widths = (16 * ceil_div(dim, 16) for dim in dims)
        vectors = all(dim % 8 == 0 for dim in dims)
        return forward_kernel(
            self.layout, *widths, self.dtype, vectors, self.features, self.scale > 0
        )  # fmt: skip

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks."""
        return ceil_div(self.sizes[0], self.layout.block_q), self.heads

    @property
    def extras(self) -> Extras:
        """What a kernel takes beside the arrays: bounds, and what options need."""
        return Extras(*self.bounds, self.heads, 0, 0.0, 0.0, 0, 0, 1.0)._replace(
            **(self.options or {})
        )


def layouts_for(table: Any, width: int) -> Any:
    """Return what a table of the rung says of a head width."""
    return next(choices for limit, choices in table.items() if width <= limit)


def operands(call: Call, rng: np.random.Generator) -> list[Any]:
    """Return q, k, v, out, lse and its rest, the last three poisoned; heads lie beside dim."""
    seq_q, seq_k, head_dim, value_dim = call.sizes
    arrays = [
        to_bits(rng.standard_normal((1, seq, call.heads, dim)), call.dtype).transpose(0, 2, 1, 3)
        for seq, dim in ((seq_q, head_dim), (seq_k, head_dim), (seq_k, value_dim))
    ]
    out = np.full((1, call.heads, seq_q, value_dim), 0xFFFF, np.uint16)
    rows = (np.full((1, call.heads, seq_q), np.nan, np.float32) for _ in range(2))
    return [*arrays, out, *rows]
