"""The CPU path beside PyTorch and NumPy: the figures that it is held to, and whether it reaches them.

    python project/bench_cpu.py                       all of them, about five minutes
    python project/bench_cpu.py --only attention decode --json out.json

A ratio is their time over ours within a round of interleaved calls, its median over the rounds; of several
calls the geometric mean counts. Rows that end in "time / PyTorch's" have our time over theirs, and a small
call is made a hundred times.  Both sides compute in float32 with the same number of threads, in one
process.  PyTorch is an extra (``pip install -e '.[bench]'``); without it what is compared with it is empty.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from operator import add, matmul
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numba
import numpy as np
from bench.measuring import (
    command_line,
    in_child,
    interleaved,
    name_of,
    peak_memory,
    ratio,
    reset_peak_memory,
    timing_note,
    write_record,
)
from bench.table_cells import figure_cells
from bench.torch_attention import load_torch
from bench.torch_gpt import TorchCache, TorchGPT
from common.command_line import POSITIVE
from data.text import Corpus, read_text
from tqdm import tqdm
from train_gpt import build

import kernels
import minitorch

#: Heads, length and head_dim of the attention calls.
SHAPES = ((8, 512, 64), (8, 2048, 64), (8, 4096, 64), (4, 4096, 128))
#: The character GPT of ``make train``.
GPT: dict[str, Any] = {
    "width": 128,
    "heads": 4,
    "layers": 2,
    "context": 128,
    "dropout": 0.0,
    "tie_weights": False,
}
BATCH, LR, BETA2, WEIGHT_DECAY = 16, 5e-3, 0.99, 0.1
#: Tokens in the cache when one more is decoded.
CACHED = 1024
NUMBERS = 10**7
PEAK_LENGTH = 16384
#: Small calls in one reading of the clock.
REPEATS = 100
MEGABYTE = 1e6
Row = dict[str, Any]


def attention(torch: Any, budget: float) -> list[Row]:
    """Compare attention with PyTorch's fused call, forward and backward."""
    if torch is None:
        return [row("attention forward / PyTorch", None), row("attention backward / PyTorch", None)]
    functional = torch.nn.functional
    found: dict[str, list[Row]] = {"forward": [], "backward": []}
    calls = [(*shape, causal) for shape in SHAPES for causal in (False, True)]
    for heads, length, dim, causal in tqdm(calls, desc="attention"):
        rng = np.random.default_rng(0)
        shape = 1, heads, length, dim
        q, k, v, dout = (rng.standard_normal(shape, np.float32) for _ in range(4))
        theirs = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
        gradient = torch.from_numpy(dout)
        out, lse = kernels.flash_attention_forward(q, k, v, is_causal=causal)
        kept = functional.scaled_dot_product_attention(*theirs, is_causal=causal)

        def forward(arrays: Any = (q, k, v), causal: bool = causal) -> None:
            kernels.flash_attention_forward(*arrays, is_causal=causal)

        def backward(arrays: Any = (dout, q, k, v, out, lse), causal: bool = causal) -> None:
            kernels.flash_attention_backward(*arrays, is_causal=causal)

        def their_forward(tensors: Any = theirs, causal: bool = causal) -> None:
            with torch.no_grad():
                functional.scaled_dot_product_attention(*tensors, is_causal=causal)

        def their_backward(kept: Any = kept, tensors: Any = theirs, dout: Any = gradient) -> None:
            torch.autograd.grad(kept, tensors, dout, retain_graph=True)

        steps = {
            ("ours", "forward"): forward, ("theirs", "forward"): their_forward,
            ("ours", "backward"): backward, ("theirs", "backward"): their_backward,
        }  # fmt: skip
        times = interleaved(steps, "cpu", budget)
        for direction, rows in found.items():
            name = f"{heads} x {length} x {dim}, {'causal' if causal else 'full'}"
            rows.append(compared(name, times["theirs", direction], times["ours", direction]))
    return [row(f"attention {direction} / PyTorch", rows) for direction, rows in found.items()]


def compared(name: str, theirs: list[float], ours: list[float]) -> Row:
    """Return one call: its name, milliseconds of both, and the ratio."""
    return {
        "call": name,
        "ms": 1e3 * median(ours),
        "their_ms": 1e3 * median(theirs),
        "ratio": ratio(theirs, ours)["median"],
    }


def row(figure: str, calls: list[Row] | None, value: float | None = None) -> Row:
    """Return one figure: the geometric mean of its calls, or a value; None for both where it is empty."""
    if calls:
        value = geometric_mean(call["ratio"] for call in calls)
    return {"figure": figure, "value": value, "calls": calls or []}


