"""Practice on CUDA: the two ideas of ``cuda_ops``, shared memory and tiles, each alone."""

from __future__ import annotations

from kernels.runtime.targets import cuda

from ..tensor_data import Storage, TensorData
from .compiled_kernels import THREADS_PER_BLOCK, jit
from .memory import memories
from .tensor_protocol import TensorLike as Tensor


def _sum_practice(out: Storage, a: Storage, size: int) -> None:
    """Sum each run of THREADS_PER_BLOCK elements.

    Computes: out[block] = sum of a[block * 32 : block * 32 + 32]
    Source: minitorch, task 3.3, for practice
    Grid: any number of blocks that covers size
    Block: THREADS_PER_BLOCK
    One thread does: one element, then its part of a tree
    Shared: THREADS_PER_BLOCK elements
    Registers: none
    Global traffic: each element is read once, and each block writes once
    Needs: any device

    Args:
        out: (blocks or fewer,); a block without elements writes nothing.
        a: (size,).
        size: Number of elements.
    """
    # TASK 3.3: Load an element to shared memory, zero beyond size; barrier; then halve, barrier, halve.
    partial = cuda.shared.array(THREADS_PER_BLOCK, out.dtype)  # (THREADS_PER_BLOCK,)
    thread = cuda.threadIdx.x
    i = cuda.grid(1)
    partial[thread] = a[i] if i < size else 0.0
    cuda.syncthreads()  # every element is stored before a neighbour reads it
    half = THREADS_PER_BLOCK // 2
    while half > 0:
        if thread < half:
            partial[thread] += partial[thread + half]
        cuda.syncthreads()  # this round is complete before the next one reads it
        half //= 2
    if thread == 0 and i < size:
        out[cuda.blockIdx.x] = partial[0]
    # END TASK 3.3


jit_sum_practice = jit(_sum_practice)


def _mm_practice(out: Storage, a: Storage, b: Storage, size: int) -> None:
    """Multiply two square matrices that fit in one block.

    Computes: out = a @ b
    Source: minitorch, task 3.4, for practice
    Grid: 1
    Block: (size, size) or more, THREADS_PER_BLOCK² at most
    One thread does: one element of out
    Shared: a and b
    Registers: one sum
    Global traffic: each element of a and b read once, each of out written once
    Needs: any device

    Args:
        out: (size * size,), row-major.
        a: Left operand, (size * size,), row-major.
        b: Right operand, (size * size,), row-major.
        size: 1 to THREADS_PER_BLOCK.
    """
    # TASK 3.4: Load both matrices to shared memory, barrier, then one row times one column.
    a_shared = cuda.shared.array((THREADS_PER_BLOCK, THREADS_PER_BLOCK), out.dtype)  # (size, size)
    b_shared = cuda.shared.array((THREADS_PER_BLOCK, THREADS_PER_BLOCK), out.dtype)  # (size, size)
    row, col = cuda.threadIdx.y, cuda.threadIdx.x
    if row < size and col < size:
        a_shared[row, col] = a[row * size + col]
        b_shared[row, col] = b[row * size + col]
    cuda.syncthreads()  # both matrices are complete before any thread reads a row or a column
    if row < size and col < size:
        total = out.dtype.type(0)
        for k in range(size):
            total += a_shared[row, k] * b_shared[k, col]
        out[row * size + col] = total
    # END TASK 3.4


jit_mm_practice = jit(_mm_practice)


def sum_practice(a: Tensor) -> TensorData:
    """Sum each run of 32 elements of a vector.

    Args:
        a: (size,), on the CUDA backend.

    Returns:
        (ceil(size / 32),), but at least two elements, as published; the rest is zero.
    """
    (size,) = a.shape
    sums = max(-(-size // THREADS_PER_BLOCK), 2)
    out = TensorData(memories.device.filled(sums, 0.0, a.dtype), (sums,))
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
    out = TensorData(memories.device.empty((size * size,), a.dtype), (size, size))
    storages = (t.contiguous()._tensor._storage for t in (a, b))
    jit_mm_practice[1, (size, size)](out._storage, *storages, size)
    return out
