"""A starter tree can be read without a network, and does not print its solutions."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from course.markers import read_bodies
from course.pages import plain
from course.starter_trees import start
from course.tasks import MODULES, tasks_of

ROOT = Path(__file__).parents[3]

LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>#]+)(#[^)\s>]*)?>?\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("module", [m.number for m in MODULES])
def test_the_guide_of_a_module_is_in_its_tree(module: int, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    start(module, tree)
    pages = {path: path.read_text(encoding="utf-8") for path in tree.rglob("*.md")}
    names = {path.relative_to(tree).as_posix() for path in pages}
    assert {f"docs/guides/module{m}.md" for m in range(module + 1)} < names
    assert not any(f"module{m}" in name for name in names for m in range(module + 1, 6))
    readme = pages[tree / "README.md"]
    for task in tasks_of(module):
        guide = re.search(rf"^\| \[{re.escape(task.id)}\]\((.+?)\)", readme, re.MULTILINE)
        assert guide is not None
        assert f"## Task {task.id}: " in pages[tree / guide[1]]
    for path, text in pages.items():
        for name in re.findall(r"pytest.* (tests/[\w/.]+)", text):
            assert (tree / name).exists(), f"{path} names {name}, which the tree has not"
        if path != tree / "README.md":
            assert "course.py start" not in text, f"{path} tells to start a tree inside of one"
    for path, text in pages.items():
        assert "```{" not in text, f"{path} has a directive that only the site knows"
        for target, _ in LINK.findall(FENCED.sub("", text)):
            if ":" not in target:
                assert (path.parent / target).exists(), (
                    f"{path} leads to {target}, which is missing"
                )
    solutions = ["\n".join(body) for body in read_bodies(ROOT).values() if len(body) > 2]
    for path, text in pages.items():
        for body in solutions:
            assert textwrap.dedent(body).strip() not in text, f"{path} prints a solution:\n{body}"


PAGE = """# A page

[here](module1.md#a) and [not here](module9.md), [the site](https://example.org), ![a](../b.svg).

```python
x = [1](module9.md)
```

```{algorithm} kernels/a.py f
0: Before, as in [this](module9.md).
1*: **for** $i$
12: $S = Q K$
```

```{tasks} 1
```
"""
PLAIN = """# A page

[here](module1.md#a) and not here, [the site](https://example.org), ![a](../b.svg).

```python
x = [1](module9.md)
```

`f` in `kernels/a.py`:

- Before, as in this.
- **1** **for** $i$
- **12** $S = Q K$

[README.md](../../README.md) has them, in order, with a hint and a command each.
"""


def test_a_page_of_the_site_becomes_one_that_needs_no_site() -> None:
    known = {"docs/guides/module1.md", "README.md"}
    assert plain(PAGE, "docs/guides/a.md", known, 1) == (PLAIN, {"docs/b.svg"})
    assert "Those of module 1 are written in this tree." in plain(PAGE, "a/b/c.md", known, 2)[0]
    with pytest.raises(ValueError, match=r"docs/a.md: .* \{experiment\}"):
        plain("```{experiment} memory\n```\n", "docs/a.md", known, 1)
