"""What the emulated GPU's instructions do: PTX by PTX, on the state of one block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernels.common.philox import PLAIN as PHILOX
from kernels.cuda.emulator.device import GARBAGE, Array, Block
from kernels.cuda.ptx.emulated import numbers
from kernels.cuda.ptx.emulated import warp as emulated

#: Where the first array of global memory lies, and how far apart they do.
GLOBAL, APART = 1 << 40, 1 << 32


class ThreadState:
    """What a thread has of its own: stores without a fence, and what it began and has not waited for."""

    def __init__(self) -> None:
        self.unfenced: list[slice] = []
        self.copies: list[Any] = []
        self.groups: list[list[Any]] = []
        self.stores: list[Any] = []
        self.store_groups: list[list[Any]] = []
        self.products: list[Any] = []
        self.product_groups: list[list[Any]] = []
        self.product_count = 0


class Instructions:
    """The instructions of a thread."""

    states: list[ThreadState]
    shared: Array
    unfenced: Array
    memory: list[Array]
    named: dict[int, tuple[int, list[int]]]
    turns: Any
    block: Block

    def _meet(self, value: Any, act: Callable[[list[Any]], list[Any]]) -> Any:
        return self.block.warps[self.turns.now // 32].hold(value, act)

    @property
    def own(self) -> ThreadState:
        """What the thread whose turn it is has of its own."""
        return self.states[self.turns.now]

    def address(self, space: str, array: Array) -> int:
        if space == "3":
            start = self.shared.__array_interface__["data"][0]
            return array.__array_interface__["data"][0] - start
        for i, known in enumerate(self.memory):
            if np.shares_memory(known, array):
                start = array.__array_interface__["data"][0] - known.__array_interface__["data"][0]
                return GLOBAL + i * APART + start
        raise LookupError("the array is not in global memory")

    def _bytes(self, address: int, count: int) -> Array:
        """Return bytes of global or shared memory; they must all be there."""
        where, at = self.shared, int(address)
        if at >= GLOBAL:
            where, at = self.memory[(at - GLOBAL) // APART], (at - GLOBAL) % APART
        if not 0 <= at <= at + count <= len(where):
            raise IndexError(f"{count} bytes at {at} of {len(where)}")
        return where[at : at + count]

    def _stored(self, address: int, count: int) -> None:
        """Note bytes that the thread stored: in shared memory no engine sees them before a fence."""
        if address < GLOBAL:
            place = slice(int(address), int(address) + count)
            self.unfenced[place] = True
            self.own.unfenced.append(place)

    def load(self, count: str | None, words: Array, address: int) -> None:
        row_of(words, 4)[:] = self._bytes(address, 16).view(np.uint32)

    def load_number(self, address: int) -> int:
        return int(self._bytes(address, 4).view(np.int32)[0])

    def store(self, count: str | None, address: int, words: Any) -> None:
        values = row_of(words, 4) if count else np.array([words], np.uint32)
        self._bytes(address, values.nbytes)[:] = values.view(np.uint8)
        self._stored(address, values.nbytes)

    def copy(self, size: str, target: int, source: int, bytes_: int) -> None:
        if target % int(size) or source % int(size):
            raise ValueError(f"a copy of {size} bytes from {source} to {target}")
        self._bytes(target, int(size))[:] = GARBAGE
        self.own.copies.append((int(size), target, source, int(bytes_)))

    def commit(self) -> None:
        self.own.groups.append(self.own.copies)
        self.own.copies = []

    def wait(self, pending: str) -> None:
        done = len(self.own.groups) - int(pending)
        for size, target, source, bytes_ in (c for g in self.own.groups[:done] for c in g):
            # Of a copy that reads nothing the source may be anywhere.
            arrived = np.zeros(size, np.uint8)
            arrived[:bytes_] = self._bytes(source, bytes_) if bytes_ else 0
            self._bytes(target, size)[:] = arrived
            self._stored(target, size)
        self.own.groups = self.own.groups[max(done, 0) :]

    def wait_all(self) -> None:
        self.commit()
        self.wait("0")

    def ldmatrix(self, count: str, turn: str | None, fragment: Array, address: int) -> None:
        def act(addresses: list[Any]) -> list[Any]:
            return list(emulated.ldmatrix(self.shared, np.array(addresses), int(count), bool(turn)))

        row_of(fragment, int(count))[:] = self._meet(int(address), act)

    def mma(self, depth: str, dtype: str, acc: Array, a: Array, b: Array) -> None:
        is_tf32 = dtype == "tf32"
        registers = int(depth) // (2 if is_tf32 else 4)
        own = row_of(acc, 4).copy(), row_of(a, registers).copy(), row_of(b, registers // 2).copy()

        def act(values: list[Any]) -> list[Any]:
            acc, a, b = map(np.stack, zip(*values, strict=True))
            if is_tf32:
                return list(emulated.mma_tf32(acc, a, b))
            return list(emulated.mma(acc, a, b, DTYPES[dtype]))

        row_of(acc, 4)[:] = self._meet(own, act)

    def pack(self, dtype: str, low: Any, high: Any) -> Any:
        return numbers.pack(low, high, DTYPES[dtype])[()]

    def draw(self, spec: str, *given: int) -> tuple[int, ...]:
        threshold, low, high, block, row, flat = map(int, given)
        found = [0, 0]
        for one in spec.split():
            more_rows, more_blocks, *places = map(int, one.split(","))
            words = PHILOX.attention_words(
                low | high << 32, flat, row + more_rows, block + more_blocks
            )
            halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
            for number, half in enumerate(halves):
                place, below = places[2 * (number // 4) :][:2]
                found[place] |= int(half >= threshold) << (8 * (number % 4) + 7 - below)
        return tuple(found)

    def permute(self, x: int, y: int, selector: int) -> int:
        eight = int(x) | int(y) << 32
        return sum((eight >> 8 * (int(selector) >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))

    def spread(self, selector: str, x: int) -> int:
        bytes_ = [(int(x) >> 8 * (int(one, 16) - 8)) & 0x80 for one in reversed(selector)]
        return sum(0xFF << 8 * i for i, byte in enumerate(bytes_) if byte)

    def pack_positive(self, dtype: str, low: Any, high: Any) -> Any:
        return self.pack(dtype, *(np.where(x < 0, np.float32(0), x) for x in (low, high)))

    def unpack(self, kind: str, pair: Any) -> Any:
        return tuple(numbers.unpack(pair, "float16" if kind == "16" else "bfloat16"))

    def store_floats(self, address: int, values: Array) -> None:
        self._bytes(address, 16).view(np.float32)[:] = row_of(values, 4)
        self._stored(address, 16)

    def store_pair(self, address: int, x: Any, y: Any) -> None:
        self._bytes(address, 8).view(np.float32)[:] = x, y

    def load_pair(self, address: int) -> Any:
        return tuple(self._bytes(address, 8).view(np.float32))

    def add(self, count: str | None, address: int, *values: Any) -> None:
        values = tuple(row_of(values[0], 4)) if count == "4" else values
        self._bytes(address, 4 * len(values)).view(np.float32)[:] += values

    def put_larger(self, address: int, x: Any) -> None:
        place = self._bytes(address, 4).view(np.float32)
        place[:] = max(place[0], np.float32(x))

    def load_word(self, address: int) -> Any:
        return self._bytes(address, 4).view(np.uint32)[0]

    def stmatrix(self, address: int, fragment: Array) -> None:
        def act(values: list[Any]) -> list[Any]:
            addresses, registers = zip(*values, strict=True)
            emulated.stmatrix(self.shared, np.array(addresses), np.stack(registers))
            return values

        self._stored(address, 16)
        self._meet((int(address), row_of(fragment, 4).copy()), act)

    def nothing(self, *_: Any) -> None:
        pass

    def bar(self, what: str, barrier: int, threads: int) -> None:
        count, waiting = self.named.pop(int(barrier), (0, []))
        if what == "sync":
            waiting.append(self.turns.now)
        if count + 1 == threads:
            self.turns.wake(waiting)
        else:
            self.named[int(barrier)] = count + 1, waiting
        if what == "sync":
            self.turns.wait()


def row_of(fragment: Array, count: int) -> Array:
    """Return as many elements from a row on, those of the next rows too."""
    if fragment.ndim == 1 and len(fragment) >= count:
        return fragment[:count]
    return np.lib.stride_tricks.as_strided(fragment, (count,), (fragment.itemsize,))


def _number(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of arrays as one of numbers."""
    return lambda *numbers: function(*numbers)[()]


