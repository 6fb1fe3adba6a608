"""ListOps: nested operations on digits, whose value is the class; the task of the Long-Range Arena.

``[MAX 2 9 [MIN 4 7 ] 0 ]`` has the value 9.  A subexpression is an operation with probability 1/4, and a
digit otherwise or at the greatest depth.  Expressions outside the bounds of length are drawn again.

Source: Nangia and Bowman, ListOps (2018); the parameters are those of Tay et al., Long-Range Arena (2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data.sequence_sets import Examples, draw_set, read_or_make

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
END = "]"
#: Token ids are places here; 0 fills up shorter sequences.
VOCABULARY = ("<pad>", *map(str, range(10)), *OPERATORS, END)
IDS = {token: number for number, token in enumerate(VOCABULARY)}
CLASSES = 10


@dataclass(frozen=True)
class ListOps:
    """The parameters of the task.

    Attributes:
        depth: Greatest depth of an expression, that of the innermost digits included.
        most_arguments: Of an operation; it has 2 at least.
        operator_probability: That a subexpression is an operation.
        least_length: Least number of tokens of an expression.
        most_length: Greatest number of tokens of an expression.
        counts: Examples of each part.  The published test set has 2,000, so that an accuracy is known
            to two points only; with 10,000 it is known to one.
    """

    depth: int = 10
    most_arguments: int = 10
    operator_probability: float = 0.25
    least_length: int = 500
    most_length: int = 2000
    counts: dict[str, int] = field(
        default_factory=lambda: {"train": 96_000, "valid": 2_000, "test": 10_000}
    )

    def __post_init__(self) -> None:
        if not (self.depth >= 2 and self.most_arguments >= 2 and 0 < self.operator_probability < 1):
            raise ValueError(
                "ListOps needs a depth of 2 or more, 2 arguments or more and a probability between 0 "
                f"and 1, got {self.depth}, {self.most_arguments} and {self.operator_probability}"
            )
        # Each operation adds its two brackets to the digits.
        longest = 2 * sum(self.most_arguments**n for n in range(self.depth - 1))
        longest += self.most_arguments ** (self.depth - 1)
        if not 4 <= self.least_length <= self.most_length or self.least_length > longest:
            raise ValueError(
                f"expressions of {self.least_length} to {self.most_length} tokens cannot be drawn with "
                f"{self.most_arguments} arguments and a depth of {self.depth}; the bounds start at 4, and "
                "longer expressions need more of either"
            )


def apply(operator: str, arguments: Sequence[int]) -> int:
    """Return the value of an operation: a digit.

    Args:
        operator: One of ``OPERATORS``; a median between two digits is rounded down, a sum is taken
            modulo 10.
        arguments: Digits.
    """
    if operator == "[MIN":
        return min(arguments)
    if operator == "[MAX":
        return max(arguments)
    if operator == "[MED":
        return int(np.median(arguments))
    return sum(arguments) % 10


class _TooLong(Exception):
    """An expression has more tokens than allowed: there is no need to draw the rest of it."""


def _draw_operation(
    random: np.random.Generator, task: ListOps, depth: int, tokens: list[int]
) -> int:
    """Append the tokens of an operation and return its value."""
    operator = OPERATORS[random.integers(len(OPERATORS))]
    tokens.append(IDS[operator])
    values = []
    for is_operation in random.random(random.integers(2, task.most_arguments + 1)):
        if depth + 1 < task.depth and is_operation < task.operator_probability:
            values.append(_draw_operation(random, task, depth + 1, tokens))
        else:
            values.append(int(random.integers(10)))
            tokens.append(IDS[str(values[-1])])
    tokens.append(IDS[END])
    if len(tokens) > task.most_length:
        raise _TooLong
    return apply(operator, values)


def draw_expression(
    random: np.random.Generator, task: ListOps
) -> tuple[npt.NDArray[np.uint8], int]:
    """Return the token ids of an expression within the bounds of length, and its value."""
    while True:
        tokens: list[int] = []
        try:
            value = _draw_operation(random, task, 1, tokens)
        except _TooLong:
            continue
        if len(tokens) >= task.least_length:
            return np.array(tokens, np.uint8), value


def listops(path: str | Path, seed: int = 0, task: ListOps | None = None) -> dict[str, Examples]:
    """Return the parts of the data set from its file, which is made first if there is none.

    Args:
        path: Of the .npz file.
        seed: Of everything that is random.
        task: The parameters; the published ones when None.
    """
    task = task or ListOps()
    recipe = {"task": "listops", "seed": seed, **asdict(task)}
    return read_or_make(
        path,
        recipe,
        lambda: draw_set(
            partial(draw_expression, task=task), task.counts, task.most_length, seed, "ListOps"
        ),
    )
