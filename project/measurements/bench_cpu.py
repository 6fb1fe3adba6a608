"""The CPU path beside PyTorch and NumPy: the figures that it is held to, and whether it reaches them.

A ratio is their time over ours within a round of interleaved calls, its median over the rounds; of several
calls the geometric mean counts.  Figures that end in "time / PyTorch's" have our time over theirs, and a
small call is made a hundred times.  Both sides compute in float32 with as many threads, in one process.
  PyTorch is an extra (``pip install -e '.[bench]'``); without it, what is compared with it is empty.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import add, matmul
from statistics import geometric_mean, median
from typing import Any

import numpy as np
from bench.contestants import DIRECTIONS
from bench.harness import Case, Figure, Measurement, Run
from bench.measuring import Unavailable, peak_memory, ratio, reset_peak_memory
from bench.processes import in_child
from bench.records import Record
from bench.torch_gpt import TorchCache, TorchGPT
from data.text import Corpus, read_text
from train_gpt import build

import kernels
import minitorch

#: Heads, length and head_dim of the attention calls.
SHAPES = ((8, 512, 64), (8, 2048, 64), (8, 4096, 64), (4, 4096, 128))
#: The character GPT of ``make train``.
GPT: Record = {
    "width": 128, "heads": 4, "layers": 2, "context": 128, "dropout": 0.0, "tie_weights": False,
}  # fmt: skip
BATCH, LR, BETA2, WEIGHT_DECAY = 16, 5e-3, 0.99, 0.1
#: Tokens in the cache when one more is decoded; small calls in one reading of the clock.
CACHED, REPEATS = 1024, 100
MEGABYTE = 1e6
Pair = tuple[Callable[[], Any], Callable[[], Any]]
#: Must, aim, and whether less is better.
BOUNDS = {
    "attention forward / PyTorch": (1.0, 1.3, False),
    "attention backward / PyTorch": (1.5, 2.5, False),
    "training step / PyTorch": (1.0, 1.3, False),
    "decode a token / PyTorch": (1.0, 2.0, False),
    "elementwise and reductions / NumPy": (1.5, 2.0, False),
    "small calls, time / PyTorch's": (3.0, 1.5, True),
    "recorded, time / PyTorch's": (3.0, 1.5, True),
    "extra memory of N = 16,384, MB": (64.0, 24.0, True),
    "import of minitorch, s": (0.6, 0.3, True),
    "first training step of a second process, s": (4.0, 2.0, True),
}


def compared(run: Run, pairs: dict[str, Pair], factor: float = 1.0, repeats: int = 1) -> Record:
    """Return the calls of a figure, ours beside theirs, and the geometric mean of their ratios."""
    calls = []
    for name, pair in pairs.items():
        steps = {
            side: call if repeats == 1 else partial(_often, call, repeats)
            for side, call in zip(("ours", "theirs"), pair, strict=True)
        }
        times = run.timed(steps, factor * run.seconds)
        ours, theirs = ([one / repeats for one in times[side]] for side in steps)
        calls.append({
            "call": name, "ms": 1e3 * median(ours), "their_ms": 1e3 * median(theirs),
            "ratio": ratio(theirs, ours)["median"],
        })  # fmt: skip
    return {"value": geometric_mean(call["ratio"] for call in calls), "calls": calls}


def _often(call: Callable[[], Any], repeats: int) -> None:
    for _ in range(repeats):
        call()


def needs_torch(run: Run) -> Any:
    """Return PyTorch."""
    if run.torch is None:
        raise Unavailable("PyTorch is not installed")
    return run.torch


def attention(run: Run, way: str) -> Record:
    """Compare attention with PyTorch's fused call."""
    torch, pairs = needs_torch(run), dict[str, Pair]()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for (heads, length, dim), causal in [(s, c) for s in SHAPES for c in (False, True)]:
        length = min(length, run.longest)
        rng, shape = np.random.default_rng(0), (1, heads, length, dim)
        q, k, v, dout = (rng.standard_normal(shape, np.float32) for _ in range(4))
        theirs = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
        forward = partial(kernels.flash_attention_forward, q, k, v, is_causal=causal)

        def their_forward(theirs: Any = theirs, causal: bool = causal) -> None:
            with torch.no_grad():
                sdpa(*theirs, is_causal=causal)

        pair: Pair = forward, their_forward
        if way == "backward":
            out, lse = forward()[:2]
            pair = (
                partial(
                    kernels.flash_attention_backward, dout, q, k, v, out, lse, is_causal=causal
                ),
                partial(
                    torch.autograd.grad, sdpa(*theirs, is_causal=causal), theirs,
                    torch.from_numpy(dout), retain_graph=True,
                ),
            )  # fmt: skip
        pairs[f"{heads} x {length} x {dim}, {'causal' if causal else 'full'}"] = pair
    return compared(run, pairs)


