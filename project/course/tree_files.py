"""Which files a starter tree holds: its tests and scripts, what these import, and nothing else.

Tests are taken one by one: a file of tests loses those of later modules and of no task, and then whatever
only they used. The ``__init__.py`` of a package keeps the names whose files are in the tree.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path

from course.markers import PACKAGES, read_text
from course.stand_ins import STAND_INS

LIBRARY = "minitorch/__init__.py"
#: What no tree before module 3 has.
COMPILED = ("kernels/interop/*",)
#: What no tree before module 5 has; what other files need of it is left out of them.
ATTENTION = (
    "kernels/__init__.py",
    "kernels/launch.py",
    "kernels/problem/*",
    "minitorch/functions/flash_attention.py",
)


def tree_texts(
    root: Path, module: int, tests: Iterable[str], files: Iterable[str]
) -> dict[str, str]:
    """Return the Python files of a starter tree: path inside it → text, as in the course.

    Args:
        root: Of the course.
        module: 0 to 5.
        tests: Files of tests.
        files: Others that the tree needs.
    """

    def absent(place: str, name: str) -> bool:
        file = _file(root, f"{place}/{name}") or _file(root, place)
        later = (*(ATTENTION if module < 5 else ()), *(COMPILED if module < 3 else ()))
        if module < 3 and file in STAND_INS:
            return not any(name in _defines(node) for node in ast.parse(STAND_INS[file]).body)
        return any(fnmatch(file or "", pattern) for pattern in later)

    def text_of(file: str) -> str:
        text = STAND_INS[file] if module < 3 and file in STAND_INS else read_text(root / file)
        return without(text, file, absent) if file.split("/")[0] in PACKAGES else text

    texts = {file: text_of(file) for file in files}
    texts |= {file: tests_of(read_text(root / file), module) for file in tests}
    used = {*texts}
    found = closure(root, texts, text_of)
    for file in found:
        if file in texts:
            continue
        texts[file] = text_of(file)
        if file.endswith("/__init__.py") and file not in used:  # its folder is needed, and no more
            texts[file] = f'"""{ast.get_docstring(ast.parse(texts[file])) or ""}"""\n'
    if LIBRARY in texts:
        texts[LIBRARY] = library_init(root, texts)
    return texts


def closure(root: Path, texts: dict[str, str], text_of: Callable[[str], str]) -> list[str]:
    """Return files and all that they import from the packages, the tests and the scripts.

    An import inside ``try`` is one that a tree may lack.

    Args:
        root: Of the course.
        texts: The files to begin with, paths inside the tree, as they will be there; packages that are
            used for themselves are added.
        text_of: Returns the text of another file as it will be there.
    """
    published = _published(root)
    todo, done = {*texts}, set[str]()
    while todo:
        file = todo.pop()
        done.add(file)
        found = {f"{folder}/__init__.py" for folder in _folders(file)}
        if file == LIBRARY or (file.endswith("/__init__.py") and file not in texts):
            continue  # what a package publishes is no reason to have it
        tree = ast.parse(texts[file] if file in texts else text_of(file))
        for module, name in _imports(tree, file):
            place = "/".join(module)
            if name is not None and place == "minitorch" and name in published:
                found.add(published[name])
            elif name is not None and (within := _file(root, f"{place}/{name}")):
                found.add(within)
            elif within := _file(root, place):
                found.add(within)
                if name != "" and within.endswith("/__init__.py") and within != LIBRARY:
                    texts.setdefault(within, text_of(within))  # it is used for itself
                    done.discard(within)
        if "/" not in file.removeprefix("project/") or file.startswith("tests/"):
            # A script of a module, or a test: not what scripts share, which serves later modules too.
            read = {name for module, name in _attributes(tree) if module == "minitorch"}
            found |= {published[name] for name in read & {*published}}
        todo |= {path for path in found if (root / path).is_file()} - done
    return sorted(done)


def _folders(file: str) -> list[str]:
    parts = file.split("/")[:-1]
    return ["/".join(parts[: i + 1]) for i in range(len(parts)) if parts[0] != "project" or i]


def _file(root: Path, place: str) -> str | None:
    """Return the file of a module, looked up as from the root and as from a script."""
    for path in (place, f"project/{place}"):
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if (root / file).is_file() and file.split("/")[0] in (*PACKAGES, "tests", "project"):
                return file
    return None


def _imports(tree: ast.Module, file: str) -> list[tuple[list[str], str | None]]:
    """Return the imports of a file: a module, and a name in it; None for the module itself."""
    optional = {id(node) for part in ast.walk(tree) if isinstance(part, ast.Try)
                for node in ast.walk(part)}  # fmt: skip
    found: list[tuple[list[str], str | None]] = []
    used = {module for module, name in _attributes(tree) if not name.startswith("__")}
    for node in ast.walk(tree):
        if id(node) in optional:
            continue
        if isinstance(node, ast.Import):
            modules = [alias.name.split(".") for alias in node.names]
            found += [(m, None) for m in modules if len(m) > 1 or m[0] in used]
        elif isinstance(node, ast.ImportFrom):
            here = file.split("/")[: -node.level] if node.level else []
            module = [*here, *(node.module.split(".") if node.module else [])]
            found += [(module, alias.name) for alias in node.names]
    return found


def _attributes(tree: ast.Module) -> set[tuple[str, str]]:
    """Return what code reads from modules, as in ``minitorch.Scalar``."""
    return {
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }


def _published(root: Path) -> dict[str, str]:
    """Return the file of each name that the library publishes."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(read_text(root / LIBRARY))):
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                file = _file(root, f"minitorch/{(node.module or alias.name).replace('.', '/')}")
                if file is not None:
                    found[alias.asname or alias.name] = file
    return found


