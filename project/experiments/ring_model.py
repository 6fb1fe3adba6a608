r"""How long ring attention takes on several devices, by the model of ``project/bench/ring_time.py``.

    python project/experiments/ring_model.py --ranks 8 --tokens 1048576
    python project/experiments/ring_model.py --ranks 2 --tokens 65536 --forward 600 --backward 450 \
        --latency 10 --bandwidth 450 --no-overlap

Without overlap, messages travel between the steps, as MPI's do on a CPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.ring_time import Machine, Work, hiding_rows, ring_time  # noqa: E402
from common.command_line import COUNT, NOT_NEGATIVE, POSITIVE, OneLineParser  # noqa: E402


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
        f"a forward step hides its transfer if a rank has at least {rows:,.0f} tokens; here it has "
        f"{work.tokens / args.ranks:,.0f}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
