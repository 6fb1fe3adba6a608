"""The CUDA backend, which launches the kernels; storages stay on the device between launches.

Shapes and strides are passed to the kernels as tuples, not as arrays, so a launch copies nothing for them.
A kernel is compiled for each length of the tuples, so its indices are in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from kernels.common.geometry import ceil_div
from kernels.cuda.backend import (
    SIZES,
    Adopted,
    DeviceMemory,
    as_bits,
    cuda_core_matmul,
    empty_device,
    fill,
    indexing,
    matmul_dispatch,
    repeats,
)
from kernels.runtime.dtypes import acc_dtype
from kernels.runtime.memory import join_dims, joined
from kernels.runtime.targets import IS_SIMULATOR

from . import operators
from .backends.bound_loops import Loop, Run, as_loop
from .backends.course_kernels import (
    THREADS_PER_BLOCK,
    _mm_practice,
    _sum_practice,
    _tensor_matrix_multiply,
    device_jit,
    jit,
    jit_mm_practice,
    jit_sum_practice,
    tensor_map,
    tensor_matrix_multiply,
    tensor_reduce,
    tensor_zip,
)
from .backends.cuda_loops import fold_kernel, map_kernel, zip_kernel
from .backends.matmul_precision import get_matmul_precision
from .backends.tensor_protocol import TensorLike as Tensor
from .tensor_data import Ints, Storage, TensorData
from .tensor_ops import TensorBackend, TensorOps

# Aliases under the published course's names.
__all__ = [
    "THREADS_PER_BLOCK",
    "CudaBackend",
    "CudaOps",
    "_mm_practice",
    "_sum_practice",
    "_tensor_matrix_multiply",
    "device_jit",
    "jit",
    "jit_mm_practice",
    "jit_sum_practice",
    "mm_practice",
    "sum_practice",
    "tensor_map",
    "tensor_matrix_multiply",
    "tensor_reduce",
    "tensor_zip",
]

#: Maximum number of elements that the element-wise kernels with few arguments can index.
FLAT_LIMIT = 1 << 32
# In the simulator each thread of a block is a Python thread, and a barrier waits for all of them.
#: Maximum number of threads per block of the course's reduction.
REDUCE_THREADS = 32 if IS_SIMULATOR else 256
#: Number of threads per block of the course's map and zip.
MAP_THREADS = SIZES.flat_threads


def _bind_elementwise(kernel: Any, strided: Any, out: TensorData, *inputs: TensorData) -> Run:
    """Return the launch of an element-wise kernel on data laid out like these.

    Args:
        kernel: ``(dims, *dtypes)`` to a kernel for operands whose dimensions join to three at most.
        strided: Returns the course's kernel, for all other layouts.
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
        steps = chain.from_iterable(_padded(steps, 3) for steps in strides[1:])
        launch = run.prepared((blocks, SIZES.flat_threads), *_padded(shape, 3)[1:], *steps)
        if any(t.is_half for t in (out, *inputs)):
            return lambda *storages: launch(*map(as_bits, storages))
        return launch

    # The course's kernels do not support 16-bit storage.
    return as_loop(partial(CudaOps.run, partial(_run_strided, strided))).bind(out, *inputs)


def _run_strided(strided: Any, out: TensorData, *inputs: TensorData) -> None:
    """Launch an element-wise kernel of the course."""
    layouts = [layout for t in inputs for layout in (t.shape, t.strides)]
    shape, *strides = joined(out.shape, out.strides, *layouts)
    args: list[Any] = [out._storage, shape, strides[0], out.size]
    for t, steps in zip(inputs, strides[1:], strict=True):
        args += [t._storage, shape, steps]  # a stride of 0 does the broadcasting
    Adopted(strided())[ceil_div(out.size, MAP_THREADS), MAP_THREADS](*args)


def _padded(steps: Ints, dims: int) -> Ints:
    """Pad the strides of at most ``dims`` dimensions to as many."""
    return (0,) * (dims - len(steps)) + steps