#: What an instruction begins with → the method, or the function of numbers, that does it.
INSTRUCTIONS: dict[str, Any] = {
    r"mov, from space (\d)": "address",
    r"mov\.b32 \$result, \$x": lambda x: x,
    r"mov\.b32 \$result, \$number": lambda x: np.float32(x).view(np.uint32),
    r"mov\.b32 \$result, \$bits": lambda bits: np.uint32(bits).view(np.float32),
    r"ld\.\w+\.(v4)\.u32": "load",
    r"st\.[\w.]+?(\.v4)?\.u32": "store",
    r"st\.shared\.v4\.f32": "store_floats",
    r"st\.global\.v2\.f32": "store_pair",
    r"ld\.shared\.v2\.f32": "load_pair",
    r"ld\.shared\.s32": "load_number",
    r"red\.global\.add(?:\.v(\d))?\.f32": "add",
    r"\{ \.reg \.b32 bits;\s+mov\.b32 bits, \$x;\s+red\.global\.max": "put_larger",
    r"ld\.(?:relaxed|acquire)\.gpu\.global\.u32": "load_word",
    r"cp\.async\.c[ag]\.shared\.global \[\$target\], \[\$source\], (\d+)": "copy",
    r"cp\.async\.commit_group": "commit",
    r"cp\.async\.wait_group (\d+)": "wait",
    r"cp\.async\.wait_all": "wait_all",
    r"ldmatrix\.sync\.aligned\.m8n8\.x(\d)(\.trans)?\.": "ldmatrix",
    r"stmatrix\.sync\.aligned\.m8n8\.x4\.": "stmatrix",
    r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col\.f32\.(f16|bf16|tf32)": "mma",
    r"cvt\.rn\.(f16|bf16)x2\.f32": "pack",
    r"cvt\.rn\.relu\.(f16|bf16)x2\.f32": "pack_positive",
    r"\{ \.reg \.b16 low, high;\s+cvt\.rn\.satfinite\.e4m3x2": _number(numbers.pack_e4m3),
    r"\{ \.reg \.b(16|32) low, high;\s+(?:mov|shl)": "unpack",
    r"cvt\.rna\.tf32": _number(numbers.round_tf32),
    r"ex2\.approx": _number(numbers.ex2),
    r"rcp\.approx": lambda x: np.float32(1) / np.float32(x),
    r"fma\.rn\.f32": _number(numbers.fma),
    r"mul\.rn\.f32": lambda x, y: np.float32(x) * np.float32(y),
    r"sub\.rn\.f32": lambda x, y: np.float32(x) - np.float32(y),
    r"lg2\.approx": _number(numbers.lg2),
    r"tanh\.approx": _number(numbers.tanh),
    r"\{ // philox ([\d, ]+);": "draw",
    r"prmt\.b32 \$result, \$x, \$y, \$selector": "permute",
    r"prmt\.b32 \$result, \$x, 0, 0x([89ab]{4})": "spread",
    r"bar\.(sync|arrive)": "bar",
}  # fmt: skip
DTYPES = {"f16": "float16", "bf16": "bfloat16", "tf32": "tf32", "e4m3": "float8_e4m3"}
