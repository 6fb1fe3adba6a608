"""Find the syntax tree of a Python function, and make functions of generated source."""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

Definition = ast.FunctionDef | ast.Lambda


def definition_of(function: FunctionType) -> Definition:
    """Return the syntax tree of a function's definition, with the lines of its file.

    Raises:
        ValueError: If the source is not available, has changed since the function was defined, or has
            several lambdas in one line that cannot be told apart.
    """
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not 0 < code.co_firstlineno <= len(lines):
        raise ValueError("its source is not available: define it in a file")
    tree, is_whole = _tree(code.co_filename, tuple(lines), code.co_firstlineno)
    found: list[Any] = [node for node in ast.walk(tree) if _may_define(node, code)]
    if any(_equal(code, other, is_whole) for other in _codes(tree, code.co_filename)):
        if len(found) > 1 and isinstance(found[0], ast.Lambda):
            found = [node for node in found if _holds(node, code)]
            found.sort(key=lambda node: len(ast.dump(node)))  # the innermost first
        if found:
            return found[0]
        raise ValueError("its line has several lambdas: put each on a line of its own")
    raise ValueError(f"its source in {code.co_filename} has changed since it was defined")


def function_of(
    definition: ast.FunctionDef, like: FunctionType, world: Mapping[str, Any]
) -> FunctionType:
    """Return the function of a generated definition, with the defaults of the function ``like``.

    ``world`` are the values of its names.  Its source is available to ``inspect.getsource``.
    """
    source = ast.unparse(ast.fix_missing_locations(definition)) + "\n"
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    file = f"<{definition.name} {digest}>"
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    made = dict[str, Any](world)
    exec(compile(source, file, "exec"), made)
    function = made.pop(definition.name)
    function.__defaults__ = like.__defaults__
    return function


@lru_cache(maxsize=8)
def _tree(file: str, lines: tuple[str, ...], first: int) -> tuple[ast.Module, bool]:
    """Return the syntax tree of a file, or of the block at a line, and whether it is of the file."""
    with suppress(SyntaxError):
        return ast.parse("".join(lines), file), True
    block = inspect.getblock(list(lines[first - 1 :]))
    is_indented = block[0][:1].isspace()
    before = "\n" * (first - 2) + "if True:\n" if is_indented else "\n" * (first - 1)
    with suppress(SyntaxError):
        return ast.parse(before + "".join(block), file), False
    raise ValueError(
        f"its source in {file} is not available: define it by def, or in a Python file"
    )


def _may_define(node: ast.AST, code: CodeType) -> bool:
    """Tell whether a node defines a function of the name and the first line of a code."""
    if isinstance(node, ast.FunctionDef):
        first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
        return (node.name, first) == (code.co_name, code.co_firstlineno)
    if isinstance(node, ast.Lambda):
        return (code.co_name, code.co_firstlineno) == ("<lambda>", node.lineno)
    return False


def _codes(node: ast.AST | CodeType, file: str) -> Iterator[CodeType]:
    """Yield the code objects of a syntax tree."""
    code: Any = node if isinstance(node, CodeType) else compile(node, file, "exec")  # type: ignore[arg-type]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant, file)


def _equal(code: CodeType, other: CodeType, is_whole: bool) -> bool:
    """Tell whether two codes of a file are of one text; without the whole file, instructions may differ."""
    if (code.co_name, code.co_firstlineno) != (other.co_name, other.co_firstlineno):
        return False
    constants = [[x for x in one.co_consts if not isinstance(x, CodeType)] for one in (code, other)]
    is_same = code.co_varnames == other.co_varnames and repr(constants[0]) == repr(constants[1])
    return is_same and (not is_whole or code.co_code == other.co_code)


def _holds(node: Any, code: CodeType) -> bool:
    """Tell whether the instructions of a code come from the body of a lambda."""
    positions: Callable[[], Any] | None = getattr(code, "co_positions", None)  # Python 3.11
    first, last = (node.body.lineno, node.body.col_offset), (node.end_lineno, node.end_col_offset)
    places = [(p[0], p[2], p[1], p[3]) for p in positions()] if positions else []
    places = [
        p for p in places if None not in p and p[3] > p[1]
    ]  # without the instruction of the call
    return bool(places) and all(first <= p[:2] and p[2:] <= last for p in places)
