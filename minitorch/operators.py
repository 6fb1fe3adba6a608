"""The functions of numbers that scalars, tensors and every backend share.

The functions of one or two numbers use arithmetic and `math` only, because the backends hand these
very functions to a compiler (`numba.njit`, `numba.cuda.jit`). The published names `id`, `map`,
`max`, `pow` and `sum` hide Python's own in this module: nothing below may count on the built-ins.
"""

import math
from collections.abc import Callable, Iterable

EPS = 1e-6
"""Keeps `log` and `log_back` finite at zero."""

# ---------------------------------------------------------------------------------------------
# Functions of numbers
# ---------------------------------------------------------------------------------------------


def mul(x: float, y: float) -> float:
    """Multiply x by y."""
    return x * y


def id(x: float) -> float:
    """Return x unchanged."""
    return x


def add(x: float, y: float) -> float:
    """Add y to x."""
    return x + y


def neg(x: float) -> float:
    """Change the sign of x."""
    return -x


def lt(x: float, y: float) -> float:
    """Return 1.0 if x is less than y, else 0.0."""
    return 1.0 if x < y else 0.0


def eq(x: float, y: float) -> float:
    """Return 1.0 if x equals y exactly, else 0.0."""
    return 1.0 if x == y else 0.0


def max(x: float, y: float) -> float:
    """Return the larger of x and y; on a tie, y."""
    return x if x > y else y


def is_close(x: float, y: float) -> float:
    """Return 1.0 if x and y differ by less than 0.01, else 0.0."""
    return 1.0 if abs(x - y) < 1e-2 else 0.0


def sigmoid(x: float) -> float:
    """Compute 1 / (1 + e^-x), which maps any number into [0, 1]."""
    # exp sees only numbers that are not positive: exp(-x) overflows for a large negative x.
    if x >= 0.0:
        return 1.0 / (1.0 + math.exp(-x))
    grown = math.exp(x)
    return grown / (1.0 + grown)


def relu(x: float) -> float:
    """Return x where it is positive, else 0.0; always a float."""
    return float(x) if x > 0.0 else 0.0


def log(x: float) -> float:
    """Compute the natural logarithm of x + EPS."""
    return math.log(x + EPS)


def exp(x: float) -> float:
    """Compute e^x."""
    return math.exp(x)


def pow(x: float, y: float) -> float:
    """Raise x to the power y; a negative x needs a whole y."""
    return math.pow(x, y)


def tanh(x: float) -> float:
    """Compute the hyperbolic tangent of x."""
    return math.tanh(x)


def inv(x: float) -> float:
    """Compute 1 / x."""
    return 1.0 / x


def log_back(x: float, d: float) -> float:
    """Multiply d by the derivative of `log` at x."""
    return d / (x + EPS)


def inv_back(x: float, d: float) -> float:
    """Multiply d by the derivative of `inv` at x."""
    return -d / (x * x)


def relu_back(x: float, d: float) -> float:
    """Multiply d by the derivative of `relu` at x, taken as 0.0 at the kink."""
    return d if x > 0.0 else 0.0


# ---------------------------------------------------------------------------------------------
# Functions of functions
# ---------------------------------------------------------------------------------------------


def map(fn: Callable[[float], float]) -> Callable[[Iterable[float]], list[float]]:
    """Lift a function of one number to a function of a list.

    Args:
        fn: The function to apply to each element.

    Returns:
        A function from (x1, x2, ...) to the list [fn(x1), fn(x2), ...].
    """

    def map_list(ls: Iterable[float]) -> list[float]:
        return [fn(x) for x in ls]

    return map_list


def zipWith(
    fn: Callable[[float, float], float],
) -> Callable[[Iterable[float], Iterable[float]], list[float]]:
    """Lift a function of two numbers to a function of two equally long lists.

    Args:
        fn: The function to apply to each pair.

    Returns:
        A function from (x1, x2, ...) and (y1, y2, ...) to the list [fn(x1, y1), fn(x2, y2), ...].
        It raises ValueError if one list is shorter than the other.
    """

    def zip_lists(ls1: Iterable[float], ls2: Iterable[float]) -> list[float]:
        return [fn(x, y) for x, y in zip(ls1, ls2, strict=True)]

    return zip_lists


def reduce(fn: Callable[[float, float], float], start: float) -> Callable[[Iterable[float]], float]:
    """Lift a function of two numbers to a function that folds a list into one number.

    Args:
        fn: The function that joins the value so far with the next element, in that order.
        start: The value before the first element, and so the result for an empty list.

    Returns:
        A function from (x1, x2, ...) to fn(fn(fn(start, x1), x2), ...).
    """

    def reduce_list(ls: Iterable[float]) -> float:
        total = start
        for x in ls:
            total = fn(total, x)
        return total

    return reduce_list


def negList(ls: Iterable[float]) -> list[float]:
    """Change the sign of each element."""
    return map(neg)(ls)


def addLists(ls1: Iterable[float], ls2: Iterable[float]) -> list[float]:
    """Add two equally long lists element by element."""
    return zipWith(add)(ls1, ls2)


def sum(ls: Iterable[float]) -> float:
    """Add up a list, starting at 0.0."""
    return reduce(add, 0.0)(ls)


def prod(ls: Iterable[float]) -> float:
    """Multiply up a list, starting at 1.0."""
    return reduce(mul, 1.0)(ls)
