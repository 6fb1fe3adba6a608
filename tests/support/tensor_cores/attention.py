"""Calls of the tensor-core kernel of attention: operands as words of 16 bits, and what must come out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kernels.common.geometry import ceil_div
from kernels.common.philox import attention_threshold
from kernels.cuda.attention.flash2_mma.forward import forward_kernel
from kernels.cuda.attention.flash2_mma.tiles import MmaLayout
from kernels.cuda.attention.options.score_functions import Extras
from kernels.cuda.ptx.emulated.numbers import from_bits, to_bits
from kernels.cuda.runtime.arrays import to_device, to_host
from kernels.cuda.runtime.kernel import Kernel
from kernels.reference.scores import kept
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


def run(call: Call, rng: np.random.Generator) -> None:
    """Run a call on a GPU and assert that it is right."""
    arrays = operands(call, rng)
    on_device = [to_device(array) for array in arrays]
    own = {
        name: to_device(value) if isinstance(value, np.ndarray) else value
        for name, value in (call.options or {}).items()
    }
    extras = call._replace(options=own).extras
    call.kernel[call.grid, call.layout.threads](*on_device, call.scale, extras)
    check(call, *arrays[:3], *map(to_host, on_device[3:]))


def attention(q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
    """Return out and lse in float64: the textbook, with bounds and the call's options."""
    given, features = call.extras, call.features
    scores = call.scale * q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2)
    if features.softcap:
        scores = given.softcap * np.tanh(scores / given.softcap)
    head, row, col = np.indices(scores.shape[-3:])
    seen = (row + given.lower <= col) & (col <= row + given.upper)
    if features.mask:
        seen = seen & given.mask
    scores = np.where(seen, scores, -np.inf)
    largest = scores.max(axis=-1, keepdims=True)
    shift = np.where(np.isfinite(largest), largest, 0.0)
    weights = np.exp(scores - shift)
    total = weights.sum(axis=-1, keepdims=True)
    if features.dropout:
        rate = given.threshold / 2**16
        weights = weights * kept(given.seed, rate, head, row, col) * given.keep_scale
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + shift)[..., 0]
    out = weights / np.where(weights.sum(axis=-1, keepdims=True) == 0, 1, total)
    return out @ v.astype(np.float64), lse


def check(call: Call, q: Any, k: Any, v: Any, out: Any, lse: Any, rest: Any) -> None:
    """Assert that out and lse are right, to a unit of the dtype."""
    q, k, v = (from_bits(x, call.dtype) for x in (q, k, v))
    expected, expected_lse = attention(q, k, v, call)
    unit = 2.0**-10 if call.dtype == "float16" else 2.0**-7
    error = np.abs(from_bits(out, call.dtype) - expected) / (unit * (1 + np.abs(expected)))
    worst = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
    assert error[worst] <= 1, f"out of {call} is off at {worst} by {error[worst]} units"
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5, err_msg=f"lse of {call}")
    np.testing.assert_allclose(rest, 0.0, atol=1e-5, err_msg=f"lse_rest of {call}")


#: What the emulated GPU runs: as little as shows every branch.
TINY = {
    "whole tiles": Call(MmaLayout(16, 16, 1), (16, 32, 16, 16)),
    "odd lengths, causal": Call(MmaLayout(32, 16, 1), (37, 43, 16, 32), (-FAR, 6), "bfloat16"),
    "a window, two warps": Call(MmaLayout(32, 32, 2), (50, 61, 48, 16), (-9, 4)),
    "no whole pieces": Call(MmaLayout(16, 16, 1), (9, 21, 13, 7), (-FAR, 2), scale=0.5),
    "padded widths": Call(MmaLayout(16, 16, 1), (20, 20, 24, 8), (-FAR, 0), "bfloat16", -0.5),
    "rows that see nothing": Call(MmaLayout(16, 16, 1), (40, 16, 16, 16), (-FAR, -20)),
    "keys that no row sees": Call(MmaLayout(16, 16, 1), (16, 45, 16, 24), (-FAR, 3)),
    "scores far apart": Call(MmaLayout(32, 16, 2), (37, 75, 16, 16), scale=6.0),
    "maxima that may grow": Call(MmaLayout(32, 16, 2, patience=2), (37, 75, 16, 16)),
    "maxima that may grow, far apart": Call(
        MmaLayout(32, 16, 2, patience=8), (37, 75, 16, 16), (-FAR, 30), scale=6.0
    ),
    "warps that skip tiles": Call(
        MmaLayout(48, 16, 3, skips=True), (85, 90, 16, 16), (-20, 5), "bfloat16"
    ),
    "warps that skip tiles, and maxima that may grow": Call(
        MmaLayout(48, 16, 3, patience=2, skips=True), (70, 61, 16, 16), (-20, -9)
    ),
    "a wide head": Call(MmaLayout(16, 16, 1), (17, 21, 160, 24), (-FAR, 4), scale=0.1),
}

_MASK = np.random.default_rng(1).random((1, 2, 21, 35)) < 0.6
_OPTIONS = Call(MmaLayout(32, 16, 2), (21, 35, 16, 16), (-FAR, 20), scale=0.5)
#: Likewise, of what options plug into the kernel: element by element, and by bits of a tile.
OPTIONS = {
    "softcap": _OPTIONS._replace(
        features=Features(softcap=True),
        options={"softcap": np.float32(1.5), "over_cap": np.float32(1 / 1.5)},
    ),
    "a mask": _OPTIONS._replace(
        features=Features(mask="bool"),
        options={"mask": _MASK, "mask_batch": np.zeros(1, np.int64)},
    ),
    "dropout": _OPTIONS._replace(
        features=Features(dropout=True),
        options={
            "seed": 7,
            "threshold": attention_threshold(0.25),
            "keep_scale": np.float32(4 / 3),
        },
    ),
}

_LARGE = {
    64: MmaLayout(128, 64, 4, resident=2),
    128: MmaLayout(128, 64, 4, resident=2, patience=8, skips=True),
}
#: What a GPU runs beside it.
LARGE = {
    "d 64": Call(_LARGE[64], (512, 512, 64, 64)),
    "d 64, causal": Call(_LARGE[64], (777, 1001, 64, 64), (-FAR, 224), "bfloat16"),
    "d 128, causal": Call(_LARGE[128], (1000, 1000, 128, 128), (-FAR, 0), scale=0.0884),
    "d 128, a window": Call(_LARGE[128], (1000, 1000, 128, 128), (-100, 50), "bfloat16", 0.0884),
    "d 80 and 96": Call(MmaLayout(64, 64, 4, resident=2), (301, 500, 80, 96), (-FAR, 199)),
    "d 256": Call(MmaLayout(64, 32, 4), (300, 300, 256, 256), (-FAR, 0), "bfloat16", 0.0625),
    "d 256, eight warps": Call(
        MmaLayout(128, 64, 8, patience=8, skips=True),
        (300, 333, 256, 256),
        (-FAR, 33),
        "bfloat16",
        0.0625,
    ),
    "d 200 and 160": Call(MmaLayout(128, 64, 8), (300, 333, 200, 160), scale=0.0625),
    "d 65 and 33": Call(_LARGE[64], (130, 257, 65, 33), (-FAR, 127)),
}
