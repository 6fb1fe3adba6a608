"""What a starter tree has to read: its README and the guide, as Markdown that needs no site and no network.

The pages are those of ``docs/``. A directive of the site becomes plain text: of an algorithm the
paper's lines stay, and the code beside them, which is a solution, does not. A link to a page that the
tree has not becomes its words.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path, PurePosixPath

from course.markers import marked_regions, read_text
from course.tasks import MODULES, SPEED, Task, tasks_of

GUIDES, README = "docs/guides", "README.md"
#: What the guide of the last module leads to.
BESIDE = ("docs/rungs/*.md", "docs/ladder.md")
PICTURES = (".svg", ".png")

FENCED = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(r"```\{([\w-]+)\} *(.*?)\n(.*)```", re.DOTALL)
LINK = re.compile(r"(?<!`)(!?)\[([^\]]*)\]\(<?([^)\s>#]*)(#[^)\s>]*)?>?\)")
LINE = re.compile(r"^(\d+)\*?: ", re.MULTILINE)
HEADING = re.compile(r"^# (.+)$", re.MULTILINE)


def write_pages(module: int, out: Path, root: Path) -> None:
    """Write the README of a starter tree, and the guides of its module and of those before it.

    Args:
        module: 0 to 5.
        out: The tree.
        root: The course.
    """
    pages = [*_guides(module, root), "docs/symbols.md"]
    if module == MODULES[-1].number:
        pages += [p.relative_to(root).as_posix() for g in BESIDE for p in sorted(root.glob(g))]
    for page in pages:
        text, pictures = plain(read_text(root / page), page, {*pages, README}, module)
        for file in (page, *pictures):
            (out / file).parent.mkdir(parents=True, exist_ok=True)
        (out / page).write_text(text, encoding="utf-8")
        for picture in pictures:
            shutil.copyfile(root / picture, out / picture)
    (out / README).write_text(_readme(module, root), encoding="utf-8")


def _guides(module: int, root: Path) -> list[str]:
    """Return the guide pages of the modules up to one; a module's own in the order of reading."""
    names = [path for m in range(module + 1) for path in sorted(root.glob(f"{GUIDES}/module{m}*"))]
    return [path.relative_to(root).as_posix() for path in sorted(names, key=lambda p: p.stem)]


def plain(text: str, page: str, known: set[str], module: int) -> tuple[str, set[str]]:
    """Return a page without directives and without links that lead nowhere, and its pictures.

    Args:
        text: Of the page.
        page: Its path inside the tree.
        known: Pages that a link may lead to.
        module: Of the tree: its tasks are in the README.

    Raises:
        ValueError: If the page has a directive for which there is no plain form.
    """
    folder, pictures = PurePosixPath(page).parent, set[str]()

    def link(match: re.Match[str]) -> str:
        picture, words, target, _ = match.groups()
        if not target or ":" in target:
            return match[0]
        file = os.path.normpath(folder / target).replace(os.sep, "/")
        if picture and file.endswith(PICTURES):
            pictures.add(file)
        elif file not in known:
            return words
        return match[0]

    def block(fenced: str) -> str:
        directive = DIRECTIVE.fullmatch(fenced)
        if directive is None:
            return fenced
        name, arguments, lines = directive.groups()
        if name == "tasks" and int(arguments) < module:
            return f"Those of module {arguments} are written in this tree."
        if name == "tasks":
            up = os.path.relpath(README, folder).replace(os.sep, "/")
            return f"[{README}]({up}) has them, in order, with a hint and a command each."
        if name == "algorithm":
            file, function = arguments.split()
            listed = LINE.sub(lambda m: "- " if m[1] == "0" else f"- **{m[1]}** ", lines)
            return LINK.sub(link, f"`{function}` in `{file}`:\n\n{listed}".rstrip("\n"))
        if name == "record-table":
            return "(The site shows a table here, which it makes from the records of the measurements.)"
        raise ValueError(f"{page}: a starter tree has no plain form of the directive {{{name}}}")

    parts = FENCED.split(text)  # prose, fenced, prose, …
    return "".join(
        block(part) if i % 2 else LINK.sub(link, part) for i, part in enumerate(parts)
    ), pictures


def points_of(task: Task) -> str:
    """Return the points of a task in words."""
    return f"{task.points} points" + (f", {task.speed} of them for speed" if task.speed else "")


def command(task: Task) -> str:
    """Return the command that runs the tests of a task."""
    run = f"python -m pytest -m {task.mark}"
    if task.simulator:
        run = f'NUMBA_ENABLE_CUDASIM=1 python -m pytest -m "{task.mark} and simulator and not cuda"'
    return f"{run} {' '.join(task.tests)}"


def _readme(module: int, root: Path) -> str:
    tasks = tasks_of(module)
    lines = [
        f"# Module {module}: {MODULES[module].title}",
        "",
        "Write what is missing, task by task. A place to write looks like this; the two comments stay:",
        "",
        "```python",
        "    # TASK 1.1: a hint",
        '    raise NotImplementedError("Task 1.1: a hint")',
        "    # END TASK 1.1",
        "```",
        "",
        "`make venv` makes an environment and installs what is needed. `make test` runs the tests of "
        "this module, and `python project/course.py grade .` prints a table of tasks and points. You "
        "may add functions and imports in the files named below, and files of your own; every other "
        "file is taken from the course when your work is graded.",
        "",
        f"Points: {sum(task.points for task in tasks)}.",
        "",
        "The guide, to be read first:",
        "",
    ]
    guides = {page: read_text(root / page) for page in _guides(module, root)}
    own = {page: text for page, text in guides.items() if f"/module{module}" in page}
    lines += [f"- [{HEADING.findall(text)[0]}]({page})" for page, text in own.items()]
    regions = marked_regions(root)
    for task in tasks:
        lines += ["", f"## Task {task.id}: {task.title} ({points_of(task)})", "", task.hint, ""]
        if task.needs:
            lines += [f"Builds on {' and '.join(task.needs)}: solve these first.", ""]
        lines += ["| file | function | hint |", "|---|---|---|"]
        for r in regions:
            if r.key.task == task.id:
                hint = r.hint.replace("|", "\\|")
                lines.append(f"| `{r.key.file}` | `{r.key.name}` | {hint} |")
        section = next(page for page, text in own.items() if f"## Task {task.id}:" in text)
        lines += ["", f"Guide: [{PurePosixPath(section).name}]({section}), task {task.id}."]
        lines += ["", f"Mark `{task.mark}`:", "", "```", command(task)]
        lines += [f"python -m pytest -m {task.mark} {SPEED}  # how fast"] if task.speed else []
        lines += ["```"]
    return "\n".join(lines) + "\n"