class CudaOps(TensorOps):
    """Operations as CUDA kernels."""

    cuda = True
    takes_half = True
    memory = DeviceMemory()
    target = "cuda"
    indexing = indexing

    @staticmethod
    def allocate(size: int, dtype: np.dtype[Any]) -> Storage:
        """Return an uninitialised flat storage on the device."""
        return empty_device((size,), dtype)

    @staticmethod
    def filled(size: int, value: float, dtype: np.dtype[Any]) -> Storage:
        """Return a flat storage of equal elements on the device."""
        storage = empty_device((size,), dtype)
        fill(storage, value)
        return storage

    @classmethod
    def map_loop(cls, fn: Callable[[float], float]) -> Callable[..., None]:
        """Return the loop of an element-wise function of one tensor."""
        kernel, strided = partial(map_kernel, fn), partial(tensor_map, fn)
        return Loop(lambda out, a: _bind_elementwise(kernel, strided, out, a))

    @classmethod
    def zip_loop(cls, fn: Callable[[float, float], float]) -> Callable[..., None]:
        """Return the loop of an element-wise function of two tensors."""
        kernel, strided = partial(zip_kernel, fn), partial(tensor_zip, fn)
        return Loop(lambda out, a, b: _bind_elementwise(kernel, strided, out, a, b))

    @classmethod
    def fold_loop(cls, fn: Callable[[float, float], float], start: float) -> Loop:
        """Return the loop that writes the fold of one dimension; ``fn`` must be commutative too."""

        def bind(out: TensorData, a: TensorData, dim: int) -> Run:
            if out.size == 0:
                return lambda o, x: None
            # The folded dimension comes last; the others may join.
            length, step = a.shape[dim], a.strides[dim]
            kept = [x[:dim] + x[dim + 1 :] for x in (out.shape, out.strides, a.strides)]
            shape, out_strides, a_strides = join_dims(*kept)
            if len(shape) <= 2:
                outputs, layout = out.size, (step, _padded(shape, 2)[1], *_padded(a_strides, 2))
                return lambda o, x: fold(fn, start, o, outputs, x, length, layout)
            threads = min(max(length, 1), REDUCE_THREADS)

            def reduce(out: TensorData, a: TensorData) -> None:
                Adopted(tensor_reduce(fn))[out.size, threads](
                    out._storage, (*shape, 1), (*out_strides, 0), out.size,
                    a._storage, (*shape, length), (*a_strides, step), len(shape), start,
                )  # fmt: skip

            # The course's kernel, which does not support 16-bit storage.
            return as_loop(partial(cls.run, reduce)).bind(out, a)

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
    def product_options(cls) -> Any:
        """Return the precision that float32 products may use."""
        return get_matmul_precision()

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
        return cuda_core_matmul.bind(out.dtype, out_steps, a_steps, b_steps, shape)

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
        CudaOps.matmul_into(out, a, b)


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


CudaBackend = TensorBackend(CudaOps)


def sum_practice(a: Tensor) -> TensorData:
    """Sum each run of 32 elements of a vector.

    Args:
        a: (size,), on the CUDA backend.

    Returns:
        (ceil(size / 32),), but at least two elements, as published; the rest is zero.
    """
    (size,) = a.shape
    sums = max(ceil_div(size, THREADS_PER_BLOCK), 2)
    out = TensorData(CudaOps.filled(sums, 0.0, a.dtype), (sums,))
    blocks = size // THREADS_PER_BLOCK + 1
    jit_sum_practice[blocks, THREADS_PER_BLOCK](out._storage, a._tensor._storage, size)
    return out


def mm_practice(a: Tensor, b: Tensor) -> TensorData:
    """Multiply two square matrices of at most 32 rows in one block.

    Args:
        a: (size, size), on the CUDA backend.
        b: (size, size), on the CUDA backend.

    Returns:
        (size, size).
    """
    size = a.shape[0]
    if not (a.shape == b.shape == (size, size) and size <= THREADS_PER_BLOCK):
        raise ValueError(
            f"mm_practice needs two square matrices of at most {THREADS_PER_BLOCK} rows, got "
            f"shapes {a.shape} and {b.shape}; use a @ b"
        )
    out = TensorData(CudaOps.allocate(size * size, a.dtype), (size, size))
    storages = (t.contiguous()._tensor._storage for t in (a, b))
    jit_mm_practice[1, (size, size)](out._storage, *storages, size)
    return out