def library_init(root: Path, texts: dict[str, str]) -> str:
    """Return the library's ``__init__.py`` with the names that a tree has.

    Args:
        root: Of the course.
        texts: The files of the tree.
    """
    tree = ast.parse(read_text(root / LIBRARY))
    lines, bound = [f'"""{ast.get_docstring(tree)}\n"""', ""], set[str]()
    for node in (part for statement in tree.body for part in ast.walk(statement)):
        if isinstance(node, ast.ImportFrom) and node.level:
            node.names = [a for a in node.names if _has(root, texts, node.module or "", a.name)]
        elif isinstance(node, ast.ImportFrom) and node.module == "numpy":
            node.names = node.names if "minitorch/tensor.py" in texts else []
        elif isinstance(
            node, ast.ImportFrom
        ):  # of the kernels; the start of the package is not needed
            file = _file(root, (node.module or "").replace(".", "/"))
            node.names = node.names if file in texts and file != LIBRARY else []
        elif not isinstance(node, ast.Assign):
            continue
        if isinstance(node, ast.ImportFrom):
            bound |= {_bound(alias) for alias in node.names}
            empty = not node.names
        else:
            empty = not _names_used(node.value) <= bound
        if not empty:
            lines.append(ast.unparse(node).replace("'", '"'))
    return "\n".join(lines) + "\n"


def _has(root: Path, texts: dict[str, str], module: str, name: str) -> bool:
    """Tell whether a module of the library is in a tree, with a name; or the module of that name is."""
    place = "/".join(["minitorch", *(module.split(".") if module else [])])
    if name != "entrance" and _file(root, f"{place}/{name}") in texts:
        return True
    text = texts.get(_file(root, place) or "") if module else None
    return text is not None and any(name in _defines(node) for node in ast.parse(text).body)


