"""Generation for many texts at once: each step of the model adds tokens to all that are running.

A request gets all pages that it may need when it is admitted, so that what runs will end. A step reads one
token of every text that is being written, and up to a number of tokens of prompts; nobody waits long for
another's prompt. When a text ends or is cancelled, its pages are free for those that wait.

Source: Yu et al. (2022), Orca, for steps whose texts come and go; Kwon et al. (2023), PagedAttention, for
pages; Agrawal et al. (2023), Sarathi, for prompts in chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Iterator
from typing import Any

import numpy as np

from kernels.common.arguments import flag, whole
from kernels.common.geometry import ceil_div

from ..backends.operations import Operations
from ..scalars.modes import no_grad
from ..tensor import Tensor
from ..training.captured_step import graph_step
from .evaluation import evaluating
from .kv_cache import Part
from .paged_cache import PagedCache
from .sampling import Sampler, choose_tokens, prompt_ids, settings_of
from .text_generation import TextGeneration

#: Most tokens of a page where one text has all pages.
PAGE = 128


class Request:
    """A text that an engine continues; :meth:`Engine.submit` makes it.

    Attributes:
        tokens: The tokens so far that continue the prompt.
        ended: None while it waits or runs; then "length", "stop", "cancelled", or "error".
        error: What went wrong, if ``ended`` is "error".
    """

    def __init__(self, prompt: list[int], count: int, sampler: Sampler, stops: Collection[int]):
        self.prompt, self.count, self.sampler, self.stops = prompt, count, sampler, stops
        self.tokens: list[int] = []
        self.ended: str | None = None
        self.error: Exception | None = None
        self.pages: list[int] = []
        self.table: Any = None  # the pages as a row of the engine's table
        self.cached = 0  # tokens whose keys and values are in the pages

    @property
    def pending(self) -> int:
        """Number of tokens that the model has not read."""
        return len(self.prompt) + len(self.tokens) - self.cached

    def next_tokens(self, count: int) -> list[int]:
        """Return the next tokens for the model to read."""
        rest = self.cached - len(self.prompt)
        source = self.tokens[rest:] if rest >= 0 else self.prompt[self.cached :]
        return source[:count]


class Engine:
    """Continue many texts at once, by one model; an engine belongs to one thread.

    With the same seed, a request gets the tokens that ``model.generate`` draws, whatever else is running.
    Rounding may differ, which can change the choice between two tokens of nearly equal probability.

    Args:
        model: A :class:`minitorch.DecoderLM` with flash or naive attention.
        pages: Number of pages in the pool.
        page_size: Number of tokens in a page, a multiple of 16 up to 256.
        batch: Maximum number of requests that run at the same time.
        chunk: Maximum number of prompt tokens in a step.
        batch_invariant: Compute the attention of a text with the same bits in every batch.

    Attributes:
        running: Requests that have pages.
        waiting: Requests that wait for pages, the oldest first.

    Raises:
        TypeError: If a number is not whole, or the model is of another type.
        ValueError: If a number is too small, or the model has no causal and exact attention.
    """

    def __init__(
        self, model: TextGeneration, *, pages: int = 512, page_size: int = 16, batch: int = 16,
        chunk: int = 256, batch_invariant: bool = False,
    ):  # fmt: skip
        self.page_size = whole("page_size", page_size, 16)
        if page_size % 16 or page_size > 256:
            raise ValueError(f"page_size must be a multiple of 16 up to 256, got {page_size}")
        if not isinstance(model, TextGeneration):
            raise TypeError(f"model must be a minitorch.DecoderLM, got {type(model).__name__}")
        layers = [getattr(model, name).attention for name in model.layer_names]
        if not all(layer.is_exact and layer.causal for layer in layers):
            raise ValueError(
                "a cache needs flash or naive attention that is causal; build the model with "
                "attention='flash'"
            )
        self.model, self.pages = model, whole("pages", pages, 1)
        self.batch, self.chunk = whole("batch", batch, 1), whole("chunk", chunk, 1)
        # One page more, for the rows of a step that no text has.
        self._cache: PagedCache = model.make_cache(pages + 1, page_size, PagedCache)
        self._cache.step.batch_invariant = flag("batch_invariant", batch_invariant)
        self._free = list(range(pages))
        self._width = min(pages, ceil_div(model.n_positions, page_size))
        self._captured: Any = None
        if model.backend.cuda:  # a graph for each number of rows, and for each form of the settings
            most = 3 * (batch.bit_length() + 1)
            self._captured = graph_step(self._read_one_each, most_shapes=most)
        self.running: list[Request] = []
        self.waiting = deque[Request]()

    @property
    def free_pages(self) -> int:
        """Number of pages that belong to no request."""
        return len(self._free)

    def submit(
        self, prompt: Any, count: int, temperature: float = 1.0, seed: int | None = None,
        *, top_k: int | None = None, top_p: float = 1.0, stops: Collection[int] = (),
    ) -> Request:  # fmt: skip
        """Add a request to the waiting requests.

        Args:
            prompt: Token ids, at least one.
            count: Number of tokens to add at most, at least 1.
            temperature: See :meth:`DecoderLM.continuation`.
            seed: Seed of the request's own stream of random numbers.
            top_k: See :meth:`DecoderLM.continuation`.
            top_p: See :meth:`DecoderLM.continuation`.
            stops: Tokens that end the text.  The token that ends it is the last one of the text.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument does not fit, or the request is too long for the model or the pool.
        """
        ids = prompt_ids(prompt, self.model.n_vocab)
        sampler = Sampler(temperature, top_k, top_p, seed)
        length, limit = len(ids) + whole("count", count, 1), self.model.n_positions
        room = self.pages * self.page_size + 1  # the last token is not read
        if length > min(limit, room):
            what = f"the model reads {limit}" if limit <= room else f"the pool holds {room}"
            raise ValueError(
                f"{len(ids)} tokens of the prompt and {count} new ones are {length}, and {what}; pass a "
                "shorter prompt, or ask for fewer"
            )
        return self.enqueue(Request(ids, count, sampler, stops))

    def enqueue(self, request: Request) -> Request:
        """Add a request whose sizes are known to fit; see :meth:`submit`."""
        self.waiting.append(request)
        return request

    def cancel(self, request: Request, error: Exception | None = None) -> None:
        """End a request and free its pages; do nothing if the request has already ended.

        Args:
            request: The request.
            error: The error, if the request ends because it cannot be continued.
        """
        self._end(request, "cancelled" if error is None else "error", error)

    def _end(self, request: Request, why: str, error: Exception | None = None) -> None:
        if request.ended is not None:
            return
        request.ended, request.error = why, error
        (self.running if request in self.running else self.waiting).remove(request)
        self._free += request.pages
        request.pages = []

    def _admit(self) -> None:
        """Give pages to requests in the order of their arrival, while there are enough."""
        while self.waiting and len(self.running) < self.batch:
            first = self.waiting[0]
            needed = ceil_div(len(first.prompt) + first.count - 1, self.page_size)
            if needed > len(self._free):
                return
            first.pages = [self._free.pop() for _ in range(needed)]
            first.table = np.full(self._width, self.pages, np.int32)
            first.table[:needed] = first.pages
            self.running.append(self.waiting.popleft())

    def step(self) -> list[tuple[Request, int]]:
        """Run the model once, and return the new tokens with their requests.

        The attribute ``ended`` of a request tells whether it has ended.  A request whose token cannot be
        chosen ends with "error".  If the model fails, no request is changed.
        """
        self._admit()
        chosen, room = [(r, 1) for r in self.running if r.pending == 1], self.chunk
        for request in self.running:
            if request.pending > 1 and room:
                count = min(request.pending, room)
                # Of one token, it is among those that write.
                chosen.insert(0 if count == 1 else len(chosen), (request, count))
                room -= count
        if not chosen:
            return []
        ending = [request for request, count in chosen if request.pending == count]
        tokens = self._tokens(chosen, ending)
        for request, count in chosen:
            request.cached += count
        found = []
        for request, token in zip(ending, tokens, strict=True):
            try:
                request.tokens.append(request.sampler.accept(token))
            except ValueError as error:  # the others go on
                self._end(request, "error", error)
                continue
            found.append((request, request.tokens[-1]))
            if request.tokens[-1] in request.stops:
                self._end(request, "stop")
            elif len(request.tokens) == request.count:
                self._end(request, "length")
        return found

    @no_grad()
    def _tokens(self, chosen: list[tuple[Request, int]], ending: list[Request]) -> list[float]:
        """Read tokens of requests, one of each first; return those that follow where none is left."""
        single = [request for request, count in chosen if count == 1]
        ids = np.array([[x for request, count in chosen for x in request.next_tokens(count)]])
        before = np.array([request.cached for request in single], np.int32)
        table = np.array([request.table for request in single])
        settings = settings_of([request.sampler for request in ending])
        with evaluating(self.model):
            if len(ending) == ids.size:
                step = self._captured or self._read_one_each
                found = step(*self._padded(ids, before, table, settings))
            else:
                parts = [Part(1, before, table)] if single else []
                for request, count in chosen[len(single) :]:
                    start = np.array([request.cached], np.int32)
                    parts.append(Part(count, start, request.table[None]))
                ends = np.cumsum([count for _, count in chosen]) - 1
                ends = ends[[request.pending == count for request, count in chosen]]
                found = self._read(ids, parts, ends, settings)
        return found.to_numpy()[: len(ending), 0].tolist() if ending else []

    def _padded(self, ids: Any, before: Any, table: Any, settings: Any) -> Any:
        """Pad a step that is captured to a power of two of rows, so that few graphs serve all steps."""
        rows = ids.size
        more = (1 << (rows - 1).bit_length()) - rows if self._captured else 0
        if not more:
            return ids, before, table, settings
        table = np.pad(table, ((0, more), (0, 0)), constant_values=self.pages)
        settings = np.pad(settings, ((0, 0), (0, more), (0, 0)), mode="edge")
        return np.pad(ids, ((0, 0), (0, more))), np.pad(before, (0, more)), table, settings

    def _read_one_each(self, ids: Any, before: Any, table: Any, settings: Any) -> Tensor:
        """Read a token of each of several texts; return the tokens that follow, (texts, 1)."""
        return self._read(ids, [Part(1, before, table)], range(ids.size), settings)

    def _read(self, ids: Any, parts: list[Part], ends: Any, settings: Any) -> Any:
        """Read tokens, (1, tokens), and return those that follow some of them, (ends, 1)."""
        self._cache.plan(parts)
        hidden = self.model.hidden(ids, self._cache)
        return choose_tokens(self.model.last_logits(hidden, ends), settings) if len(ends) else None

    def tokens(self, request: Request) -> Generator[int]:
        """Yield the tokens of a request as they come, while all other requests continue, too.

        If the iteration is left early, the request is cancelled.

        Raises:
            Exception: The error that ended the request, if it could not be continued.
        """
        given = 0
        try:
            while True:
                while given < len(request.tokens):
                    yield request.tokens[given]
                    given += 1
                if request.ended:
                    break
                self.step()
        finally:
            self.cancel(request)
        if request.error is not None:
            raise request.error


def continued(model: TextGeneration, ids: list[int], count: int, sampler: Sampler) -> Iterator[int]:
    """Yield a number of tokens that continue a text, as the only request of an engine.

    Beyond the context, each token moves all others, and the whole text is read again.
    """
    within = min(count, model.n_positions + 1 - len(ids))  # the last token is not read
    if within > 0:
        size = min(PAGE, 16 * ceil_div(model.n_positions, 16))
        pages = ceil_div(len(ids) + within - 1, size)
        # Kept from text to text for its graphs; taken away while one is written.
        engine = vars(model).pop("_engine", None)
        if engine is None or engine.pages < pages:
            engine = Engine(model, pages=pages, page_size=size, batch=1, chunk=model.n_positions)
        request = engine.enqueue(Request(ids, within, sampler, ()))
        try:
            yield from engine.tokens(request)
        finally:
            if model.backend.cuda:
                vars(model)["_engine"] = engine
        ids, count = [*ids, *request.tokens], count - within
    yield from Operations.plain["continued"](model, ids, count, sampler)
