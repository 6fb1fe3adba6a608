"""The server: what clients get, and that nothing they do stops it or keeps its pages."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="pip install -e '.[serve]'")
uvicorn = pytest.importorskip("uvicorn", reason="pip install -e '.[serve]'")

import serve  # noqa: E402
from serving.api import Served, Stopper, make_app  # noqa: E402
from serving.worker import Refused, Worker  # noqa: E402
from training.gpt_tokens import encoded  # noqa: E402

import minitorch  # noqa: E402

SCRIPT = Path(serve.__file__)
PIPE = subprocess.PIPE


def ask(port: int, body: Any, path: str = "/v1/completions") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    text = body if isinstance(body, bytes) else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, text)
    return connection.getresponse()


class Running:
    """A server in a thread, with a small model, room for three texts, and a queue of four."""

    def __init__(self) -> None:
        sizes = {"layers": 1, "width": 8, "heads": 2, "context": 96, "vocabulary": 96}
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(serve.PRESETS, "tiny", sizes)
            self.model, self.config = serve.load("tiny", "fast")
        self.model.eval()
        engine = minitorch.Engine(self.model, pages=18, batch=4)
        self.worker = Worker(engine, most_waiting=4)
        app = make_app(Served("tiny", self.worker, self.config, None))
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def ask(self, body: Any, path: str = "/v1/completions") -> http.client.HTTPResponse:
        return ask(self.port, body, path)

    def text(self, **asked: Any) -> str:
        reply = self.ask(asked)
        found = json.loads(reply.read())
        assert reply.status == 200, found
        return found["choices"][0]["text"]

    def expected(self, prompt: str, count: int, **options: Any) -> str:
        ids = encoded(prompt, self.config).tolist()
        found = self.model.generate(ids, count, **options)[len(ids) :]
        return "".join(self.config["characters"][i] for i in found)

    def numbers(self) -> dict[str, float]:
        lines = self.ask(None, "/metrics").read().decode().splitlines()
        return {name[10:]: float(value) for name, value in map(str.split, lines)}

    def wait_until_free(self) -> None:
        begin = time.monotonic()
        while (found := self.numbers())["free_pages"] < found["pages"] or found["waiting"]:
            assert time.monotonic() - begin < 30, f"pages are still taken: {found}"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    own = Running()
    yield own
    own.worker.end(0.0)
    own.server.should_exit = True
    own.thread.join()
    own.worker.join()


def pieces(reply: http.client.HTTPResponse) -> list[Any]:
    events = [e for e in reply.read().decode().split("\n\n") if e]
    assert events[-1] == "data: [DONE]"
    return [json.loads(e.removeprefix("data: ")) for e in events[:-1]]


def test_a_completion_is_what_generate_writes(running: Running) -> None:
    for options in ({"seed": 3}, {"temperature": 0.0}, {"seed": 1, "top_k": 4, "top_p": 0.9}):
        expected = running.expected("The ", 20, **options)
        assert running.text(prompt="The ", max_tokens=20, **options) == expected
        asked = {"prompt": "The ", "max_tokens": 20, "stream": True, **options}
        found = pieces(running.ask(asked))
        assert "".join(one["choices"][0]["text"] for one in found) == expected
        assert [one["choices"][0]["finish_reason"] for one in found][-2:] == [None, "length"]
    ids = encoded("The ", running.config).tolist()
    assert running.text(prompt=ids, max_tokens=3, seed=2) == running.expected("The ", 3, seed=2)


def test_a_text_ends_before_a_string_that_stops_it(running: Running) -> None:
    whole = running.expected("The ", 30, seed=5)
    reply = running.ask(
        {"prompt": "The ", "max_tokens": 30, "seed": 5, "stop": [whole[9:12], "\0"]}
    )
    choice = json.loads(reply.read())["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(whole[9:12])], "stop")
    running.wait_until_free()


@given(
    parts=st.lists(st.text("ab", max_size=4), max_size=8),
    stop=st.text("ab", min_size=1, max_size=4),
)
@example(["aa", "a", "b"], "aab")
def test_what_is_shown_is_all_before_the_stop(parts: list[str], stop: str) -> None:
    stopper, shown = Stopper([stop]), ""
    for part in parts:
        shown += stopper.passed(part)
        if stopper.found:
            break
    else:
        shown += stopper.passed("", is_last=True)
    assert shown == "".join(parts).partition(stop)[0]
    assert stopper.found == (stop in "".join(parts))


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "the body: Invalid JSON"),
        (b"\xff\x00", 400, "JSON"),
        ({}, 400, "prompt: Field required"),
        ({"prompt": ""}, 400, "at least one token"),
        ({"prompt": [[1]]}, 400, "prompt"),
        ({"prompt": [96]}, 400, "96"),
        ({"prompt": [10**30]}, 400, "tokens of the prompt"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": 10**30}, 400, "count"),
        ({"prompt": "a" * 90, "max_tokens": 7}, 400, "the model reads 96"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature"),
        (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature"),
        ({"prompt": "a", "top_p": 0}, 400, "top_p"),
        ({"prompt": "a", "n": 2}, 400, "n: "),
        ({"prompt": "a", "stop": [""]}, 400, "stop"),
        (b" " * (1 << 21), 413, "shorter prompt"),
    ],
    ids=str,
)
def test_a_bad_request_is_refused_in_words(
    running: Running, body: Any, status: int, words: str
) -> None:
    reply = running.ask(body)
    found = json.loads(reply.read())["error"]
    assert (reply.status, found["code"]) == (status, status) and words in found["message"]
    assert len(running.text(prompt="The ", max_tokens=1)) == 1


def test_a_client_that_leaves_frees_its_pages_and_disturbs_nobody(running: Running) -> None:
    before = running.numbers().get('requests_total{ended="cancelled"}', 0)
    with ThreadPoolExecutor() as pool:
        long = {"prompt": "a", "max_tokens": 95, "seed": 1}
        other = pool.submit(running.text, **{**long, "seed": 2})
        left = running.ask({**long, "stream": True})
        left.read(50)
        left.close()
        assert other.result() == running.expected("a", 95, seed=2)
    running.wait_until_free()
    assert running.numbers()['requests_total{ended="cancelled"}'] - before <= 1


def test_ten_times_more_requests_than_fit_are_served_or_told_to_come_again(
    running: Running,
) -> None:
    def one(seed: int) -> tuple[int, str, str]:
        reply = running.ask({"prompt": "The ", "max_tokens": 60, "seed": seed})
        found = json.loads(reply.read())
        if reply.status == 200:
            return 200, found["choices"][0]["text"], running.expected("The ", 60, seed=seed)
        assert reply.getheader("Retry-After") and "waiting already" in found["error"]["message"]
        return reply.status, "", ""

    with ThreadPoolExecutor(40) as pool:
        found = [*pool.map(one, range(40))]
    assert {status for status, *_ in found} == {200, 429}
    assert all(text == expected for _, text, expected in found)
    running.wait_until_free()
    assert not running.worker.engine.running and not running.worker._listening


def test_the_page_and_the_models_are_there(running: Running) -> None:
    assert b"/v1/completions" in running.ask(None, "/").read()
    assert json.loads(running.ask(None, "/v1/models").read())["data"][0]["id"] == "tiny"
    assert running.ask(None, "/none").status == 404


def test_when_the_server_ends_what_runs_gets_an_error_and_what_comes_is_refused() -> None:
    own = Running()
    reply = own.ask({"prompt": "a", "max_tokens": 95, "stream": True})
    reply.read(10)
    own.worker.end(0.0)
    assert "error" in pieces_after(reply)[-1]
    late = own.ask({"prompt": "a"})
    assert late.status == 503 and b"ending" in late.read()
    own.worker.join()
    own.server.should_exit = True
    own.thread.join()
    assert own.worker.engine.free_pages == own.worker.engine.pages


def pieces_after(reply: http.client.HTTPResponse) -> list[Any]:
    """Return the whole events that are left of a reply whose first bytes have been read."""
    events = reply.read().decode().split("\n\n")[1:-1]
    assert events[-1] == "data: [DONE]"
    return [json.loads(e.removeprefix("data: ")) for e in events[:-1]]


def test_a_request_that_comes_while_the_worker_ends_gets_an_answer(running: Running) -> None:
    """The thread may end between two lines of ``submit``; a wait without end is the mistake."""

    async def submitted(worker: Worker) -> str | None:
        try:
            request, sink = await worker.submit(prompt=[1], count=1)
        except Refused as error:
            return str(error)
        while await sink.get() is not None:
            pass
        return request.ended

    async def answers(round_: int) -> set[str | None]:
        worker = Worker(minitorch.Engine(running.model, pages=4), most_waiting=64)
        ends = threading.Thread(target=lambda: (time.sleep(1e-5 * (round_ % 40)), worker.end(0.0)))
        ends.start()
        found = {await asyncio.wait_for(submitted(worker), 20) for _ in range(4)}
        ends.join()
        worker.join()
        return found

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        found = set().union(*(asyncio.run(answers(i)) for i in range(200)))
    finally:
        sys.setswitchinterval(before)
    assert any("ending" in str(one) for one in found)


LONG = {"prompt": "The ", "max_tokens": 100, "stream": True}


@contextmanager
def process(*options: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """Start the script, and yield it and its output when it compiles."""
    command = [sys.executable, str(SCRIPT), "--port", "0", *options]
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True) as found:
        lines: Any = found.stdout
        for words in ("the weights are random", "compiling the model"):
            assert words in lines.readline()
        yield found, lines


def port_of(line: str) -> int:
    return int(line.split()[0].rpartition(":")[2])


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_process_when_all_have_their_answer(sent: int) -> None:
    with process("--grace", "300", "--batch", "1") as (server, lines):
        port = port_of(lines.readline())
        replies = [ask(port, LONG) for _ in range(4)]  # they run one after the other
        server.send_signal(sent)
        assert "Ctrl-C ends it at once" in lines.readline()
        late = ask(port, LONG)
        assert late.status == 503 and b"ending" in late.read()
        for reply in replies:
            assert pieces(reply)[-1]["choices"][0]["finish_reason"] == "length"
        assert server.communicate(timeout=60) == ("", "") and server.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_a_second_signal_ends_the_process_at_once_and_what_runs_gets_an_error() -> None:
    with process("--grace", "300", "--batch", "1") as (server, lines):
        port = port_of(lines.readline())
        replies = [ask(port, LONG) for _ in range(8)]
        server.send_signal(signal.SIGINT)
        lines.readline()
        server.send_signal(signal.SIGINT)
        assert "has ended before this text" in pieces(replies[-1])[-1]["error"]["message"]
        assert server.communicate(timeout=60) == ("", "") and server.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_a_signal_ends_the_start_with_one_line() -> None:
    with process() as (server, _):
        server.send_signal(signal.SIGINT)
        assert server.communicate(timeout=60)[1] == "the server has ended before it was ready\n"
        assert server.returncode == 130


def test_a_port_out_of_range_is_refused_with_the_range(capsys: pytest.CaptureFixture[str]) -> None:
    for port in ("-1", "65536", "http"):
        with pytest.raises(SystemExit):
            serve.parse_args(["--port", port])
        assert f"a whole number from 0 to 65535, got {port}" in capsys.readouterr().err