def tests_of(text: str, module: int) -> str:
    """Return a file of tests with those of the tasks of a module and of earlier ones, and what they use.

    Args:
        text: Of the file.
        module: 0 to 5.
    """
    body, mark = ast.parse(text).body, re.compile(rf"task[0-{module}]_\d+")
    uses = [_uses(node) for node in body]
    places = {name: i for i, node in enumerate(body) for name in _defines(node)}

    def reached(start: Iterable[int]) -> set[int]:
        todo, seen = {*start}, set[int]()
        while todo:
            seen.add(i := todo.pop())
            todo |= {places[name] for name in uses[i] & {*places}} - seen
        return seen

    def decides(node: ast.stmt) -> bool:
        """Tell whether a test has the mark of such a task: its own, or by the name of a decorator."""
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            return False
        if not node.name.startswith(("test_", "Test")):
            return False
        marks = node.decorator_list if isinstance(node, ast.FunctionDef) else [node]
        named = {places[name] for part in marks for name in _uses(part) & {*places}}
        named |= {places["pytestmark"]} if "pytestmark" in places else set()
        parts = [*marks, *(body[i] for i in reached(named))]
        return any(mark.search(ast.unparse(part)) for part in parts)

    kept = reached(
        i
        for i, node in enumerate(body)
        if decides(node)
        or isinstance(node, ast.Expr)
        or getattr(node, "module", "") == "__future__"
        or "pytestmark" in _defines(node)
        or any("autouse" in ast.unparse(d) for d in getattr(node, "decorator_list", []))
    )
    used = {name for i in kept if not isinstance(body[i], _IMPORTS) for name in uses[i]}
    lines: list[str | None] = [*text.split("\n")]
    for i, node in enumerate(body):
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        while i not in kept and first > 1 and (lines[first - 2] or "").startswith("#:"):
            first -= 1
        span = range(first - 1, node.end_lineno or first)
        if i not in kept:
            lines[span.start : span.stop] = [None] * len(span)
        elif isinstance(node, _IMPORTS) and getattr(node, "module", "") != "__future__":
            names = [alias for alias in node.names if _bound(alias) in used]
            if len(names) < len(node.names):
                node.names = names
                lines[span.start : span.stop] = [ast.unparse(node), *[None] * (len(span) - 1)]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(line for line in lines if line is not None))


_IMPORTS = (ast.Import, ast.ImportFrom)


def _bound(alias: ast.alias) -> str:
    return (alias.asname or alias.name).split(".")[0]


def _defines(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, _IMPORTS):
        return {_bound(alias) for alias in node.names}
    return {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }


def _uses(node: ast.AST) -> set[str]:
    """Return the names that code uses; a test names fixtures by its parameters, and in strings."""
    found = set[str]()
    for n in ast.walk(node):
        if isinstance(n, ast.Name):
            found.add(n.id)
        elif isinstance(n, ast.arg):
            found.add(n.arg)
        elif isinstance(n, ast.Constant) and isinstance(n.value, str):
            found.add(n.value)
    return found


def without(text: str, file: str, absent: Callable[[str, str], bool]) -> str:
    """Return a source without its imports of what a tree lacks, and without what uses them.

    Functions and classes go, methods and attributes of classes too, until nothing names what is gone.

    Args:
        text: Of the file.
        file: Its path inside the tree.
        absent: Takes a module, with slashes, and a name in it.
    """
    tree, gone = ast.parse(text), set[str]()
    lines: list[str | None] = [*text.split("\n")]

    def cut(node: ast.stmt, instead: str | None = None) -> None:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        last = node.end_lineno or first
        while last - 1 < len(lines) - 1 and (lines[last] or "").strip() == "# fmt: skip":
            last += 1
        lines[first - 1 : last] = [instead, *[None] * (last - first)]

    for node in tree.body:
        if not isinstance(node, ast.ImportFrom):
            continue
        here = file.split("/")[: -node.level] if node.level else []
        module = "/".join([*here, *(node.module.split(".") if node.module else [])])
        names = [alias for alias in node.names if not absent(module, alias.name)]
        if len(names) < len(node.names):
            gone |= {_bound(alias) for alias in node.names if alias not in names}
            node.names = names
            cut(node, ast.unparse(node) if names else None)
    members = [part for node in tree.body if isinstance(node, ast.ClassDef) for part in node.body]
    parts = [
        n for n in (*tree.body, *members) if not isinstance(n, (*_IMPORTS, ast.ClassDef, ast.If))
    ]
    while gone:
        users = [part for part in parts if gone & _names_used(part)]
        if not users:
            break
        for part in users:
            cut(part)
            if part in tree.body:
                gone |= _defines(part)
        parts = [part for part in parts if part not in users]
    return "\n".join(line for line in lines if line is not None)


def _names_used(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
