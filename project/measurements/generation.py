"""Tokens per second of GPT-2 small that continues one text greedily, beside Hugging Face's transformers.

The weights are random and the same for all: a folder is written and read by each.  A continuation is 64
tokens after a prompt of 32, and its time includes the prompt.  Each round runs every contestant once, and a
ratio is the median of our speed over the other's within the rounds.  On a CPU all is float32; on a GPU it
is bfloat16, and transformers also runs with a static cache and torch.compile.  Without transformers only
ours is timed.

``serving`` is of 64 requests at a time, whose prompts and answers have 128 to 1,024 tokens together, half
of them in the prompt: tokens of answers per second of our engine, of transformers' continuous batching,
and of ours for one request after another, of which every eighth is timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
from bench.kit import Measurement, Record, Run, Unavailable, ratio, ready, spread
from bench.measuring import interleaved, timing_note

import minitorch
from kernels.common.geometry import ceil_div
from minitorch.models.engine import Engine

Continue = Callable[[], list[int]]
OURS, EAGER, COMPILED = "ours", "transformers, eager", "transformers, static cache, compiled"
#: Arguments of DecoderLM: GPT-2 small, and a tiny model to try the measurement with.
SMALL: dict[str, Any] = {
    "n_vocab": 50_257, "n_embd": 768, "n_head": 12, "n_positions": 1024, "n_layer": 12,
    "middle_dim": 3072,
}  # fmt: skip
TINY = SMALL | {"n_vocab": 61, "n_embd": 32, "n_head": 2, "n_positions": 64, "n_layer": 2}
PROMPT, TOKENS = 32, 64
ALONE, BATCHED = "ours, one after another", "transformers, continuous batching"
#: Tokens of a page of the engine.
PAGE = 16
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}


@contextmanager
def saved(sizes: dict[str, Any]) -> Iterator[str]:
    """Write a model with random weights to a folder for the time of a block."""
    with tempfile.TemporaryDirectory() as folder:
        minitorch.manual_seed(0)
        options = {"p_dropout": 0.0, "tie_weights": True, "backend": minitorch.FastBackend}
        minitorch.DecoderLM(**sizes, **options, dtype=np.float32).save_pretrained(folder)
        yield folder


def loaded(folder: str, device: str) -> minitorch.DecoderLM:
    """Return our model."""
    backend = minitorch.CudaBackend if device == "cuda" else minitorch.FastBackend
    return minitorch.DecoderLM.from_pretrained(folder, backend, precision=DTYPES[device])


def ours(folder: str, device: str, prompt: list[int], count: int) -> Continue:
    """Return our continuation of a prompt."""
    model = loaded(folder, device)
    return lambda: model.generate(prompt, count, temperature=0)


def pretrained(folder: str, device: str) -> tuple[Any, Any, Any]:
    """Return PyTorch, transformers, and its model.

    Raises:
        Unavailable: If one of them is not installed.
    """
    try:
        import torch  # type: ignore[import-not-found]
        import transformers  # type: ignore[import-not-found]
    except ImportError as error:
        missing = f"{error.name} is not installed (pip install torch transformers)"
        raise Unavailable(missing) from None
    dtype = getattr(torch, DTYPES[device])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    return torch, transformers, model


def theirs(folder: str, device: str, prompt: list[int], count: int, compiled: bool) -> Continue:
    """Return the continuation of transformers."""
    torch, _, model = pretrained(folder, device)
    ids = torch.tensor([prompt], device=device)
    options: Record = dict.fromkeys(("max_new_tokens", "min_new_tokens"), count)
    # With a static cache, generate compiles each step for CUDA graphs.
    options |= {"cache_implementation": "static"} if compiled else {}
    options |= {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    return torch.no_grad()(lambda: model.generate(ids, **options)[0].tolist())


def cases(run: Run) -> Record:
    """Return tokens per second of each contestant, and our ratio to each."""
    sizes = TINY if run.is_quick else SMALL
    with saved(sizes) as folder:
        prompt = np.random.default_rng(0).integers(0, sizes["n_vocab"], PROMPT).tolist()
        count = min(TOKENS, sizes["n_positions"] - PROMPT)
        given = folder, run.device, prompt, count
        make = {OURS: partial(ours, *given), EAGER: partial(theirs, *given, False)}
        if run.device == "cuda":
            make[COMPILED] = partial(theirs, *given, True)
        runs, why_not = ready(make)
        texts = {name: one() for name, one in runs.items()}
        # On either device the last token is on the host when a continuation ends.
        times = interleaved(runs, "cpu", 0.0, least=1 if run.is_quick else run.rounds)
    return {
        "timing": timing_note("cpu"), "dtype": DTYPES[run.device], **sizes, "prompt": PROMPT,
        "tokens": TOKENS, "why_not": why_not,
        "tokens_per_second": {n: spread([count / t for t in taken]) for n, taken in times.items()},
        "ratios": {name: ratio(times[name], times[OURS]) for name in times if name != OURS},
        "same_tokens": {name: text == texts[OURS] for name, text in texts.items() if name != OURS},
    }  # fmt: skip


def engine(model: Any, requests: list[tuple[list[int], int]], batch: int) -> Any:
    """Return the function that answers requests by our engine, as many at a time.

    It returns the number of tokens.
    """
    pages = sum(ceil_div(len(prompt) + count, PAGE) for prompt, count in requests)
    own = Engine(model, pages=pages, batch=batch)

    def answer() -> int:
        asked = [own.submit(prompt, count, 0.0) for prompt, count in requests]
        while not all(request.ended for request in asked):
            own.step()
        return sum(len(request.tokens) for request in asked)

    return answer


def batched(run: Run, close: ExitStack, folder: str, requests: list[tuple[list[int], int]]) -> Any:
    """Return the function that answers requests by transformers' continuous batching."""
    torch, transformers, model = pretrained(folder, run.device)
    longest = max(count for _, count in requests)
    options = {"do_sample": False, "max_new_tokens": longest, "eos_token_id": -1, "pad_token_id": 0}
    close.enter_context(torch.no_grad())
    config = transformers.GenerationConfig(**options)
    manager = close.enter_context(model.continuous_batching_context_manager(config, timeout=5))

    def answer() -> int:
        for prompt, count in requests:
            manager.add_request(prompt, max_new_tokens=count)
        done = [manager.get_result(timeout=60) for _ in requests]
        return sum(len(one.generated_tokens) for one in done)

    return answer


