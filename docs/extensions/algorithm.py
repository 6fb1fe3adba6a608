r"""The directive ``{algorithm}``: a paper's lines on the left, and on the right the code that does each.

    ```{algorithm} kernels/cuda/attention/flash1.py flash1_forward
    0: what stands before the first line
    6: **for** $1 \le j \le T_c$ **do**
    4*: a line without code of its own
    ```

The code is cut at its comments ``# 6: …``, so it is never older than the kernel; a line that only one of
the two has is an error.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
COMMENT = re.compile(r"^\s*# (?=\d+(?:, \d+)*(?:, \w+ half)?: )")
NUMBERS = re.compile(r"(?:^|\s{3,})(\d+(?:, \d+)*)(?:, \w+ half)?: ")
MARKER = re.compile(
    r"^\s*# (END )?TASK \d"
)  # of the course, where a student's work begins and ends
LINE = re.compile(r"(\d+)(\*?): (.+)")


class Piece(NamedTuple):
    """Some lines of code, and the lines of the paper that they do; none before the first."""

    numbers: tuple[int, ...]
    code: list[str]


def function_lines(file: str, name: str) -> list[str]:
    """Return the body of a function, without its docstring.

    Raises:
        ValueError: If the file has no function of that name.
    """
    text = (ROOT / file).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            first = node.body[0]
            start = first.end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1
            body = [
                line
                for line in text.splitlines()[start : node.end_lineno]
                if not MARKER.match(line)
            ]
            return textwrap.dedent("\n".join(body)).splitlines()
    raise ValueError(f"{file} has no function {name}")


def pieces(lines: list[str]) -> list[Piece]:
    """Cut code at its numbered comments; what comments stand right before one go with it."""
    found = [Piece((), [])]
    for line in lines:
        if COMMENT.match(line):
            last, above = found[-1].code, []
            while last and last[-1].lstrip().startswith("#") and not COMMENT.match(last[-1]):
                above.insert(0, last.pop())
            groups = NUMBERS.findall(COMMENT.sub("", line))
            numbers = tuple(int(n) for group in groups for n in group.split(", "))
            found.append(Piece(numbers, above))
        found[-1].code.append(line)
    return found


def rows(content: list[str], code: list[Piece]) -> list[tuple[str, str]]:
    """Return (paper, code) for each row, in the order of the code.

    Raises:
        ValueError: If a line of one of the two is missing in the other.
    """
    paper: dict[int, str] = {}
    result: list[tuple[str, str]] = []
    loose: list[tuple[int, str]] = []
    for line in filter(None, map(str.strip, content)):
        match = LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"a line begins with its number and a colon, got {line!r}")
        number, star, text = int(match[1]), match[2], match[3]
        if star:
            loose.append((number, text))
        else:
            paper[number] = text
    missing = set(paper) ^ {0, *(n for piece in code for n in piece.numbers)}
    if missing - {0}:
        raise ValueError(f"lines {sorted(missing)} stand only on one side")
    shown: set[int] = set()
    for piece in code:
        numbers = piece.numbers or ((0,) if 0 in paper else ())
        first = min(numbers, default=0)
        while loose and loose[0][0] <= first:
            number, text = loose.pop(0)
            result.append((f"**{number}** {text}", ""))
        words = [
            f"**{n}** (continued)" if n in shown else f"**{n}** {paper[n]}" if n else paper[n]
            for n in numbers
        ]
        shown.update(numbers)
        source = textwrap.dedent("\n".join(piece.code)).strip("\n")
        if source and numbers:
            result.append(("\n\n".join(words), source))
    return result + [(f"**{number}** {text}", "") for number, text in loose]


class Algorithm(SphinxDirective):
    """Show a function of the code beside the lines of a paper."""

    required_arguments = 2
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return a table of two columns."""
        file, name = self.arguments
        self.env.note_dependency(str(ROOT / file))
        try:
            table = rows(list(self.content), pieces(function_lines(file, name)))
        except ValueError as error:
            raise self.error(f"{file}, {name}: {error}") from None
        box = nodes.container(classes=["algorithm"])
        for paper, code in table:
            row, left = nodes.container(classes=["row"]), nodes.container(classes=["paper"])
            self.state.nested_parse(StringList(paper.splitlines(), file), 0, left)
            row += left
            if code:
                row += nodes.literal_block(code, code, language="python")
            box += row
        return [box]


def setup(app: Any) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("algorithm", Algorithm)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
