"""The derivatives of operators and functions of numbers: one table."""

from __future__ import annotations

import ast
import builtins
import math
from typing import Any

import numpy as np

#: Operator or function → the tangent of its result, of arguments x and y with tangents dx and dy, by
#: ``math`` and ``f``, the function itself.
RULES = {
    "Add": "dx + dy",
    "Sub": "dx - dy",
    "Mult": "dx * y + x * dy",
    "Div": "(dx - x / y * dy) / y",
    "Mod": "dx - math.floor(x / y) * dy",
    "FloorDiv": "0.0",
    "Pow": "(y * x ** (y - 1) if y != 0 else 0.0) * dx"
    " + (x ** y * math.log(x) if x > 0 else 0.0) * dy",
    "UAdd": "dx",
    "USub": "-dx",
    "abs": "dx if x >= 0 else -dx",
    "acos": "-dx / math.sqrt(1.0 - x * x)",
    "acosh": "dx / math.sqrt(x * x - 1.0)",
    "asin": "dx / math.sqrt(1.0 - x * x)",
    "asinh": "dx / math.sqrt(x * x + 1.0)",
    "atan": "dx / (1.0 + x * x)",
    "atan2": "(dx * y - x * dy) / (x * x + y * y)",
    "atanh": "dx / (1.0 - x * x)",
    "bool": "0.0",
    "ceil": "0.0",
    "copysign": "dx if (x >= 0) == (f(1.0, y) >= 0) else -dx",
    "cos": "-math.sin(x) * dx",
    "cosh": "math.sinh(x) * dx",
    "erf": "1.1283791670955126 * math.exp(-x * x) * dx",
    "erfc": "-1.1283791670955126 * math.exp(-x * x) * dx",
    "exp": "f(x) * dx",
    "exp2": "0.6931471805599453 * f(x) * dx",
    "expm1": "(f(x) + 1.0) * dx",
    "float": "dx",
    "floor": "0.0",
    "fmod": "dx - math.trunc(x / y) * dy",
    "hypot": "(x * dx + y * dy) / f(x, y)",
    "int": "0.0",
    "isfinite": "0.0",
    "isinf": "0.0",
    "isnan": "0.0",
    "log": "dx / x",
    "log10": "dx / (2.302585092994046 * x)",
    "log1p": "dx / (1.0 + x)",
    "log2": "dx / (0.6931471805599453 * x)",
    "max": "dy if y > x else dx",
    "min": "dy if y < x else dx",
    "round": "0.0",
    "sign": "0.0",
    "sin": "math.cos(x) * dx",
    "sinh": "math.cosh(x) * dx",
    "sqrt": "dx / (2.0 * f(x))",
    "square": "2.0 * x * dx",
    "tan": "(1.0 + f(x) ** 2) * dx",
    "tanh": "(1.0 - f(x) ** 2) * dx",
    "trunc": "0.0",
}
#: Another name → the name in the table.
_ALIASES = {
    "absolute": "abs", "arctan2": "atan2", "fabs": "abs", "float32": "float", "float64": "float",
    "maximum": "max", "minimum": "min", "pow": "Pow", "power": "Pow", "rint": "round",
    **{f"arc{name[1:]}": name for name in RULES if name[0] == "a" and name not in ("abs", "atan2")},
}  # fmt: skip
#: Function → its name in the table.
KNOWN: dict[Any, str] = {
    found: rule
    for name, rule in {**_ALIASES, **{name: name for name in RULES}}.items()
    for module in (builtins, math, np)
    if (found := getattr(module, name, None)) is not None
    and (module is not np or isinstance(found, (np.ufunc, type)))
}
TREES = {name: ast.parse(rule, mode="eval").body for name, rule in RULES.items()}
