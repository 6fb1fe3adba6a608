"""The directive ``{records}``: the records of ``kernels``, from their docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]


def _records(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """Yield the named tuples and dataclasses of a module whose names are public."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            made_by = [ast.unparse(one) for one in (*node.bases, *node.decorator_list)]
            if any("NamedTuple" in one or "dataclass" in one for one in made_by):
                yield node


def as_markdown(root: Path) -> str:
    """Return a table of the records of a package, by name: what each is, its fields, its module."""
    rows = []
    for path in root.glob("**/*.py"):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        for record in _records(ast.parse(path.read_text(encoding="utf-8"))):
            fields = [ast.unparse(x.target) for x in record.body if isinstance(x, ast.AnnAssign)]
            text = (ast.get_docstring(record) or "").partition("\n")[0].replace("|", "\\|")
            shown = ", ".join(f"`{name}`" for name in fields)
            rows.append(f"| `{record.name}` | {text} | {shown} | `{module}` |")
    return "\n".join(["| record | meaning | fields | module |", "|---|---|---|---|", *sorted(rows)])


class RecordTable(SphinxDirective):
    """Insert the table."""

    def run(self) -> list[nodes.Node]:
        """Return the parsed table."""
        box = nodes.container(classes=["records"])
        lines = as_markdown(ROOT / "kernels").splitlines()
        self.state.nested_parse(StringList(lines, "records"), 0, box)
        return [box]


def setup(app: Any) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("records", RecordTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
