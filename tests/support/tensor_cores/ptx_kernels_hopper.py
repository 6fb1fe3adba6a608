"""A tiny kernel for every instruction of blocks, copy engine and warpgroups, and what it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import float32, types, uint8, uint32, uint64, void

from kernels.cuda.ptx import barriers, bulk, copies, wgmma
from kernels.cuda.ptx.emulated import warp as emulated
from kernels.cuda.ptx.emulated.numbers import E4M3
from kernels.cuda.ptx.emulated.wgmma import gather_rows, read_operand, read_registers
from kernels.cuda.ptx.emulated.wgmma import wgmma as emulated_wgmma
from kernels.runtime.targets import cuda

from .ptx_cases import (
    ALIGNMENT,
    BYTES,
    FLOATS,
    GROUP,
    HOPPER,
    WARP,
    WORDS,
    Case,
    Generator,
    Map,
    eights,
    normals,
    pairs,
    words,
)

# -- barriers ------------------------------------------------------------------------------------


def _named_barriers() -> Case:
    def kernel(x, out):
        shared = cuda.shared.array(32, uint32)
        thread = cuda.threadIdx.x
        if thread < 32:  # the second warp reads what the first one stored
            shared[thread] = x[0, thread]
            barriers.bar_arrive(1, 64)
        else:
            barriers.bar_sync(1, 64)
            out[0, thread - 32] = shared[63 - thread]

    def make(rng: Generator) -> Any:
        x = words(rng, 1, WARP)
        return [x], np.zeros_like(x), x[:, ::-1], 0

    return Case(
        "bar_arrive, bar_sync", kernel, void(WORDS, WORDS), (8, 0), "bar.arrive", make, threads=64
    )


def _barrier_in_memory() -> Case:
    def kernel(x, out):
        shared = cuda.shared.array(32, uint32)
        memory = cuda.shared.array(1, uint64)
        lane, barrier = cuda.threadIdx.x, copies.shared_address(memory)
        if lane == 0:
            barriers.mbarrier_init(barrier, WARP)
            barriers.fence_mbarrier_init()
        cuda.syncthreads()  # the barrier is made
        out[1, lane] = barriers.mbarrier_try_wait(barrier, 1)  # the phase before the first
        for phase in range(3):
            shared[lane] = x[phase, lane]
            barriers.mbarrier_arrive(barrier)
            barriers.mbarrier_wait(barrier, phase % 2)
            out[0, lane] += shared[31 - lane]
            cuda.syncthreads()  # all have read before the next phase is stored

    def make(rng: Generator) -> Any:
        x, expected = words(rng, 3, WARP), np.ones((2, WARP), np.uint32)
        expected[0] = x.sum(axis=0, dtype=np.uint32)[::-1]
        return [x], np.zeros((2, WARP), np.uint32), expected, 0

    text = "mbarrier.try_wait.parity.shared::cta.b64"
    return Case("mbarrier", kernel, void(WORDS, WORDS), (9, 0), text, make)


def _registers() -> Case:
    fewer, more = barriers.make_setmaxnreg("dec", 24), barriers.make_setmaxnreg("inc", 240)

    def kernel(out):
        thread = cuda.threadIdx.x
        if thread < GROUP:
            fewer()
            out[0, thread] = 24
        else:
            more()
            out[0, thread] = 240

    def make(rng: Generator) -> Any:
        expected = np.repeat(np.array([24, 240], np.uint32), GROUP)[None]
        return [], np.zeros((1, 2 * GROUP), np.uint32), expected, 0

    text = "setmaxnreg.inc.sync.aligned.u32"
    return Case("setmaxnreg", kernel, void(WORDS), HOPPER, text, make, threads=2 * GROUP)


# -- bulk copies ---------------------------------------------------------------------------------


def _bulk_copies() -> Case:
    wait, wait_read = (bulk.make_cp_async_bulk_wait_group(0, is_read) for is_read in (False, True))

    def kernel(x, out):
        shared = cuda.shared.array(66 + 32, float32)
        base, target = (
            copies.align_up(copies.shared_address(shared), 128),
            copies.global_address(out),
        )
        place = cuda.threadIdx.x + (base - copies.shared_address(shared)) // 4
        lane, barrier = cuda.threadIdx.x, base + 128
        if lane == 0:
            barriers.mbarrier_init(barrier, 1)
            barriers.fence_mbarrier_init()
            barriers.mbarrier_arrive_expect_tx(barrier, 128)
            bulk.cp_async_bulk_load(base, copies.global_address(x), 128, barrier)
        cuda.syncthreads()  # the barrier is made
        barriers.mbarrier_wait(barrier, 0)
        shared[place] += float32(1)
        barriers.fence_proxy_async()
        cuda.syncthreads()  # all have added
        if lane == 0:
            bulk.cp_async_bulk_store(target, base, 128)
            bulk.cp_async_bulk_commit_group()
            wait_read()
            wait()
            bulk.cp_reduce_async_bulk_add(target + 128, base, 128)
            bulk.cp_async_bulk_commit_group()
            wait()

    def make(rng: Generator) -> Any:
        x, before = normals(rng, 1, WARP), normals(rng, 2, WARP)
        expected = np.vstack([x + 1, before[1] + (x + 1)])
        return [x], before, expected, 0

    text = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
    return Case("cp_async_bulk", kernel, void(FLOATS, FLOATS), (9, 0), text, make)


def _tensor_copy(dims: int, swizzle: int, start: tuple[int, ...]) -> Case:
    load = bulk.make_tensor_load(dims)
    shape = (3, 2, 20, 72)[-dims:]
    box = (2, 2, 16, (swizzle or 64) // 2)[-dims:]
    size = 2 * int(np.prod(box))

    def kernel(x, tensor_map, out):
        shared = cuda.shared.array(0, uint8)
        memory = cuda.shared.array(1, uint64)
        base = copies.align_up(copies.shared_address(shared), ALIGNMENT)
        first = base - copies.shared_address(shared)
        barrier, source = copies.shared_address(memory), copies.global_address(tensor_map)
        if cuda.threadIdx.x == 0:
            barriers.mbarrier_init(barrier, 1)
            barriers.fence_mbarrier_init()
            barriers.mbarrier_arrive_expect_tx(barrier, size)
            load(base, source, barrier, start)
        cuda.syncthreads()  # the barrier is made
        barriers.mbarrier_wait(barrier, 0)
        for i in range(cuda.threadIdx.x, size, WARP):
            out[0, i] = shared[first + i]

    def make(rng: Generator) -> Any:
        x = rng.integers(0, 2**16, shape, dtype=np.uint16)
        shared = np.zeros(size, np.uint8)
        emulated.tensor_load(shared, 0, x, box, start, swizzle)
        return [x], np.zeros((1, size), np.uint32), shared[None].astype(np.uint32), 0

    name, text = f"tensor load {dims}d, {swizzle} bytes", f"cp.async.bulk.tensor.{dims}d.shared"
    signature = void(types.Array(types.uint16, dims, "C"), BYTES, WORDS)
    return Case(
        name, kernel, signature, (9, 0), text, make, shared_bytes=size + ALIGNMENT,
        maps=(Map(0, box, "float16", swizzle),),
    )  # fmt: skip


def _tensor_store(is_added: bool) -> Case:
    """Store or add a box that lies partly outside; the input is what it is stored to."""
    store, wait = bulk.make_tensor_store(2, is_added), bulk.make_cp_async_bulk_wait_group(0)
    shape, box, start = (12, 40), (8, 32), (16, 8)

    def kernel(x, tensor_map, out):
        shared = cuda.shared.array(0, float32)
        lane, base = cuda.threadIdx.x, copies.align_up(copies.shared_address(shared), 128)
        first = (base - copies.shared_address(shared)) // 4
        for i in range(lane, 256, WARP):
            shared[first + i] = float32(i)
        barriers.fence_proxy_async()
        cuda.syncthreads()  # the box is whole
        if lane == 0:
            store(copies.global_address(tensor_map), start, base)
            bulk.cp_async_bulk_commit_group()
            wait()
            cuda.threadfence()
        cuda.syncthreads()  # the box is stored
        for i in range(lane, 480, WARP):
            out[i // 40, i % 40] = x[i // 40, i % 40]

    def make(rng: Generator) -> Any:
        x = rng.integers(-99, 99, shape).astype(np.float32)
        values, expected = np.arange(256, dtype=np.float32).reshape(box), x.copy()
        part = np.s_[start[1] : start[1] + box[0], start[0] : start[0] + box[1]]
        inside = values[: shape[0] - start[1], : shape[1] - start[0]]
        expected[part] = expected[part] + inside if is_added else inside
        return [x], np.zeros(shape, np.float32), expected, 0

    text = f"cp{'.reduce' if is_added else ''}.async.bulk.tensor.2d.global.shared::cta"
    return Case(
        "tensor add" if is_added else "tensor store", kernel, void(FLOATS, BYTES, FLOATS), (9, 0),
        text, make, shared_bytes=1024 + 128, maps=(Map(0, box, "float32", 0),),
    )  # fmt: skip


# -- warpgroups ----------------------------------------------------------------------------------


def warpgroup(
    cols: int, dtype: str, in_registers: bool, a_transposed: bool, b_transposed: bool, swizzle: int
) -> Case:
    """Return two products into one accumulator, of whatever random tiles lie behind the descriptors."""
    multiply = wgmma.make_wgmma(cols, dtype, in_registers, a_transposed, b_transposed)
    wait, accumulators = wgmma.make_wgmma_wait_group(0), cols // 2
    width = swizzle or 16

    def layout_of(lines: int, is_transposed: bool) -> tuple[int, int]:
        """Return a layout, and the bytes of an operand: eights of lines one after the other."""
        piece = 8 * width
        if is_transposed:
            panels = -(-2 * lines // width)
            across, along = 2 * piece, piece  # two eights along the depth a panel
            leading, stride = (across, along) if swizzle else (along, across)
            return wgmma.descriptor_layout(swizzle, leading, stride), panels * across
        # Without a swizzle 32 bytes of the depth are two columns of pieces.
        columns = 1 if swizzle else 2
        leading = lines * width if not swizzle else 16
        return wgmma.descriptor_layout(swizzle, leading, piece), lines * width * columns

    a_layout, a_bytes = layout_of(64, a_transposed)
    b_layout, b_bytes = layout_of(cols, b_transposed)
    b_start = -(-a_bytes // ALIGNMENT) * ALIGNMENT
    # A further KB: tiles narrower than the swizzle's lines read beyond.
    total = b_start + -(-b_bytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT
    words = total // 4

    def kernel(image, registers, out):
        shared = cuda.shared.array(0, uint32)
        acc = cuda.local.array(accumulators, float32)
        a = cuda.local.array(4, uint32)
        thread = cuda.threadIdx.x
        base = copies.align_up(copies.shared_address(shared), ALIGNMENT)
        first = (base - copies.shared_address(shared)) // 4
        for i in range(thread, words, GROUP):
            shared[first + i] = image[0, i]
        for i in range(4):
            a[i] = registers[thread, i]
        barriers.fence_proxy_async()
        cuda.syncthreads()  # the operands are whole
        a_descriptor = wgmma.descriptor(a_layout, base)
        b_descriptor = wgmma.descriptor(b_layout, base + b_start)
        for i in range(accumulators):
            acc[i] = float32(1e9)  # does not count
        wgmma.wgmma_fence()
        if in_registers:
            multiply(acc, a, b_descriptor, 0)
            multiply(acc, a, b_descriptor, 1)
        else:
            multiply(acc, a_descriptor, b_descriptor, 0)
            multiply(acc, a_descriptor, b_descriptor, 1)
        wgmma.wgmma_commit_group()
        wait()
        for i in range(accumulators):
            out[thread, i] = acc[i]

    def make(rng: Generator) -> Any:
        if dtype == "tf32":
            image = normals(rng, 1, words).view(np.uint32)
            registers = normals(rng, GROUP, 4).view(np.uint32)
        elif dtype == E4M3:
            image, registers = eights(rng, 1, words), eights(rng, GROUP, 4)
        else:
            image, registers = pairs(rng, dtype, 1, words), pairs(rng, dtype, GROUP, 4)
        shared, fragment = image.reshape(-1).view(np.uint8), registers.reshape(4, WARP, 4)
        a: Any = fragment if in_registers else a_layout
        b = b_layout | b_start >> 4
        acc = np.zeros((4, WARP, accumulators), np.float32)
        once = emulated_wgmma(shared, acc, a, b, dtype, a_transposed, b_transposed, False)
        left = (
            read_registers(fragment, dtype)
            if in_registers
            else read_operand(shared, a_layout, 64, dtype, a_transposed)
        )
        right = read_operand(shared, b, cols, dtype, b_transposed)
        size = gather_rows(np.abs(left) @ np.abs(right).T).reshape(GROUP, accumulators)
        expected = 2 * once.reshape(GROUP, accumulators)
        # Tensor cores drop the bits below those of the largest product, of e4m3 more.
        unit = 2.0**-11 if dtype == E4M3 else 2e-6
        return [image, registers], np.zeros_like(expected), expected, unit * size + 1e-6

    turned = ("ᵀ" if a_transposed else "", "ᵀ" if b_transposed else "")
    left = "registers" if in_registers else f"A{turned[0]}"
    name = f"wgmma n{cols} {dtype}, {left}, B{turned[1]}, {swizzle} bytes"
    depth = wgmma.KINDS[dtype][1]
    text = f"wgmma.mma_async.sync.aligned.m64n{cols}k{depth}.f32"
    signature = void(WORDS, WORDS, FLOATS)
    return Case(name, kernel, signature, HOPPER, text, make, GROUP, shared_bytes=total + ALIGNMENT)


#: Columns of B that attention needs: keys of a tile, or a head's width.
WIDTHS = (8, 16, 32, 64, 80, 96, 128, 160, 192, 256)


def _warpgroups() -> Iterator[Case]:
    for cols in WIDTHS:
        yield warpgroup(cols, "float16", False, False, False, 128)
    for cols in (64, 128, 256):
        yield warpgroup(cols, "bfloat16", True, False, True, 128)
    for swizzle in (0, 32, 64, 128):
        for a_transposed in (False, True):
            for b_transposed in (False, True):
                yield warpgroup(64, "bfloat16", False, a_transposed, b_transposed, swizzle)
        yield warpgroup(64, "tf32", False, False, False, swizzle)
    yield warpgroup(64, "tf32", True, False, False, 128)
    for cols in (64, 128):
        for in_registers in (False, True):
            yield warpgroup(cols, E4M3, in_registers, False, False, 128)


CASES = [
    _named_barriers(),
    _barrier_in_memory(),
    _registers(),
    _bulk_copies(),
    _tensor_copy(2, 128, (8, 8)),
    _tensor_copy(2, 0, (-8, 17)),
    _tensor_copy(3, 64, (48, 3, 1)),
    _tensor_copy(4, 32, (0, -1, 0, 2)),
    _tensor_store(is_added=False),
    _tensor_store(is_added=True),
    *_warpgroups(),
]
