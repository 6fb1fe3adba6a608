"""Modules 0 and 1 in a browser, as a student meets them: write, run, read what is wrong, go on."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from course.browser_lessons import write_lessons
from course.markers import ROOT, read_bodies

from ...support.browser import browser as browser

pytestmark = pytest.mark.slow
PACKAGES = ROOT / "build" / "browser"


class Quiet(SimpleHTTPRequestHandler):
    """A server of plain files that does not write what it serves."""

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Open the lessons."""
    if not (PACKAGES / ".packages").exists():
        reason = "no lessons in a browser without Pyodide: make docs, which needs npm"
        warnings.warn(reason, stacklevel=1)
        pytest.skip(reason)
    out = tmp_path_factory.mktemp("lessons") / "browser"
    write_lessons(out, PACKAGES)
    server = ThreadingHTTPServer(("localhost", 0), partial(Quiet, directory=str(out)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = browser.new_page()
    page.set_default_timeout(60_000)
    page.goto(f"http://localhost:{server.server_port}/index.html")
    page.wait_for_selector("#run:enabled")
    yield page
    page.close()
    server.shutdown()


def solve(page: Any, task: str) -> None:
    """Write the course's own bodies of a task into its editors."""
    page.click(f'nav button[id="{task}"]')
    own = {key: lines for key, lines in read_bodies(ROOT).items() if key.task == task}
    editors = page.query_selector_all("textarea")
    for editor, lines in zip(editors, own.values(), strict=True):
        editor.fill("\n".join(lines))


def marked(page: Any) -> str:
    """Run the tests of the task that is shown, and return its mark."""
    page.click("#run")
    page.wait_for_function(
        "!['', 'Running …'].includes(document.getElementById('mark').textContent)"
    )
    return str(page.text_content("#mark"))


def test_a_task_is_marked_before_and_after_it_is_written(page: Any) -> None:
    assert marked(page).startswith("0 of 10 points: ")
    assert "NotImplementedError: Task 0.1" in page.text_content("#said")
    solve(page, "0.1")
    assert marked(page).startswith("10 of 10 points: ")
    page.reload()
    page.wait_for_selector("#run:enabled")
    assert marked(page).startswith("10 of 10 points: ")  # the code is kept


def test_an_endless_loop_is_stopped(page: Any) -> None:
    page.click('nav button[id="1.1"]')
    page.locator("textarea").first.fill("    while True:\n        pass")
    page.click("#run")
    page.click("#stop")
    assert page.text_content("#mark") == "Stopped."
    page.wait_for_selector("#run:enabled")
    solve(page, "1.1")
    assert marked(page).startswith("5 of 5 points: ")


def test_a_graph_is_drawn_by_the_student_s_code(page: Any) -> None:
    for task in ("1.2", "1.3", "1.4"):
        solve(page, task)
    assert marked(page).startswith("15 of 15 points: ")
    page.fill("#expression", "(x * y).relu() - z")
    page.click("#draw")
    page.wait_for_selector("#graph svg")
    assert page.text_content("#slopes") == "derivative by x: 3, by y: 2, by z: -1"
