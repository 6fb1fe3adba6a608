"""Combine partial results of attention: weigh rows by their log-sum-exp, or add them."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import numpy as np

from kernels.common.geometry import ceil_div
from kernels.cuda.device.half import EIGHT, as_bits, form, make_read_eight, make_write_eight
from kernels.cuda.device.one_source import (
    batch_and_head,
    inverse_sum,
    log_sum_exp,
    merge_weight,
    shift_of,
)
from kernels.cuda.device.vector import ALIGNMENT
from kernels.cuda.runtime.arrays import device_pointer, element_strides, flattened, reshaped
from kernels.cuda.runtime.kernel import WARP, Kernel, device_function, scalar_type
from kernels.cuda.runtime.repeated import repeats
from kernels.cuda.runtime.sizes import SIZES
from kernels.runtime.dtypes import acc_dtype
from kernels.runtime.memory import Ints, joined_step
from kernels.runtime.targets import cuda
from kernels.runtime.types import int64, types, void


@device_function
def _weighed(old, new, old_share, new_share):
    return (
        old[0] * old_share + new[0] * new_share, old[1] * old_share + new[1] * new_share,
        old[2] * old_share + new[2] * new_share, old[3] * old_share + new[3] * new_share,
        old[4] * old_share + new[4] * new_share, old[5] * old_share + new[5] * new_share,
        old[6] * old_share + new[6] * new_share, old[7] * old_share + new[7] * new_share,
    )  # fmt: skip


@cache
def merge_kernel(
    before_dtype: np.dtype[Any],
    values_dtype: np.dtype[Any],
    out_dtype: np.dtype[Any],
    is_weighed: bool,
) -> Kernel:
    """Return the kernel for given dtypes of the sums so far, of the values, and of the new sums."""
    forms = form(before_dtype), form(values_dtype), form(out_dtype)
    widen_before, widen, narrow = forms[0].widen, forms[1].widen, forms[2].narrow
    read_before, read = make_read_eight(before_dtype), make_read_eight(values_dtype)
    write = make_write_eight(out_dtype, narrow)
    own = acc_dtype(values_dtype)
    real, zero, one = scalar_type(own), own.type(0), own.type(1)
    nothing = (zero,) * EIGHT

    def merge(before, values, out, lses, sizes, steps, is_new, in_vectors):
        """Merge rows with the rows so far.

        Computes: out = w before + (1 - w) values with w = exp(lse) / (exp(lse) + exp(added)), and
            lse = log(exp(lse) + exp(added)), with their rests; or out = before + values
        Source: FlashAttention-2, section 3.1
        Grid: (ceil(rows / rows of a block), batch · heads)
        Block: (threads of a row, rows)
        One thread does: eight neighbouring elements of a row, by vectors of 128 bits where they are
            aligned, and others that lie eight for each of its threads further on
        Registers: eight elements of before and of values
        Global traffic: before, values and the rows of lse read once, out and lse written once
        Needs: whole rows in a block: none of its threads may read the lse that another has written
        """
        (heads, rows, dim, first, first_value), (lse, rest, added, added_rest) = sizes, lses
        lane, row = cuda.threadIdx.x, cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        y = cuda.blockIdx.y
        batch, head = batch_and_head(y, heads)
        inside = row < rows
        place, place_of_value = first + row, first_value + row
        old_share, new_share = one, one
        if is_weighed:
            shift, total = zero, zero
            if inside:
                old_lse, new_lse = lse[y, place], added[y, place_of_value]
                shift = real(shift_of(max(old_lse, new_lse)))
                old_share = merge_weight(old_lse, rest[y, place], shift)
                new_share = merge_weight(new_lse, added_rest[y, place_of_value], shift)
                total = old_share + new_share
                inverse = real(inverse_sum(total))
                old_share *= inverse
                new_share *= inverse
            cuda.syncthreads()  # all threads of a row have read its lse
            if inside and lane == 0:
                lse[y, place], rest[y, place] = log_sum_exp(shift, total)
        if inside:
            before_row = batch * steps[0] + head * steps[1] + place * steps[2]
            values_row = batch * steps[3] + head * steps[4] + place_of_value * steps[5]
            out_row = batch * steps[6] + head * steps[7] + place * steps[8]
            i = lane * EIGHT
            while i < dim:  # a range with a step divides
                if in_vectors:
                    old = nothing if is_new else read_before(before, before_row + i)
                    new = read(values, values_row + i)
                    write(out, out_row + i, _weighed(old, new, old_share, new_share))
                else:
                    for n in range(i, min(i + EIGHT, dim)):
                        found = widen(values[values_row + n]) * new_share
                        if not is_new:
                            found += widen_before(before[before_row + n]) * old_share
                        out[out_row + n] = narrow(found)
                i += cuda.blockDim.x * EIGHT

    flat = [types.Array(scalar_type(x.stored), 1, "C") for x in forms]
    lses = types.Array(real, 2, "C") if is_weighed else flat[1]
    numbers = types.UniTuple(int64, 5), types.UniTuple(int64, 9)
    return Kernel(merge, void(*flat, types.UniTuple(lses, 4), *numbers, int64, int64))


@lru_cache(maxsize=1024)
def _steps(shape: Ints, strides: Ints) -> Ints:
    """Return the strides of batches, heads and rows; raise ValueError if rows cannot be merged."""
    *lead, head_step, row_step, step = strides
    batch_step = joined_step(shape[:-3], tuple(lead)) if lead else 0
    if (step != 1 and shape[-1] != 1) or batch_step is None:
        raise ValueError(
            f"rows are merged in arrays whose rows are consecutive elements and whose batches have one "
            f"stride, got shape {shape} and strides {strides}; make a contiguous copy first"
        )
    return batch_step, head_step, row_step


@repeats
def merge_rows(
    out: Any, values: Any, rows: range, place: int = 0, before: Any = None, *lses: Any
) -> None:
    """Add rows to the sums so far, or merge them as attention to two sets of keys.

    Each number is computed in the dtype in which values are summed, and rounded once.

    Args:
        out: (…, heads, seq, dim), of which some rows are written.
        values: (…, heads, n, dim).
        rows: The rows of out that are written.
        place: The row of the values that belongs to the first of these rows.
        before: The sums so far, of the shape of out; may be out itself.  None writes the values.
        *lses: With weights, four arrays: the log-sum-exp of the keys so far, (…, heads, seq), row-major and
            of the dtype in which values are summed, which in these rows becomes that of all keys; what it
            loses by rounding, see ``Operands.lse_rest``; and both for the values, (…, heads, n).

    Raises:
        ValueError: If an array has gaps, or elements of a row that are not consecutive.
    """
    *lead, heads, _, dim = values.shape
    count = math.prod(lead) * heads
    if not (count and len(rows) and dim):
        return
    arrays = out if before is None else before, values, out
    steps = [_steps(tuple(x.shape), element_strides(x)) for x in arrays]
    in_vectors = dim % EIGHT == 0 and all(
        device_pointer(x) % ALIGNMENT == 0
        and all(step * x.dtype.itemsize % ALIGNMENT == 0 for step in own)
        for x, own in zip(arrays, steps, strict=True)
    )
    lanes = min(1 << (ceil_div(dim, EIGHT) - 1).bit_length(), WARP, SIZES.flat_threads)
    rows_of_block = SIZES.flat_threads // lanes
    flat = [as_bits(flattened(x)) for x in arrays]
    kernel = merge_kernel(*(x.dtype for x in arrays), bool(lses))
    given = [reshaped(x, (count, tuple(x.shape)[-1])) for x in lses] or [flat[1]] * 4
    kernel[(ceil_div(len(rows), rows_of_block), count), (lanes, rows_of_block)](
        *flat, (*given,), (heads, len(rows), dim, rows.start, place), (*steps[0], *steps[1], *steps[2]),
        int(before is None), int(in_vectors),
    )  # fmt: skip
