"""How long ring attention takes on several devices: an alpha-beta model of its steps.

A rank computes N/n rows.  In each of n steps it attends to N/n keys, which takes A/(n² F) seconds, where A
is the number of operations of the whole attention and F a rank's FLOP/s, and a time for each call of the
kernels.  Meanwhile it sends 2 (N/n) h_k d numbers to the next rank: a message of m bytes takes
alpha + m/beta seconds.  In the backward pass the gradients of keys and values travel too, in float32.

Source: Hockney, The communication challenge for MPP (1994), for alpha and beta; Liu, Zaharia and Abbeel,
Ring Attention (2023), section 3, for which block hides its transfer.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels.traffic.formulas import attention_backward_flops, attention_flops

#: Bytes of an element of the gradients that travel.
GRADIENT_BYTES = 4
#: Calls of the kernels in a step: two chunks of rows each see one of the two chunks of keys, under a mask.
CALLS = 2


class Machine(NamedTuple):
    """A rank and its link."""

    forward: float  # fLOP/s of a forward pass
    backward: float  # fLOP/s of a backward pass, counting five products
    latency: float  # of a message, alpha, in seconds
    bandwidth: float  # of a link in one direction, beta, in bytes/s
    call: float = 0.0  # seconds that a call of the kernels takes beside its operations
    overlaps: bool = True  # whether messages travel while the rank computes


class Work(NamedTuple):
    """One attention over a whole sequence: N tokens, h heads, h_k key heads of d columns."""

    tokens: int
    heads: int
    key_heads: int
    head_dim: int
    itemsize: int = 2
    causal: bool = True

    def flops(self, way: str) -> float:
        """Return the operations of a pass, "forward" or "backward"."""
        of = attention_flops if way == "forward" else attention_backward_flops
        return of(self.heads, self.tokens, self.tokens, self.head_dim, causal=self.causal)


class Time(NamedTuple):
    """Seconds of a pass on each rank: of compute, of messages, and of the pass."""

    compute: float
    transfer: float
    total: float

    @property
    def exposed(self) -> float:
        """The share of the pass in which a rank waits for messages."""
        return 1.0 - self.compute / self.total


def messages(work: Work, ranks: int, machine: Machine, itemsize: int) -> float:
    """Return the seconds in which two tensors of a rank's keys travel to the next rank."""
    size = work.tokens / ranks * work.key_heads * work.head_dim * itemsize
    return 2.0 * (machine.latency + size / machine.bandwidth)


def ring_time(work: Work, ranks: int, machine: Machine, way: str) -> Time:
    """Return the time of a pass of ring attention, "forward" or "backward", that so many ranks share."""
    rate = machine.forward if way == "forward" else machine.backward
    step = work.flops(way) / ranks**2 / rate + CALLS * machine.call
    compute = ranks * step
    if ranks == 1:
        return Time(compute, 0.0, compute)
    keys = messages(work, ranks, machine, work.itemsize)  # n - 1 times
    back = messages(work, ranks, machine, GRADIENT_BYTES) if way == "backward" else 0.0  # n times
    transfer = (ranks - 1) * keys + ranks * back
    if not machine.overlaps:
        return Time(compute, transfer, compute + transfer)
    # During the first step only keys travel, during the last one only gradients, which then go home.
    between = (ranks - 2) * max(step, keys + back)
    return Time(compute, transfer, max(step, keys) + between + max(step, back) + back)


def hiding_rows(work: Work, machine: Machine) -> float:
    """Return the rows of a rank from which on a forward step takes as long as its transfer.

    4 r² h d / F = 2 r h_k d s / beta for r rows and elements of s bytes, without latency, or half of the
    operations under a causal mask.
    """
    pairs = 0.5 if work.causal else 1.0
    moved = 2.0 * work.key_heads * work.itemsize / machine.bandwidth
    return moved * machine.forward / (4.0 * pairs * work.heads)
