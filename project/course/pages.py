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

from course.markers import ROOT, marked_regions, read_text
from course.tasks import MODULES, Task, tasks_of

GUIDES, README = "docs/guides", "README.md"
#: What the guide of the last module leads to.
BESIDE = ("docs/symbols.md", "docs/rungs/naive.md", "docs/rungs/flash[12].md")
PICTURES = (".svg", ".png")

START = "course.py start"

FENCED = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(r"```\{([\w-]+)\} *(.*?)\n(.*)```", re.DOTALL)
LINK = re.compile(r"(?<!`)(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(<?([^)\s>#]*)(#[^)\s>]*)?>?\)")
LINE = re.compile(r"^(\d+)\*?: ", re.MULTILINE)
HEADING = re.compile(r"^# (.+)$", re.MULTILINE)


def write_pages(module: int, out: Path) -> None:
    """Write the README of a starter tree, and the guides of its module and of those before it.

    Args:
        module: 0 to 5.
        out: The tree.
    """
    pages = _guides(module)
    if module == MODULES[-1].number:
        pages += [p.relative_to(ROOT).as_posix() for g in BESIDE for p in sorted(ROOT.glob(g))]
    for page in pages:
        text, pictures = plain(read_text(ROOT / page), page, {*pages, README}, module)
        for file in (page, *pictures):
            (out / file).parent.mkdir(parents=True, exist_ok=True)
        (out / page).write_text(text, encoding="utf-8")
        for picture in pictures:
            shutil.copyfile(ROOT / picture, out / picture)
    (out / README).write_text(_readme(module), encoding="utf-8")


def _guides(module: int) -> list[str]:
    """Return the guide pages of the modules up to one; a module's own in the order of reading."""
    names = [path for m in range(module + 1) for path in sorted(ROOT.glob(f"{GUIDES}/module{m}*"))]
    return [path.relative_to(ROOT).as_posix() for path in sorted(names, key=lambda p: p.stem)]


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
        if name == "records":
            return "(The site shows a table here, which it makes from the code.)"
        raise ValueError(f"{page}: a starter tree has no plain form of the directive {{{name}}}")

    # A student has a tree: how to start one is not for these pages.
    paragraphs = text.split("\n\n")
    text = "\n\n".join(part for part in paragraphs if START not in part)
    parts = FENCED.split(text)  # prose, fenced, prose, …
    return "".join(
        block(part) if i % 2 else LINK.sub(link, part) for i, part in enumerate(parts)
    ), pictures


def command(task: Task) -> str:
    """Return the command that runs the tests of a task."""
    if task.emulated:
        return (
            f'MINITORCH_EMULATE=check python -m pytest -m "{task.mark} and emulated and not cuda"'
        )
    return f"python -m pytest -m {task.mark}"


def _readme(module: int) -> str:
    """Return the one page that a student begins with: where to write, in which order, what to run."""
    tasks, regions = tasks_of(module), marked_regions(ROOT)
    guides = {page: read_text(ROOT / page) for page in _guides(module) if f"e{module}" in page}
    rows, hints = list[str](), list[str]()
    for task in tasks:
        names: dict[str, list[str]] = {}
        for r in regions:
            if r.key.task == task.id:
                names.setdefault(r.key.file, []).append(r.key.name)
        places = "; ".join(
            f"`{file}`: {', '.join(dict.fromkeys(own))}" for file, own in names.items()
        )
        page = next(page for page, text in guides.items() if f"## Task {task.id}:" in text)
        link = f"[{task.id}]({page})"
        rows.append(f"| {link} | {task.title} | {task.points} | {places} |")
        after = f" After {' and '.join(task.needs)}." if task.needs else ""
        hints.append(f"- **{task.id}** {task.hint}{after}")
    first = tasks[0]
    more = module < MODULES[-1].number
    return "\n".join([
        f"# Module {module}: {MODULES[module].title}", "",
        "1. `make venv` makes an environment, `source .venv/bin/activate` enters it.",
        "2. Read " + ", then ".join(f"[{HEADING.findall(t)[0]}]({p})" for p, t in guides.items())
        + ".",
        "3. Write the tasks below in their order. A place to write looks like this; keep the "
        "two comments:", "",
        "   ```python", f"   # TASK {first.id}: a hint",
        f'   raise NotImplementedError("Task {first.id}: a hint")',
        f"   # END TASK {first.id}", "   ```", "",
        f"4. `{command(first)}` runs the tests of one task, and "
        f"`python project/course.py grade . --task {first.id}` grades it: with points, the way your "
        "instructor's grader does, if the course repository is on your machine.",
        "5. `make test` runs the tests of this module, and `python project/course.py grade .` grades all "
        "its tasks.",
        "6. `make app` opens pages in a browser that show the ideas of this module, computed by your code.",
        "",
        "You may add functions and imports in the files named here, and files of your own. Every other "
        "file is taken from the course when your work is graded."
        + f" To begin the next module with your code, run `python project/course.py start {module + 1} "
        "NEW --from OLD` in the course repository, if you have it." * more,
        "", f"| task, guide | title | {sum(task.points for task in tasks)} points | write |",
        "|---|---|---|---|", *rows, "", "## Hints", "", *hints, "", "## Commands", "", "```",
        *(f"{command(task)}" for task in tasks),
        "```", "",
    ])  # fmt: skip
