"""Module 3: print what numba says of how it runs the loops of the fast backend in parallel.

python project/parallel_check.py                   map, zip, reduce and the matrix product
python project/parallel_check.py --level 1         shorter; 4 says most

Look for the loops marked as parallel, for what was fused, and for allocations that numba hoisted out of a
loop.  This takes about ten seconds: numba's cache keeps no diagnostics, so the loops are compiled again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from common.command_line import OneLineParser
from numba import njit
from training.script_helpers import ends_in_one_line

import minitorch
from minitorch import fast_ops, operators


def map_loop() -> tuple[Any, tuple[Any, ...]]:
    out, a = minitorch.zeros((10,)), minitorch.zeros((10,))
    return fast_ops.tensor_map(njit()(operators.id)), (*out.tuple(), *a.tuple())


def zip_loop() -> tuple[Any, tuple[Any, ...]]:
    out, a, b = (minitorch.zeros((10,)) for _ in range(3))
    return fast_ops.tensor_zip(njit()(operators.eq)), (*out.tuple(), *a.tuple(), *b.tuple())


def reduce_loop() -> tuple[Any, tuple[Any, ...]]:
    out, a = minitorch.zeros((1,)), minitorch.zeros((10,))
    return fast_ops.tensor_reduce(njit()(operators.add)), (*out.tuple(), *a.tuple(), 0)


def product_loop() -> tuple[Any, tuple[Any, ...]]:
    out, a, b = (minitorch.zeros((1, 10, 10)) for _ in range(3))
    return fast_ops.tensor_matrix_multiply, (*out.tuple(), *a.tuple(), *b.tuple())


#: Each returns a compiled loop of its own, and arguments to compile it for.
LOOPS: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "MAP": map_loop,
    "ZIP": zip_loop,
    "REDUCE": reduce_loop,
    "MATRIX MULTIPLY": product_loop,
}


def show(name: str, level: int) -> None:
    """Print what numba says of one of the loops."""
    print(f"\n{name}\n")
    loop, arguments = LOOPS[name]()
    loop(*arguments)
    loop.parallel_diagnostics(level=level)


def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--level", type=int, choices=(1, 2, 3, 4), default=3,
        help="how much numba says (default: %(default)s)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    with ends_in_one_line("--level"):
        for name in LOOPS:
            show(name, args.level)


if __name__ == "__main__":
    main()
