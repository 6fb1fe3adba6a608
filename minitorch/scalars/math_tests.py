"""Small functions for floats and for variables, whose results the tests and the app compare.

Do not rename these functions: tests are numbered in the alphabetical order of their names. The
ending `2` marks a function of two numbers, and the ending `red` marks a function of a list.
"""

from collections.abc import Callable
from typing import Any

from .. import operators

Named = list[tuple[str, Callable[..., Any]]]
NamedPairs = list[tuple[str, Callable[..., Any], Callable[..., Any]]]


class MathTest:
    """The functions for floats; those that use only arithmetic work for variables too."""

    neg = staticmethod(lambda a: -a)
    addConstant = staticmethod(lambda a: 5 + a)
    square = staticmethod(lambda a: a * a)
    cube = staticmethod(lambda a: a * a * a)
    subConstant = staticmethod(lambda a: a - 5)
    multConstant = staticmethod(lambda a: 5 * a)
    div = staticmethod(lambda a: a / 5)
    inv = staticmethod(lambda a: operators.inv(a + 3.5))
    sig = staticmethod(lambda a: operators.sigmoid(a))
    # Far from the edge at zero, and from overflow.
    log = staticmethod(lambda a: operators.log(a + 100000))
    relu = staticmethod(lambda a: operators.relu(a + 5.5))
    exp = staticmethod(lambda a: operators.exp(a - 200))
    explog = staticmethod(lambda a: operators.log(a + 100000) + operators.exp(a - 200))
    complex = staticmethod(
        lambda a: (
            operators.log(
                operators.sigmoid(operators.relu(operators.relu(a * 10 + 7) * 6 + 5) * 10)
            )
            / 50
        )
    )

    add2 = staticmethod(lambda a, b: a + b)
    mul2 = staticmethod(lambda a, b: a * b)
    div2 = staticmethod(lambda a, b: a / (b + 5.5))
    gt2 = staticmethod(lambda a, b: operators.lt(b, a + 1.2))
    lt2 = staticmethod(lambda a, b: operators.lt(a + 1.2, b))
    eq2 = staticmethod(lambda a, b: operators.eq(a, b + 5.5))

    sum_red = staticmethod(lambda a: operators.sum(a))
    mean_red = staticmethod(lambda a: operators.sum(a) / float(len(a)))
    mean_full_red = staticmethod(lambda a: operators.sum(a) / float(len(a)))

    @classmethod
    def _tests(cls) -> tuple[Named, Named, Named]:
        """Sort the functions of this class into those of one number, of two, and of a list."""
        # Names of MathTest, so that a subclass has the same lists.
        named = [(name, getattr(cls, name)) for name in dir(MathTest) if name[0] != "_"]
        two = [each for each in named if each[0].endswith("2")]
        red = [each for each in named if each[0].endswith("red")]
        return [each for each in named if each not in two + red], two, red

    @classmethod
    def _comp_testing(cls) -> tuple[NamedPairs, NamedPairs, NamedPairs]:
        """Return three lists of (name, function of floats, function of this class)."""
        one, two, red = (
            [(name, f, g) for (name, f), (_, g) in zip(on_floats, own, strict=True)]
            for on_floats, own in zip(MathTest._tests(), cls._tests(), strict=True)
        )
        return one, two, red


class MathTestVariable(MathTest):
    """The same functions for scalars and tensors, overridden where they need a method of the variable."""

    inv = staticmethod(lambda a: 1.0 / (a + 3.5))
    sig = staticmethod(lambda a: a.sigmoid())
    log = staticmethod(lambda a: (a + 100000).log())
    relu = staticmethod(lambda a: (a + 5.5).relu())
    exp = staticmethod(lambda a: (a - 200).exp())
    explog = staticmethod(lambda a: (a + 100000).log() + (a - 200).exp())
    complex = staticmethod(
        lambda a: (((a * 10 + 7).relu() * 6 + 5).relu() * 10).sigmoid().log() / 50
    )
    gt2 = staticmethod(lambda a, b: a + 1.2 > b)
    lt2 = staticmethod(lambda a, b: a + 1.2 < b)
    eq2 = staticmethod(lambda a, b: a == b + 5.5)
    # Along dimension 0, and over every dimension.
    sum_red = staticmethod(lambda a: a.sum(0))
    mean_red = staticmethod(lambda a: a.mean(0))
    mean_full_red = staticmethod(lambda a: a.mean())
