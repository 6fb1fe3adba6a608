"""Kernels open with the same fields in the same order: whoever reads one finds what they look for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path for folder in ("kernels", "minitorch") for path in (ROOT / folder).rglob("*.py")
)
FIELDS = [
    "Computes",
    "Source",
    "Grid",
    "Block",
    "One thread does",
    "Shared",
    "Registers",
    "Global traffic",
    "Needs",
]
#: By what a thread finds its part of the work.
PLACES = {"cuda.threadIdx", "cuda.blockIdx", "cuda.grid"}
#: By what a function becomes a kernel.
COMPILERS = {"Kernel", "_kernel", "_kernel_of", "jit"}


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """What a function does itself, without the functions that are made in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef):
            yield node
            yield from own_nodes(node)


def is_kernel(function: ast.FunctionDef) -> bool:
    """Kernels ask for their threads' places; helpers that do are compiled by a decorator."""
    asks = (ast.unparse(n) in PLACES for n in own_nodes(function) if isinstance(n, ast.Attribute))
    return not function.decorator_list and any(asks)


def compiled(tree: ast.AST) -> set[str]:
    """Names that a file hands to what makes kernels of functions."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args)
    firsts = (call.args[0] for call in calls if ast.unparse(call.func) in COMPILERS)
    return {first.id for first in firsts if isinstance(first, ast.Name)}


def fields(docstring: str) -> list[str]:
    """The fields of the header, which ends with its paragraph; further lines of a field are indented."""
    header = re.search(r"^Computes.*?(?=\n\n|\Z)", docstring, re.MULTILINE | re.DOTALL)
    return re.findall(r"^([A-Z][^:\n]*): \S", header[0], re.MULTILINE) if header else []


TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
FUNCTIONS = {
    path: [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for path, tree in TREES.items()
}
KERNELS = {
    f"{path.name}:{function.name}": function
    for path, functions in FUNCTIONS.items()
    for function in functions
    if is_kernel(function)
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_opens_with_the_fields_in_their_order(name: str) -> None:
    found = fields(ast.get_docstring(KERNELS[name]) or "")
    missing = [field for field in FIELDS if field not in found]
    assert not missing, f"{name} does not say: {', '.join(missing)}"
    assert found == FIELDS, f"{name} has other fields, or another order: {', '.join(found)}"


def test_no_kernel_is_overlooked() -> None:
    for path, functions in FUNCTIONS.items():
        names = {function.name for function in functions} & compiled(TREES[path])
        overlooked = {f"{path.name}:{name}" for name in names} - set(KERNELS)
        assert not overlooked, f"not looked at: {', '.join(overlooked)}"
    assert len(KERNELS) >= 68
