"""The CPU path beside PyTorch and NumPy: the figures that it is held to, and whether it reaches them.

A ratio is their time over ours within a round of interleaved calls, its median over the rounds; of
several calls the geometric mean counts.  Figures that end in "time / PyTorch's" have our time over
theirs, and a small call is made up to a hundred times in a reading.  Both sides compute in float32 with
as many threads, in one process. PyTorch is an extra (``pip install -e '.[bench]'``); without it, what
is compared with it is empty.
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
from bench.contestants import DIRECTIONS, Call
from bench.kit import Case, Figure, Measurement, Record, Run, ratio
from bench.measuring import Peak
from bench.torch_gpt import TorchCache
from bench.training_contestants import OURS, THEIRS, Training, size_of
from common.child import in_child

import minitorch

#: Heads, length and head_dim of the attention calls.
SHAPES = ((8, 512, 64), (8, 2048, 64), (8, 4096, 64), (4, 4096, 128))
#: The size of the character GPT of ``make train``, and how both sides train it.
GPT, HOW = size_of("toy"), ("cpu", "float32")
#: Tokens in the cache when one more is decoded.
CACHED, MEGABYTE = 1024, 1e6
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


def compared(run: Run, pairs: dict[str, Pair], factor: float = 1.0) -> Record:
    """Return the calls of a figure, ours beside theirs, and the geometric mean of their ratios."""
    calls = []
    for name, pair in pairs.items():
        ours, theirs = run.timed(dict(enumerate(pair)), factor * run.seconds).values()
        calls.append({
            "call": name, "ms": 1e3 * median(ours), "their_ms": 1e3 * median(theirs),
            "ratio": ratio(theirs, ours)["median"],
        })  # fmt: skip
    return {"value": geometric_mean(call["ratio"] for call in calls), "calls": calls}


def attention(run: Run, way: str) -> Record:
    """Compare attention with PyTorch's fused call."""
    torch, pairs = run.pytorch, dict[str, Pair]()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for (heads, length, dim), causal in [(s, c) for s in SHAPES for c in (False, True)]:
        rng, shape = np.random.default_rng(0), (1, heads, min(length, run.longest), dim)
        arrays = [rng.standard_normal(shape, np.float32) for _ in range(4)]
        leaves = [torch.from_numpy(x).requires_grad_() for x in arrays[:3]]
        call, attend = Call(arrays, {"is_causal": causal}), partial(sdpa, *leaves, is_causal=causal)
        pair: Pair = call.forward, torch.no_grad()(attend)
        if way == "backward":
            call.forward()
            dout, kept = torch.from_numpy(arrays[3]), {"retain_graph": True}
            pair = call.backward, partial(torch.autograd.grad, attend(), leaves, dout, **kept)
        pairs[f"{heads} x {shape[2]} x {dim}, {'causal' if causal else 'full'}"] = pair
    return compared(run, pairs)


def training(run: Run) -> Record:
    """Compare a training step of the character GPT: forward, backward and AdamW."""
    _, ours = run.pytorch, Training(OURS, GPT, *HOW)
    theirs = Training(THEIRS, GPT, *HOW, source=ours.model)
    return compared(run, {"a step": (ours.timed_step(), theirs.timed_step())}, 4)


def decode(run: Run) -> Record:
    """Compare decoding one token after many that are in a cache."""
    torch, size = run.pytorch, GPT._replace(context=2 * CACHED, batch=1)
    model: Any = Training(OURS, size, *HOW).model
    theirs = Training(THEIRS, size, *HOW, source=model).gpt
    first = np.random.default_rng(0).integers(0, 50, (1, CACHED))
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
    torch, rng = run.pytorch, np.random.default_rng(0)

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
    found = compared(run, calls)
    return {**found, "value": 1 / found["value"]}


def peak_of_attention(length: int) -> int:
    """In a process of its own: return the bytes that forward and backward add to the peak."""
    rng, peak = np.random.default_rng(0), Peak("cpu")
    for n in (256, length):  # the kernels are loaded before
        call = Call([rng.standard_normal((1, 1, n, 64), np.float32) for _ in range(4)], {})
        peak.begin()
        call.forward()
        call.backward()
    return peak.bytes()


def memory(run: Run) -> Record:
    return {"value": in_child(peak_of_attention, 16384) / MEGABYTE, "calls": []}


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
    code, less = "import minitorch", seconds_of("pass", run.starts)
    if what == "step":
        less, code = 0.0, (
            # A training does not load PyTorch.
            f"import sys; sys.path[:0] = {sys.path!r}; sys.modules['torch'] = None\n"
            "from measurements.bench_cpu import GPT, HOW, OURS, Training\nTraining(OURS, GPT, *HOW).take()"
        )  # fmt: skip
        seconds_of(code, 1)  # the caches are warm from now on
    return {"value": seconds_of(code, run.starts) - less, "calls": []}


PARTS: dict[str, list[Callable[[Run], Record]]] = {
    "attention": [partial(attention, way=way) for way in DIRECTIONS],
    "training": [training],
    "decode": [decode],
    "elementwise": [elementwise],
    "small": [partial(small, recorded=recorded) for recorded in (False, True)],
    "memory": [memory],
    "start": [partial(start, what=what) for what in ("import", "step")],
}


def cases(run: Run) -> Iterator[Case]:
    measures = [(part, measure) for part, own in PARTS.items() for measure in own]
    for name, (part, measure) in zip(BOUNDS, measures, strict=True):
        if part in run.only:
            yield {"figure": name}, partial(measure, run)


def figures(record: Record) -> list[Figure]:
    return [
        Figure(row["figure"], row.get("value"), *BOUNDS[row["figure"]]) for row in record["rows"]
    ]


MEASUREMENT = Measurement(
    "bench_cpu", "Does the CPU path reach its figures beside PyTorch and NumPy?", cases,
    {"cpu": {"normal": {"only": tuple(PARTS), "seconds": 3.0, "numbers": 10**7, "longest": 4096,
                        "starts": 5},
             "quick": {"seconds": 0.02, "numbers": 10**5, "longest": 256, "starts": 1}}},
    figures=figures, minutes={"cpu": 5}, choices={"only": tuple(PARTS)},
    records={"small_calls": {"only": ("small", "start"), "seconds": 2.0}},
)  # fmt: skip
