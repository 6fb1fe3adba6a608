"""Syntax trees of derivatives: rules with expressions in the place of their names, kept short."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

ZERO, ONE = ast.Constant(0.0), ast.Constant(1.0)
_OPERATIONS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.NotEq: operator.ne,
}  # fmt: skip


def filled(rule: ast.expr, given: Mapping[str, ast.expr]) -> ast.expr:
    """Return a rule with expressions in the place of its names, without terms and factors of 0 and 1."""
    match rule:
        case ast.Name(id=name):
            return given[name]
        case ast.BinOp(left=x, op=op, right=y):
            return _combined(filled(x, given), op, filled(y, given))
        case ast.UnaryOp(op=ast.USub() as op, operand=x):
            x = filled(x, given)
            return ZERO if x is ZERO else ast.UnaryOp(op, x)
        case ast.IfExp(test=test, body=x, orelse=y):
            return chosen(filled(test, given), filled(x, given), filled(y, given))
        case ast.Compare(left=x, ops=[op], comparators=[y]):
            x, y = filled(x, given), filled(y, given)
            values = _number(x), _number(y)
            if None not in values:
                return ast.Constant(_OPERATIONS[type(op)](*values))
            return ast.Compare(x, [op], [y])
        case ast.Attribute(value=x, attr=name):
            return ast.Attribute(filled(x, given), name, ast.Load())
        case ast.Call(func=f, args=args):
            return ast.Call(filled(f, given), [filled(x, given) for x in args], [])
    return ZERO if _number(rule) == 0 else rule


def chosen(test: ast.expr, x: ast.expr, y: ast.expr) -> ast.expr:
    """Return ``x if test else y``, or one of them where the test does not matter."""
    if isinstance(test, ast.Constant):
        return x if test.value else y
    return x if ast.dump(x) == ast.dump(y) else ast.IfExp(test, x, y)


def _combined(x: ast.expr, op: ast.operator, y: ast.expr) -> ast.expr:
    """Return x op y."""
    a, b = _number(x), _number(y)
    if a is not None and b is not None and x is not ZERO and y is not ZERO:
        with suppress(ArithmeticError):
            number = _OPERATIONS[type(op)](a, b)
            made = ast.Constant(abs(number))
            return made if number >= 0 else ast.UnaryOp(ast.USub(), made)
    match op:
        case ast.Add() if x is ZERO or y is ZERO:
            return y if x is ZERO else x
        case ast.Sub() if y is ZERO:
            return x
        case ast.Sub() if x is ZERO:
            return ast.UnaryOp(ast.USub(), y)
        case ast.Mult() if ZERO in (x, y) or 0 in (a, b):
            return ZERO
        case ast.Div() if x is ZERO:
            return ZERO
        case ast.Mult() if a == 1:
            return y
        case ast.Mult() | ast.Div() | ast.Pow() if b == 1:
            return x
    return ast.BinOp(x, op, y)


def _number(node: ast.expr) -> Any:
    """Return the value of a number; None if an expression is none."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    return None


def live_statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return statements without the assignments that the result does not depend on."""
    live, count = set[str](), -1
    while count != len(live):
        count = len(live)
        for node in (node for statement in body for node in ast.walk(statement)):
            if isinstance(node, ast.stmt) and _matters(node, live):
                parts = [getattr(node, name, None) for name in ("value", "test", "iter", "targets")]
                parts = [
                    x for part in parts for x in (part if isinstance(part, list) else [part]) if x
                ]
                names = [x for part in parts for x in ast.walk(part) if isinstance(x, ast.Name)]
                live |= {x.id for x in names if isinstance(x.ctx, ast.Load)}
    return _without(body, live)


def _matters(node: ast.stmt, live: set[str]) -> bool:
    """Tell whether a statement is more than an assignment to variables that are not read."""
    if not isinstance(node, ast.Assign):
        return True
    targets = [x for target in node.targets for x in getattr(target, "elts", [target])]
    return any(not isinstance(x, ast.Name) or x.id in live for x in targets)


def _without(body: list[ast.stmt], live: set[str]) -> list[ast.stmt]:
    kept = []
    for node in body:
        if isinstance(node, (ast.If, ast.For, ast.While)):
            node.body, node.orelse = _without(node.body, live), _without(node.orelse, live)
            if not node.body and not node.orelse:
                continue
            node.body = node.body or [ast.Pass()]
        if _matters(node, live):
            kept.append(node)
    return kept


def contains(node: ast.AST, part: ast.AST) -> bool:
    """Tell whether a node is within another."""
    return any(x is part for x in ast.walk(node))


def where_read(node: ast.expr, site: ast.AST, index: ast.expr) -> ast.expr:
    """Return an index of what an expression reads at a site; 0 in a branch that does not read it."""
    if isinstance(node, ast.IfExp):
        zero = ast.Constant(0)
        if contains(node.body, site):
            return ast.IfExp(node.test, where_read(node.body, site, index), zero)
        if contains(node.orelse, site):
            return ast.IfExp(node.test, zero, where_read(node.orelse, site, index))
    if node is site:
        return index
    parts = (x for x in ast.iter_child_nodes(node) if contains(x, site))
    return where_read(next(parts), site, index)  # type: ignore[arg-type]
