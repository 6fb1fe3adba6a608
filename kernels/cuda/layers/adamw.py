"""AdamW over all parameters in one launch, and the norm of all gradients in two; the host reads nothing.

16-bit parameters have float32 master weights, which are updated; the parameters are copies of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels.common.pointwise import adam_constants, make_adam
from kernels.cuda.device.half import form
from kernels.cuda.device.per_device import no_clip
from kernels.cuda.device.row_folds import RowBlock, make_row_folds
from kernels.cuda.layers.tensor_lists import (
    CHUNK,
    MATRIX,
    THREADS,
    make_access,
    tensor_list,
)
from kernels.cuda.runtime.arrays import empty_device
from kernels.cuda.runtime.kernel import Kernel, device_function, scalar_type
from kernels.cuda.runtime.recorder import Renewed
from kernels.cuda.runtime.sizes import SIZES
from kernels.runtime.dtypes import FLOAT64
from kernels.runtime.targets import cuda
from kernels.runtime.types import float64, int64, types, void

_adam = make_adam(device_function)
#: Threads of the one block that adds up the sums of all parts.
LAST_THREADS = SIZES.row_threads_most
#: Number of elements that a thread has in registers at a time.
TURNS = 4


@cache
def squares_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel that begins the norm of a list of gradients of one dtype."""
    block = RowBlock(THREADS, 1)
    slots, widen, load = block.slots, form(dtype).widen, make_access(dtype).load
    _, block_sum = make_row_folds(block)

    def squares(table, work, sums, first):
        """Add up the squares of each part.

        Computes: sums[first + part] = Σ g²
        Grid: parts of the list
        Block: THREADS
        One thread does: every THREADS-th element of the part
        Shared: one sum a warp
        Registers: one sum, in float64: squares of a float32 may be beyond its range
        Global traffic: each gradient read once; a sum written a part
        Needs: table (tensors, 2): gradients and sizes
        """
        partial = cuda.shared.array(slots, float64)  # (slots,)
        part = cuda.blockIdx.x
        tensor, start = work[part, 0], work[part, 1]
        address, stop = table[tensor, 0], min(start + CHUNK, table[tensor, 1])
        total = 0.0
        for i in range(start + cuda.threadIdx.x, stop, THREADS):
            g = float64(widen(load(address, i)))
            total += g * g
        total = block_sum(partial, total)
        if cuda.threadIdx.x == 0:
            sums[first + part] = total

    return Kernel(squares, void(MATRIX, MATRIX, float64[::1], int64), THREADS)


@cache
def norm_end_kernel() -> Kernel:
    """Return the kernel that finishes the norm and computes the scale of gradients."""
    block = RowBlock(LAST_THREADS, 1)
    slots, (_, block_sum) = block.slots, make_row_folds(block)

    def norm_end(sums, result, max_norm):
        """Add up the sums of all parts in a fixed order.

        Computes: result[0] = sqrt(Σ sums); result[1] = max_norm / max(norm, max_norm)
        Source: Pascanu, Mikolov and Bengio (2013), Algorithm 1
        Grid: 1
        Block: LAST_THREADS
        One thread does: every LAST_THREADS-th sum
        Shared: one sum a warp
        Registers: one sum
        Global traffic: a number read for each part
        """
        partial = cuda.shared.array(slots, float64)  # (slots,)
        total = 0.0
        for i in range(cuda.threadIdx.x, sums.shape[0], LAST_THREADS):
            total += sums[i]
        norm = math.sqrt(block_sum(partial, total))
        if cuda.threadIdx.x == 0:
            result[0] = norm
            # Exactly 1 where nothing is to be done; NaN where the norm is.
            result[1] = 1.0 if norm <= max_norm else max_norm / norm

    return Kernel(norm_end, void(float64[::1], float64[::1], float64), LAST_THREADS)


class AdamForm(NamedTuple):
    """The dtypes of the values, the gradients and the 16-bit copies of a list of parameters."""

    value: np.dtype[Any]  # Dtype of the updated values and of their moments
    grad: np.dtype[Any]  # Dtype of the gradients
    #: Dtype of parameters that are copies of a master weight; None if there is no master.
    copy: np.dtype[Any] | None = None


