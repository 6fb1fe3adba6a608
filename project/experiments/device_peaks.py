"""What a device can do at most: floating-point operations and bytes a second, measured by small loops.

A roofline drawn with a data sheet's figures says what a clock that the device may never have would allow.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from bench.measuring import interleaved
from numba import float32, int64, njit, prange, void

from kernels.cuda.runtime.arrays import empty_device
from kernels.cuda.runtime.kernel import Kernel, array_type
from kernels.runtime.targets import cuda

#: Of the CPU's loop: work items, turns, and chains side by side.  How many of them a compiler keeps in
#: vector registers is its affair, so that there are two loops, and the faster counts.
ITEMS, CPU_TURNS, LANES = 64, 20_000, (128, 256)
#: Elements that are copied: more than any cache holds.
COPIED = {"cpu": 1 << 25, "cuda": 1 << 28}
#: Of the loop of multiply-adds: blocks, threads a block, and turns of eight chains of four.
BLOCKS, THREADS, TURNS = 2112, 256, 2048
CHAINS, UNROLL = 8, 4


class Peaks(NamedTuple):
    """The roof.

    Attributes:
        tflops: Operations a second in float32, without tensor cores, in units of 10¹².
        gbs: Bytes copied a second, read and written together, in units of 10⁹.
    """

    tflops: float
    gbs: float


@njit(parallel=True)
def _copy(source, out):
    for i in prange(source.shape[0]):
        out[i] = source[i]


def _make_chains(lanes: int) -> Any:
    """Return a loop of multiply-adds for the CPU: so many chains side by side, none waits for another."""

    @njit(parallel=True, fastmath={"contract"})
    def chains(out, turns, factor):
        for item in prange(out.shape[0]):
            acc = np.empty(lanes, np.float32)
            for i in range(lanes):
                acc[i] = float32(i)
            for _ in range(turns):
                for i in range(lanes):
                    acc[i] = acc[i] * factor + factor
            out[item] = acc.sum()

    return chains


@cache
def copy_kernel() -> Kernel:
    """Return a kernel that copies a flat array."""

    def copy_flat(source, out):
        """Copy element by element, neighbouring threads neighbouring elements."""
        i = cuda.grid(1)
        if i < out.shape[0]:
            out[i] = source[i]

    flat = array_type(np.dtype(np.float32), 1)
    return Kernel(copy_flat, void(flat, flat), THREADS)


@cache
def multiply_add_kernel() -> Kernel:
    """Return a kernel of nothing but multiply-adds: eight chains a thread, none waits for another."""

    def multiply_adds(out, turns, factor):
        """Run the chains, and write their sum so that the compiler leaves them there."""
        chains = cuda.local.array(CHAINS, float32)
        for c in range(CHAINS):
            chains[c] = float32(c) + factor
        for _ in range(turns):
            for _u in range(UNROLL):
                for c in range(CHAINS):
                    chains[c] = chains[c] * factor + factor
        total = float32(0)
        for c in range(CHAINS):
            total += chains[c]
        out[cuda.grid(1)] = total

    flat = array_type(np.dtype(np.float32), 1)
    return Kernel(multiply_adds, void(flat, int64, float32), THREADS)


def measure_peaks(device: str, budget: float = 1.0) -> Peaks:
    """Return the best of several rounds of multiply-adds in registers, and of copying an array.

    Args:
        device: "cpu" or "cuda".
        budget: Seconds to spend.
    """
    elements, steps = COPIED[device], dict[str, Any]()
    flops: dict[str, float] = {}
    if device == "cuda":
        source, target = (empty_device((elements,), np.dtype(np.float32)) for _ in range(2))
        sums = empty_device((BLOCKS * THREADS,), np.dtype(np.float32))
        steps["multiply-adds"] = lambda: multiply_add_kernel()[BLOCKS, THREADS](sums, TURNS, 0.5)
        flops["multiply-adds"] = 2.0 * BLOCKS * THREADS * TURNS * UNROLL * CHAINS
        steps["copy"] = lambda: copy_kernel()[elements // THREADS, THREADS](source, target)
    else:
        source, target = (np.zeros(elements, np.float32) for _ in range(2))
        sums, factor = np.zeros(ITEMS, np.float32), np.float32(0.5)
        for lanes in LANES:
            chains = _make_chains(lanes)
            steps[f"{lanes} chains"] = lambda chains=chains: chains(sums, CPU_TURNS, factor)
            flops[f"{lanes} chains"] = 2.0 * ITEMS * CPU_TURNS * lanes
        steps["copy"] = lambda: _copy(source, target)
    times = interleaved(steps, device, budget, least=5)
    most = max(count / min(times[name]) for name, count in flops.items())
    return Peaks(1e-12 * most, 1e-9 * 8 * elements / min(times["copy"]))


#: For the record.
PEAKS_NOTE = (
    "peaks: the best of several rounds of multiply-adds in registers, float32 without tensor cores, and of "
    "copying an array, read and written"
)