def models(torch: Any, capacity: int) -> tuple[minitorch.DecoderLM, Any, Corpus]:
    """Return the character GPT with some weights, the same in PyTorch or None, and its text."""
    corpus = Corpus.from_text(read_text(None), GPT["context"])
    config = {
        **GPT, "characters": corpus.characters, "prompt": corpus.prompt, "attention": "flash",
        "context": capacity,
    }  # fmt: skip
    minitorch.manual_seed(0)
    model = build(config, "fast")
    if torch is None:
        return model, None, corpus
    return model, TorchGPT(model, "PyTorch flash", "cpu", LR, BETA2, WEIGHT_DECAY), corpus


def training(torch: Any, budget: float) -> list[Row]:
    """Compare a training step of the character GPT: forward, backward, Adam."""
    model, theirs, corpus = models(torch, GPT["context"])
    batch = corpus.batch(np.random.default_rng(0), BATCH, GPT["context"])
    optimizer = minitorch.Adam(model.parameters(), lr=LR, beta2=BETA2, weight_decay=WEIGHT_DECAY)

    def step() -> None:
        optimizer.zero_grad()
        model.loss(*batch).backward()
        optimizer.step()

    if theirs is None:
        return [row("training step / PyTorch", None)]
    steps = {"ours": step, "theirs": lambda: theirs.step(*batch, LR)}
    times = interleaved(steps, "cpu", 4 * budget)
    return [row("training step / PyTorch", [compared("a step", times["theirs"], times["ours"])])]


def decode(torch: Any, budget: float) -> list[Row]:
    """Compare decoding one token after many that are in a cache."""
    model, theirs, _ = models(torch, 2 * CACHED)
    if theirs is None:
        return [row("decode a token / PyTorch", None)]
    rng = np.random.default_rng(0)
    first = rng.integers(0, 50, (1, CACHED))
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

    times = interleaved({"ours": ours_one, "theirs": theirs_one}, "cpu", 2 * budget)
    return [row("decode a token / PyTorch", [compared("a token", times["theirs"], times["ours"])])]


def elementwise(torch: Any, budget: float) -> list[Row]:
    """Compare operations on many numbers with NumPy's."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(NUMBERS, np.float32) for _ in range(2))
    a, b = (minitorch.from_numpy(array) for array in (x, y))
    square = minitorch.from_numpy(x.reshape(1000, -1))
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "a + b": (lambda: a + b, lambda: x + y),
        "a * b": (lambda: a * b, lambda: x * y),
        "exp": (a.exp, lambda: np.exp(x)),
        "sigmoid": (a.sigmoid, lambda: 1 / (1 + np.exp(-x))),
        "relu": (a.relu, lambda: np.maximum(x, 0)),
        "a < b": (lambda: a < b, lambda: (x < y).astype(np.float32)),
        "sum": (a.sum, x.sum),
        "sum of rows": (lambda: square.sum(1), lambda: x.reshape(1000, -1).sum(1)),
        "sum of columns": (lambda: square.sum(0), lambda: x.reshape(1000, -1).sum(0)),
    }
    calls = []
    for name, (ours, theirs) in tqdm(pairs.items(), desc="elementwise"):
        times = interleaved({"ours": ours, "theirs": theirs}, "cpu", budget)
        calls.append(compared(name, times["theirs"], times["ours"]))
    return [row("elementwise and reductions / NumPy", calls)]


def small(torch: Any, budget: float) -> list[Row]:
    """Compare calls that are little more than Python, without and with a record for backward."""
    names = {False: "small calls, time / PyTorch's", True: "recorded, time / PyTorch's"}
    if torch is None:
        return [row(name, None) for name in names.values()]
    rng, rows = np.random.default_rng(0), []
    for recorded, name in names.items():

        def pair(*shape: int, recorded: bool = recorded) -> tuple[Any, Any]:
            array = rng.standard_normal(shape, np.float32)
            ours = minitorch.from_numpy(array, requires_grad=recorded)
            return ours, torch.from_numpy(array.copy()).requires_grad_(recorded)

        calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
        for size in (10, 4096):
            (a, their_a), (b, their_b) = pair(size), pair(size)
            calls[f"add {size}"] = partial(add, a, b), partial(add, their_a, their_b)
            calls[f"sum {size}"] = a.sum, their_a.sum
        (a, their_a), (b, their_b) = pair(32, 32), pair(32, 32)
        calls["product 32 x 32"] = partial(matmul, a, b), partial(matmul, their_a, their_b)
        (q, their_q), (k, their_k), (v, their_v) = (pair(1, 4, 64, 32) for _ in range(3))
        attend = torch.nn.functional.scaled_dot_product_attention
        calls["attention 4 x 64 x 32"] = (
            partial(q.flash_attention, k, v), partial(attend, their_q, their_k, their_v),
        )  # fmt: skip
        found = []
        for call, (ours, theirs) in tqdm(calls.items(), desc=name):
            steps = {"ours": repeated(ours), "theirs": repeated(theirs)}
            times = interleaved(steps, "cpu", budget)
            single = {name: [one / REPEATS for one in each] for name, each in times.items()}
            found.append(compared(call, single["theirs"], single["ours"]))
        inverse = 1 / geometric_mean(call["ratio"] for call in found)
        rows.append({**row(name, None, inverse), "calls": found})
    return rows


def repeated(call: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that makes a call often: one alone is too short for the clock."""

    def run() -> None:
        for _ in range(REPEATS):
            call()

    return run


