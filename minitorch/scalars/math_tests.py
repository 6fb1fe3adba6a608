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

    @staticmethod
    def neg(a: Any) -> Any:
        """Compute -a."""
        return -a

    @staticmethod
    def addConstant(a: Any) -> Any:
        """Compute 5 + a."""
        return 5 + a

    @staticmethod
    def square(a: Any) -> Any:
        """Compute a * a."""
        return a * a

    @staticmethod
    def cube(a: Any) -> Any:
        """Compute a * a * a."""
        return a * a * a

    @staticmethod
    def subConstant(a: Any) -> Any:
        """Compute a - 5."""
        return a - 5

    @staticmethod
    def multConstant(a: Any) -> Any:
        """Compute 5 * a."""
        return 5 * a

    @staticmethod
    def div(a: Any) -> Any:
        """Compute a / 5."""
        return a / 5

    @staticmethod
    def inv(a: Any) -> Any:
        """Compute 1 / (a + 3.5)."""
        return operators.inv(a + 3.5)

    @staticmethod
    def sig(a: Any) -> Any:
        """Compute the sigmoid of a."""
        return operators.sigmoid(a)

    @staticmethod
    def log(a: Any) -> Any:
        """Compute the log of a + 100000, far from the edge at zero."""
        return operators.log(a + 100000)

    @staticmethod
    def relu(a: Any) -> Any:
        """Compute the relu of a + 5.5."""
        return operators.relu(a + 5.5)

    @staticmethod
    def exp(a: Any) -> Any:
        """Compute e^(a - 200), far from overflow."""
        return operators.exp(a - 200)

    @staticmethod
    def explog(a: Any) -> Any:
        """Compute log(a + 100000) + e^(a - 200)."""
        return operators.log(a + 100000) + operators.exp(a - 200)

    @staticmethod
    def complex(a: Any) -> Any:
        """Compute log(sigmoid(relu(relu(10 a + 7) * 6 + 5) * 10)) / 50."""
        inner = operators.relu(operators.relu(a * 10 + 7) * 6 + 5)
        return operators.log(operators.sigmoid(inner * 10)) / 50

    @staticmethod
    def add2(a: Any, b: Any) -> Any:
        """Compute a + b."""
        return a + b

    @staticmethod
    def mul2(a: Any, b: Any) -> Any:
        """Compute a * b."""
        return a * b

    @staticmethod
    def div2(a: Any, b: Any) -> Any:
        """Compute a / (b + 5.5)."""
        return a / (b + 5.5)

    @staticmethod
    def gt2(a: Any, b: Any) -> Any:
        """Tell whether a + 1.2 > b."""
        return operators.lt(b, a + 1.2)

    @staticmethod
    def lt2(a: Any, b: Any) -> Any:
        """Tell whether a + 1.2 < b."""
        return operators.lt(a + 1.2, b)

    @staticmethod
    def eq2(a: Any, b: Any) -> Any:
        """Tell whether a == b + 5.5."""
        return operators.eq(a, b + 5.5)

    @staticmethod
    def sum_red(a: Any) -> Any:
        """Add up a list."""
        return operators.sum(a)

    @staticmethod
    def mean_red(a: Any) -> Any:
        """Average a list."""
        return operators.sum(a) / float(len(a))

    @staticmethod
    def mean_full_red(a: Any) -> Any:
        """Average a list; for tensors, over every dimension."""
        return operators.sum(a) / float(len(a))

    @classmethod
    def _tests(cls) -> tuple[Named, Named, Named]:
        """Sort the functions of this class into those of one number, of two, and of a list."""
        one: Named = []
        two: Named = []
        red: Named = []
        for name in dir(MathTest):  # of MathTest, so that a subclass has the same list
            if name.startswith("_"):
                continue
            group = two if name.endswith("2") else red if name.endswith("red") else one
            group.append((name, getattr(cls, name)))
        return one, two, red

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

    @staticmethod
    def inv(a: Any) -> Any:
        """Compute 1 / (a + 3.5)."""
        return 1.0 / (a + 3.5)

    @staticmethod
    def sig(a: Any) -> Any:
        """Compute the sigmoid of a."""
        return a.sigmoid()

    @staticmethod
    def log(a: Any) -> Any:
        """Compute the log of a + 100000."""
        return (a + 100000).log()

    @staticmethod
    def relu(a: Any) -> Any:
        """Compute the relu of a + 5.5."""
        return (a + 5.5).relu()

    @staticmethod
    def exp(a: Any) -> Any:
        """Compute e^(a - 200)."""
        return (a - 200).exp()

    @staticmethod
    def explog(a: Any) -> Any:
        """Compute log(a + 100000) + e^(a - 200)."""
        return (a + 100000).log() + (a - 200).exp()

    @staticmethod
    def complex(a: Any) -> Any:
        """Compute log(sigmoid(relu(relu(10 a + 7) * 6 + 5) * 10)) / 50."""
        return (((a * 10 + 7).relu() * 6 + 5).relu() * 10).sigmoid().log() / 50

    @staticmethod
    def gt2(a: Any, b: Any) -> Any:
        """Tell whether a + 1.2 > b."""
        return a + 1.2 > b

    @staticmethod
    def lt2(a: Any, b: Any) -> Any:
        """Tell whether a + 1.2 < b."""
        return a + 1.2 < b

    @staticmethod
    def eq2(a: Any, b: Any) -> Any:
        """Tell whether a == b + 5.5."""
        return a == b + 5.5

    @staticmethod
    def sum_red(a: Any) -> Any:
        """Add up along dimension 0."""
        return a.sum(0)

    @staticmethod
    def mean_red(a: Any) -> Any:
        """Average along dimension 0."""
        return a.mean(0)

    @staticmethod
    def mean_full_red(a: Any) -> Any:
        """Average over every dimension."""
        return a.mean()
