"""A tiny kernel for every instruction whose operands have a layout: its data, and what it must leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from kernels.cuda.ptx import barriers, copies, mma, wgmma
from kernels.cuda.ptx.emulated import warp as emulated
from kernels.cuda.ptx.emulated.numbers import E4M3, pack, pack_e4m3
from kernels.cuda.ptx.emulated.wgmma import gather_rows, read_operand, read_registers
from kernels.cuda.ptx.emulated.wgmma import wgmma as emulated_wgmma
from kernels.cuda.runtime.arrays import to_device, to_host
from kernels.cuda.runtime.kernel import Kernel
from kernels.runtime.targets import cuda
from kernels.runtime.types import float32, uint32, void

WORDS, FLOATS = uint32[:, ::1], float32[:, ::1]
WARP, GROUP = 32, 128
HOPPER = (9, 0, "a")
#: Where tiles of bulk copies and descriptors may begin.
ALIGNMENT = 1024

Generator = np.random.Generator


class Case(NamedTuple):
    """One kernel.

    Attributes:
        name: Of the instruction.
        source: Takes the inputs and the output.
        signature: Its types.
        cc: The lowest compute capability that has the instruction.
        text: Of the instruction in PTX.
        make: Inputs, the output as it is before, the expected one, and by how much it may be off.
        threads: Of the block.
        shared_bytes: Dynamic shared memory.
    """

    name: str
    source: Callable[..., None]
    signature: Any
    cc: tuple[Any, ...]
    text: str
    make: Callable[[Generator], tuple[list[Any], Any, Any, Any]]
    threads: int = WARP
    shared_bytes: int = 0

    @property
    def kernel(self) -> Kernel:
        """What is launched."""
        return Kernel(self.source, self.signature, self.threads, self.shared_bytes)


def run(case: Case, rng: Generator) -> float:
    """Run a case on the GPU; return the largest error as a share of what is allowed; 0 is equal bits."""
    inputs, before, expected, allowed = case.make(rng)
    arrays = [to_device(array) for array in inputs]
    out = to_device(before)
    case.kernel[1, case.threads](*arrays, out)
    return worst_error(to_host(out), expected, allowed)


def worst_error(found: Any, expected: Any, allowed: Any) -> float:
    """Return the largest error as a share of what is allowed; words must be equal."""
    if found.dtype == np.uint32:
        return 0.0 if np.array_equal(found, expected) else np.inf
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        error = np.abs(found.astype(np.float64) - expected) / np.maximum(allowed, 1e-30)
    return float(np.nanmax(np.where(same, 0.0, np.where(np.isnan(error), np.inf, error))))


def words(rng: Generator, *shape: int) -> Any:
    return rng.integers(0, 2**32, shape, dtype=np.uint32)


def normals(rng: Generator, *shape: int) -> Any:
    return rng.standard_normal(shape, dtype=np.float32)


def pairs(rng: Generator, dtype: str, *shape: int) -> Any:
    return pack(normals(rng, *shape), normals(rng, *shape), dtype)


def eights(rng: Generator, *shape: int) -> Any:
    return pack_e4m3(*(normals(rng, *shape) for _ in range(4)))


# -- fragments -----------------------------------------------------------------------------------


def _load_matrices(is_transposed: bool) -> Case:
    name = "ldmatrix_x4" + ("_trans" if is_transposed else "")
    load = getattr(mma, name)

    def kernel(x, rows, out):
        shared = cuda.shared.array(256, uint32)
        fragment = cuda.local.array(4, uint32)
        lane = cuda.threadIdx.x
        for i in range(lane, 256, WARP):
            shared[i] = x[0, i]
        cuda.syncthreads()  # the matrices are stored
        load(fragment, copies.shared_address(shared) + 16 * rows[lane, 0])
        for i in range(4):
            out[lane, i] = fragment[i]

    def make(rng: Generator) -> Any:
        x, rows = words(rng, 1, 256), rng.integers(0, 64, (WARP, 1), dtype=np.uint32)
        shared = x.reshape(-1).view(np.uint8)
        expected = emulated.ldmatrix(shared, 16 * rows[:, 0].astype(int), 4, is_transposed)
        return [x, rows], np.zeros((WARP, 4), np.uint32), expected, 0

    text = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if is_transposed else ''}.shared.b16"
    return Case(name, kernel, void(WORDS, WORDS, WORDS), (7, 5), text, make)


def _store_matrices() -> Case:
    def kernel(x, rows, out):
        shared = cuda.shared.array(128, uint32)
        fragment = cuda.local.array(4, uint32)
        lane = cuda.threadIdx.x
        for i in range(4):
            fragment[i] = x[lane, i]
        mma.stmatrix_x4(copies.shared_address(shared) + 16 * rows[lane, 0], fragment)
        cuda.syncthreads()  # the matrices are stored
        for i in range(4):
            out[lane, i] = shared[4 * lane + i]

    def make(rng: Generator) -> Any:
        x, rows = words(rng, WARP, 4), rng.permutation(WARP).astype(np.uint32)[:, None]
        shared = np.zeros(512, np.uint8)
        emulated.stmatrix(shared, 16 * rows[:, 0].astype(int), x)
        return [x, rows], np.zeros((WARP, 4), np.uint32), shared.view(np.uint32).reshape(WARP, 4), 0

    text = "stmatrix.sync.aligned.m8n8.x4.shared.b16"
    return Case("stmatrix_x4", kernel, void(WORDS, WORDS, WORDS), (9, 0), text, make)


def _product(name: str, dtype: str, cc: tuple[int, int], text: str, a_registers: int) -> Case:
    multiply, b_registers = getattr(mma, name), a_registers // 2

    def kernel(a, b, before, out):
        lane = cuda.threadIdx.x
        # Rows of larger arrays, as kernels have them.
        acc = cuda.local.array((2, 4), float32)
        left = cuda.local.array((2, a_registers), uint32)
        right = cuda.local.array((2, b_registers), uint32)
        for n in range(2):
            for i in range(4):
                acc[n, i] = before[lane, i]
            for i in range(a_registers):
                left[n, i] = a[lane, n * a_registers + i]
            for i in range(b_registers):
                right[n, i] = b[lane, n * b_registers + i]
        for n in range(2):
            for k in range(2):
                multiply(acc[n], left[k], right[(n + k) % 2])
            for i in range(4):
                out[lane, 4 * n + i] = acc[n, i]

    def make(rng: Generator) -> Any:
        if dtype == "tf32":
            a, b = (normals(rng, WARP, 2 * n).view(np.uint32) for n in (a_registers, b_registers))
        else:
            a, b = (pairs(rng, dtype, WARP, 2 * n) for n in (a_registers, b_registers))
        before = normals(rng, WARP, 4)
        tiles = []
        for n in range(2):
            acc = before
            for k in range(2):
                left, right = np.split(a, 2, axis=1)[k], np.split(b, 2, axis=1)[(n + k) % 2]
                acc = (
                    emulated.mma_tf32(acc, left, right)
                    if dtype == "tf32"
                    else emulated.mma(acc, left, right, dtype)
                )
            tiles.append(acc)
        # Sums of 32 products of about one each.
        return [a, b, before], np.zeros((WARP, 8), np.float32), np.hstack(tiles), 1e-4

    return Case(name, kernel, void(WORDS, WORDS, FLOATS, FLOATS), cc, text, make)


OF_A_WARP = [
    *(_load_matrices(turned) for turned in (False, True)),
    _store_matrices(),
    _product("mma_f16", "float16", (8, 0), "mma.sync.aligned.m16n8k16.row.col.f32.f16", 4),
    _product("mma_bf16", "bfloat16", (8, 0), "mma.sync.aligned.m16n8k16.row.col.f32.bf16", 4),
    _product("mma_tf32", "tf32", (8, 0), "mma.sync.aligned.m16n8k8.row.col.f32.tf32", 4),
]


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


CASES = [*OF_A_WARP, *_warpgroups()]
