"""Generation for many texts at once: each step of the model adds tokens to all that are running.

A request gets all pages that it may need when it is admitted, so that what runs will end. A step reads one
token of every text that is being written, and up to a number of tokens of prompts; nobody waits long for
another's prompt. When a text ends or is cancelled, its pages are free for those that wait.

Source: Yu et al. (2022), Orca, for steps whose texts come and go; Kwon et al. (2023), PagedAttention, for
pages; Agrawal et al. (2023), Sarathi, for prompts in chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator
from typing import Any

import numpy as np

from kernels.common.arguments import flag, whole
from kernels.common.geometry import ceil_div

from ..modules_basic import lookup
from ..scalars.modes import no_grad
from .evaluation import evaluating
from .paged_cache import PagedCache, Part
from .sampling import Logits, make_sampler, prompt_ids
from .text_generation import TextGeneration


class Request:
    """A text that an engine continues; :meth:`Engine.submit` makes it.

    Attributes:
        tokens: The tokens so far that continue the prompt.
        ended: None while it waits or runs; then "length", "stop", "cancelled", or "error".
        error: What went wrong, if ``ended`` is "error".
    """

    def __init__(
        self, prompt: list[int], count: int, choose: Callable[[Logits], int], stops: Collection[int]
    ):
        self.prompt, self.count, self.choose, self.stops = prompt, count, choose, stops
        self.tokens: list[int] = []
        self.ended: str | None = None
        self.error: Exception | None = None
        self.pages: list[int] = []
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

    With the same seed, the tokens of a request are those of ``model.generate``, whatever else is running,
    up to rounding: sums may be split differently, which can change a draw between two tokens.

    Args:
        model: A :class:`minitorch.DecoderLM` with flash or naive attention.
        pages: Number of pages in the pool.
        page_size: Tokens of a page, a multiple of 16 up to 256.
        batch: Most requests that run at the same time.
        chunk: Most tokens of prompts in a step.
        batch_invariant: Let attention of a text have the same bits in every batch.

    Attributes:
        running: Requests that have their pages.
        waiting: Requests that wait for them, the oldest first.

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
                "an engine needs causal flash or naive attention; build the model with attention='flash'"
            )
        self.model, self.pages = model, whole("pages", pages, 1)
        self.batch, self.chunk = whole("batch", batch, 1), whole("chunk", chunk, 1)
        self._cache = PagedCache(model, pages, page_size, flag("batch_invariant", batch_invariant))
        self._free = list(range(pages))
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
        """Add a request to those that wait.

        Args:
            prompt: Token ids, at least one.
            count: Number of tokens to add at most, at least 1.
            temperature: See :meth:`DecoderLM.continuation`, also for the next three.
            seed: The request has a random stream of its own.
            top_k: As there.
            top_p: As there.
            stops: Tokens that end the text; the one that does is its last.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument does not fit, or the request is too long for the model or the pool.
        """
        ids = prompt_ids(prompt, self.model.n_vocab)
        choose = make_sampler(temperature, top_k, top_p, seed)
        length, limit = len(ids) + whole("count", count, 1), self.model.n_positions
        room = self.pages * self.page_size + 1  # the last token is not read
        if length > min(limit, room):
            what = f"the model reads {limit}" if limit <= room else f"the pool holds {room}"
            raise ValueError(
                f"{len(ids)} tokens of the prompt and {count} new ones are {length}, and {what}; pass a "
                "shorter prompt, or ask for fewer"
            )
        request = Request(ids, count, choose, stops)
        self.waiting.append(request)
        return request

    def cancel(self, request: Request, error: Exception | None = None) -> None:
        """End a request, whose pages are then free; one that has ended stays as it is.

        Args:
            request: The request.
            error: Why it cannot be continued, if that is the reason.
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
            self.running.append(self.waiting.popleft())

    def step(self) -> list[tuple[Request, int]]:
        """Let the model read once, and return the new tokens; requests that have ended say so themselves.

        A request whose token cannot be chosen ends with an error. If the model fails, nothing has changed.
        """
        self._admit()
        chosen, room = [(r, 1) for r in self.running if r.pending == 1], self.chunk
        for request in self.running:
            if request.pending > 1 and room:
                chosen.append((request, min(request.pending, room)))
                room -= chosen[-1][1]
        if not chosen:
            return []
        found = []
        logits = iter(self._logits(chosen))
        for request, count in chosen:
            request.cached += count
            if request.pending:
                continue
            try:
                token = request.choose(next(logits).astype(np.float64))
            except Exception as error:  # its logits are no numbers, for example; the others go on
                self._end(request, "error", error)
                continue
            request.tokens.append(token)
            found.append((request, token))
            if token in request.stops:
                self._end(request, "stop")
            elif len(request.tokens) == request.count:
                self._end(request, "length")
        return found

    @no_grad()
    def _logits(self, chosen: list[tuple[Request, int]]) -> Any:
        """Read tokens; return the logits after those requests that have none left, (requests, n_vocab)."""
        single = [request for request, count in chosen if count == 1]
        several = [([request], count) for request, count in chosen if count > 1]
        groups = [(single, 1), *several] if single else several
        chosen[:] = [(request, count) for own, count in groups for request in own]
        self._cache.plan([_part(own, count) for own, count in groups])
        ids = [token for request, count in chosen for token in request.next_tokens(count)]
        ends = np.cumsum([count for _, count in chosen]) - 1
        ends = ends[[request.pending == count for request, count in chosen]]
        with evaluating(self.model):
            hidden = self.model.hidden(np.array([ids]), self._cache)  # (1, tokens, n_embd)
            if not len(ends):
                return []
            last = lookup(hidden.view(*hidden.shape[1:]), ends[None])  # (1, requests, n_embd)
            return self.model.score(last).to_numpy()[0]

    def tokens(self, request: Request) -> Generator[int]:
        """Yield the tokens of a request as they come; all others go on meanwhile.

        An iteration that is left early cancels it.

        Raises:
            Exception: What ended the request, if it could not be continued.
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


def _part(requests: list[Request], count: int) -> Part:
    """Return what requests with equally many next tokens add."""
    table = np.zeros((len(requests), max(len(r.pages) for r in requests)), np.int32)
    for row, request in zip(table, requests, strict=True):
        row[: len(request.pages)] = request.pages
    return Part(count, np.array([r.cached for r in requests], np.int32), table)
