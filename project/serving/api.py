"""The HTTP interface: completions in the common form, a page to chat, metrics."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import ClientDisconnect
from training.gpt_tokens import text_encoder, text_reader

from minitorch.models.engine import Request as Text
from serving.worker import Refused, Sink, Worker

#: Most bytes of a request's body.
MOST_BYTES = 1 << 20
PAGE = Path(__file__).with_name("chat.html")
Stop = Annotated[str, Field(min_length=1, max_length=64)]


class Completion(BaseModel):
    """What a client asks for; names and defaults are those of the common form, and ``top_k``."""

    prompt: str | list[int]
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool = False
    # What is not supported may be given as what it is without it.
    n: Literal[1] = 1
    echo: Literal[False] = False
    logprobs: None = None
    suffix: None = None


class Served(NamedTuple):
    """What the server serves.

    Attributes:
        name: The model's name.
        worker: Its engine, in a thread.
        config: The configuration, which says what tokens stand for; see ``training.gpt_tokens``.
        eos: The token that ends a text, or None.
    """

    name: str
    worker: Worker
    config: dict[str, Any]
    eos: int | None


class Stopper:
    """Passes a text on as it comes, up to one of the strings that end it.

    Attributes:
        found: Whether one has come.
    """

    def __init__(self, stops: str | list[str] | None):
        self._stops = [stops] if isinstance(stops, str) else stops or []
        self._held, self.found = "", False

    def passed(self, piece: str, is_last: bool = False) -> str:
        """Return what can be shown: not the beginning of a string that may end the text."""
        text = self._held + piece
        ends = [place for s in self._stops if (place := text.find(s)) >= 0]
        held = [n for s in self._stops for n in range(1, len(s)) if text.endswith(s[:n])]
        self.found = bool(ends)
        shown = min(ends) if ends else len(text) - (0 if is_last else max(held, default=0))
        self._held = text[shown:]
        return text[:shown]


async def read(request: Request) -> Completion:
    """Return what a client asks for.

    Raises:
        Refused: If it cannot be read.
    """
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                text = f"the request has more than {MOST_BYTES} bytes; send a shorter prompt"
                raise Refused(413, text)
    except (asyncio.CancelledError, ClientDisconnect):
        raise Refused(
            503, "the server or the client has ended before the request was there"
        ) from None
    try:
        return Completion.model_validate_json(body)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, e['loc'])) or 'the body'}: {e['msg']}" for e in error.errors()
        ]
        raise Refused(400, "; ".join(lines)) from None


class Answer:
    """A text that is being written, and how the common form says so."""

    def __init__(self, served: Served, asked: Completion, text: Text, sink: Sink):
        self._text, self._sink = text, sink
        self._read, self._stopper = text_reader(served.config), Stopper(asked.stop)
        self._frame = {
            "id": f"cmpl-{uuid4().hex}", "object": "text_completion", "created": int(time.time()),
            "model": served.name,
        }  # fmt: skip

    async def pieces(self) -> AsyncIterator[str]:
        """Yield the text as it comes.

        Raises:
            Refused: If it cannot be written to its end.
        """
        passed = self._stopper.passed
        while (token := await self._sink.get()) is not None:
            if token not in self._text.stops and (piece := passed(self._read([token]))):
                yield piece
            if self._stopper.found:
                return
        if rest := passed("", is_last=True):
            yield rest
        if self._text.error is not None:
            raise Refused(503, str(self._text.error))

    def chunk(self, piece: str, is_last: bool = False) -> dict[str, Any]:
        """Return a piece of text in the common form."""
        ended = "stop" if self._stopper.found else self._text.ended
        reason = ended if is_last else None
        choice = {"text": piece, "index": 0, "logprobs": None, "finish_reason": reason}
        return {**self._frame, "choices": [choice]}

    async def whole(self) -> dict[str, Any]:
        """Return the whole text in the common form."""
        text = "".join([piece async for piece in self.pieces()])
        sizes = len(self._text.prompt), len(self._text.tokens)
        names = "prompt_tokens", "completion_tokens", "total_tokens"
        return {
            **self.chunk(text, True),
            "usage": dict(zip(names, (*sizes, sum(sizes)), strict=True)),
        }

    async def events(self) -> AsyncIterator[str]:
        """Yield server-sent events."""
        try:
            async for piece in self.pieces():
                yield f"data: {json.dumps(self.chunk(piece))}\n\n"
            yield f"data: {json.dumps(self.chunk('', True))}\n\n"
        except Refused as error:  # too late for a status
            yield f"data: {json.dumps(failed(error.status, str(error)))}\n\n"
        yield "data: [DONE]\n\n"


class Events(StreamingResponse):
    """A stream that calls a function when it ends, however it does."""

    def __init__(self, events: AsyncIterator[str], at_end: Callable[[], None]):
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._at_end = at_end

    async def __call__(self, *args: Any) -> None:
        """Send the stream."""
        try:
            await super().__call__(*args)
        finally:
            self._at_end()


def failed(status: int, message: str) -> dict[str, Any]:
    """Return an error in the common form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def metrics(worker: Worker, refused: Counter[int], started: float) -> str:
    """Return the numbers of the server as Prometheus reads them."""
    engine = worker.engine
    lines = {
        "seconds": round(time.monotonic() - started, 3), "running": len(engine.running),
        "waiting": len(engine.waiting), "pages": engine.pages, "free_pages": engine.free_pages,
        "tokens_total": worker.written,
    }  # fmt: skip
    ended = {f'requests_total{{ended="{how}"}}': n for how, n in dict(worker.counts).items()}
    others = {f'refused_total{{status="{status}"}}': n for status, n in refused.items()}
    rows = {**lines, **ended, **others}.items()
    return "".join(f"minitorch_{name} {value}\n" for name, value in rows)


def make_app(served: Served) -> FastAPI:
    """Return the application."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    worker, encode, started = served.worker, text_encoder(served.config), time.monotonic()
    refused, created = Counter[int](), int(time.time())
    stops = {served.eos} - {None}

    @app.exception_handler(Refused)
    async def refuse(_: Request, error: Refused) -> JSONResponse:
        refused[error.status] += 1
        headers = {"Retry-After": "1"} if error.status in (429, 503) else None
        return JSONResponse(failed(error.status, str(error)), error.status, headers)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Any:
        asked = await read(request)
        try:
            prompt = asked.prompt
            if isinstance(prompt, str):
                prompt = (await asyncio.to_thread(encode, prompt)).tolist()
            text, sink = await worker.submit(
                prompt=prompt, count=asked.max_tokens, temperature=asked.temperature,
                seed=asked.seed, top_k=asked.top_k, top_p=asked.top_p, stops=stops,
            )  # fmt: skip
        except (OverflowError, TypeError, ValueError) as error:
            raise Refused(400, str(error)) from None
        answer = Answer(served, asked, text, sink)
        if asked.stream:
            return Events(answer.events(), lambda: worker.cancel(text))
        writing = asyncio.ensure_future(answer.whole())
        try:
            while not (await asyncio.wait({writing}, timeout=0.5))[0]:
                if await request.is_disconnected():
                    writing.cancel()
            return await writing
        except asyncio.CancelledError:
            return Response(status_code=499)  # the client has left
        finally:
            worker.cancel(text)

    @app.get("/v1/models")
    async def models() -> Any:
        own = {"id": served.name, "object": "model", "created": created, "owned_by": "local"}
        return {"object": "list", "data": [own]}

    @app.get("/metrics")
    async def numbers() -> PlainTextResponse:
        return PlainTextResponse(metrics(worker, refused, started))

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    return app
