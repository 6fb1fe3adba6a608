"""Calls on a cache of keys and values: rotate and append new rows, then attend, all on the device.

Hopper's decoding kernel runs the calls that it can, and the loops of flash2_mma and flash2 run the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from kernels.cuda.attention.flash2_mma import launch as flash2_mma
from kernels.cuda.attention.flash3_wgmma.launch_common import WIDEST
from kernels.cuda.attention.flash_decoding import launch
from kernels.cuda.attention.flash_decoding.by_rungs import on_cuda_cores, on_tensor_cores
from kernels.cuda.attention.options.cached_rows import CachedRows
from kernels.cuda.device.half import as_bits, form
from kernels.cuda.device.memory import DeviceMemory
from kernels.cuda.device.per_device import HOPPER, why_no_device
from kernels.cuda.device.vector import are_vectors
from kernels.cuda.runtime.arrays import empty_device
from kernels.cuda.runtime.kernel import Kernel, array_type, scalar_type
from kernels.cuda.runtime.repeated import Repeat, noted
from kernels.cuda.runtime.sizes import launch_each
from kernels.problem.cached_keys import Cached
from kernels.problem.operands import Operands, make_operands, own_mask, view_of
from kernels.problem.options import ARRAY_ORDER, AXES
from kernels.problem.question import Problem
from kernels.runtime.dtypes import acc_dtype, is_half
from kernels.runtime.targets import cuda, current_device
from kernels.runtime.types import int32, types, void
from kernels.scores.program import CacheForm

MEMORY = DeviceMemory()
#: The fields of a call that are arrays, or None.
_ARRAYS = Cached._fields[1:10]


def _rung_of(problem: Problem, operands: Operands) -> Callable[[Problem, Operands], None]:
    """Return the function that runs a call on the current device."""
    q, k, v = operands.q, operands.k, operands.v
    if is_half(problem.dtype) and why_no_device(HOPPER) is None:
        # Its copies are of whole 16 bytes of a row, and its sums of at most WIDEST columns.
        dims = problem.head_dim, problem.value_dim
        fits = max(dims) <= WIDEST and dims[0] % 8 == dims[1] % 8 == 0 and are_vectors(k, v)
        if fits and q.shape[1] // k.shape[1] <= launch.MOST_ROWS:
            return launch.forward
    is_mma = is_half(problem.dtype) and why_no_device(flash2_mma.CAPABILITY) is None
    return on_tensor_cores if is_mma else on_cuda_cores


@cache
def place_kernel(dtype: np.dtype[Any], is_rotated: bool, is_cache: bool, is_paged: bool) -> Kernel:
    """Return the kernel that rotates the last rows of sequences, and writes them to a cache or an array."""
    (stored, widen, narrow, _), sums = form(dtype), acc_dtype(dtype)
    real = scalar_type(sums)

    def place_rows(source, cos, sin, lengths, added, table, is_interleaved, target):
        """Rotate rows by their positions and write them where these are.

        Computes: target = R(position) source, for the last rows of each sequence
        Grid: ceil(batch * heads * rows * dim / threads)
        One thread does: one element
        Global traffic: reads source twice, cos and sin once per element; writes target once
        """
        batch, heads, rows, dim = source.shape
        i = cuda.grid(1)
        if i < batch * heads * rows * dim:
            line, c = i // dim, i % dim
            b, h, row = line // rows // heads, line // rows % heads, line % rows
            position = max(int32(lengths[b] + added) - rows + row, 0)
            x = widen(source[b, h, row, c])
            if is_rotated and c < 2 * cos.shape[1]:
                pairs = cos.shape[1]
                pair = c // 2 if is_interleaved else c % pairs
                is_first = c % 2 == 0 if is_interleaved else c < pairs
                step = 1 if is_interleaved else pairs
                other = widen(source[b, h, row, c + step if is_first else c - step])
                turned = other * sin[position, pair]
                x = x * cos[position, pair] + (-turned if is_first else turned)
            value = narrow(real(x))
            if is_cache:
                size = target.shape[2]
                page = table[b, position // size] if is_paged else b
                target[page, h, position % size, c] = value
            else:
                target[b, h, row, c] = value

    four, ints = array_type(stored, 4), types.Array(int32, 1, "C")
    angles = array_type(sums, 2) if is_rotated else types.int64
    pages = types.Array(int32, 2, "C") if is_paged else types.int64
    numbers = ints, types.int64, pages, types.int64
    return Kernel(place_rows, void(four, angles, angles, *numbers, four))


def _place(call: Cached, source: Any, target: Any, is_rotated: bool) -> None:
    """Rotate rows if asked to, and write them to the cache if it is the target."""
    is_cache, is_paged = target is call.k_cache or target is call.v_cache, call.table is not None
    is_rotated = is_rotated and call.cos is not None
    sums = call.problem.acc_dtype
    angles = [MEMORY.convert(x, sums) if is_rotated else 0 for x in (call.cos, call.sin)]
    kernel = place_kernel(np.dtype(source.dtype), is_rotated, is_cache, is_cache and is_paged)
    table = call.table if is_cache and is_paged else 0
    arguments = call.lengths, call.new, table, int(call.is_interleaved), as_bits(target)
    launch_each(kernel, int(np.prod(source.shape)), as_bits(source), *angles, *arguments)


def brought(call: Cached) -> tuple[Cached, list[Any]]:
    """Return a call with all arrays on the device, and these, in the order of ``bound_calls.find``."""
    given = {name: MEMORY.bring(x) for name in _ARRAYS if (x := getattr(call, name)) is not None}
    options = {
        name: (MEMORY.bring if name == "attn_mask" else MEMORY.constant)(x)
        for name in ARRAY_ORDER
        if (x := call.arrays.get(name)) is not None
    }
    return call._replace(**given, arrays=options), [*given.values(), *options.values()]


def note(call: Cached, arrays: list[Any]) -> tuple[Any, Repeat | None]:
    """Return the results of a call that :func:`brought` returned, and how others repeat its launches."""
    names = [name for name in _ARRAYS if getattr(call, name) is not None]

    def run(own: Any, seed: int) -> tuple[Any, Any]:
        options = dict(zip(call.arrays, own[len(names) :], strict=True))
        return forward(call._replace(**dict(zip(names, own, strict=False)), arrays=options))

    return noted(run, arrays, 0)


def forward(call: Cached) -> tuple[Any, Any]:
    """Return out and lse of a call whose arrays are all on the device."""
    problem, (batch, heads, seq_q, _) = call.problem, call.q.shape
    if call.lengths is None:
        call = call._replace(lengths=launch.full_lengths(batch, problem.seq_k, current_device()))
    q = call.q
    if call.new:
        _place(call, call.k, call.k_cache, True)
        _place(call, call.v, call.v_cache, False)
    if call.cos is not None:
        q = empty_device(tuple(call.q.shape), call.q.dtype)
        _place(call, call.q, q, True)
    out = empty_device((batch, heads, seq_q, problem.value_dim), problem.dtype)
    lse, rest = (empty_device((batch, heads, seq_q), problem.acc_dtype) for _ in range(2))
    form = CacheForm(is_paged=call.table is not None, is_fixed=call.batch_invariant)
    plain = replace(problem, groups=1, cache=form)
    operands = make_operands(MEMORY, plain, q, call.k_cache, call.v_cache, call.arrays)
    views = {
        name: view_of(MEMORY, plain, name, x)
        for name in AXES
        if (x := getattr(operands, name)) is not None
    }
    if operands.mask is not None:
        own, views["mask_batch"] = own_mask(MEMORY, plain, operands.mask)
        if problem.mask != "bool":
            own = MEMORY.convert(own, problem.acc_dtype)
        views["mask"] = MEMORY.four_dims(own, (len(own), heads, *own.shape[-2:]))
    pages = (call.table, call.k_cache.shape[2]) if form.is_paged else ()
    views["cache"] = CachedRows(call.lengths, call.new, *pages)
    operands = operands.having(out=out, lse=lse, lse_rest=rest, **views)
    if batch:
        _rung_of(plain, operands)(plain, operands)
    return out, lse
