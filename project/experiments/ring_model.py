r"""How long ring attention takes on several devices: an alpha-beta model of its steps.

    python project/experiments/ring_model.py --ranks 8 --tokens 1048576
    python project/experiments/ring_model.py --ranks 2 --tokens 65536 --forward 600 --backward 450 \
        --latency 10 --bandwidth 450 --no-overlap

A rank computes N/n rows.  In each of n steps it attends to N/n keys, which takes A/(n² F) seconds, where A
is the number of operations of the whole attention and F a rank's FLOP/s, and a time for each call of the
kernels.  Meanwhile it sends 2 (N/n) h_k d numbers to the next rank: a message of m bytes takes
alpha + m/beta seconds.  In the backward pass the gradients of keys and values travel too, in float32.

Source: Hockney, The communication challenge for MPP (1994), for alpha and beta; Liu, Zaharia and Abbeel,
Ring Attention (2023), section 3, for which block hides its transfer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from common.command_line import COUNT, NOT_NEGATIVE, POSITIVE, OneLineParser  # noqa: E402

from kernels.traffic.formulas import attention_backward_flops, attention_flops  # noqa: E402

#: Bytes of an element of the gradients that travel.
GRADIENT_BYTES = 4
#: Calls of the kernels in a step: two chunks of rows each see one of the two chunks of keys, under a mask.
CALLS = 2


class Machine(NamedTuple):
    """What a rank and its link do.

    Attributes:
        forward: FLOP/s of a forward pass.
        backward: FLOP/s of a backward pass, counting five products.
        latency: Of a message, alpha, in seconds.
        bandwidth: Of a link in one direction, beta, in bytes/s.
        call: Seconds that a call of the kernels takes beside its operations.
        overlaps: Whether messages travel while the rank computes.
    """

    forward: float
    backward: float
    latency: float
    bandwidth: float
    call: float = 0.0
    overlaps: bool = True


class Work(NamedTuple):
    """One attention over a whole sequence.

    Attributes:
        tokens: Queries and keys, N.
        heads: Of the queries, h.
        key_heads: Of keys and values, h_k.
        head_dim: d.
        itemsize: Bytes of an element of keys and values.
        causal: Whether a causal mask halves the work.
    """

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
    """Seconds of a pass on each rank.

    Attributes:
        compute: In which the rank computes.
        transfer: In which messages travel.
        total: Of the pass.
    """

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
    """Return the time of a pass of ring attention.

    Args:
        work: The whole attention.
        ranks: That share it, n.
        machine: Each of them.
        way: "forward" or "backward".
    """
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


def add_options(parser: OneLineParser) -> None:
    """Add the options that describe a GPU, its link and an attention to a parser."""
    parser.option("--heads", COUNT, 32, "of the queries")
    parser.option("--key-heads", COUNT, 8, "of keys and values")
    parser.option("--head-dim", COUNT, 128, "of all of them")
    parser.option("--forward", POSITIVE, 600.0, "TFLOP/s of a forward pass on one GPU")
    parser.option("--backward", POSITIVE, 450.0, "TFLOP/s of a backward pass, five products")


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.option("--ranks", COUNT, 8, "GPUs, one rank each")
    parser.option("--tokens", COUNT, 2**20, "of the whole sequence")
    add_options(parser)
    parser.option("--latency", NOT_NEGATIVE, 10.0, "of a message, microseconds")
    parser.option("--bandwidth", POSITIVE, 450.0, "of a link in one direction, GB/s")
    parser.option("--call", NOT_NEGATIVE, 10.0, "microseconds of a call beside its operations")
    parser.option("--itemsize", COUNT, 2, "bytes of an element")
    parser.add_argument("--no-overlap", action="store_true", help="messages travel between steps")
    parser.add_argument("--full", action="store_true", help="no causal mask")
    args = parser.parse_args(argv)
    work = Work(
        args.tokens, args.heads, args.key_heads, args.head_dim, args.itemsize, not args.full
    )
    machine = Machine(
        args.forward * 1e12, args.backward * 1e12, args.latency * 1e-6, args.bandwidth * 1e9,
        args.call * 1e-6, not args.no_overlap,
    )  # fmt: skip
    for way in ("forward", "backward"):
        time = ring_time(work, args.ranks, machine, way)
        print(
            f"{way:8}  {time.total * 1e3:.4g} ms: {time.compute * 1e3:.4g} ms of compute, "
            f"{time.transfer * 1e3:.4g} ms of transfer; waits for {time.exposed:.1%} of the time"
        )
    rows = hiding_rows(work, machine)
    print(
        f"a forward step hides its transfer from {rows:,.0f} tokens a rank on; here a rank has "
        f"{work.tokens / args.ranks:,.0f}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
