"""Train a character GPT with naive and flash attention, and in PyTorch: speed, memory, equal losses.

First all of them train the same weights on the same batches, a few steps each in turn; their losses should
be equal but for rounding.  Then one model is trained for each context on the same number of tokens, with
flash attention: its loss on held-out text, and how its speed falls with the context, beside that of naive
attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median

import numpy as np
from bench.kit import Case, Measurement, Panel, Record, Run, cell, markdown, spread
from bench.plots import curves as curves_of
from bench.torch_gpt import torch_peers
from bench.training_contestants import OURS, Size, Training, corpus_of, peak_of_training
from common.child import in_child
from train_gpt import judge

FLASH, NAIVE = "flash", "naive"
#: Steps that are timed together; their losses are read at the end.
BLOCK = 5
#: Of the model: line break and printable ASCII.
VOCABULARY = 96


def size_at(run: Run, context: int) -> Size:
    """Return the size of the model at a context, with as many tokens a step."""
    batch = max(1, run.tokens // context)
    return Size(run.layers, run.width, run.heads, VOCABULARY, False, context, batch, run.lr)


def side_of(name: str) -> tuple[str, str]:
    """Return whose model it is, and its attention: flash, naive, or that of a peer."""
    return (OURS, name) if name in (FLASH, NAIVE) else (name, FLASH)


def training_of(run: Run, name: str, size: Size, planned: int) -> Training:
    """Return a contestant in training."""
    who, attention = side_of(name)
    return Training(who, size, run.device, "float32", attention, planned=planned)


def peak(run: Run, name: str, size: Size) -> int | None:
    """Return the bytes that training takes at its peak, or None if it runs out of memory."""
    who, attention = side_of(name)
    try:
        return in_child(peak_of_training, who, size, run.device, "float32", False, attention)
    except RuntimeError as error:
        if "memory" not in str(error).lower():
            raise
        return None


def timed(run: Run, sides: dict[str, Training], rounds: int) -> dict[str, Record]:
    """Let each take a block of steps in turn; return tokens a second but for the first, which compiles."""
    blocks = {name: partial(each.take, BLOCK) for name, each in sides.items()}
    times = run.timed(blocks, 0.0, least=rounds, most=rounds, warm_up=False)
    return {n: spread([BLOCK * x.tokens / t for t in times[n][1:]]) for n, x in sides.items()}


def cases(run: Run) -> Iterator[Case]:
    names = ("width", "heads", "layers", "tokens", "lr", "context", "curve_steps", "steps")
    run.note(model=run.chosen(*names))
    yield {"kind": "curves", "context": run.context}, partial(curves, run)
    for context in run.contexts:
        yield {"kind": "context", "context": context}, partial(one_context, run, context)


def curves(run: Run) -> Record:
    """Return the losses and the speed of all contestants."""
    size = size_at(run, run.context)
    names = [NAIVE, *torch_peers(run.device), FLASH]
    sides = {name: training_of(run, name, size, run.curve_steps) for name in names}
    rates = timed(run, sides, run.curve_steps // BLOCK)
    losses = {name: each.losses(run.curve_steps) for name, each in sides.items()}
    reference = np.array(losses[FLASH])
    return {
        "batch": size.batch,
        "runs": {
            name: {
                "losses": own, "difference": float(np.abs(reference - own).max()),
                "tokens_per_second": rates[name], "peak_bytes": peak(run, name, size),
            }
            for name, own in losses.items()
        },
    }  # fmt: skip


def one_context(run: Run, context: int) -> Record:
    """Train on the tokens of the budget with one context; return losses, speed and memory."""
    size = size_at(run, context)
    names = [NAIVE, FLASH] if context <= run.naive_to else [FLASH]
    peaks = {name: peak(run, name, size) for name in names}
    sides = {
        name: training_of(run, name, size, run.steps)
        for name in names
        if name == FLASH or peaks[name] is not None
    }
    rates = timed(run, sides, run.timed_blocks)
    sides.pop(NAIVE, None)
    own = sides[FLASH]
    losses = own.losses(run.steps)
    windows = corpus_of(size).held_out_windows(context)
    held_out = judge(own.model, windows, size.batch, seconds=float("inf"))  # type: ignore[arg-type]
    return {
        "batch": size.batch, "tokens": run.steps * size.tokens, "held_out": float(np.mean(held_out)),
        "train": float(np.mean(losses[-BLOCK:])),
        "runs": {n: {"tokens_per_second": rates[n], "peak_bytes": peaks[n]} for n in rates},
    }  # fmt: skip


def contexts_of(rows: list[Record]) -> list[Record]:
    """Return the rows of the contexts."""
    return [row for row in rows if row["kind"] == "context" and "runs" in row]


def rate(row: Record, name: str = FLASH) -> float:
    """Return the median of the tokens a second."""
    return row["runs"][name]["tokens_per_second"]["median"]


def table(record: Record) -> str:
    shown = []

    def megabytes(entry: Record) -> str:
        return "–" if entry["peak_bytes"] is None else f"{entry['peak_bytes'] / 1e6:,.0f}"

    for row in (row for row in record["rows"] if row["kind"] == "curves"):
        head = [
            f"context {row['context']}, batch {row['batch']}", "tokens/s", "peak MB",
            f"median of the last {BLOCK} losses", f"largest difference of a loss from {FLASH}",
        ]  # fmt: skip
        lines = [
            [name, f"{one['tokens_per_second']['median']:,.0f}", megabytes(one),
             f"{median(one['losses'][-BLOCK:]):.4f}", f"{one['difference']:.1e}"]
            for name, one in row["runs"].items()
        ]  # fmt: skip
        shown.append(markdown(head, lines))
    head = ["context, batch", "tokens", "held-out loss", f"{FLASH}, tokens/s", f"{FLASH}, MB"]
    head += [f"{NAIVE}, tokens/s", f"{NAIVE}, MB", f"speed, {FLASH} / {NAIVE}"]
    lines = []
    for row in contexts_of(record["rows"]):
        naive, beside = row["runs"].get(NAIVE), ["–", "–", "–"]
        if naive is not None:
            gain = cell(rate(row) / rate(row, NAIVE))
            beside = [f"{rate(row, NAIVE):,.0f}", megabytes(naive), gain]
        lines.append([
            f"{row['context']:,}, {row['batch']}", f"{row['tokens']:,}", f"{row['held_out']:.3f}",
            f"{rate(row):,.0f}", megabytes(row["runs"][FLASH]), *beside,
        ])  # fmt: skip
    return "\n\n".join([*shown, markdown(head, lines)])


def draw(record: Record) -> list[Panel]:
    """Show the losses of all contestants, and speed and held-out loss by context."""
    rows, model = record["rows"], record["model"]
    losses = {
        name: list(enumerate(one["losses"]))
        for row in rows if row["kind"] == "curves"
        for name, one in row["runs"].items()
    }  # fmt: skip
    found = contexts_of(rows)
    speed = curves_of(
        (n, row["context"], rate(row, n))
        for n in (NAIVE, FLASH)
        for row in found
        if n in row["runs"]
    )
    held_out = {FLASH: [(row["context"], row["held_out"]) for row in found]}
    head = (
        "{layers} layers, width {width}, float32, {tokens:,} tokens a step\n"
        "training loss, context {context}".format(**model)
    )
    title = "held-out loss after equally many tokens"
    return [
        Panel(head, "step", "nats", losses),
        Panel("speed of training", "context", "tokens per second", speed, log="xy"),
        Panel(title, "context", "nats per character", held_out, log="x"),
    ]


MEASUREMENT = Measurement(
    "training", "Does flash attention train as naive does, and how much faster, by context?", cases,
    {"cpu": {"quick": {"width": 32, "layers": 1, "tokens": 256, "context": 32, "curve_steps": 10,
                       "contexts": (32, 64), "steps": 10, "timed_blocks": 2},
             "normal": {"width": 64, "heads": 2, "layers": 2, "tokens": 2048, "lr": 5e-3, "context": 256,
                        "curve_steps": 60, "contexts": (128, 256, 512, 1024, 2048), "steps": 200,
                        "timed_blocks": 4, "naive_to": 2048}},
     "cuda": {"quick": {"width": 64, "heads": 2, "layers": 2, "tokens": 4096, "context": 512,
                        "curve_steps": 20, "contexts": (256, 512), "steps": 20, "timed_blocks": 3},
              "normal": {"width": 256, "heads": 4, "layers": 4, "tokens": 16384, "lr": 3e-3,
                         "context": 1024, "curve_steps": 80, "contexts": (256, 512, 1024, 2048, 4096),
                         "steps": 160, "timed_blocks": 6, "naive_to": 4096}}},
    table=table, draw=draw, height=2.7, minutes={"cpu": 4, "cuda": 2},
    caption="Loss of a small character model with naive and with flash attention (the curves coincide); "
    "speed by context length; and held-out loss by context length.",
)  # fmt: skip