def peak_of_attention(length: int) -> int:
    """In a process of its own: return the bytes that forward and backward add to the peak."""
    rng = np.random.default_rng(0)
    for n in (256, length):  # the kernels are loaded before
        arrays = [rng.standard_normal((1, 1, n, 64), np.float32) for _ in range(4)]
        before = reset_peak_memory()
        q, k, v, dout = arrays
        out, lse = kernels.flash_attention_forward(q, k, v)
        kernels.flash_attention_backward(dout, q, k, v, out, lse)
    return peak_memory() - before


def memory(torch: Any, budget: float) -> list[Row]:
    """Measure the peak of forward and backward attention beyond the operands."""
    return [
        row(
            "extra memory of N = 16,384, MB",
            None,
            in_child(peak_of_attention, PEAK_LENGTH) / MEGABYTE,
        )
    ]


def seconds_of(code: str, repeats: int) -> float:
    """Return how long a fresh Python takes for some code, from the start of the process; the least."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - start)
    return min(taken)


FIRST_STEP = """
import sys
sys.path[:0] = {folders!r}
sys.modules["torch"] = None  # a training does not load it
import numpy as np
import minitorch
from bench_cpu import BATCH, GPT, models
model, _, corpus = models(None, GPT["context"])
optimizer = minitorch.Adam(model.parameters())
optimizer.zero_grad()
model.loss(*corpus.batch(np.random.default_rng(0), BATCH, GPT["context"])).backward()
optimizer.step()
"""


def start(torch: Any, budget: float) -> list[Row]:
    """Measure the import, and the first training step of a second process."""
    folders = [str(Path(__file__).parent), *sys.path]
    code = FIRST_STEP.format(folders=folders)
    seconds_of(code, 1)  # the caches are warm from now on
    nothing = seconds_of("pass", 5)
    return [
        row("import of minitorch, s", None, seconds_of("import minitorch", 5) - nothing),
        row("first training step of a second process, s", None, seconds_of(code, 3)),
    ]


#: What can be asked for, and the figures: must, aim, and whether less is better.
SECTIONS: dict[str, Callable[[Any, float], list[Row]]] = {
    "attention": attention,
    "training": training,
    "decode": decode,
    "elementwise": elementwise,
    "small": small,
    "memory": memory,
    "start": start,
}
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


def table(rows: list[Row]) -> str:
    """Return the figures as a Markdown table, and below it the calls that they are made of."""
    lines = ["| figure | reached | must | aim | |", "|---|---:|---:|---:|---|"]
    for one in rows:
        must, aim, is_most = BOUNDS[one["figure"]]
        lines.append(figure_cells(one["figure"], one["value"], must, aim, is_most))
    lines += ["", "| call | ms | theirs | ratio |", "|---|---:|---:|---:|"]
    lines += [
        f"| {one['figure'].split(' /')[0]}: {call['call']} | {call['ms']:.3g} | {call['their_ms']:.3g} | "
        f"{call['ratio']:.2f} |"
        for one in rows
        for call in one["calls"]
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="(default: all)")
    add(
        "--seconds", type=POSITIVE, default=3.0, help="to spend on each call (default: %(default)s)"
    )
    add("--json", metavar="FILE", help="also write the rows there")
    args = parser.parse_args(argv)
    torch, rows = load_torch(), []
    if torch is None:
        print("PyTorch is not installed: what is compared with it is empty", file=sys.stderr)
    else:
        torch.set_num_threads(numba.get_num_threads())
    try:
        for name in args.only:
            rows += SECTIONS[name](torch, args.seconds)
    except KeyboardInterrupt:
        print("interrupted: these figures are done", file=sys.stderr)
    if args.json:
        command = command_line("project/bench_cpu.py", argv)
        write_record(args.json, command, name_of("cpu"), timing=timing_note("cpu"), rows=rows)
    print(f"{name_of('cpu')}, {numba.get_num_threads()} threads, float32\n\n{table(rows)}")


if __name__ == "__main__":
    main()