@cache
def adam_kernel(own_form: AdamForm) -> Kernel:
    """Return the kernel of a step for a list of parameters."""
    value_dtype, grad_dtype, copy_dtype = own_form
    real, one = scalar_type(value_dtype), value_dtype.type(1)
    values, has_copy = make_access(value_dtype), copy_dtype is not None
    load, store, load_grad = values.load, values.store, make_access(grad_dtype).load
    widen, narrow = form(grad_dtype).widen, form(copy_dtype or value_dtype).narrow
    store_copy = make_access(copy_dtype or value_dtype).store
    size_column = 6 if has_copy else 5

    def adam_many(table, work, clip, constants):
        """Take a step of AdamW.

        Computes: m, v and value in place, as ``pointwise.make_adam``, of clip[1] times the gradient; and
            the copy of value
        Source: Kingma and Ba (2015), Algorithm 1; Loshchilov and Hutter (2019), Algorithm 2
        Grid: parts of the list
        Block: THREADS
        One thread does: every THREADS-th element of the part
        Registers: four elements and what belongs to them
        Global traffic: four reads and three writes an element, and one of the copy
        Needs: table (tensors, 6 or 7): values, gradients, m, v, whether it decays, the copies, sizes
        """
        part = cuda.blockIdx.x
        tensor, start = work[part, 0], work[part, 1]
        stop = min(start + CHUNK, table[tensor, size_column])
        at, at_grad = table[tensor, 0], table[tensor, 1]
        at_m, at_v = table[tensor, 2], table[tensor, 3]
        size, beta1, beta2, eps, root, kept = constants
        keep = kept if table[tensor, 4] else one
        own, scale = (size, beta1, beta2, eps, root, keep), real(clip[1])
        value, grad = cuda.local.array(TURNS, real), cuda.local.array(TURNS, real)  # (TURNS,)
        m, v = cuda.local.array(TURNS, real), cuda.local.array(TURNS, real)  # (TURNS,)
        for first in range(start + cuda.threadIdx.x, stop, TURNS * THREADS):
            # Read for some turns, then write: the compiler cannot know that a write is not read next.
            for turn in range(TURNS):
                i = first + turn * THREADS
                if i < stop:
                    value[turn], grad[turn] = load(at, i), real(widen(load_grad(at_grad, i)))
                    m[turn], v[turn] = load(at_m, i), load(at_v, i)
            for turn in range(TURNS):
                i = first + turn * THREADS
                if i < stop:
                    new_m, new_v, moved = _adam(
                        value[turn], scale * grad[turn], m[turn], v[turn], one, own
                    )
                    store(at, i, real(moved))
                    store(at_m, i, real(new_m))
                    store(at_v, i, real(new_v))
                    if has_copy:
                        store_copy(table[tensor, 5], i, narrow(real(moved)))

    numbers = types.UniTuple(real, 6)
    return Kernel(adam_many, void(MATRIX, MATRIX, float64[::1], numbers), THREADS)


class Moved(NamedTuple):
    """One parameter of an optimiser step, as contiguous device arrays of equal size."""

    value: Any  # The values to update in place, float32 or float64
    grad: Any  # The gradient, of any floating dtype
    m: Any  # Running mean of the gradient, of value's dtype; updated in place
    v: Any  # Running mean of the square of the gradient
    decays: bool  # Whether weight decay applies
    #: The 16-bit parameter whose master weights ``value`` holds, or None; it is written.
    copy: Any = None

    @property
    def form(self) -> AdamForm:
        """The form of its kernel."""
        copy = None if self.copy is None else self.copy.dtype
        return AdamForm(self.value.dtype, self.grad.dtype, copy)


def _sizes(arrays: Sequence[Any]) -> list[int]:
    return [math.prod(array.shape) for array in arrays]


def clip_of(grads: Sequence[Any], max_norm: float) -> Any:
    """Return the norm of all gradients and their scale, (2,) float64 on the device.

    The squares are added in an order that depends only on the sizes, so that the result is bitwise
    reproducible.  With a maximum of infinity, the norm is only measured.
    """
    lists = []
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        own = [grad for grad in grads if grad.dtype == dtype]
        lists.append((dtype, tensor_list([own], _sizes(own))))
    sums = empty_device((sum(one.parts for _, one in lists),), FLOAT64)
    first = 0
    for dtype, one in lists:
        squares_kernel(dtype)[one.parts, THREADS](one.table, one.work, sums, first)
        first += one.parts
    result = empty_device((2,), FLOAT64)
    norm_end_kernel()[1, LAST_THREADS](sums, result, float(max_norm))
    return result


def adam_many(
    parameters: Sequence[Moved],
    clip: Any = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    weight_decay: float = 0.0,
    again: Callable[[], Mapping[str, Any]] | None = None,
) -> None:
    """Take a step of AdamW for all parameters, with one launch for each combination of dtypes.

    Each parameter has an element or more.  ``clip`` is a result of :func:`clip_of`; None scales by 1.  For
    the six numbers see ``pointwise.adam_constants``; ``again`` returns those of a later step by name, for a
    graph that contains this step.
    """
    clip = no_clip() if clip is None else clip
    given = {
        "lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "step": step, "weight_decay": weight_decay,
    }  # fmt: skip
    asked = again or (lambda: given)
    for own_form in dict.fromkeys(p.form for p in parameters):
        own = [p for p in parameters if p.form == own_form]
        values, grads, m, v, decays, copies = zip(*own, strict=True)
        columns: list[Sequence[Any]] = [values, grads, m, v, [int(flag) for flag in decays]]
        if own_form.copy is not None:
            columns.append(copies)
        one = tensor_list(columns, _sizes(values))
        real = own_form.value.type
        constants = Renewed(lambda real=real: tuple(map(real, adam_constants(**asked()))))
        adam_kernel(own_form)[one.parts, THREADS](one.table, one.work, clip, constants)
