"""A tiny kernel for every instruction of a warp, and what NumPy's emulation says it leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, uint32, void

from kernels.cuda.ptx import copies, mma, numbers
from kernels.cuda.ptx.emulated import numbers as en
from kernels.cuda.ptx.emulated import warp as emulated
from kernels.runtime.targets import cuda

from .ptx_cases import FLOATS, WARP, WORDS, Case, Generator, normals, pairs, words

# -- numbers -------------------------------------------------------------------------------------

_SPECIAL = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 65519.0, 65520.0, 3.4e38], np.float32)


def _any_floats(rng: Generator, count: int) -> Any:
    values = normals(rng, WARP, count) * np.float32(2.0) ** rng.integers(-12, 12, (WARP, count))
    values = values.astype(np.float32)
    values[: len(_SPECIAL)] = _SPECIAL[:, None]
    return values


def _packing(name: str, dtype: str, text: str) -> Case:
    function = getattr(numbers, name)

    def kernel(x, out):
        lane = cuda.threadIdx.x
        out[lane, 0] = function(x[lane, 0], x[lane, 1])

    def make(rng: Generator) -> Any:
        x = _any_floats(rng, 2)
        expected = en.pack(x[:, 0], x[:, 1], dtype)
        nan = np.isnan(x).any(axis=1)  # what its bits are is not promised for float16
        x[nan], expected[nan] = 0, 0
        return [x], np.zeros((WARP, 1), np.uint32), expected[:, None], 0

    return Case(name, kernel, void(FLOATS, WORDS), (8, 0), text, make)


def _packing_four() -> Case:
    def kernel(x, out):
        lane = cuda.threadIdx.x
        out[lane, 0] = numbers.pack_e4m3(x[lane, 0], x[lane, 1], x[lane, 2], x[lane, 3])

    def make(rng: Generator) -> Any:
        x = _any_floats(rng, 4)
        x[: len(_SPECIAL), 1:] = normals(rng, len(_SPECIAL), 3)
        x = np.where(np.isnan(x), np.float32(0), x)  # what its bits are is not promised
        return [x], np.zeros((WARP, 1), np.uint32), en.pack_e4m3(*x.T)[:, None], 0

    text = "cvt.rn.satfinite.e4m3x2.f32"
    return Case("pack_e4m3", kernel, void(FLOATS, WORDS), (8, 9), text, make)


def _unpacking(name: str, dtype: str, text: str) -> Case:
    function = getattr(numbers, name)

    def kernel(x, out):
        lane = cuda.threadIdx.x
        out[lane, 0], out[lane, 1] = function(x[lane, 0])

    def make(rng: Generator) -> Any:
        x = words(rng, WARP, 1)
        return [x], np.zeros((WARP, 2), np.float32), en.unpack(x[:, 0], dtype), 0

    return Case(name, kernel, void(WORDS, FLOATS), (7, 5), text, make)


def _rounding() -> Case:
    def kernel(x, out):
        out[cuda.threadIdx.x, 0] = numbers.round_tf32(x[cuda.threadIdx.x, 0])

    def make(rng: Generator) -> Any:
        x = _any_floats(rng, 1)
        x[np.isnan(x)] = 1  # what its bits are is not promised
        return [x], np.zeros((WARP, 1), np.uint32), en.round_tf32(x), 0

    return Case("round_tf32", kernel, void(FLOATS, WORDS), (8, 0), "cvt.rna.tf32.f32", make)


def _bits() -> Case:
    def kernel(x, out):
        bits = numbers.bits_of(numbers.float_of(x[cuda.threadIdx.x, 0]))
        out[cuda.threadIdx.x, 0] = bits + np.uint32(1)

    def make(rng: Generator) -> Any:
        x = words(rng, WARP, 1)
        return [x], np.zeros_like(x), x + np.uint32(1), 0

    return Case("bits_of, float_of", kernel, void(WORDS, WORDS), (7, 5), "mov.b32", make)


def _exponential() -> Case:
    def kernel(x, out):
        out[cuda.threadIdx.x, 0] = numbers.ex2(x[cuda.threadIdx.x, 0])

    def make(rng: Generator) -> Any:
        x = rng.uniform(-140, 130, (WARP, 1)).astype(np.float32)
        x[:4, 0] = -np.inf, np.inf, np.nan, 0
        expected = en.ex2(x)
        return [x], np.zeros_like(x), expected, 2.0**-22 * np.abs(expected)

    return Case("ex2", kernel, void(FLOATS, FLOATS), (7, 5), "ex2.approx.ftz.f32", make)


def _reciprocal() -> Case:
    def kernel(x, out):
        out[cuda.threadIdx.x, 0] = numbers.rcp(x[cuda.threadIdx.x, 0])

    def make(rng: Generator) -> Any:
        x = rng.uniform(-140, 130, (WARP, 1)).astype(np.float32)
        x[:3, 0] = -np.inf, np.inf, 1
        expected = np.float32(1) / x
        return [x], np.zeros_like(x), expected, 2.0**-22 * np.abs(expected)

    return Case("rcp", kernel, void(FLOATS, FLOATS), (7, 5), "rcp.approx.ftz.f32", make)


def _multiplication_and_addition() -> Case:
    def kernel(x, y, z, out):
        lane = cuda.threadIdx.x
        out[lane, 0] = numbers.fma(x[lane, 0], y[lane, 0], z[lane, 0])

    def make(rng: Generator) -> Any:
        x, y = rng.uniform(-2, 2, (2, WARP, 1)).astype(np.float32)
        z = -(x * y)  # what is left is what the product lost by rounding
        expected = (x.astype(np.float64) * y + z).astype(np.float32)
        return [x, y, z], np.zeros_like(x), expected, 0

    signature = void(FLOATS, FLOATS, FLOATS, FLOATS)
    return Case("fma", kernel, signature, (7, 5), "fma.rn.f32", make)


def _logarithm() -> Case:
    def kernel(x, out):
        out[cuda.threadIdx.x, 0] = numbers.lg2(x[cuda.threadIdx.x, 0])

    def make(rng: Generator) -> Any:
        x = np.exp(rng.uniform(-80, 80, (WARP, 1))).astype(np.float32)
        x[:7, 0] = np.inf, np.nan, 0, -1, 1, 1.5, 1e-40
        expected = en.lg2(x)
        return [x], np.zeros_like(x), expected, 2.0**-22 * np.maximum(np.abs(expected), 1)

    return Case("lg2", kernel, void(FLOATS, FLOATS), (7, 5), "lg2.approx.ftz.f32", make)


def _tanh() -> Case:
    def kernel(x, out):
        out[cuda.threadIdx.x, 0] = numbers.tanh(x[cuda.threadIdx.x, 0])

    def make(rng: Generator) -> Any:
        x = (rng.choice((-1, 1), (WARP, 1)) * np.geomspace(1e-6, 90, WARP)[:, None]).astype(
            np.float32
        )
        x[:3, 0] = -np.inf, np.inf, np.nan
        expected = np.tanh(x.astype(np.float64)).astype(np.float32)
        return [x], np.zeros_like(x), expected, 2.0**-10.9 * np.abs(expected)

    return Case("tanh", kernel, void(FLOATS, FLOATS), (7, 5), "tanh.approx.f32", make)


# -- memory --------------------------------------------------------------------------------------


def _pairs_to_memory() -> Case:
    def kernel(x, out):
        lane = cuda.threadIdx.x
        copies.st_global_v2(copies.global_address(out) + 8 * lane, x[lane, 0], x[lane, 1])

    def make(rng: Generator) -> Any:
        x = _any_floats(rng, 2)
        return [x], np.zeros_like(x), x, 0

    return Case("st.global.v2", kernel, void(FLOATS, FLOATS), (7, 5), "st.global.v2.f32", make)


def _through_memory() -> Case:
    def kernel(x, out):
        shared = cuda.shared.array(256, uint32)
        words = cuda.local.array(4, uint32)
        lane = cuda.threadIdx.x
        base = copies.shared_address(shared)
        copies.ld_global_v4(words, copies.global_address(x) + 16 * lane)
        copies.st_shared_v4(base + 16 * lane, words)
        cuda.syncthreads()  # what the neighbour reads is stored
        neighbour = lane ^ 1
        copies.ld_shared_v4(words, base + 16 * neighbour)
        copies.st_global_v4(copies.global_address(out) + 32 * lane, words)
        copies.st_shared(base + 512 + 4 * neighbour, lane)
        cuda.syncthreads()  # likewise
        copies.st_global(copies.global_address(out) + 32 * lane + 16, shared[128 + lane])

    def make(rng: Generator) -> Any:
        x, neighbour = words(rng, WARP, 4), np.arange(WARP) ^ 1
        expected = np.zeros((WARP, 8), np.uint32)
        expected[:, :4], expected[:, 4] = x[neighbour], neighbour
        return [x], np.zeros((WARP, 8), np.uint32), expected, 0

    return Case("ld, st", kernel, void(WORDS, WORDS), (7, 5), "ld.shared.v4.u32", make)


def _pairs_of_floats() -> Case:
    def kernel(x, out):
        shared = cuda.shared.array(64, float32)
        lane = cuda.threadIdx.x
        shared[lane], shared[lane + 32] = x[lane, 0], x[lane, 1]
        cuda.syncthreads()  # the pair is stored
        out[lane, 0], out[lane, 1] = copies.ld_shared_v2(copies.shared_address(shared) + 8 * lane)

    def make(rng: Generator) -> Any:
        x = normals(rng, WARP, 2)
        return [x], np.zeros_like(x), x.T.reshape(WARP, 2), 0

    return Case("ld_shared_v2", kernel, void(FLOATS, FLOATS), (7, 5), "ld.shared.v2.f32", make)


def _asynchronous_copy(waits_for_all: bool) -> Case:
    wait, size = copies.make_cp_async_wait_group(0), 16
    last = copies.cp_async_wait_all if waits_for_all else wait
    own = size // 4

    def kernel(x, out):
        shared = cuda.shared.array(128, uint32)
        lane = cuda.threadIdx.x
        target = copies.shared_address(shared) + size * lane
        copies.cp_async_16(target, copies.global_address(x) + size * (31 - lane), lane % (size + 1))
        copies.cp_async_commit_group()
        last()
        for i in range(own):
            out[lane, i] = shared[own * lane + i]

    def make(rng: Generator) -> Any:
        x, shared = words(rng, WARP, own), np.zeros(WARP * size, np.uint8)
        memory = x.reshape(-1).view(np.uint8)
        for lane in range(WARP):
            source = size * (31 - lane)
            emulated.cp_async(shared, size * lane, memory, source, lane % (size + 1))
        expected = shared.view(np.uint32).reshape(WARP, own)
        return [x], np.zeros((WARP, own), np.uint32), expected, 0

    name = f"cp_async_16, {'wait_all' if waits_for_all else 'wait_group'}"
    return Case(name, kernel, void(WORDS, WORDS), (8, 0), "cp.async.cg.shared.global", make)


def _additions(size: int) -> Case:
    def one(x, out):
        copies.red_add(copies.global_address(out), x[cuda.threadIdx.x, 0])

    def four(x, out):
        values = cuda.local.array(4, float32)
        for i in range(4):
            values[i] = x[cuda.threadIdx.x, i]
        copies.red_add_v4(copies.global_address(out), values)

    def make(rng: Generator) -> Any:
        # Small whole numbers: their sum is exact in any order.
        x = rng.integers(-99, 99, (WARP, size)).astype(np.float32)
        return [x], np.ones((1, size), np.float32), x.sum(axis=0, keepdims=True) + 1, 0

    vector = "" if size == 1 else f".v{size}"
    name, text = f"red_add{vector.replace('.', '_')}", f"red.global.add{vector}.f32"
    cc = (7, 5) if size == 1 else (9, 0)
    return Case(name, {1: one, 4: four}[size], void(FLOATS, FLOATS), cc, text, make)


def _larger() -> Case:
    def kernel(x, out):
        copies.red_max(copies.global_address(out), x[cuda.threadIdx.x, 0])

    def make(rng: Generator) -> Any:
        x = abs(normals(rng, WARP, 1))
        return [x], np.zeros((1, 1), np.float32), x.max(keepdims=True), 0

    return Case("red_max", kernel, void(FLOATS, FLOATS), (7, 5), "red.global.max.s32", make)


def _relaxed() -> Case:
    def kernel(x, out):
        at = 4 * (31 - cuda.threadIdx.x)
        word = copies.ld_relaxed(copies.global_address(x) + at)
        copies.st_relaxed(copies.global_address(out) + at, word)

    def make(rng: Generator) -> Any:
        x = words(rng, WARP, 1)
        return [x], np.zeros((WARP, 1), np.uint32), x, 0

    return Case(
        "ld_relaxed, st_relaxed", kernel, void(WORDS, WORDS), (7, 5), "ld.relaxed.gpu", make
    )


# -- fragments -----------------------------------------------------------------------------------


def _load_matrices(count: int, is_transposed: bool) -> Case:
    name = f"ldmatrix_x{count}" + ("_trans" if is_transposed else "")
    load = getattr(mma, name)

    def kernel(x, rows, out):
        shared = cuda.shared.array(256, uint32)
        fragment = cuda.local.array(count, uint32)
        lane = cuda.threadIdx.x
        for i in range(lane, 256, WARP):
            shared[i] = x[0, i]
        cuda.syncthreads()  # the matrices are stored
        load(fragment, copies.shared_address(shared) + 16 * rows[lane, 0])
        for i in range(count):
            out[lane, i] = fragment[i]

    def make(rng: Generator) -> Any:
        x, rows = words(rng, 1, 256), rng.integers(0, 64, (WARP, 1), dtype=np.uint32)
        shared = x.reshape(-1).view(np.uint8)
        expected = emulated.ldmatrix(shared, 16 * rows[:, 0].astype(int), count, is_transposed)
        return [x, rows], np.zeros((WARP, count), np.uint32), expected, 0

    text = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if is_transposed else ''}.shared.b16"
    return Case(name, kernel, void(WORDS, WORDS, WORDS), (7, 5), text, make)


def _store_matrices(is_transposed: bool) -> Case:
    name = "stmatrix_x4" + ("_trans" if is_transposed else "")
    store = getattr(mma, name)

    def kernel(x, rows, out):
        shared = cuda.shared.array(128, uint32)
        fragment = cuda.local.array(4, uint32)
        lane = cuda.threadIdx.x
        for i in range(4):
            fragment[i] = x[lane, i]
        store(copies.shared_address(shared) + 16 * rows[lane, 0], fragment)
        cuda.syncthreads()  # the matrices are stored
        for i in range(4):
            out[lane, i] = shared[4 * lane + i]

    def make(rng: Generator) -> Any:
        x, rows = words(rng, WARP, 4), rng.permutation(WARP).astype(np.uint32)[:, None]
        shared = np.zeros(512, np.uint8)
        emulated.stmatrix(shared, 16 * rows[:, 0].astype(int), x, is_transposed)
        return [x, rows], np.zeros((WARP, 4), np.uint32), shared.view(np.uint32).reshape(WARP, 4), 0

    text = f"stmatrix.sync.aligned.m8n8.x4{'.trans' if is_transposed else ''}.shared.b16"
    return Case(name, kernel, void(WORDS, WORDS, WORDS), (9, 0), text, make)


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


CASES = [
    _packing("pack_f16", "float16", "cvt.rn.f16x2.f32"),
    _packing("pack_bf16", "bfloat16", "cvt.rn.bf16x2.f32"),
    _packing_four(),
    _unpacking("unpack_f16", "float16", "cvt.f32.f16"),
    _unpacking("unpack_bf16", "bfloat16", "shl.b32"),
    _rounding(),
    _bits(),
    _exponential(),
    _reciprocal(),
    _multiplication_and_addition(),
    _logarithm(),
    _tanh(),
    _pairs_to_memory(),
    _through_memory(),
    _pairs_of_floats(),
    *(_asynchronous_copy(waits_for_all) for waits_for_all in (False, True)),
    *(_additions(size) for size in (1, 4)),
    _larger(),
    _relaxed(),
    *(_load_matrices(count, turned) for count in (1, 2, 4) for turned in (False, True)),
    *(_store_matrices(turned) for turned in (False, True)),
    _product("mma_f16", "float16", (8, 0), "mma.sync.aligned.m16n8k16.row.col.f32.f16", 4),
    _product("mma_bf16", "bfloat16", (8, 0), "mma.sync.aligned.m16n8k16.row.col.f32.bf16", 4),
    _product("mma_f16_k8", "float16", (7, 5), "mma.sync.aligned.m16n8k8.row.col.f32.f16", 2),
    _product("mma_tf32", "tf32", (8, 0), "mma.sync.aligned.m16n8k8.row.col.f32.tf32", 4),
]
