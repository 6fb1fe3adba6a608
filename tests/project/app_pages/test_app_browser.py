"""The app in a real browser: headless Chromium, as its users see it.

The pictures of docs/app.md come from here: MINITORCH_SCREENSHOTS=docs/images says where they go.
Without a browser the test is skipped, with a warning; with MINITORCH_BROWSER=1, as CI should have it,
it fails.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from ...support.browser import browser as browser
from .test_app import PAGES, ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start the app as its users do; return where it is."""
    log = tmp_path_factory.mktemp("app") / "log.txt"
    # Port 0 would be a free one too, but not every Streamlit of our range then says which it is.
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "streamlit", "run", "project/app.py", "--server.headless=true",
        f"--server.port={port}", "--server.fileWatcherType=none",
    ]  # fmt: skip
    with log.open("w") as out:
        server = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    try:
        url = f"http://localhost:{port}"
        _wait_for(url, server, log)
        yield url
    finally:
        server.terminate()
        server.wait(10)


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the app answers; its log says why it does not."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{url}/_stcore/health", timeout=5) as answer:
                assert answer.status == 200
            return
        except OSError:  # not yet
            time.sleep(0.1)
    raise AssertionError(f"the app does not start: {log.read_text()}")


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 101), ("127.0.0.1", 101), ("rebound.example", 403), ("", 403)],
)
def test_a_request_to_another_host_name_is_refused(host: str, status: int, address: str) -> None:
    port = int(address.rpartition(":")[2])
    headers = {
        "Host": f"{host}:{port}" if host else "", "Upgrade": "websocket", "Connection": "Upgrade",
        "Sec-WebSocket-Key": "MTIzNDU2Nzg5MDEyMzQ1Ng==", "Sec-WebSocket-Version": "13",
    }  # fmt: skip
    with closing(HTTPConnection("localhost", port, timeout=10)) as connection:
        connection.request("GET", "/_stcore/stream", headers=headers)
        assert connection.getresponse().status == status


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere 127.0.0.2 is no address of this machine"
)
def test_the_app_answers_to_this_machine_only(address: str) -> None:
    """A server of all addresses would answer here too, as it would to others in the network."""
    port = int(address.rpartition(":")[2])
    with socket.create_connection(("localhost", port), timeout=5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def settled(view: Any) -> None:
    """Wait until the page has run to its end."""
    view.wait_for_selector("h1")
    view.wait_for_timeout(300)  # a click takes a moment to reach the server
    view.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]", timeout=60_000)


def test_the_app_works_in_a_browser(browser: Any, address: str, tmp_path: Path) -> None:
    folder = Path(os.environ.get("MINITORCH_SCREENSHOTS") or tmp_path)
    view = browser.new_page(viewport={"width": 1280, "height": 1150})
    faults: list[str] = []
    view.on("pageerror", lambda error: faults.append(str(error)))
    entries = view.locator("[data-testid=stSidebar] [data-testid=stRadio] label")
    view.goto(address)
    settled(view)
    for number, page in enumerate(PAGES):
        entries.filter(has_text=" · ").nth(number).click()
        settled(view)
        assert view.url.endswith(f"?page={page}")
        assert view.locator("[data-testid=stException], [data-testid=stAlert]").count() == 0, page
        if page in ("autodiff", "tensor", "attention"):
            assert view.locator("[data-testid=stSlider]").count() > 0
    view.goto(f"{address}/?page=math")
    settled(view)
    picture = "[data-testid=stImage] img"
    before = view.locator(picture).first.get_attribute("src")
    view.get_by_role("slider").first.press("ArrowRight")
    settled(view)
    assert view.locator(picture).first.get_attribute("src") != before, "the slider changes nothing"

    def shot(page: str) -> None:
        view.wait_for_timeout(500)
        view.screenshot(path=folder / f"app-{page}.png")

    view.goto(f"{address}/?page=attention")
    settled(view)
    values = view.locator("[data-testid=stMetricValue]")
    counts = values.all_inner_texts()
    for _ in range(3):
        view.get_by_role("button", name="tile ▶▶").click()
        settled(view)
    assert values.all_inner_texts() != counts, "the step changes no counter"
    shot("attention")
    view.goto(f"{address}/?page=autodiff")
    settled(view)
    steps = view.get_by_role("slider").last
    for _ in range(3):
        steps.press("ArrowRight")
        settled(view)
    assert view.locator("[data-testid=stGraphVizChart] svg").count() == 1
    shot("autodiff")
    view.goto(f"{address}/?page=ladder")
    settled(view)
    shot("ladder")
    view.goto(f"{address}/?page=fast")
    settled(view)
    view.get_by_role("button", name="train", exact=True).click()
    view.wait_for_selector("[data-testid=stProgress]")
    assert view.locator(picture).count() > 0, "no picture while the first epoch runs"
    settled(view)
    shot("train")
    assert not faults, faults
