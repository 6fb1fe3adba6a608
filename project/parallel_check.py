"""Module 3: print what numba says of how it runs the loops of the fast backend in parallel.

python project/parallel_check.py                   map, zip, reduce and the matrix product
python project/parallel_check.py --level 1         shorter; 4 says most

Look for the loops marked as parallel, for what was fused, and for allocations that numba hoisted out of a
loop.  This takes about ten seconds: numba's cache keeps no diagnostics, so the loops are compiled again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.command_line import OneLineParser
from numba import njit
from training.script_helpers import ends_in_one_line

import minitorch
from minitorch import fast_ops, operators

ROW, ONE, SQUARE = (10,), (1,), (1, 10, 10)
#: By name: what returns a compiled loop of its own, and the shapes of the tensors to compile it for.
LOOPS: dict[str, tuple[Callable[[], Any], tuple[tuple[int, ...], ...]]] = {
    "MAP": (lambda: fast_ops.tensor_map(njit()(operators.id)), (ROW, ROW)),
    "ZIP": (lambda: fast_ops.tensor_zip(njit()(operators.eq)), (ROW, ROW, ROW)),
    "REDUCE": (lambda: fast_ops.tensor_reduce(njit()(operators.add)), (ONE, ROW)),
    "MATRIX MULTIPLY": (lambda: fast_ops.tensor_matrix_multiply, (SQUARE, SQUARE, SQUARE)),
}


def show(name: str, level: int) -> None:
    """Print what numba says of one of the loops."""
    print(f"\n{name}\n")
    make, shapes = LOOPS[name]
    loop, arguments = make(), [part for shape in shapes for part in minitorch.zeros(shape).tuple()]
    loop(*arguments, *[0] * (name == "REDUCE"))
    loop.parallel_diagnostics(level=level)


def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(description=__doc__)
    level = "how much numba says (default: %(default)s)"
    parser.add_argument("--level", type=int, choices=(1, 2, 3, 4), default=3, help=level)
    args = parser.parse_args(argv)
    with ends_in_one_line("--level"):
        for name in LOOPS:
            show(name, args.level)


if __name__ == "__main__":
    main()
