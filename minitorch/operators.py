"""The functions of numbers that scalars, tensors and every backend share.

The functions of one or two numbers use arithmetic and `math` only, because the backends compile
these functions (with `numba.njit` or `numba.cuda.jit`). In this module, the names `id`, `map`,
`max`, `pow` and `sum`, which the published course chose, hide Python's built-ins, so its functions
cannot call these built-ins.
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
    # TASK 0.1: Multiply x by y.
    return x * y
    # END TASK 0.1


def id(x: float) -> float:
    """Return x unchanged."""
    # TASK 0.1: Return what you were given.
    return x
    # END TASK 0.1


def add(x: float, y: float) -> float:
    """Add y to x."""
    # TASK 0.1: Add x and y.
    return x + y
    # END TASK 0.1


def neg(x: float) -> float:
    """Change the sign of x."""
    # TASK 0.1: Return -x.
    return -x
    # END TASK 0.1


def lt(x: float, y: float) -> float:
    """Return 1.0 if x is less than y, else 0.0."""
    # TASK 0.1: A float, not a bool: 1.0 or 0.0.
    return 1.0 if x < y else 0.0
    # END TASK 0.1


def eq(x: float, y: float) -> float:
    """Return 1.0 if x equals y exactly, else 0.0."""
    # TASK 0.1: A float, not a bool: 1.0 or 0.0.
    return 1.0 if x == y else 0.0
    # END TASK 0.1


def max(x: float, y: float) -> float:
    """Return the larger of x and y; on a tie, y. NaN if one of them is NaN."""
    # TASK 0.1: Compare; Python's own max is hidden here. Only NaN is unequal to itself.
    return x if x > y or x != x else y
    # END TASK 0.1


def is_close(x: float, y: float) -> float:
    """Return 1.0 if x and y differ by less than 0.01, else 0.0."""
    # TASK 0.1: Compare the absolute difference with 0.01.
    # Other courses call this on tensors, element by element, which `abs`, `and` and `if` do not support.
    return 1.0 * (x - y < 1e-2) * (y - x < 1e-2)
    # END TASK 0.1


def sigmoid(x: float) -> float:
    """Compute 1 / (1 + e^-x), which maps any number into [0, 1]."""
    # TASK 0.1: For x < 0 use e^x / (1 + e^x): math.exp(-x) overflows there.
    # The argument of exp is never positive: exp(-x) overflows for a large negative x.
    if x >= 0.0:
        return 1.0 / (1.0 + math.exp(-x))
    grown = math.exp(x)
    return grown / (1.0 + grown)
    # END TASK 0.1


def relu(x: float) -> float:
    """Return x where it is positive, else 0.0; always a float. NaN stays NaN."""
    # TASK 0.1: A float in both branches, 0.0 and not 0. Ask for x <= 0, because NaN compares as False.
    return 0.0 if x <= 0.0 else float(x)
    # END TASK 0.1


def log(x: float) -> float:
    """Compute the natural logarithm of x + EPS; EPS is 1e-6, so that x may be 0."""
    # TASK 0.1: math.log of x + EPS.
    return math.log(x + EPS)
    # END TASK 0.1


def exp(x: float) -> float:
    """Compute e^x."""
    # TASK 0.1: math.exp.
    return math.exp(x)
    # END TASK 0.1


def pow(x: float, y: float) -> float:  # beyond module 2
    """Raise x to the power y; a negative x needs a whole y."""
    return math.pow(x, y)


def tanh(x: float) -> float:  # beyond module 2
    """Compute the hyperbolic tangent of x."""
    return math.tanh(x)


def inv(x: float) -> float:
    """Compute 1 / x."""
    # TASK 0.1: Divide 1.0 by x.
    return 1.0 / x
    # END TASK 0.1


def log_back(x: float, d: float) -> float:
    """Multiply d by the derivative of `log` at x."""
    # TASK 0.1: Derive log(x + EPS) by the chain rule; times d.
    return d / (x + EPS)
    # END TASK 0.1


def inv_back(x: float, d: float) -> float:
    """Multiply d by the derivative of `inv` at x."""
    # TASK 0.1: Write 1 / x as a power of x and derive it; times d.
    return -d / (x * x)
    # END TASK 0.1


def relu_back(x: float, d: float) -> float:
    """Multiply d by the derivative of `relu` at x, taken as 0.0 at the kink."""
    # TASK 0.1: Draw relu: how steep is it on either side of 0? Times d.
    return d if x > 0.0 else 0.0
    # END TASK 0.1


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

    # TASK 0.3: Define a function of a list inside, and return that function.
    def map_list(ls: Iterable[float]) -> list[float]:
        return [fn(x) for x in ls]

    return map_list
    # END TASK 0.3


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

    # TASK 0.3: As map, with zip(…, strict=True), so that a shorter list is an error.
    def zip_lists(ls1: Iterable[float], ls2: Iterable[float]) -> list[float]:
        return [fn(x, y) for x, y in zip(ls1, ls2, strict=True)]

    return zip_lists
    # END TASK 0.3


def reduce(fn: Callable[[float, float], float], start: float) -> Callable[[Iterable[float]], float]:
    """Lift a function of two numbers to a function that folds a list into one number.

    Args:
        fn: The function that joins the value so far with the next element, in that order.
        start: The value before the first element, and so the result for an empty list.

    Returns:
        A function from (x1, x2, ...) to fn(fn(fn(start, x1), x2), ...).
    """

    # TASK 0.3: Keep the value so far in a variable that begins as start.
    def reduce_list(ls: Iterable[float]) -> float:
        total = start
        for x in ls:
            total = fn(total, x)
        return total

    return reduce_list
    # END TASK 0.3


def negList(ls: Iterable[float]) -> list[float]:
    """Change the sign of each element."""
    # TASK 0.3: map, of neg.
    return map(neg)(ls)
    # END TASK 0.3


def addLists(ls1: Iterable[float], ls2: Iterable[float]) -> list[float]:
    """Add two equally long lists element by element."""
    # TASK 0.3: zipWith, of add.
    return zipWith(add)(ls1, ls2)
    # END TASK 0.3


def sum(ls: Iterable[float]) -> float:
    """Add up a list, starting at 0.0."""
    # TASK 0.3: reduce, of add; what is the sum of no numbers?
    return reduce(add, 0.0)(ls)
    # END TASK 0.3


def prod(ls: Iterable[float]) -> float:
    """Multiply the elements of a list, starting at 1.0."""
    # TASK 0.3: reduce, of mul; what is the product of no numbers?
    return reduce(mul, 1.0)(ls)
    # END TASK 0.3
