"""Where Python's ``math`` raises, what every other backend computes: infinity, or NaN.

``math.exp(1000.0)`` is an OverflowError, and e^1000 in an array infinity.  A tensor is an array: one
element that overflows must not end the computation of all others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from .. import operators

#: What raises → the same by NumPy, which does not.
_UNRAISING: dict[Callable[..., Any], Callable[..., Any]] = {
    operators.exp: np.exp,
    operators.log: lambda x: np.log(x + operators.EPS),
    operators.pow: np.power,  # beyond module 2
}


def unraising(make_loop: Callable[[Any], Callable[..., None]]) -> Callable[[Any], Any]:
    """Wrap a factory of loops: one that raises runs again, with NumPy for the numbers at which it does.

    Args:
        make_loop: Makes the loop of a function of ``operators``; it writes all of its output.

    Returns:
        A factory of loops with the same arguments.
    """

    @wraps(make_loop)
    def make(fn: Callable[..., Any]) -> Callable[..., None]:
        loop, numpy_fn = make_loop(fn), _UNRAISING.get(fn)
        if numpy_fn is None:
            return loop

        def either(*numbers: Any) -> Any:
            try:
                return fn(*numbers)
            except (OverflowError, ValueError):
                return numpy_fn(*numbers)

        again = make_loop(either)

        def run(*arguments: Any) -> None:
            try:
                loop(*arguments)
            except (OverflowError, ValueError):
                with np.errstate(all="ignore"):
                    again(*arguments)

        return run

    return make
