"""Tokens per second of GPT-2 small that continues one text greedily, beside Hugging Face's transformers.

The weights are random and the same for all: a folder is written and read by each.  A continuation is 64
tokens after a prompt of 32, and its time includes the prompt.  Each round runs every contestant once, and a
ratio is the median of our speed over the other's within the rounds.  On a CPU all is float32; on a GPU it
is bfloat16, and transformers also runs with a static cache and torch.compile.  Without transformers only
ours is timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from bench.kit import Measurement, Record, Run, Unavailable, ratio, ready, spread
from bench.measuring import interleaved, timing_note

import minitorch

Continue = Callable[[], list[int]]
OURS, EAGER, COMPILED = "ours", "transformers, eager", "transformers, static cache, compiled"
#: Arguments of DecoderLM: GPT-2 small, and a tiny model to try the measurement with.
SMALL: dict[str, Any] = {
    "n_vocab": 50_257, "n_embd": 768, "n_head": 12, "n_positions": 1024, "n_layer": 12,
    "middle_dim": 3072,
}  # fmt: skip
TINY = SMALL | {"n_vocab": 61, "n_embd": 32, "n_head": 2, "n_positions": 64, "n_layer": 2}
PROMPT, TOKENS = 32, 64
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}


def ours(folder: str, device: str, prompt: list[int], count: int) -> Continue:
    """Return our continuation of a prompt."""
    backend = minitorch.CudaBackend if device == "cuda" else minitorch.FastBackend
    model = minitorch.DecoderLM.from_pretrained(folder, backend, precision=DTYPES[device])
    return lambda: model.generate(prompt, count, temperature=0)


def theirs(folder: str, device: str, prompt: list[int], count: int, compiled: bool) -> Continue:
    """Return the continuation of transformers."""
    try:
        import torch  # type: ignore[import-not-found]
        import transformers  # type: ignore[import-not-found]
    except ImportError as error:
        missing = f"{error.name} is not installed (pip install torch transformers)"
        raise Unavailable(missing) from None
    dtype = getattr(torch, DTYPES[device])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    ids = torch.tensor([prompt], device=device)
    options: Record = dict.fromkeys(("max_new_tokens", "min_new_tokens"), count)
    # With a static cache, generate compiles each step for CUDA graphs.
    options |= {"cache_implementation": "static"} if compiled else {}
    options |= {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    return torch.no_grad()(lambda: model.generate(ids, **options)[0].tolist())


def cases(run: Run) -> Record:
    """Return tokens per second of each contestant, and our ratio to each."""
    sizes = TINY if run.is_quick else SMALL
    with tempfile.TemporaryDirectory() as folder:
        minitorch.manual_seed(0)
        options = {"p_dropout": 0.0, "tie_weights": True, "backend": minitorch.FastBackend}
        minitorch.DecoderLM(**sizes, **options, dtype=np.float32).save_pretrained(folder)
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


SETTINGS = {"normal": {"rounds": 5}}
MEASUREMENT = Measurement(
    "generation", "How fast does GPT-2 small generate text, beside transformers?", cases,
    {"cpu": SETTINGS, "cuda": SETTINGS}, minutes={"cpu": 2, "cuda": 2},
)  # fmt: skip
