"""The thread that an engine runs in, and what it tells the loop of the server."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from minitorch import Engine
from minitorch.models.engine import Request

#: Where the tokens of a request come, and None after the last.
Sink = asyncio.Queue[int | None]


class Refused(Exception):
    """A request that is not served, and the status of HTTP that says so."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Worker:
    """Runs an engine in a thread of its own, in which everything happens to it, between two steps.

    Args:
        engine: The engine, which nothing else may use.
        most_waiting: Most requests that wait for their pages.

    Attributes:
        counts: Number of requests by how they ended.
        written: Number of tokens.
    """

    def __init__(self, engine: Engine, most_waiting: int):
        self.engine, self.most_waiting = engine, most_waiting
        self.counts, self.written = Counter[str](), 0
        self._deadline: float | None = None  # after which nothing runs any more
        self._lock = threading.Lock()  # held while a request comes, and while the thread ends
        self._inbox: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._listening: dict[Request, tuple[asyncio.AbstractEventLoop, Sink]] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def submit(self, **arguments: Any) -> tuple[Request, Sink]:
        """Add a request; return it and where its tokens come.

        Args:
            arguments: Of :meth:`Engine.submit`.

        Raises:
            Refused: If the server is ending, or too many requests wait.
            TypeError: As the engine does.
            ValueError: As the engine does, for a request that can never fit, for example.
        """
        loop, sink, future = asyncio.get_running_loop(), Sink(), Future[Request]()

        def add() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if len(self.engine.waiting) >= self.most_waiting:
                    text = f"{self.most_waiting} requests are waiting already; try again later"
                    raise Refused(429, text)
                request = self.engine.submit(**arguments)
            except Exception as error:
                future.set_exception(error)
            else:
                self._listening[request] = loop, sink
                future.set_result(request)

        with self._lock:
            if self.is_ending:
                raise Refused(503, "the server is ending; ask again when it has started anew")
            self._inbox.put(add)
        try:
            return await asyncio.wrap_future(future), sink
        except asyncio.CancelledError:  # who asked has left
            future.add_done_callback(lambda f: None if f.cancelled() else self.cancel(f.result()))
            raise

    def cancel(self, request: Request) -> None:
        """End a request soon; one that has ended stays as it is."""
        if request.ended is None:
            self._inbox.put(lambda: self.engine.cancel(request))

    @property
    def is_ending(self) -> bool:
        """Whether it takes no more requests."""
        return self._deadline is not None

    def end(self, grace: float) -> None:
        """Take no more requests, and end those that are left after some seconds; a signal may call it."""
        self._deadline = min(time.monotonic() + grace, self._deadline or math.inf)
        self._inbox.put(lambda: None)  # which wakes the thread

    def join(self, seconds: float | None = None) -> bool:
        """Wait until every request has its answer, or for some seconds; return whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        engine = self.engine
        while True:
            is_idle = not engine.running and not engine.waiting
            if self._deadline is not None:
                with self._lock:
                    if is_idle and self._inbox.empty():
                        return
                if time.monotonic() > self._deadline:
                    self._fail(RuntimeError("the server has ended before this text was written"))
            with suppress(queue.Empty):
                while True:
                    self._inbox.get(block=is_idle)()
                    is_idle = False
            try:
                found = engine.step()
            except Exception as error:  # memory, for example: smaller requests may come
                self._fail(error)
                found = []
            self.written += len(found)
            for request, token in found:
                self._tell(request, token)
            for request in [r for r in self._listening if r.ended]:
                self.counts[str(request.ended)] += 1
                self._tell(request, None)
                del self._listening[request]

    def _fail(self, error: Exception) -> None:
        for request in [*self.engine.running, *self.engine.waiting]:
            self.engine.cancel(request, error)

    def _tell(self, request: Request, token: int | None) -> None:
        loop, sink = self._listening[request]
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(sink.put_nowait, token)
