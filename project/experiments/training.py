"""Train the character GPT with naive and flash attention, and in PyTorch: speed, memory, equal losses.

    python project/experiments/training.py                  on the CPU, a small model
    python project/experiments/training.py --device cuda    on a GPU, contexts up to 4,096

First all of them train the same weights on the same batches, a few steps each in turn; their losses should
be equal but for rounding.  Then one model is trained for each context on the same number of tokens, with
flash attention: its loss on held-out text, and how its speed falls with the context, beside that of naive
attention.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from harness import (
    Experiment,
    Record,
    Report,
    Result,
    cell,
    colour_of,
    headline,
    legend,
    markdown,
    panels,
    run,
)

# isort: split
from bench.measuring import (
    in_child,
    interleaved,
    out_of_memory,
    peak_memory,
    reset_peak_memory,
    spread,
    timing_note,
)
from bench.torch_gpt import TorchGPT, TorchMemory, torch_peers
from data.text import Corpus, read_text
from train_gpt import build, judge, train_step
from training.script_helpers import learning_rate

import minitorch
from kernels.cuda.runtime.arrays import pool

FLASH, NAIVE = "flash", "naive"
BACKENDS = {"cpu": "fast", "cuda": "cuda"}
BETA2, WEIGHT_DECAY, SEED = 0.99, 0.1, 0
#: Steps that are timed together; their losses are read at the end.
BLOCK = 5
#: Context, and tokens of a step, that load the kernels.
SMALLEST = 16


@dataclass(frozen=True)
class Size:
    """A model, and how it is trained.

    Attributes:
        width: Of the model.
        heads: Likewise.
        layers: Likewise.
        tokens: Of a step: batch times context.
        lr: Highest learning rate.
        context: Of the comparison of losses.
        curve_steps: Likewise.
        contexts: That are compared.
        steps: For each of them.
        timed: Blocks of steps in which naive and flash attention are timed side by side.
        naive_to: Longest context with naive attention.
    """

    width: int
    heads: int
    layers: int
    tokens: int
    lr: float
    context: int
    curve_steps: int
    contexts: tuple[int, ...]
    steps: int
    timed: int
    naive_to: int


SIZES = {
    "cpu": {
        "quick": Size(32, 2, 1, 512, 5e-3, 64, 10, (64, 128), 10, 2, 128),
        "normal": Size(64, 2, 2, 2048, 5e-3, 256, 60, (128, 256, 512, 1024, 2048), 200, 4, 2048),
        "full": Size(128, 4, 2, 4096, 5e-3, 256, 200, (256, 512, 1024, 2048, 4096), 400, 5, 4096),
    },
    "cuda": {
        "quick": Size(64, 2, 2, 4096, 3e-3, 512, 20, (256, 512), 20, 3, 512),
        "normal": Size(256, 4, 4, 16384, 3e-3, 1024, 80, (256, 512, 1024, 2048, 4096), 160, 6, 4096),
        "full": Size(256, 4, 4, 16384, 3e-3, 1024, 300, (256, 512, 1024, 2048, 4096), 600, 20, 4096),
    },
}  # fmt: skip


class OurGPT:
    """The model of this library, with its optimiser.

    Args:
        model: Whose attention is fused or composed.
        lr: Highest learning rate.
    """

    def __init__(self, model: minitorch.DecoderLM, lr: float):
        self.model = model
        self.optimizer = minitorch.Adam(
            model.parameters(), lr=lr, beta2=BETA2, weight_decay=WEIGHT_DECAY
        )

    def step(self, inputs: Any, targets: Any, lr: float) -> Any:
        """Take one step; return the loss before it, unread."""
        self.optimizer.lr = lr
        return train_step(self.model, self.optimizer, inputs, targets)


class Run:
    """One model in training: which batch comes next depends on the step alone.

    Args:
        name: "flash", "naive", or a peer of :mod:`torch_gpt`.
        device: "cpu" or "cuda".
        size: Of the model and of a step.
        context: Characters a window.
        steps: That the learning rate is planned for.
        corpus: The text.
    """

    def __init__(
        self, name: str, device: str, size: Size, context: int, steps: int, corpus: Corpus
    ):
        config = {
            "characters": corpus.characters, "prompt": corpus.prompt, "width": size.width,
            "heads": size.heads, "layers": size.layers, "context": context, "dropout": 0.0,
            "attention": NAIVE if name == NAIVE else FLASH, "tie_weights": False,
        }  # fmt: skip
        minitorch.manual_seed(SEED)
        model = build(config, BACKENDS[device])
        self.gpt: Any = (
            OurGPT(model, size.lr)
            if name in (FLASH, NAIVE)
            else TorchGPT(model, name, device, size.lr, BETA2, WEIGHT_DECAY)
        )
        self.corpus, self.size, self.context, self.steps = corpus, size, context, steps
        self.batch = max(1, size.tokens // context)
        self.rng = np.random.default_rng(SEED)
        self.losses: list[float] = []

    def block(self, count: int = BLOCK) -> None:
        """Take so many steps, and read their losses."""
        unread = []
        for step in range(len(self.losses), len(self.losses) + count):
            batch = self.corpus.batch(self.rng, self.batch, self.context)
            unread.append(self.gpt.step(*batch, learning_rate(step / self.steps, self.size.lr)))
        self.losses += [loss.item() for loss in unread]

    def tokens_per_second(self, seconds: list[float]) -> dict[str, float]:
        """Return the spread over blocks of steps; the first, in which kernels compile, is left out."""
        tokens = BLOCK * self.batch * self.context
        return spread([tokens / each for each in seconds[1:]])


def peak_of_process(name: str, settings: dict[str, Any], context: int) -> int:
    """Return by how many bytes training raises the peak of this process; to be called in a fresh one."""
    size, corpus = Size(**settings), Corpus.from_text(read_text(None), context)
    # Kernels are loaded by a batch so small that what it leaves in the heap serves nobody afterwards.
    Run(name, "cpu", replace(size, tokens=SMALLEST), SMALLEST, 2, corpus).block(1)
    before = reset_peak_memory()
    Run(name, "cpu", size, context, 2, corpus).block(2)
    return peak_memory() - before


def peak_of_device(name: str, size: Size, context: int, corpus: Corpus) -> int | None:
    """Return the most bytes of the device that training takes, weights included; None: not known."""
    memory: Any = pool() if name in (FLASH, NAIVE) else TorchMemory()
    if memory is None:  # another memory manager is in charge
        return None
    before = memory.reset_peak()
    try:
        Run(name, "cuda", size, context, 2, corpus).block(2)
    except Exception as error:
        if not out_of_memory(error):
            raise
        return None
    return memory.peak() - before


def peak(name: str, device: str, size: Size, context: int, corpus: Corpus) -> int | None:
    """Return the bytes that training takes at its peak."""
    if device == "cpu":
        return in_child(peak_of_process, name, asdict(size), context)
    return peak_of_device(name, size, context, corpus)


def timed_blocks(runs: dict[str, Run], device: str, rounds: int) -> dict[str, list[float]]:
    """Let each run take a block of steps in turn, so many times; return the seconds of each."""
    steps: dict[str, Callable[[], None]] = {name: run.block for name, run in runs.items()}
    return interleaved(steps, device, 0.0, least=rounds, most=rounds, warm_up=False)


def curves(device: str, size: Size, text: str) -> Record:
    """Return the losses and the speed of all contestants."""
    corpus = Corpus.from_text(text, size.context)
    names = [NAIVE, *torch_peers(device), FLASH]
    runs = {name: Run(name, device, size, size.context, size.curve_steps, corpus) for name in names}
    times = timed_blocks(runs, device, size.curve_steps // BLOCK)
    peaks = {name: peak(name, device, size, size.context, corpus) for name in names}
    reference = np.array(runs[FLASH].losses)
    return {
        "kind": "curves",
        "context": size.context,
        "batch": runs[FLASH].batch,
        "runs": {
            name: {
                "losses": run.losses,
                "difference": float(np.abs(reference - run.losses).max()),
                "tokens_per_second": run.tokens_per_second(times[name]),
                "peak_bytes": peaks[name],
            }
            for name, run in runs.items()
        },
    }


def one_context(device: str, size: Size, context: int, text: str) -> Record:
    """Train on the tokens of the budget with one context; return losses, speed and memory."""
    corpus = Corpus.from_text(text, context)
    make = partial(Run, device=device, size=size, context=context, steps=size.steps, corpus=corpus)
    names = [NAIVE, FLASH] if context <= size.naive_to else [FLASH]
    peaks = {name: peak(name, device, size, context, corpus) for name in names}
    runs = {name: make(name) for name in names if name == FLASH or peaks[name] is not None}
    times = timed_blocks(runs, device, size.timed)
    run = runs[FLASH]
    naive = runs.pop(NAIVE, None)
    while len(run.losses) < size.steps:
        run.block(min(BLOCK, size.steps - len(run.losses)))
    held_out = judge(
        run.gpt.model, corpus.held_out_windows(context), run.batch, seconds=float("inf")
    )
    row: Record = {
        "kind": "context",
        "context": context,
        "batch": run.batch,
        "tokens": run.steps * run.batch * context,
        "held_out": float(np.mean(held_out)),
        "train": float(np.mean(run.losses[-BLOCK:])),
        "runs": {},
    }
    for name, one in ((NAIVE, naive), (FLASH, run)):
        if one is not None:
            rate = one.tokens_per_second(times[name])
            row["runs"][name] = {"tokens_per_second": rate, "peak_bytes": peaks[name]}
    return row


def measure(args: argparse.Namespace, report: Report) -> None:
    """Compare the losses, then the contexts."""
    device, size = args.device, SIZES[args.device][args.size]
    text = read_text(None)
    report.note(timing=timing_note(device), model=asdict(size), characters=len(text))
    for context in report.progress((None, *size.contexts), "training"):
        if context is None:
            report.add(**curves(device, size, text))
        else:
            report.add(**one_context(device, size, context, text))
            report.note(efficiency=efficiency(report.rows))


def contexts_of(rows: list[Record]) -> list[Record]:
    """Return the rows of the contexts."""
    return [row for row in rows if row["kind"] == "context"]


def rate(row: Record, name: str = FLASH) -> float:
    """Return the median of the tokens a second."""
    return row["runs"][name]["tokens_per_second"]["median"]


def efficiency(rows: list[Record]) -> dict[str, dict[str, float]]:
    """Return the tokens a second at each context, relative to those at 512, or at the shortest there is."""
    found = contexts_of(rows)
    first = next((row for row in found if row["context"] == 512), found[0])
    return {
        name: {
            str(row["context"]): rate(row, name) / rate(first, name)
            for row in found
            if name in row["runs"] and name in first["runs"]
        }
        for name in (NAIVE, FLASH)
    }


def megabytes(entry: Record) -> str:
    """Write the peak of a run."""
    return "–" if entry["peak_bytes"] is None else f"{entry['peak_bytes'] / 1e6:,.0f}"


def table(record: Record) -> str:
    """Return a line for each contestant, and one for each context."""
    shown = []
    for row in record["rows"]:
        if row["kind"] == "curves":
            head = [
                f"context {row['context']}, batch {row['batch']}", "tokens/s", "peak MB",
                f"median of the last {BLOCK} losses", f"largest difference of a loss from {FLASH}",
            ]  # fmt: skip
            lines = [
                [
                    name, f"{one['tokens_per_second']['median']:,.0f}", megabytes(one),
                    f"{median(one['losses'][-BLOCK:]):.4f}", f"{one['difference']:.1e}",
                ]
                for name, one in row["runs"].items()
            ]  # fmt: skip
            shown.append(markdown(head, lines))
    head = ["context, batch", "tokens", "held-out loss", f"{FLASH}, tokens/s", f"{FLASH}, MB"]
    head += [f"{NAIVE}, tokens/s", f"{NAIVE}, MB", f"speed, {FLASH} / {NAIVE}"]
    lines = []
    for row in contexts_of(record["rows"]):
        own, naive = row["runs"][FLASH], row["runs"].get(NAIVE)
        line = [
            f"{row['context']:,}, {row['batch']}", f"{row['tokens']:,}", f"{row['held_out']:.3f}",
            f"{rate(row):,.0f}", megabytes(own),
        ]  # fmt: skip
        if naive is None:
            lines.append([*line, "–", "–", "–"])
        else:
            gain = cell(rate(row) / rate(row, NAIVE))
            lines.append([*line, f"{rate(row, NAIVE):,.0f}", megabytes(naive), gain])
    return "\n\n".join([*shown, markdown(head, lines)])


def draw(figure: Any, results: list[Result]) -> None:
    """Draw the losses of all contestants, and speed and held-out loss by context."""
    names = [NAIVE, FLASH]
    for result in results:
        names += [n for row in result.rows for n in row["runs"] if n not in names]
    drawn: list[Any] = []
    for (losses, speed, held_out), result in panels(figure, results, rows=3):
        for row in result.rows:
            for place, (name, one) in enumerate(row["runs"].items()):
                if row["kind"] == "curves":
                    losses.plot(
                        one["losses"], color=colour_of(name, names), label=name, alpha=0.7,
                        linewidth=4 - place, linestyle="-" if place == 0 else "--",
                    )  # fmt: skip
        found = contexts_of(result.rows)
        for name in (NAIVE, FLASH):
            points = [(row["context"], rate(row, name)) for row in found if name in row["runs"]]
            if points:
                speed.plot(
                    *zip(*points, strict=True),
                    "o-",
                    color=colour_of(name, names),
                    label=f"{name}, by context",
                )
        held_out.plot(
            [row["context"] for row in found], [row["held_out"] for row in found], "o-",
            color=colour_of(FLASH, names),
        )  # fmt: skip
        model = result.record["model"]
        losses.set(xlabel="step", ylabel="nats")
        headline(
            losses,
            f"{model['layers']} layers, width {model['width']}, float32, "
            f"{model['tokens']:,} tokens a step\ntraining loss, context {model['context']}",
        )
        speed.set(xlabel="context", ylabel="tokens per second", yscale="log")
        headline(speed, "speed of training")
        held_out.set(xlabel="context", ylabel="nats per character")
        headline(held_out, "held-out loss after equally many tokens")
        for axes in (speed, held_out):
            axes.set_xscale("log", base=2)
        drawn += [losses, speed]
    legend(figure, drawn)


CAPTION = (
    "Loss of a small character model with naive and with flash attention (the curves coincide); speed "
    "by context length; and held-out loss by context length."
)
EXPERIMENT = Experiment("training", __doc__, measure, table, draw, height=2.7, caption=CAPTION)

if __name__ == "__main__":
    raise SystemExit(run(EXPERIMENT))