def models(capacity: int) -> tuple[minitorch.DecoderLM, Corpus]:
    """Return the character GPT with room for so many tokens, and its text."""
    corpus = Corpus.from_text(read_text(None), GPT["context"])
    config = {
        **GPT, "characters": corpus.characters, "prompt": corpus.prompt, "attention": "flash",
        "context": capacity,
    }  # fmt: skip
    minitorch.manual_seed(0)
    return build(config, "fast"), corpus


def peer_of(model: minitorch.DecoderLM) -> TorchGPT:
    """Return the same model in PyTorch."""
    return TorchGPT(model, "PyTorch flash", "cpu", LR, BETA2, WEIGHT_DECAY)


def training_step(model: minitorch.DecoderLM, corpus: Corpus) -> tuple[Callable[[], None], Any]:
    """Return a training step, forward, backward and Adam, and its batch."""
    batch = corpus.batch(np.random.default_rng(0), BATCH, GPT["context"])
    optimizer = minitorch.Adam(model.parameters(), lr=LR, beta2=BETA2, weight_decay=WEIGHT_DECAY)

    def step() -> None:
        optimizer.zero_grad()
        model.loss(*batch).backward()
        optimizer.step()

    return step, batch


def training(run: Run) -> Record:
    """Compare a training step of the character GPT."""
    needs_torch(run)
    model, corpus = models(GPT["context"])
    theirs = peer_of(model)
    step, batch = training_step(model, corpus)
    return compared(run, {"a step": (step, lambda: theirs.step(batch[0], batch[1], LR))}, 4)


def decode(run: Run) -> Record:
    """Compare decoding one token after many that are in a cache."""
    torch = needs_torch(run)
    model, _ = models(2 * CACHED)
    theirs, first = peer_of(model), np.random.default_rng(0).integers(0, 50, (1, CACHED))
    model.eval()
    cache, their_cache = model.make_cache(1, 2 * CACHED), TorchCache(theirs, 2 * CACHED)
    model(first, cache)
    with torch.no_grad():
        theirs.logits(torch.from_numpy(first), their_cache)

    def ours_one() -> None:
        model(first[:, :1], cache).to_numpy()
        cache.truncate(CACHED)

    def theirs_one() -> None:
        with torch.no_grad():
            theirs.logits(torch.from_numpy(first[:, :1]), their_cache).numpy()
        their_cache.length = CACHED

    return compared(run, {"a token": (ours_one, theirs_one)}, 2)


