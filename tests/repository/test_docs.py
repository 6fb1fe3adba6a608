"""The documentation: its code runs, its links lead somewhere; ``make docs`` runs the cells of notebooks."""

from __future__ import annotations

import importlib.util
import re
import sys
from contextlib import nullcontext
from functools import cache
from inspect import ismethod
from pathlib import Path
from types import ModuleType

import pytest

import kernels
import minitorch
from kernels.runtime import targets

from ..support.device.emulated_gpu import emulated_gpu

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SITE = ROOT / "build" / "docs"

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
#: A page whose blocks launch CUDA kernels says so in a comment; a single block says so as its language.
EMULATED = "<!-- blocks: emulated -->"
PLAIN, ON_DEVICE = "python", "python emulated"
#: A block that needs packages beyond the requirements names them.
WITH_TORCH, WITH_MODELS = "python torch", "python torch transformers"
FENCE = re.compile(r"^( *)(`{3,}|:{3,})(.*)$")
LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(<?([^)\s>]+)>?\)")
PACKAGES = ("minitorch", "kernels")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def split(page: Path) -> tuple[list[str], list[tuple[int, str, str]]]:
    """Return the lines of a page outside of fences, and (first line, language, text) of each fence."""
    prose: list[str] = []
    fences: list[tuple[int, str, str]] = []
    opened: tuple[int, str, str, str] | None = None
    body: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        match = FENCE.match(line)
        if opened is None and match:
            opened, body = (number + 1, match[1], match[2], match[3]), []
        elif opened is not None and line.strip() == opened[2]:
            fences.append((opened[0], opened[3].strip(), "\n".join(body)))
            opened = None
        elif opened is not None:
            body.append(line.removeprefix(opened[1]))
        else:
            prose.append(line)
    assert opened is None, f"{name_of(page)}: the fence before line {opened[0]} is never closed"
    return prose, fences


def slug(heading: str) -> str:
    """Return the anchor that GitHub and MyST give a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@cache
def anchors(page: Path) -> set[str]:
    found: set[str] = set()
    for line in split(page)[0]:
        if match := HEADING.match(line):
            base = slug(match[1])
            anchor, count = base, 0
            while anchor in found:
                count += 1
                anchor = f"{base}-{count}"
            found.add(anchor)
    return found


def printed(page: Path) -> dict[int, str]:
    """Return the output that a page shows below a block, by the first line of the block."""
    found, before = {}, None
    for line, language, text in split(page)[1]:
        ends = (
            before and before[0] + len(before[2].splitlines()) + 3
        )  # its fence, an empty line, a fence
        if language == "text" and before and before[1] == PLAIN and line == ends:
            found[before[0]] = text
        before = line, language, text
    return found


def blocks(page: Path, wanted: str = PLAIN) -> list[tuple[int, str]]:
    return [(line, text) for line, language, text in split(page)[1] if language == wanted]


def runs_emulated(page: Path) -> bool:
    return EMULATED in page.read_text(encoding="utf-8")


PROGRAMS = [
    pytest.param(
        page,
        language,
        id=name_of(page) + language.removeprefix(PLAIN),
        # Those of PyTorch run with the other tests of it.
        marks=[pytest.mark.emulated] * (language == ON_DEVICE or runs_emulated(page))
        + [pytest.mark.slow] * (language not in (WITH_TORCH, WITH_MODELS)),
    )
    for page in PAGES
    for language in (PLAIN, ON_DEVICE, WITH_TORCH, WITH_MODELS)
    if blocks(page, language)
]


@pytest.mark.parametrize(("page", "language"), PROGRAMS)
def test_every_python_block_of_a_page_runs(
    page: Path, language: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """One namespace a page; an error is at the page's own line, and output below a block is right."""
    if language in (WITH_TORCH, WITH_MODELS):
        for name in language.split()[1:]:
            pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # classes of a page belong to a module
    minitorch.manual_seed(0)
    before = minitorch.get_default_dtype()
    shown = printed(page)
    on_tensor_cores = language == ON_DEVICE and targets.EMULATED
    with emulated_gpu() if on_tensor_cores else nullcontext():
        for line, text in blocks(page, language):
            capsys.readouterr()
            exec(compile("\n" * (line - 1) + text, str(page), "exec"), module.__dict__)
            if line in shown:
                assert capsys.readouterr().out.rstrip("\n") == shown[line], f"{page}:{line}"
    assert minitorch.get_default_dtype() == before, "a page leaves the default dtype as it was"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_and_image_leads_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall("\n".join(split(page)[0])):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists():
            broken.append(f"{target}: there is no such file")
        elif anchor and (there.suffix != ".md" or anchor not in anchors(there)):
            broken.append(f"{target}: there is no such heading")
    assert not broken, f"{name_of(page)}: " + "; ".join(broken)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_diagrams_are_what_the_script_draws_and_all_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    drawn = load(DOCS / "draw_diagrams.py").drawn()
    committed = {
        path.stem: path.read_text(encoding="utf-8") for path in DOCS.glob("diagrams/*.svg")
    }
    assert committed == drawn, "run python docs/draw_diagrams.py"
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in drawn if f"diagrams/{name}.svg" not in text] == []


def public_names() -> list[tuple[str, str]]:
    """Return (name to look for, name where it is defined) of each public class and function."""
    found = []
    for package, names in ((kernels, kernels.__all__), (minitorch, vars(minitorch))):
        for name in names:
            thing = getattr(package, name)
            home = getattr(thing, "__module__", "")
            is_own = callable(thing) and home.startswith(PACKAGES)
            if is_own and not name.startswith("_") and not ismethod(thing):  # conv1d is a class's
                qualified = f"{home}.{getattr(thing, '__qualname__', name)}"
                found.append((f"{package.__name__}.{name}", qualified))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not SITE.exists(), reason="there is no site here: make docs")
def test_the_site_asks_no_network_and_has_every_public_name() -> None:
    """Formulas are MathML, and whatever a page loads lies beside it."""
    pages = {page: page.read_text(encoding="utf-8") for page in SITE.rglob("*.html")}
    assert "<math" in pages[SITE / "guides" / "module5.html"]
    loads = re.compile(r'<(?:script|img|link)\b[^>]*?(?:src|href)="(https?:[^"]+)')
    assert not [
        (page.name, found) for page, text in pages.items() if (found := loads.findall(text))
    ]
    inventory = pytest.importorskip("sphinx.util.inventory").InventoryFile
    with (SITE / "objects.inv").open("rb") as file:
        entries = inventory.load(file, "", lambda base, path: path)
    documented = {
        name for group, names in entries.items() if group.startswith("py:") for name in names
    }
    missing = [shown for shown, home in public_names() if not documented & {shown, home}]
    assert not missing, "give them a place in docs/api, and run make docs"
