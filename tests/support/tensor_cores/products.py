"""Products on tensor cores: calls as the tensors' ``@`` makes them, and what must come out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kernels.cuda.matmul import dispatch
from kernels.cuda.runtime.arrays import empty_device, to_device, to_host
from kernels.runtime.dtypes import BFLOAT16, FLOAT16, FLOAT32

Array = np.ndarray[Any, Any]
#: Kind of a product → dtype of the operands, and what a number is off by, of its size, when it is rounded.
KINDS = {
    "float16": (FLOAT16, 2.0**-11),
    "bfloat16": (BFLOAT16, 2.0**-8),
    "tf32": (FLOAT32, 2.0**-10),  # cut off, where it is read as it lies
    "split": (FLOAT32, 2.0**-23),
}


class Product(NamedTuple):
    """One call.

    Attributes:
        kind: Of the products.
        sizes: rows, cols, depth.
        lead: Batch and heads.
        a_turned: The left operand is a transposed view.
        b_turned: The right one is.
        repeats: One right operand serves all batches and heads.
        dtype: Of operands and result, when not the kind's own: float32 rounded to 16 bits.
    """

    kind: str
    sizes: tuple[int, int, int]
    lead: tuple[int, int] = (1, 1)
    a_turned: bool = False
    b_turned: bool = False
    repeats: bool = False
    dtype: np.dtype[Any] | None = None

    @property
    def stored(self) -> np.dtype[Any]:
        """Dtype of operands and result."""
        return self.dtype or KINDS[self.kind][0]


def _operand(shape: tuple[int, ...], is_turned: bool, dtype: Any, rng: Any) -> tuple[Array, Array]:
    """Return an operand, and the memory that it is a view of."""
    stored = shape[:-2] + (shape[-2:][::-1] if is_turned else shape[-2:])
    memory = rng.standard_normal(stored, dtype=np.float32).astype(dtype)
    return (memory.swapaxes(-1, -2) if is_turned else memory), memory


def operands(call: Product, rng: np.random.Generator) -> list[tuple[Array, Array]]:
    """Return the left and the right operand, and their memories."""
    rows, cols, depth = call.sizes
    b_lead = (1, 1) if call.repeats else call.lead
    return [
        _operand((*call.lead, rows, depth), call.a_turned, call.stored, rng),
        _operand((*b_lead, depth, cols), call.b_turned, call.stored, rng),
    ]


def steps_of(array: Array) -> tuple[int, ...]:
    """Return strides in elements, 0 where there is one for all."""
    size = array.dtype.itemsize
    return tuple(
        0 if length == 1 and axis < 2 else step // size
        for axis, (length, step) in enumerate(zip(array.shape, array.strides, strict=True))
    )


def check(call: Product, a: Array, b: Array, out: Array) -> float:
    """Return the largest error, in units of what rounding allows; more than 1 is wrong."""
    wide = [x.astype(np.float64) for x in (a, b)]
    expected, size = wide[0] @ wide[1], np.abs(wide[0]) @ np.abs(wide[1])
    unit = KINDS[call.kind][1]
    own = KINDS[str(call.stored)][1] if call.stored != FLOAT32 else 2.0**-24
    # Each factor is rounded, if it is not exact already; sums of float32; and the result once.
    exact = call.kind == str(call.stored)
    factors = 0.0 if exact else 2 * unit / np.sqrt(a.shape[-1]) * 4
    allowed = (factors + 2.0**-22) * size + 2 * own * np.abs(expected) + 1e-30
    return float((np.abs(out.astype(np.float64) - expected) / allowed).max())


def run(call: Product, rng: np.random.Generator) -> float:
    """Run a call on the device; return the largest error, as :func:`check` does."""
    (a, a_memory), (b, b_memory) = operands(call, rng)
    rows, cols, depth = call.sizes
    batch, heads = call.lead
    out = empty_device((batch * heads * rows * cols,), call.stored)
    flat = [to_device(x.reshape(-1)) for x in (a_memory, b_memory)]
    steps = (heads * rows * cols, rows * cols, cols, 1)
    dispatch.multiply(
        out, steps, flat[0], steps_of(a), flat[1], steps_of(b),
        (batch, heads, rows, cols, depth), call.kind,
    )  # fmt: skip
    return check(call, a, b, to_host(out).reshape(batch, heads, rows, cols))


#: What a GPU runs: every kind, layout and batch; sizes that no tile and no copy divides.
CALLS = {
    "bfloat16": Product("bfloat16", (264, 520, 456)),
    "bfloat16, both turned": Product("bfloat16", (264, 520, 456), (2, 3), True, True),
    "float16, odd sizes": Product("float16", (37, 61, 131), (3, 2)),
    "float16, odd sizes, both turned": Product("float16", (37, 61, 131), (2, 1), True, True),
    "float16, one right operand": Product("float16", (70, 64, 72), (2, 3), repeats=True),
    "bfloat16, a long sum in parts": Product("bfloat16", (136, 264, 16384), a_turned=True),
    "bfloat16, parts, odd": Product("bfloat16", (129, 65, 9001)),
    "tf32": Product("tf32", (200, 136, 200)),
    "tf32, odd sizes, left turned": Product("tf32", (131, 67, 133), (2, 2), a_turned=True),
    "float32 as bfloat16": Product("bfloat16", (200, 133, 200), dtype=FLOAT32),
    "float32 as float16, turned": Product("float16", (200, 133, 201), (1, 2), True, dtype=FLOAT32),
    "split": Product("split", (200, 136, 200)),
    "split, both turned, odd": Product("split", (131, 67, 133), (2, 2), True, True),
    "split, a long sum": Product("split", (128, 128, 5000)),
    "one of each": Product("bfloat16", (1, 1, 1)),
    "a vector": Product("float16", (1, 300, 70)),
}

#: What the emulated GPU runs: as little as shows every branch.
TINY = {
    "whole pieces": Product("bfloat16", (40, 72, 72)),
    "both turned, heads": Product("bfloat16", (40, 72, 72), (1, 2), True, True),
    "odd sizes, batches": Product("float16", (37, 21, 31), (2, 1)),
    "odd sizes, both turned": Product("float16", (37, 21, 31), (1, 1), True, True),
    "one right operand": Product("float16", (40, 32, 40), (2, 2), repeats=True),
    "a long sum in parts": Product("bfloat16", (40, 40, 500), a_turned=True),
    "tf32": Product("tf32", (40, 40, 40)),
    "tf32, odd sizes, left turned": Product("tf32", (31, 17, 33), (1, 2), a_turned=True),
    "float32 as bfloat16": Product("bfloat16", (40, 33, 20), dtype=FLOAT32),
    "float32 as float16": Product("float16", (40, 33, 21), (1, 2), True, dtype=FLOAT32),
    "split": Product("split", (40, 40, 40)),
    "split, both turned, odd": Product("split", (31, 37, 33), (1, 2), True, True),
    "split, a long sum": Product("split", (20, 20, 300)),
    "one of each": Product("bfloat16", (1, 1, 1)),
    "a vector": Product("float16", (1, 50, 20)),
}
