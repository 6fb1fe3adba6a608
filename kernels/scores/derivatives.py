"""Differentiate a user function of a score: from the syntax tree of its source to another function.

The derivative is computed forward.  Before each statement ``x = …`` that depends on the score stands one
for its tangent, dx / dscore, and ``return`` returns the tangent.  Branches and loops stay as they are, so
that at a kink the derivative is that of the side that the function takes.  The result is an ordinary
Python function, compiled for a target as the user's own, and can be differentiated again.
"""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from types import FunctionType
from typing import Any

from .rules import KNOWN, RULES, TREES
from .sources import definition_of, function_of
from .trees import ONE, ZERO, chosen, contains, filled, live_statements, where_read


def kinds_of(function: Any) -> tuple[type, ...]:
    """Return the types of the numbers that a template takes; () for a function that takes none."""
    return getattr(function, "kinds", ())


@lru_cache(maxsize=256)
def derivative_of(function: Callable[..., Any]) -> FunctionType:
    """Return the derivative of a function with respect to its score, as a Python function.

    The score is the first argument, or the second one of a template, after its numbers.

    Raises:
        ValueError: If it cannot be differentiated; the message names the expression and its line.
    """
    score = 1 if kinds_of(function) else 0
    made: Any = _Tangent(function, (score,), {score: ONE}).function("derivative_of_")
    made.is_derivative, made.kinds = True, kinds_of(function)
    return made


@lru_cache(maxsize=256)
def reads_of(function: Callable[..., Any], dims: int) -> tuple[FunctionType, ...]:
    """Return a function of the same arguments for each place where one reads its table, the last argument.

    It returns the derivative of the result with respect to the element of the table, of ``dims``
    dimensions, that is read there, and the indices of the element, three with zeros for those missing.

    Raises:
        ValueError: If it cannot be differentiated; the message names the expression and its line.
    """
    count = len(_Tangent(function, (), {}).sites(dims))
    found: Any = [
        _Tangent(function, (), {}, (dims, n)).function(f"read_{n}_of_") for n in range(count)
    ]
    for read in found:
        read.kinds = kinds_of(function)
    return tuple(found)


@lru_cache(maxsize=256)
def returns_one(function: Callable[..., Any]) -> bool:
    """Tell whether the source of a function returns the constant 1, and nothing else."""
    found: list[Any] = []
    if isinstance(function, FunctionType):
        with suppress(ValueError):
            found = [
                x.value for x in ast.walk(definition_of(function)) if isinstance(x, ast.Return)
            ]
    return bool(found) and all(getattr(x, "value", None) == 1 for x in found)


@lru_cache(maxsize=256)
def _tangent_of(function: Any, active: tuple[int, ...]) -> Any:
    """Return the function of the tangents of some arguments, and of all arguments, to the result's tangent.

    It is compiled by numba as the function itself is.
    """
    made = _Tangent(function, active, {}).function("tangent_of_")
    if isinstance(function, FunctionType):
        return made
    return type(function)(made, targetoptions=function.targetoptions)


