"""User functions whose captured numbers are an argument: a changing number compiles nothing.

A *template* is generated from the source of a ``mask_mod`` or ``score_mod``.  It takes the tuple of the
numbers that the function captures before the arguments of the function::

    def near(batch, head, row, col):                def near(numbers, batch, head, row, col):
        return row - col <= window                      window, = numbers
                                                        return row - col <= window

Kernels are compiled for the template, and a call passes the numbers.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np

from .derivatives import derivative_of, value_of, world_of
from .rules import KNOWN
from .sources import Definition, definition_of, function_of

#: A whole number that is an argument has 32 bits, so that GPU kernels know that it fits.
_MOST = 2**31


def kind_of(value: Any) -> type | None:
    """Return int or float for a number that can be an argument, None for any other value."""
    if isinstance(value, float):
        return float
    is_whole = type(value) is int or isinstance(value, np.signedinteger)
    return int if is_whole and -_MOST <= value < _MOST else None


def template_of(mod: Any) -> Any:
    """Return what is compiled for a user function: its template, or the function if it has none."""
    return getattr(mod, "template", mod)


def numbers_of(mod: Any) -> tuple[Any, ...]:
    """Return the numbers that a call passes to the template of a user function."""
    return getattr(mod, "numbers", ())


def derived(mod: Any) -> Any:
    """Return the derivative of a user function, or of a template, with the same numbers.

    Raises:
        ValueError: If it cannot be differentiated; see ``derivative_of``.
    """
    if not hasattr(mod, "template"):
        return derivative_of(mod)
    made: Any = partial(template := derivative_of(mod.template), mod.numbers)
    made.template, made.numbers = template, mod.numbers
    return made


def changing_names(function: FunctionType, count: int) -> frozenset[str]:
    """Return the names of the captured numbers that the template of a function takes as an argument.

    ``count`` is the number of arguments of the function without those that have defaults of its own.
    There are none if its source is not available.
    """
    with suppress(ValueError):
        definition = definition_of(function)
        own = definition.args
        places, world = _parameters(definition)[:count], captured_by(function)
        uses = _Uses(world, function.__code__.co_varnames, places)
        uses.within(True, *statements_of(definition))
        if not (own.vararg or own.kwarg or own.kwonlyargs) and uses.stored.isdisjoint(world):
            found = {name for name in uses.read & {*world} if kind_of(world[name]) is not None}
            return frozenset(found - uses.constants - {*places})
    return frozenset()


def make_template(function: FunctionType, count: int, names: Collection[str]) -> Any:
    """Return the template of a function of ``count`` arguments that takes numbers of these names."""
    definition, world = deepcopy(definition_of(function)), captured_by(function)
    places, argument = _parameters(definition)[:count], "numbers"
    while argument in (*world, *function.__code__.co_varnames):
        argument += "_"
    targets: list[ast.expr] = [ast.Name(name, ast.Store()) for name in sorted(names)]
    unpacked = ast.Assign(
        [ast.Tuple(targets, ast.Store())], ast.Name(argument, ast.Load()), lineno=1
    )
    arguments = ast.arguments(
        posonlyargs=[], args=[ast.arg(name) for name in (argument, *places)],
        kwonlyargs=[], kw_defaults=[], defaults=[],
    )  # fmt: skip
    body = [unpacked, *statements_of(definition)]
    name = function.__name__.rpartition(".")[2].strip("<>") + "_of_numbers"
    made = ast.FunctionDef(name, arguments, body, [], lineno=1)
    made.type_params = []  # type: ignore[attr-defined]  # Python 3.12
    others = {name: value for name, value in world.items() if name not in names}
    template: Any = function_of(made, function, others)
    template.__defaults__ = None
    template.kinds = tuple([kind_of(world[name]) for name in sorted(names)])
    return template


def statements_of(definition: Definition) -> list[ast.stmt]:
    """Return the statements of a function, or that of a lambda."""
    body = definition.body
    return [ast.Return(body)] if isinstance(body, ast.expr) else body


def _parameters(definition: Definition) -> list[str]:
    return [one.arg for one in (*definition.args.posonlyargs, *definition.args.args)]


def captured_by(function: FunctionType) -> dict[str, Any]:
    """Return the values of the globals, captured variables and defaults of a function, by name."""
    code, defaults = function.__code__, function.__defaults__ or ()
    last = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return {**world_of(function), **dict(zip(last, defaults, strict=True))}


class _Uses(ast.NodeVisitor):
    """The names that a function reads, those that have to stay constants, and those that it stores to.

    A number may be an argument where a variable of the same value computes the same: in arithmetic,
    comparisons, conditions, ranges, functions of numbers, and indices of arrays.  Elsewhere, as a shape or
    as an index of a tuple, compilers may need a constant.
    """

    def __init__(self, world: Mapping[str, Any], local: Sequence[str], places: Sequence[str]):
        self.world, self.local, self.places = world, local, places
        self.read, self.constants, self.stored = set[str](), set[str](), set[str]()
        self.is_free = True

    def within(self, is_free: bool, *nodes: ast.AST) -> None:
        """Visit nodes in which a name may be a variable if ``is_free``."""
        before, self.is_free = self.is_free, self.is_free and is_free
        for node in nodes:
            self.visit(node)
        self.is_free = before

    def visit_Name(self, node: ast.Name) -> None:
        (self.read if isinstance(node.ctx, ast.Load) else self.stored).add(node.id)
        if not self.is_free:
            self.constants.add(node.id)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.visit(node.left)
        self.within(not isinstance(node.op, ast.Pow), node.right)  # constant powers are products

    def visit_Compare(self, node: ast.Compare) -> None:
        refused = (ast.Is, ast.IsNot, ast.In, ast.NotIn)
        is_free = not any(isinstance(op, refused) for op in node.ops)
        self.within(is_free, node.left, *node.comparators)

    def visit_Call(self, node: ast.Call) -> None:
        found = value_of(node.func, self.world, self.local)
        is_known = getattr(found, "__hash__", None) is not None and (
            found in KNOWN or found is range
        )
        self.within(False, node.func)
        self.within(is_known and not node.keywords, *node.args, *node.keywords)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        name = getattr(node.value, "id", "")
        is_array = name in self.places or isinstance(self.world.get(name), np.ndarray)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        self.within(False, node.value)
        self.within(is_array, *parts)

    def generic_visit(self, node: ast.AST) -> None:
        is_free = isinstance(node, _FREE)
        self.within(is_free, *ast.iter_child_nodes(node))


_FREE = (
    ast.Assign, ast.AugAssign, ast.AnnAssign, ast.If, ast.While, ast.For, ast.Return, ast.Expr,
    ast.UnaryOp, ast.BoolOp, ast.IfExp, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
