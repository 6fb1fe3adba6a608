"""What the options of attention cost: time with an option over time without it, forward and backward.

    python project/bench_options.py                     on the CPU
    python project/bench_options.py --device cuda       on a GPU
    python project/bench_options.py --only "butterfly" "dropout" --json out.json

Every figure is the median of ratios of interleaved pairs: first the one, then what it is compared with.
Time should follow work: a block-sparse pattern that visits a part s of the tiles should take s of the time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from bench.contestants import ArrayCall
from bench.measuring import command_line, interleaved, name_of, ratio, timing_note, write_record
from common.command_line import POSITIVE
from tqdm import tqdm

import kernels
from kernels import BlockMask
from kernels.cuda.runtime.arrays import to_device
from kernels.runtime.targets import why_no_cuda


class Size(NamedTuple):
    """Lengths and heads for a device."""

    heads: int
    length: int
    sparse_length: int
    sparse_heads: int


SIZES = {"cpu": Size(4, 2048, 16384, 1), "cuda": Size(64, 4096, 16384, 32)}
HEAD_DIM = 64
CACHE = 8192


class Packed:
    """Packed sequences in one call.

    Args:
        device: "cpu" or "cuda".
        heads: Of q, k and v.
        lengths: Of the sequences.
    """

    def __init__(self, device: str, heads: int, lengths: list[int]):
        rng = np.random.default_rng(0)
        place = to_device if device == "cuda" else lambda array: array
        shape = (sum(lengths), heads, HEAD_DIM)
        self.q, self.k, self.v, self.dout = (
            place(rng.standard_normal(shape, dtype=np.float32)) for _ in range(4)
        )
        self.sums = np.concatenate([[0], np.cumsum(lengths)])
        self.results: Any = None

    def forward(self) -> None:
        """Compute out and lse of all sequences."""
        self.results = kernels.flash_attention_varlen_forward(
            self.q, self.k, self.v, self.sums, self.sums, is_causal=True
        )

    def backward(self) -> None:
        """Compute dq, dk and dv of all sequences."""
        kernels.flash_attention_varlen_backward(
            self.dout, self.q, self.k, self.v, *self.results, self.sums, self.sums, is_causal=True
        )


class Several:
    """Several calls one after the other.

    Args:
        calls: To be timed together.
    """

    def __init__(self, calls: list[ArrayCall]):
        self.calls = calls

    def forward(self) -> None:
        """Run all of them forward."""
        for call in self.calls:
            call.forward()

    def backward(self) -> None:
        """Run all of them backward."""
        for call in self.calls:
            call.backward()


class Figure(NamedTuple):
    """Two calls to be compared, and the ratio that is aimed at.

    Attributes:
        call: The one with the option.
        other: What it is compared with.
        bound: Of the ratio; None where there is none.
        backward: Whether it has a backward pass.
    """

    call: Any
    other: Any
    bound: float | None
    backward: bool = True


def figures(device: str) -> dict[str, Callable[[], Figure]]:
    """Return what is measured, by name; a figure takes its memory when it is called."""
    size = SIZES[device]
    heads, n, sparse_n = size.heads, size.length, size.sparse_length
    rng = np.random.default_rng(1)

    def against_plain(bound: float | None, **options: Any) -> Callable[[], Figure]:
        return lambda: Figure(
            ArrayCall(device, heads, n, **options), ArrayCall(device, heads, n), bound
        )

    def sparse(mask: BlockMask) -> Callable[[], Figure]:
        bound = 1.2 * mask.density + 0.1
        return lambda: Figure(
            ArrayCall(device, size.sparse_heads, sparse_n, block_mask=mask),
            ArrayCall(device, size.sparse_heads, sparse_n),
            bound,
        )

    patterns = {
        "butterfly": BlockMask.butterfly(sparse_n, sparse_n, 64),
        "local": BlockMask.local(sparse_n, sparse_n, 1024, 1024, 64),
        "bigbird": BlockMask.bigbird(sparse_n, sparse_n, 64),
        "strided": BlockMask.strided(sparse_n, sparse_n, 64),
    }
    lengths = [int(x) for x in rng.integers(n // 8, n, 8)]
    slopes = 2.0 ** -np.arange(1, heads + 1)
    return {
        "causal / dense": lambda: Figure(
            ArrayCall(device, heads, 2 * n, is_causal=True), ArrayCall(device, heads, 2 * n), 0.6
        ),
        "boolean mask / plain": against_plain(1.5, attn_mask=rng.random((n, n)) < 0.9),
        "floating mask / plain": against_plain(
            None, attn_mask=rng.standard_normal((n, n), dtype=np.float32)
        ),
        "dropout / plain": against_plain(1.5, dropout_p=0.1, seed=1),
        "ALiBi / plain": against_plain(None, alibi_slopes=slopes),
        "softcap / plain": against_plain(None, softcap=30.0),
        **{
            f"{name}, density {mask.density:.3f} / dense": sparse(mask)
            for name, mask in patterns.items()
        },
        "window of 1,024: 65,536 rows / 16,384 rows": lambda: Figure(
            ArrayCall(device, min(8, size.sparse_heads), 65536, window_size=(512, 511)),
            ArrayCall(device, min(8, size.sparse_heads), 16384, window_size=(512, 511)),
            4.4,
        ),
        "packed / the sum of its parts": lambda: Figure(
            Packed(device, heads, lengths),
            Several([ArrayCall(device, heads, length, is_causal=True) for length in lengths]),
            1.15,
        ),
        "one token against a cache / computing all": lambda: Figure(
            ArrayCall(device, heads, 1, CACHE, is_causal=True, causal_offset=CACHE - 1),
            ArrayCall(device, heads, CACHE, is_causal=True),
            1 / 50,
            backward=False,
        ),
    }


def measure(figure: Figure, device: str, budget: float) -> dict[str, Any]:
    """Return milliseconds and the median ratio of each direction."""
    row: dict[str, Any] = {"bound": figure.bound}
    for direction in ("forward", "backward") if figure.backward else ("forward",):
        steps = {"call": figure.call, "other": figure.other}
        times = interleaved(
            {name: getattr(one, direction) for name, one in steps.items()}, device, budget
        )
        row[direction] = {
            "ms": 1e3 * median(times["call"]),
            "other_ms": 1e3 * median(times["other"]),
            "ratio": ratio(times["call"], times["other"])["median"],
            "pairs": len(times["call"]),
        }
    return row


def table(rows: dict[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    lines = ["| figure | forward | backward | at most |", "|---|---:|---:|---:|"]
    for name, row in rows.items():
        ratios = [f"{row[d]['ratio']:.3g}" if d in row else "–" for d in ("forward", "backward")]
        bound = "–" if row["bound"] is None else f"{row['bound']:.3g}"
        lines.append(f"| {name} | {' | '.join(ratios)} | {bound} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="figures whose names hold it")
    parser.add_argument("--seconds", type=POSITIVE, default=3.0, help="to spend on each direction")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    args = parser.parse_args(argv)
    if args.device == "cuda" and (missing := why_no_cuda()) is not None:
        sys.exit(missing)
    chosen = {
        name: make
        for name, make in figures(args.device).items()
        if not args.only or any(text in name for text in args.only)
    }
    device = name_of(args.device)
    rows: dict[str, Any] = {}
    for name, make in tqdm(chosen.items(), unit="figure"):
        rows[name] = measure(make(), args.device, args.seconds)
        if args.json:  # at once: the next figure may take long
            command = command_line("project/bench_options.py", argv)
            sizes, timing = SIZES[args.device]._asdict(), timing_note(args.device)
            write_record(args.json, command, device, timing=timing, sizes=sizes, rows=rows)
    print(f"{device}, float32, head_dim {HEAD_DIM}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
