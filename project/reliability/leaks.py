"""Ten thousand training steps do not make the process grow, nor does anything else that is done again.

The memory of a process is what it has written to itself, in memory or swapped out; pages of files come
and go as the system likes.  Growth compares the medians of two stretches: the tenth of the steps after
the warm-up, which is itself the first tenth, and the last tenth.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from bench.contestants import place_on
from bench.kit import Case, Figure, Measurement, Record, Run
from tqdm import tqdm

import kernels
import minitorch
from kernels import BlockMask
from kernels.cuda.runtime.arrays import pool

#: Growth that is no leak, in percent: the allocators' own.
ALLOWED = 1.0
#: Readings of each kind of step.
READINGS = 100
VOCABULARY, LONGEST = 32, 64

Step = Callable[[int], Any]


def memory_of(device: str) -> dict[str, int]:
    """Return the bytes that this process has written to, resident or swapped out, and the GPU's."""
    status, memory = Path("/proc/self/status").read_text(), None if device == "cpu" else pool()
    sizes = (int(status.split(f"{key}:")[1].split()[0]) for key in ("RssAnon", "VmSwap"))
    return {"written": 1024 * sum(sizes), "device": 0 if memory is None else memory.in_use()}


# -- what is done again and again --------------------------------------------------------------------


def make_model(device: str, seed: int = 0) -> minitorch.DecoderLM:
    """Return a tiny transformer with dropout."""
    minitorch.manual_seed(seed)
    return minitorch.DecoderLM(
        n_vocab=VOCABULARY, n_embd=16, n_head=2, n_positions=LONGEST, p_dropout=0.1, n_layer=1,
        middle_dim=64, attention="flash", dtype=np.float32,
        backend=minitorch.FastBackend if device == "cpu" else minitorch.CudaBackend,
    )  # fmt: skip


def training(device: str, length: Callable[[int], int] = lambda step: 32) -> Step:
    """Return a training step."""
    model, rng = make_model(device), np.random.default_rng(0)
    optimizer = minitorch.Adam(model.parameters(), lr=1e-3)

    def step(number: int) -> None:
        inputs, targets = rng.integers(0, VOCABULARY, (2, 2, length(number)))
        optimizer.zero_grad()
        loss = model.loss(inputs, targets)
        loss.backward()
        minitorch.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if number % 10 == 0:
            loss.item()

    return step


def lengths(device: str) -> Step:
    """Return a training step whose sequences have a length of their own each time."""
    return training(device, lambda step: 2 + step * 37 % (LONGEST - 2))


def writing(device: str) -> Step:
    """Return a step that asks a model for text, token by token from a cache."""
    model = make_model(device)
    model.eval()
    return lambda number: model.generate([1, 2, 3], 4, seed=number)


def models(device: str) -> Step:
    """Return a step that makes a model, trains it once and drops it."""

    def step(number: int) -> None:
        model = make_model(device, number)
        model.loss(np.ones((1, 4), np.int64), np.ones((1, 4), np.int64)).backward()

    return step


def attention(device: str) -> Step:
    """Return a step of one call on arrays, forward and backward, with other options each time."""
    rng, place = np.random.default_rng(0), place_on(device)

    def step(number: int) -> None:
        seq = 1 + number * 29 % 96
        q, k, v = (place(rng.standard_normal((2, seq, 16)).astype(np.float32)) for _ in range(3))
        options: dict[str, Any] = [
            {"is_causal": True}, {"dropout_p": 0.1, "seed": number},
            {"attn_mask": place(rng.random((seq, seq)) < 0.5)},
            {"block_mask": BlockMask.butterfly(seq, seq, 16)},
        ][number % 4]  # fmt: skip
        out, lse = kernels.flash_attention_forward(q, k, v, **options)
        kernels.flash_attention_backward(out, q, k, v, out, lse, **options)

    return step


def refused(device: str) -> Step:
    """Return a step that asks for what cannot be: the error holds no arrays once it is caught."""
    place = place_on(device)
    q, wrong = place(np.ones((2, 40, 16), np.float32)), place(np.ones((2, 40, 8), np.float32))

    def step(number: int) -> None:
        try:
            kernels.flash_attention_forward(q, wrong, q)
        except ValueError:
            return
        raise AssertionError("a wrong call has been taken")

    return step


#: What is done again and again: it returns a step for a device, and so many steps are taken.
KINDS: dict[str, tuple[Callable[[str], Step], int]] = {
    "training": (training, 10_000),
    "lengths": (lengths, 4_000),
    "writing": (writing, 2_000),
    "models": (models, 1_000),
    "attention": (attention, 8_000),
    "refused": (refused, 10_000),
}
#: The part of the steps before the first stretch.  The last 1024 calls of attention are remembered, and a
#: seed makes one of its own: so long until that is full.
WARM_UP = {"attention": 0.5}

# -- measuring ---------------------------------------------------------------------------------------


def growth(readings: list[int], warm_up: float) -> float:
    """Return by how many percent the last tenth of the readings is above the one after the warm-up."""
    tenth, start = max(len(readings) // 10, 1), int(warm_up * len(readings))
    before, after = median(readings[start : start + tenth]), median(readings[-tenth:])
    return 100.0 * (after / before - 1.0) if before else 100.0 * bool(after)


def measure(name: str, device: str, steps: int) -> Record:
    """Take the steps of one kind; return a row of the record."""
    step, every = KINDS[name][0](device), max(steps // READINGS, 1)
    readings: dict[str, list[int]] = {key: [] for key in memory_of(device)}
    for number in tqdm(range(steps), desc=name, unit="step", mininterval=0.5):
        step(number)
        if number % every == every - 1:
            gc.collect()
            for key, value in memory_of(device).items():
                readings[key].append(value)
    warm_up = WARM_UP.get(name, 0.1)
    grown = {f"{key}_growth_percent": growth(x, warm_up) for key, x in readings.items()}
    return {
        "steps": steps, **{key: round(value, 3) for key, value in grown.items()},
        "written_mb": round(readings["written"][-1] / 1e6, 1), "device_bytes": readings["device"][-1],
    }  # fmt: skip


def cases(run: Run) -> Iterator[Case]:
    run.note(allowed_percent=ALLOWED)
    for name in run.only:
        steps = run.steps or KINDS[name][1]
        yield {"what": name}, partial(measure, name, run.device, steps)


def figures(record: Record) -> list[Figure]:
    keys = ("written_growth_percent", "device_growth_percent")
    return [
        Figure(
            f"growth of memory by {row['what']}, %", max(map(row.get, keys)), ALLOWED, is_most=True
        )
        for row in record["rows"]
    ]


COMMON = {"only": tuple(KINDS), "steps": 0}
QUICK = {"only": ("training", "refused"), "steps": 100}
MEASUREMENT = Measurement(
    "leaks", "Does the process grow when things are done ten thousand times?", cases,
    {"cpu": {"normal": COMMON, "quick": QUICK}, "cuda": {"normal": COMMON, "quick": QUICK}},
    figures=figures, minutes={"cpu": 8, "cuda": 8}, choices={"only": tuple(KINDS)}, folder="reliability",
)  # fmt: skip
