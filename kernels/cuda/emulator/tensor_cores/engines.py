"""What Hopper's engines do on the emulated GPU: mbarriers, the copy engine, the products of warpgroups."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kernels.cuda.emulator.device import GARBAGE, Array, Block
from kernels.cuda.emulator.schedule import GROUP, WARP, Meeting
from kernels.cuda.ptx.emulated import warp as emulated
from kernels.cuda.ptx.emulated import wgmma as emulated_wgmma

from ..tensor_maps import decoded
from .instructions import DTYPES, INSTRUCTIONS, Instructions, ThreadState, row_of


class MemoryBarrier:
    """An ``mbarrier``."""

    def __init__(self, count: int):
        self.count = self.missing = count
        self.bytes = self.phase = 0
        self.waiting: list[int] = []

    def update(self, arrivals: int, bytes_: int) -> list[int]:
        """Count arrivals, and bytes announced, or that have come where negative; return who may go on."""
        self.missing -= arrivals
        self.bytes += bytes_
        if self.missing or self.bytes:
            return []
        self.missing, self.phase = self.count, self.phase + 1
        woken, self.waiting = self.waiting, []
        return woken


class Product:
    """A product of a warpgroup.

    Attributes:
        is_early: It reads what it is given when the last thread has asked for it, not when all wait for it.
        count: Threads that have asked for it.
        shared: What shared memory was then.
    """

    def __init__(self, is_early: bool):
        self.is_early, self.count = is_early, 0
        self.shared: Array | None = None


class Engines(Instructions):
    """The instructions that need compute capability 9.0."""

    def begin_block(self, block: Block) -> None:
        """Begin a block."""
        threads = block.threads
        self.shared, self.turns, self.block = block.shared, block.turns, block
        self.unfenced = np.zeros(len(block.shared), bool)
        self.states = [ThreadState() for _ in range(threads)]
        self.named: dict[int, tuple[int, list[int]]] = {}
        self.barriers: dict[int, MemoryBarrier] = {}
        self.products: list[list[Product]] = [[] for _ in range(threads // GROUP)]
        self.groups = [
            Meeting(first, GROUP, GROUP, block.turns)
            for first in range(0, threads - GROUP + 1, GROUP)
        ]

    def _meet_group(self, value: Any, act: Callable[[list[Any]], list[Any]]) -> Any:
        return self.groups[self.turns.now // GROUP].hold(value, act)

    def _came(self, address: int, count: int, barrier: int) -> None:
        """Tell a barrier of bytes of shared memory that the copy engine wrote."""
        self.unfenced[int(address) : int(address) + count] = False
        self._update(barrier, 0, -int(count))

    def fence(self) -> None:
        """Let engines see what the thread has stored."""
        for place in self.own.unfenced:
            self.unfenced[place] = False
        self.own.unfenced = []

    def _as_engines_see(self) -> Array:
        """Return shared memory as the copy engine and the products of warpgroups see it."""
        if not self.unfenced.any():
            return self.shared
        return np.where(self.unfenced, np.uint8(GARBAGE), self.shared)

    def check_ended(self) -> None:
        """Check that a thread that ends has waited for all the copies and products that it asked for."""
        own = self.own
        asked = own.copies or any(own.groups) or own.stores or own.store_groups
        if asked or own.products or own.product_groups:
            raise RuntimeError("a thread has ended before the copies or products that it asked for")

    # -- mbarriers ---------------------------------------------------------------------------

    def mbarrier_init(self, barrier: int, count: int) -> None:
        self.barriers[int(barrier)] = MemoryBarrier(int(count))

    def _update(self, barrier: int, arrivals: int, bytes_: int) -> None:
        self.turns.wake(self.barriers[int(barrier)].update(arrivals, bytes_))

    def mbarrier_arrive(self, barrier: int) -> None:
        self._update(barrier, 1, 0)

    def mbarrier_arrive_expect(self, barrier: int, bytes_: int) -> None:
        self._update(barrier, 1, int(bytes_))

    def mbarrier_try_wait(self, barrier: int, parity: int) -> int:
        """Wait once, if at all: who comes late may find the next phase, which has the other parity."""
        one = self.barriers[int(barrier)]
        if one.phase % 2 == parity:
            one.waiting.append(self.turns.now)
            self.turns.wait()
        return int(one.phase % 2 != parity)

    # -- the copy engine -----------------------------------------------------------------------

    def bulk_load(self, target: int, source: int, bytes_: int, barrier: int) -> None:
        if target % 16 or source % 16 or bytes_ % 16:
            raise ValueError(f"a bulk copy of {bytes_} bytes from {source} to {target}")
        self._bytes(target, bytes_)[:] = GARBAGE

        def arrive() -> None:
            self._bytes(target, bytes_)[:] = self._bytes(source, bytes_)
            self._came(target, bytes_, barrier)

        self.turns.copies.append(arrive)

    def _store(self, store: Callable[[], None]) -> None:
        """Do what the engine writes to global memory, now or when it is waited for."""
        if self.turns.drawn() < 0.5:
            store()
        else:
            self.own.stores.append(store)

    def bulk_add(self, target: int, source: int, bytes_: int) -> None:
        def store() -> None:
            values = self._as_engines_see()[source : source + bytes_].view(np.float32)
            self._bytes(target, bytes_).view(np.float32)[:] += values

        self._store(store)

    def bulk_commit(self) -> None:
        self.own.store_groups.append(self.own.stores)
        self.own.stores = []

    def bulk_wait(self, pending: str) -> None:
        while len(self.own.store_groups) > int(pending):
            for store in self.own.store_groups.pop(0):
                store()

    def tensor_load(self, target: int, tensor_map: int, barrier: int, start: Any) -> None:
        tensor, box, swizzle = decoded(self._bytes(tensor_map, 128).tobytes())
        size = int(np.prod(box)) * tensor.itemsize
        if target % max(8 * swizzle, 128):
            raise ValueError(f"a box with a swizzle of {swizzle} bytes to {target}")
        self._bytes(target, size)[:] = GARBAGE

        def arrive() -> None:
            emulated.tensor_load(self.shared, int(target), tensor, box, start, swizzle)
            self._came(target, size, barrier)

        self.turns.copies.append(arrive)

    def tensor_store(self, tensor_map: int, start: Any, source: int) -> None:
        tensor, box, swizzle = decoded(self._bytes(tensor_map, 128).tobytes())

        def store() -> None:
            places = int(source) + emulated.box_places(box, tensor.itemsize, swizzle)
            seen = self._as_engines_see()[places]
            values = np.ascontiguousarray(seen).view(tensor.dtype)[..., 0]
            of_box, there = emulated.inside(box, start, tensor.shape)
            tensor[there] = values[of_box]

        self._store(store)

    # -- warpgroups ----------------------------------------------------------------------------

    def wgmma(
        self, cols: str, dtype: str, turned: str, acc: Array, a: Any, b: int, add: int = 0
    ) -> None:
        own = row_of(acc, int(cols) // 2)
        flags = tuple(flag == "1" for flag in turned.split(", ")[1:])
        left = row_of(a, 4) if isinstance(a, np.ndarray) else int(a) % (1 << 64)
        is_transposed = (False, *flags)[-2:] if flags else (False, False)
        product = self._product()
        product.count += 1
        if product.count == GROUP and product.is_early:
            product.shared = self._as_engines_see().copy()
        if product.is_early and isinstance(left, np.ndarray):
            left = left.copy()
        rest = int(b) % (1 << 64), DTYPES[dtype], *is_transposed, bool(add)
        self.own.products.append((own, left, product, rest))

    def _product(self) -> Product:
        """Return the next product of the thread, which its warpgroup shares."""
        own, products = self.own, self.products[self.turns.now // GROUP]
        if own.product_count == len(products):
            products.append(Product(self.turns.drawn() < 0.5))
        own.product_count += 1
        return products[own.product_count - 1]

    def wgmma_commit(self) -> None:
        self.own.product_groups.append(self.own.products)
        self.own.products = []

    def wgmma_wait(self, pending: str) -> None:
        """Do the products: what they read must be there from the first and not written anew until now."""
        done = max(len(self.own.product_groups) - int(pending), 0)
        for own, left, product, rest in (
            one for group in self.own.product_groups[:done] for one in group
        ):
            act = partial(self._multiply, product, rest)
            own[:] = self._meet_group((own.copy(), np.copy(left)), act)
        self.own.product_groups = self.own.product_groups[done:]

    def _multiply(self, product: Product, rest: Any, values: list[Any]) -> list[Any]:
        accumulators, lefts = zip(*values, strict=True)
        acc = np.stack(accumulators).reshape(4, WARP, -1)
        left = np.stack(lefts).reshape(4, WARP, 4) if lefts[0].ndim else int(lefts[0])
        shared = self._as_engines_see() if product.shared is None else product.shared
        product.shared = None  # it was read
        result = emulated_wgmma.wgmma(shared, acc, left, *rest)
        return list(result.reshape(GROUP, -1))


#: What an instruction begins with → the method that does it.
OF_ENGINES = {
    r"fence\.proxy\.async": "fence",
    r"fence\.mbarrier_init|prefetch\.tensormap|setmaxnreg\.|wgmma\.fence": "nothing",
    r"mbarrier\.init": "mbarrier_init",
    r"mbarrier\.arrive\.expect_tx": "mbarrier_arrive_expect",
    r"mbarrier\.arrive\.shared": "mbarrier_arrive",
    r"\{ \.reg \.pred ended": "mbarrier_try_wait",
    r"cp\.async\.bulk\.shared": "bulk_load",
    r"cp\.reduce\.async\.bulk\.global": "bulk_add",
    r"cp\.async\.bulk\.commit_group": "bulk_commit",
    r"cp\.async\.bulk\.wait_group(?:\.read)? (\d+)": "bulk_wait",
    r"cp\.async\.bulk\.tensor\.\dd\.shared": "tensor_load",
    r"cp\.async\.bulk\.tensor\.\dd\.global": "tensor_store",
    r"(?s)\{.*wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k\d+\.f32\.(\w+).*accumulate, 1, 1(.*); \}":
        "wgmma",
    r"wgmma\.commit_group": "wgmma_commit",
    r"wgmma\.wait_group\.sync\.aligned (\d+)": "wgmma_wait",
}  # fmt: skip

_METHODS = INSTRUCTIONS | OF_ENGINES
ENGINES = Engines()


def instruction(ptx: str) -> Callable[..., Any]:
    """Return the function that does what an instruction does."""
    for pattern, name in _METHODS.items():
        if (found := re.match(pattern, ptx)) is not None:
            method = getattr(ENGINES, name) if isinstance(name, str) else name
            return partial(method, *found.groups())
    raise NotImplementedError(f"the emulated GPU does not know {ptx!r}; add what it does")
