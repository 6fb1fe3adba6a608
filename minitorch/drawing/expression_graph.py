"""The graph of a computation as a picture: variables from left to right, and what made them."""

from __future__ import annotations

from typing import Any

from kernels.common.picture import AMBER, BLUE, Picture

#: Width and height of a box, and the distances between their corners, pixels.
WIDTH, HEIGHT, ACROSS, DOWN = 108, 42, 148, 58


class ExpressionGraph:
    """A picture of how a scalar or a tensor was computed, which a notebook shows.

    Args:
        result: The last variable, a :class:`minitorch.Scalar` or a :class:`minitorch.Tensor`.
        most: Maximum number of variables.

    Raises:
        TypeError: If ``result`` is not a variable.
        ValueError: If there are more than ``most`` variables.
    """

    def __init__(self, result: Any, most: int = 200):
        if not hasattr(result, "history"):
            raise TypeError(
                f"a graph starts from a Scalar or a Tensor, got {type(result).__name__}; pass the result"
            )
        #: Each variable and its column, inputs before the variables computed from them.
        self.columns: dict[int, tuple[Any, int]] = {}
        waiting = [result]
        while waiting:
            variable = waiting[-1]
            unknown = [p for p in _inputs(variable) if p.unique_id not in self.columns]
            if len(waiting) + len(self.columns) > most:
                raise ValueError(
                    f"the graph has more than {most} variables; draw a part of it, or pass a larger most"
                )
            if unknown and variable.unique_id not in self.columns:
                waiting += unknown
                continue
            waiting.pop()
            before = [self.columns[p.unique_id][1] for p in _inputs(variable)]
            self.columns[variable.unique_id] = variable, max(before, default=-1) + 1

    def __repr__(self) -> str:
        return f"ExpressionGraph({len(self.columns)} variables)"

    def _repr_svg_(self) -> str:
        """Return the picture, for a notebook or a file."""
        by_column: dict[int, list[Any]] = {}
        for variable, column in self.columns.values():
            by_column.setdefault(column, []).append(variable)
        tallest = max(map(len, by_column.values()))
        p = Picture(ACROSS * len(by_column) - 20, DOWN * tallest + 4, "The graph of a computation")
        places: dict[int, tuple[float, float]] = {}
        for column, variables in by_column.items():
            top = 10 + DOWN * (tallest - len(variables)) / 2
            for row, variable in enumerate(variables):
                places[variable.unique_id] = 10 + ACROSS * column, top + DOWN * row
        for variable, _ in self.columns.values():
            x, y = places[variable.unique_id]
            for parent in _inputs(variable):
                left, level = places[parent.unique_id]
                p.arrow(left + WIDTH, level + HEIGHT / 2, x, y + HEIGHT / 2)
        for variable, _ in self.columns.values():  # above the arrows
            x, y = places[variable.unique_id]
            first, second, colour = _label(variable)
            p.box(x, y, WIDTH, HEIGHT, fill=colour)
            p.text(x + WIDTH / 2, y + 18, first, 13)
            p.text(x + WIDTH / 2, y + 34, second, 12)
        return p.svg()


def _inputs(variable: Any) -> list[Any]:
    """Return the variables that one was computed from, several results of a function sharing its own."""
    inputs = variable.history.inputs if variable.history is not None else ()
    return [each for each in inputs if hasattr(each, "history")]


def _label(variable: Any) -> tuple[str, str, str]:
    """Return the two lines and the colour of a variable's box."""
    shape, number = getattr(variable, "shape", None), getattr(variable, "data", None)
    text = f"{number:.4g}" if isinstance(number, float) else "" if shape is None else str(shape)
    made_by = variable.history.last_fn if variable.history is not None else None
    if made_by is not None:
        return made_by.__name__.strip("_"), text, AMBER
    name = getattr(variable, "name", "")
    is_named = name and name != str(variable.unique_id)
    kind = "constant" if variable.history is None else "leaf"
    return name if is_named else kind, text, BLUE if kind == "leaf" else "white"