def serving(run: Run) -> Record:
    """Return the tokens of answers per second of each contestant, and our ratio to each."""
    sizes, rng = TINY if run.is_quick else SMALL, np.random.default_rng(0)
    lengths = rng.integers(sizes["n_positions"] // 8, sizes["n_positions"], run.requests)
    requests = [
        (rng.integers(0, sizes["n_vocab"], n // 2).tolist(), int(n - n // 2)) for n in lengths
    ]
    with saved(sizes) as folder, ExitStack() as close:
        model = loaded(folder, run.device)
        make = {
            OURS: partial(engine, model, requests, run.requests),
            ALONE: partial(engine, model, requests[::8], 1),
            BATCHED: partial(batched, run, close, folder, requests),
        }
        runs, why_not = ready(make)
        tokens = {name: one() for name, one in runs.items()}
        times = interleaved(runs, "cpu", 0.0, least=run.rounds)
    each = {name: [one / tokens[name] for one in taken] for name, taken in times.items()}
    return {
        "timing": timing_note("cpu"), "dtype": DTYPES[run.device], **sizes, "tokens": tokens,
        "why_not": why_not,
        "tokens_per_second": {n: spread([1 / t for t in taken]) for n, taken in each.items()},
        "ratios": {name: ratio(each[name], each[OURS]) for name in each if name != OURS},
    }  # fmt: skip


SETTINGS = {"normal": {"rounds": 5}}
OF_SERVING = {"normal": {"requests": 64, "rounds": 3}, "quick": {"requests": 8, "rounds": 1}}
MEASUREMENTS = [Measurement(
    "generation", "How fast does GPT-2 small generate text, beside transformers?", cases,
    {"cpu": SETTINGS, "cuda": SETTINGS}, minutes={"cpu": 2, "cuda": 2},
), Measurement(
    "serving", "How many tokens per second has a server of 64 requests, beside transformers?", serving,
    {"cpu": OF_SERVING, "cuda": OF_SERVING}, minutes={"cpu": 10, "cuda": 2},
)]  # fmt: skip