def elementwise(run: Run) -> Record:
    """Compare operations on many numbers with NumPy's."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(run.numbers, np.float32) for _ in range(2))
    a, b = (minitorch.from_numpy(array) for array in (x, y))
    square = minitorch.from_numpy(x.reshape(1000, -1))
    return compared(run, {
        "a + b": (lambda: a + b, lambda: x + y),
        "a * b": (lambda: a * b, lambda: x * y),
        "exp": (a.exp, lambda: np.exp(x)),
        "sigmoid": (a.sigmoid, lambda: 1 / (1 + np.exp(-x))),
        "relu": (a.relu, lambda: np.maximum(x, 0)),
        "a < b": (lambda: a < b, lambda: (x < y).astype(np.float32)),
        "sum": (a.sum, x.sum),
        "sum of rows": (lambda: square.sum(1), lambda: x.reshape(1000, -1).sum(1)),
        "sum of columns": (lambda: square.sum(0), lambda: x.reshape(1000, -1).sum(0)),
    })  # fmt: skip


def small(run: Run, recorded: bool) -> Record:
    """Compare calls that are little more than Python, with or without a record for backward."""
    torch, rng = needs_torch(run), np.random.default_rng(0)

    def pair(*shape: int) -> tuple[Any, Any]:
        array = rng.standard_normal(shape, np.float32)
        ours = minitorch.from_numpy(array, requires_grad=recorded)
        return ours, torch.from_numpy(array.copy()).requires_grad_(recorded)

    calls: dict[str, Pair] = {}
    for size in (10, 4096):
        (a, their_a), (b, their_b) = pair(size), pair(size)
        calls[f"add {size}"] = partial(add, a, b), partial(add, their_a, their_b)
        calls[f"sum {size}"] = a.sum, their_a.sum
    (a, their_a), (b, their_b) = pair(32, 32), pair(32, 32)
    calls["product 32 x 32"] = partial(matmul, a, b), partial(matmul, their_a, their_b)
    (q, their_q), (k, their_k), (v, their_v) = (pair(1, 4, 64, 32) for _ in range(3))
    attend = partial(torch.nn.functional.scaled_dot_product_attention, their_q, their_k, their_v)
    calls["attention 4 x 64 x 32"] = partial(q.flash_attention, k, v), attend
    found = compared(run, calls, repeats=REPEATS)
    return {**found, "value": 1 / found["value"]}


def peak_of_attention(length: int) -> int:
    """In a process of its own: return the bytes that forward and backward add to the peak."""
    rng, before = np.random.default_rng(0), 0
    for n in (256, length):  # the kernels are loaded before
        arrays = [rng.standard_normal((1, 1, n, 64), np.float32) for _ in range(4)]
        before = reset_peak_memory()
        q, k, v, dout = arrays
        out, lse = kernels.flash_attention_forward(q, k, v)
        kernels.flash_attention_backward(dout, q, k, v, out, lse)
    return peak_memory() - before


def seconds_of(code: str, repeats: int) -> float:
    """Return the least time that a fresh Python takes for some code, from the start of the process."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - start)
    return min(taken)


def start(run: Run, what: str) -> Record:
    """Measure the import, or the first training step of a second process."""
    if what == "import":
        least = seconds_of("import minitorch", run.starts) - seconds_of("pass", run.starts)
        return {"value": least, "calls": []}
    code = (
        # A training does not load PyTorch.
        f"import sys; sys.path[:0] = {sys.path!r}; sys.modules['torch'] = None\n"
        "from measurements.bench_cpu import GPT, models, training_step\n"
        "training_step(*models(GPT['context']))[0]()"
    )
    seconds_of(code, 1)  # the caches are warm from now on
    return {"value": seconds_of(code, run.starts), "calls": []}


def cases(run: Run) -> Iterator[Case]:
    parts: dict[str, list[Callable[[], Record]]] = {
        "attention": [partial(attention, run, way) for way in DIRECTIONS],
        "training": [partial(training, run)],
        "decode": [partial(decode, run)],
        "elementwise": [partial(elementwise, run)],
        "small": [partial(small, run, recorded) for recorded in (False, True)],
        "memory": [lambda: {"value": in_child(peak_of_attention, 16384) / MEGABYTE, "calls": []}],
        "start": [partial(start, run, what) for what in ("import", "step")],
    }
    figures = [(part, measure) for part, own in parts.items() for measure in own]
    for name, (part, measure) in zip(BOUNDS, figures, strict=True):
        if part in run.only:
            yield {"figure": name}, measure


def figures(record: Record) -> list[Figure]:
    return [
        Figure(row["figure"], row.get("value"), *BOUNDS[row["figure"]]) for row in record["rows"]
    ]


PARTS = ("attention", "training", "decode", "elementwise", "small", "memory", "start")
MEASUREMENT = Measurement(
    "bench_cpu", "Does the CPU path reach its figures beside PyTorch and NumPy?", cases,
    {"cpu": {"normal": {"only": PARTS, "seconds": 3.0, "numbers": 10**7, "longest": 4096, "starts": 5},
             "quick": {"seconds": 0.02, "numbers": 10**5, "longest": 256, "starts": 1}}},
    figures=figures, minutes={"cpu": 5}, choices={"only": PARTS},
    records={"small_calls": {"only": ("small", "start"), "seconds": 2.0}},
)  # fmt: skip
