"""Operations on CUDA in place of the course's: kernels with few arguments, and products on tensor cores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from kernels.common.geometry import ceil_div
from kernels.cuda.backend import SIZES, as_bits, bound, empty_device, repeats
from kernels.cuda.matmul import cuda_cores as cuda_core_matmul
from kernels.cuda.matmul import dispatch as matmul_dispatch
from kernels.runtime.dtypes import acc_dtype
from kernels.runtime.memory import join_dims, joined

from .. import operators
from ..backends.matmul_precision import get_matmul_precision
from ..cuda_ops import CudaOps
from ..tensor_data import Ints, Storage, TensorData
from .bound_loops import BoundOps, Loop, Run, on_storages
from .cuda_loop_kernels import fold_kernel, map_kernel, zip_kernel

#: Maximum number of elements that the element-wise kernels with few arguments can index.
FLAT_LIMIT = 1 << 32


def _bind_elementwise(kernel: Any, other: Any, out: TensorData, *inputs: TensorData) -> Run:
    """Return the launch of an element-wise kernel on data laid out like these.

    Args:
        kernel: ``(dims, *dtypes)`` to a kernel for operands whose dimensions join to three at most.
        other: The loop of the course, for all other layouts; its kernel does not support 16-bit storage.
        out: The output.
        *inputs: Broadcast to the shape of out.
    """
    if out.size == 0:  # a grid without blocks cannot be launched
        return lambda *storages: None
    layouts = [layout for t in inputs for layout in (t.shape, t.strides)]
    shape, *strides = joined(out.shape, out.strides, *layouts)
    if len(shape) <= 3 and out.size < FLAT_LIMIT:
        blocks = ceil_div(out.size, SIZES.flat_threads * SIZES.flat_items)
        run = kernel(len(shape), *[t.dtype for t in (out, *inputs)])
        own = (*_padded(shape, 3)[1:], *chain.from_iterable(_padded(x, 3) for x in strides[1:]))
        return bound(
            lambda *storages: run[blocks, SIZES.flat_threads](*map(as_bits, storages), *own)
        )

    return on_storages(other, out, *inputs)


def _padded(steps: Ints, dims: int) -> Ints:
    """Pad the strides of at most ``dims`` dimensions to as many."""
    return (0,) * (dims - len(steps)) + steps


class FasterCudaOps(BoundOps, CudaOps):
    """Kernels for operands whose dimensions join to few, and products on tensor cores."""

    takes_half = True
    product_options = staticmethod(get_matmul_precision)

    @classmethod
    def map_loop(cls, fn: Callable[[float], float]) -> Callable[..., None]:
        """Return the loop of an element-wise function of one tensor."""
        kernel, other = partial(map_kernel, fn), partial(cls.run, super().map_loop(fn))
        return Loop(lambda out, a: _bind_elementwise(kernel, other, out, a))

    @classmethod
    def zip_loop(cls, fn: Callable[[float, float], float]) -> Callable[..., None]:
        """Return the loop of an element-wise function of two tensors."""
        kernel, other = partial(zip_kernel, fn), partial(cls.run, super().zip_loop(fn))
        return Loop(lambda out, a, b: _bind_elementwise(kernel, other, out, a, b))

    @classmethod
    def fold_loop(cls, fn: Callable[[float, float], float], start: float) -> Loop:
        """Return the loop that writes the fold of one dimension; ``fn`` must be commutative too."""
        of_the_course = super().fold_loop(fn, start)

        def bind(out: TensorData, a: TensorData, dim: int) -> Run:
            if out.size == 0:
                return lambda o, x: None
            # The folded dimension comes last; the others may join.
            length, step = a.shape[dim], a.strides[dim]
            kept = [x[:dim] + x[dim + 1 :] for x in (out.shape, out.strides, a.strides)]
            shape, _, a_strides = join_dims(*kept)
            if len(shape) <= 2:
                outputs, layout = out.size, (step, _padded(shape, 2)[1], *_padded(a_strides, 2))
                return lambda o, x: fold(fn, start, o, outputs, x, length, layout)
            # The course's kernel does not support 16-bit storage.
            return on_storages(partial(cls.run, lambda o, x: of_the_course(o, x, dim)), out, a)

        return Loop(bind)

    @classmethod
    def multiply_into(cls, out: TensorData, a: TensorData, b: TensorData) -> None:
        """Fill ``out`` with the product, on tensor cores if permitted; see ``matmul.dispatch``."""
        operands = matrices(out, a, b) if a.dtype == b.dtype == out.dtype else None
        kind = None
        if operands is not None:
            kind = matmul_dispatch.kind_of(out.dtype, get_matmul_precision(), operands.shape)
        if operands is None or kind is None:
            super().multiply_into(out, a, b)
        else:
            matmul_dispatch.multiply(*operands, kind)

    @classmethod
    def bind_product(cls, out: TensorData, a: TensorData, b: TensorData) -> Run | None:
        """Return a function that launches a product of operands with these layouts."""
        operands = matrices(out, a, b) if out.size else None
        if operands is None:
            return None
        # The launch is kept for later calls, and must not keep the operands of this one.
        _, out_steps, _, a_steps, _, b_steps, shape = operands
        kind = matmul_dispatch.kind_of(out.dtype, get_matmul_precision(), shape)
        if kind is not None:
            return lambda o, x, y: matmul_dispatch.multiply(
                o, out_steps, x, a_steps, y, b_steps, shape, kind
            )
        if out.is_half:
            return None
        return bound(
            lambda o, x, y: cuda_core_matmul.multiply(o, out_steps, x, a_steps, y, b_steps, shape)
        )

    @classmethod
    def matmul_into(cls, out: TensorData, a: TensorData, b: TensorData) -> None:
        """Fill ``out`` with the product, reading operands in place if their batch strides allow it."""
        if out.size == 0:
            return
        a, b = (cls._in_dtype(t, out.dtype) for t in (a, b))
        if (operands := matrices(out, a, b)) is None:
            super().matmul_into(out, a, b)
        else:
            cuda_core_matmul.multiply(*operands)

    @classmethod
    def _in_dtype(cls, t: TensorData, dtype: np.dtype[Any]) -> TensorData:
        """Return ``t`` in the single dtype that the kernel of a product supports."""
        if t.dtype == dtype:
            return t
        copy = TensorData(cls.allocate(t.size, dtype), t.shape)
        cls.map_loop(operators.id)(copy, t)
        return copy

    @staticmethod
    def matmul_loop(out: TensorData, a: TensorData, b: TensorData) -> None:
        """Multiply (batch, n, k) by (batch, k, m) into (batch, n, m)."""
        FasterCudaOps.matmul_into(out, a, b)


class Matrices(NamedTuple):
    """The arguments of product kernels: storages, strides of batch, heads and matrix, and all sizes."""

    out: Storage
    out_steps: Ints
    a: Storage
    a_steps: Ints
    b: Storage
    b_steps: Ints
    shape: Ints


def matrices(out: TensorData, a: TensorData, b: TensorData) -> Matrices | None:
    """Return the arguments of a product kernel, or None if more than two batch dimensions remain."""
    lead, *steps = joined(*(x[:-2] for t in (out, a, b) for x in (t.shape, t.strides)))
    if len(lead) > 2:
        return None
    out_steps, a_steps, b_steps = (
        _padded(own, 2) + t.strides[-2:] for t, own in zip((out, a, b), steps, strict=True)
    )
    shape = (*(1,) * (2 - len(lead)), *lead, *out.shape[-2:], a.shape[-1])
    return Matrices(out._storage, out_steps, a._storage, a_steps, b._storage, b_steps, shape)


@repeats
def fold(
    fn: Callable[[float, float], float],
    start: float,
    out: Storage,
    outputs: int,
    a: Storage,
    length: int,
    layout: Ints,
) -> None:
    """Fold one dimension of ``a``, in several passes where a single one would underuse the device.

    Args:
        fn: Associative and commutative.
        start: What the fold starts from.
        out: (outputs,), written.
        outputs: The number of outputs.
        a: The input.
        length: Of the folded dimension.
        layout: Step of that dimension; size of the fastest of the others; step from one row of that
            size to the next; step within a row.
    """
    step, inner, _, inner_step = layout
    shape = SIZES.fold_long if length >= SIZES.fold_long_from else SIZES.fold_short
    if inner > 1 and inner_step < step:
        shape = SIZES.fold_across
    # The number of parts depends on the shape alone, and so does the rounding of a sum.
    blocks = ceil_div(outputs, shape.outputs)
    parts = min(SIZES.fold_blocks // blocks, length // (shape.lanes * SIZES.fold_items))
    chunk = ceil_div(length, max(parts, 1))
    parts = ceil_div(length, chunk) if length else 1  # rounding may leave none for the last
    last = parts == 1
    target = out if last else empty_device((parts * outputs,), acc_dtype(out.dtype))
    block = (shape.lanes, shape.outputs) if shape.along else (shape.outputs, shape.lanes)
    fold_kernel(fn, target.dtype, a.dtype, shape)[(blocks, parts), block](
        as_bits(target), as_bits(a), outputs, length, *layout, chunk, start, int(last)
    )
    if not last:
        fold(fn, start, out, outputs, target, parts, (outputs, outputs, 0, 1))