class _Tangent:
    """The differentiation of one function with respect to its arguments at the positions ``active``.

    ``known`` has the tangents of arguments; the others become parameters, before those of the function.
    With ``read``, the dimensions of the table and a number of :meth:`sites`, it is the differentiation with
    respect to the element that is read there.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        active: Sequence[int],
        known: Mapping[int, ast.expr],
        read: tuple[int, int] | None = None,
    ):
        self.plain: Any = getattr(function, "py_func", function)
        if not isinstance(self.plain, FunctionType):
            raise ValueError(f"it is not a Python function but {type(function).__name__}")
        self.code = self.plain.__code__
        self.definition = deepcopy(definition_of(self.plain))
        own = self.definition.args
        if own.vararg or own.kwarg or own.kwonlyargs:
            raise self.refused(self.definition, "its parameters are not all positional")
        self.parameters = [one.arg for one in (*own.posonlyargs, *own.args)]
        self.world = world_of(self.plain)
        names = {node.id for node in ast.walk(self.definition) if isinstance(node, ast.Name)}
        names |= {*self.parameters, *self.world}
        self.prefix = "d_"
        while any(name.startswith(self.prefix) for name in names):
            self.prefix = f"d{self.prefix}"
        self.index = "index"
        while any(name.startswith(self.index) for name in names):
            self.index += "_"
        self.math = "math"
        while self.math in names and self.world.get(self.math) is not math:
            self.math += "_"
        self.active = {self.parameters[place] for place in active}
        every = [x for x in ast.walk(self.definition) if isinstance(x, ast.Name)]
        self.stored = {x.id for x in every if isinstance(x.ctx, ast.Store)}
        self.known = {self.parameters[place]: tangent for place, tangent in known.items()}
        self.site = None if read is None else self.sites(read[0])[read[1]]
        self.added = [self.prefix + x for x in self.parameters if x in self.active - {*self.known}]

    def function(self, prefix: str) -> FunctionType:
        """Return the generated function; its name is that of the function after a prefix."""
        body: list[ast.stmt] = []
        count = -1
        while count != len(self.active):  # until no more variables depend on the arguments
            count = len(self.active)
            if isinstance(self.definition, ast.Lambda):
                body = self.statement(ast.Return(self.definition.body))
            else:
                body = [*self.first_tangents(), *self.statements(self.definition.body)]
        arguments = ast.arguments(
            posonlyargs=[], args=[ast.arg(name) for name in (*self.added, *self.parameters)],
            kwonlyargs=[], kw_defaults=[], defaults=[],
        )  # fmt: skip
        # torch.compile names an inner function by its whole path, outer.<locals>.inner.
        name = prefix + self.plain.__name__.rpartition(".")[2].strip("<>")
        made = ast.FunctionDef(name, arguments, live_statements(body), [], lineno=1)
        made.type_params = []  # type: ignore[attr-defined]  # Python 3.12
        return function_of(made, self.plain, {**self.world, self.math: math})

    def first_tangents(self) -> list[ast.stmt]:
        """Return the assignments of the tangents of parameters that the function assigns to."""
        made = [] if self.site is None else self.placed([ast.Constant(0)] * 3)
        for name in self.parameters:
            own = self.prefix + name
            if name in self.stored & self.active and own not in self.added:
                first = self.known.get(name, ZERO)
                made.append(ast.Assign([ast.Name(own, ast.Store())], first, lineno=1))
        return made

    # -- statements ----------------------------------------------------------------------------------

    def statements(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Return statements with those of the tangents."""
        return [made for statement in body for made in self.statement(statement)]

    def statement(self, node: ast.stmt) -> list[ast.stmt]:
        """Return a statement, after that of its tangent if it has one."""
        made = self.differentiated(node)
        value = getattr(node, "value", None)
        if self.site is None or value is None or not contains(value, self.site[0]):
            return made
        indices = [where_read(value, self.site[0], index) for index in self.site[1]]
        return [*self.placed(indices), *made]

    def placed(self, indices: Sequence[ast.expr]) -> list[ast.stmt]:
        """Return the assignments of the indices of the element that is read."""
        targets = [ast.Name(f"{self.index}_{axis}", ast.Store()) for axis in range(3)]
        return [
            ast.Assign([target], index, lineno=1)
            for target, index in zip(targets, indices, strict=False)
        ]

    def differentiated(self, node: ast.stmt) -> list[ast.stmt]:
        """Return a statement, after that of its tangent if it has one, without what it reads."""
        match node:
            case ast.Return(value=ast.expr() as value) if self.site is not None:
                own = [ast.Name(f"{self.index}_{axis}", ast.Load()) for axis in range(3)]
                weight = ast.Call(ast.Name("float", ast.Load()), [self.tangent(value)], [])
                return [ast.Return(ast.Tuple([weight, *own], ast.Load()))]
            case ast.Return(value=ast.expr() as value):
                return [ast.Return(self.tangent(value))]
            case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
                before = ast.Name(name, ast.Load())
                return self.assigned(node, [target], ast.BinOp(before, op, value))
            case ast.Assign(targets=targets, value=value):
                return self.assigned(node, targets, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                return self.assigned(node, [target], value)
            case ast.If(test=test, body=body, orelse=orelse):
                return [ast.If(test, self.statements(body), self.statements(orelse))]
            case ast.For(target=target, iter=iterated, body=body, orelse=[]):
                if self.depends(target) or self.depends(iterated):
                    raise self.refused(node, "a loop's range depends on the score")
                return [ast.For(target, iterated, self.statements(body), [], lineno=node.lineno)]
            case ast.While(test=test, body=body, orelse=[]):
                if self.depends(test):
                    raise self.refused(test, "a loop's condition depends on the score")
                return [ast.While(test, self.statements(body), [])]
            case ast.Expr(value=ast.Constant()):
                return []
            case ast.Pass() | ast.Break() | ast.Continue():
                return [node]
        raise self.refused(node, f"a statement of type {type(node).__name__} is not supported")

    def assigned(
        self, node: ast.stmt, targets: Sequence[ast.expr], value: ast.expr
    ) -> list[ast.stmt]:
        """Return an assignment after that of the tangents."""
        made: list[ast.stmt] = [ast.Assign([*targets], value, lineno=node.lineno)]
        pairs = [(target, value) for target in targets]
        if isinstance(targets[0], ast.Tuple):
            is_pairwise = isinstance(value, ast.Tuple) and len(targets) == 1
            if not is_pairwise:
                if self.depends(value):
                    raise self.refused(value, "several variables are assigned from one value")
                value = ast.Tuple([ZERO] * len(targets[0].elts), ast.Load())
            pairs = list(zip(targets[0].elts, value.elts, strict=True))  # type: ignore[attr-defined]
        tangents: list[Any] = [(target, self.tangent(part)) for target, part in pairs]
        for target, tangent in tangents:
            if isinstance(target, ast.Name):
                self.active |= set() if tangent is ZERO else {target.id}
            elif tangent is not ZERO:
                raise self.refused(node, "only a variable may hold what depends on the score")
        kept = [(t.id, tangent) for t, tangent in tangents if getattr(t, "id", "") in self.active]
        if not kept:
            return made
        own: list[ast.expr] = [ast.Name(self.prefix + name, ast.Store()) for name, _ in kept]
        if len(kept) == 1:
            return [ast.Assign(own, kept[0][1], lineno=node.lineno), *made]
        every = ast.Tuple([tangent for _, tangent in kept], ast.Load())
        return [ast.Assign([ast.Tuple(own, ast.Store())], every, lineno=node.lineno), *made]

    # -- expressions ---------------------------------------------------------------------------------

    def sites(self, dims: int) -> list[tuple[ast.Subscript, list[ast.expr]]]:
        """Return the places that read an element of the table, the last argument, with their indices.

        Raises:
            ValueError: If the table is used otherwise, or in a loop.
        """
        table, found, uses = self.parameters[-1], list[Any](), 0
        loops = [x for x in ast.walk(self.definition) if isinstance(x, (ast.For, ast.While))]
        for node in ast.walk(self.definition):
            uses += isinstance(node, ast.Name) and node.id == table
            if not (isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == table):
                continue
            place = node.slice
            indices = place.elts if isinstance(place, ast.Tuple) else [place]
            if len(indices) != dims or any(
                isinstance(x, (ast.Slice, ast.Starred)) for x in indices
            ):
                raise self.refused(node, f"an element of {table} has {dims} indices")
            if any(contains(loop, node) for loop in loops):
                raise self.refused(node, f"{table} is read in a loop")
            found.append((node, indices))
        if uses != len(found):
            raise self.refused(self.definition, f"{table} is used otherwise than by its elements")
        return found

    def depends(self, node: ast.AST) -> bool:
        """Tell whether an expression reads a variable that depends on the arguments."""
        is_read = self.site is not None and contains(node, self.site[0])
        return is_read or any(
            isinstance(x, ast.Name) and x.id in self.active for x in ast.walk(node)
        )

    def tangent(self, node: ast.expr) -> ast.expr:
        """Return the tangent of an expression; ``ZERO`` if it is constant."""
        if self.site is not None and node is self.site[0]:
            return ONE
        if not self.depends(node):
            return ZERO
        match node:
            case ast.Name(id=name):
                tangent = ast.Name(self.prefix + name, ast.Load())
                return tangent if name in self.stored else self.known.get(name, tangent)
            case ast.BinOp(left=x, op=op, right=y) if type(op).__name__ in RULES:
                return self.by_rule(type(op).__name__, None, [x, y])
            case ast.UnaryOp(op=op, operand=x) if type(op).__name__ in RULES:
                return self.by_rule(type(op).__name__, None, [x])
            case ast.IfExp(test=test, body=x, orelse=y):
                return chosen(test, self.tangent(x), self.tangent(y))
            case ast.Compare() | ast.UnaryOp(op=ast.Not()):
                return ZERO
            case ast.BoolOp(values=values) if all(self.tangent(x) is ZERO for x in values):
                return ZERO
            case ast.Call(func=callee, args=args, keywords=[]):
                return self.of_call(node, callee, args)
            case ast.Subscript(value=x, slice=y) if not self.depends(x) and self.tangent(y) is ZERO:
                return ZERO
        raise self.refused(node, "no derivative is known for it")

    def of_call(self, node: ast.expr, callee: ast.expr, args: list[ast.expr]) -> ast.expr:
        """Return the tangent of a call."""
        found = self.value_of(callee)
        if any(isinstance(x, ast.Starred) for x in args):
            raise self.refused(node, "no derivative is known for it")
        if (name := KNOWN.get(found) if getattr(found, "__hash__", None) else None) is not None:
            while name in ("min", "max") and len(args) > 2:
                args = [ast.Call(callee, args[:2], []), *args[2:]]
            if len(args) > 1 + ("y" in RULES[name]) and RULES[name] != "0.0":
                raise self.refused(node, f"no derivative is known with {len(args)} arguments")
            return self.by_rule(name, callee, args)
        tangents = [self.tangent(x) for x in args]
        active = tuple(place for place, tangent in enumerate(tangents) if tangent is not ZERO)
        if not active:
            return ZERO
        if not isinstance(getattr(found, "py_func", found), FunctionType):
            raise self.refused(node, "no derivative is known for this function")
        made = _tangent_of(found, active)
        name = getattr(made, "py_func", made).__name__ + "".join(f"_{place}" for place in active)
        while self.world.setdefault(name, made) is not made:
            name += "_"
        return ast.Call(
            ast.Name(name, ast.Load()), [*(tangents[place] for place in active), *args], []
        )

    def by_rule(self, name: str, callee: ast.expr | None, args: Sequence[ast.expr]) -> ast.expr:
        """Return the tangent by a rule of the table."""
        given: dict[str, Any] = {"f": callee, "math": ast.Name(self.math, ast.Load())}
        for letter, argument in zip("xy", args, strict=False):
            given |= {letter: argument, f"d{letter}": self.tangent(argument)}
        return filled(TREES[name], given)

    def value_of(self, node: ast.expr) -> Any:
        """Return what a name or an attribute of a module stands for; None if it is not known."""
        return value_of(node, self.world, self.code.co_varnames)

    def refused(self, node: ast.AST, why: str) -> ValueError:
        """Return the error for a node that cannot be differentiated."""
        line = getattr(node, "lineno", self.code.co_firstlineno)
        text = ast.unparse(node).splitlines()[0]
        return ValueError(f"cannot differentiate `{text}` ({self.code.co_filename}:{line}): {why}")


def value_of(node: ast.expr, world: Mapping[str, Any], local: Sequence[str]) -> Any:
    """Return what a name that is not local, or an attribute of a module, stands for; None if not known."""
    if isinstance(node, ast.Attribute):
        return getattr(value_of(node.value, world, local), node.attr, None)
    if not isinstance(node, ast.Name) or node.id in local:
        return None
    return world.get(node.id, getattr(builtins, node.id, None))


def world_of(function: FunctionType) -> dict[str, Any]:
    """Return the values of the globals and the captured variables of a function."""
    world = {**function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # still empty
            world[name] = cell.cell_contents
    return world
