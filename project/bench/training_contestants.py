"""The GPTs that measurements of training compare: ours and PyTorch's, of equal weights on equal batches."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np
from data.text import LIBRARY, PROMPT, Corpus, read_text
from tqdm import tqdm
from train_gpt import build
from training.gpt_loop import ALONE, train_step
from training.gpt_presets import PRESETS, characters_of, flops_per_token, spelled
from training.script_helpers import learning_rate

import minitorch
from bench.measuring import Peak
from bench.torch_gpt import FUSED, MATH, TorchGPT

OURS, THEIRS, COMPILED = "ours", "PyTorch", "PyTorch, compiled"
BACKENDS = {"cpu": "fast", "cuda": "cuda"}
BETA2, WEIGHT_DECAY, SEED = 0.99, 0.1, 0
#: Of presets that name none.
LR = 1e-3
#: Batches that steps take in turn while they are timed, and steps before, in which a captured one is made.
BATCHES, WARM_UP = 4, 6
#: Of a batch in float64, for which a GPU has no memory otherwise.
PARTS = 4
#: What --quick makes of the presets, and by how much it divides the contexts that figures ask for.
QUICK = {
    "toy": {"layers": 1, "width": 32, "heads": 2, "context": 32, "batch": 2},
    "char": {"layers": 2, "width": 48, "heads": 2, "context": 32, "batch": 4},
    "gpt2-small": {
        "layers": 2, "width": 64, "heads": 2, "context": 64, "batch": 4, "vocabulary": 512,
    },
}  # fmt: skip
QUICK_CONTEXT = 16
#: The longest context for which Python's manual has a text to hold out, about.
MANUAL_CONTEXT = 1 << 14


class Size(NamedTuple):
    """A model, and the batches that it is trained on: ``batch`` texts of ``context`` tokens a step."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    tied: bool
    context: int
    batch: int
    lr: float

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.context * self.batch


def size_of(preset: str, context: int | None = None, quick: bool = False) -> Size:
    """Return the size of a preset, with as many tokens a step at another context; tiny if quick."""
    own = PRESETS[preset] | (QUICK[preset] if quick else {})
    wanted = own["context"] if context is None else context // (QUICK_CONTEXT if quick else 1)
    return Size(
        own["layers"], own["width"], own["heads"], own["vocabulary"],
        bool(own.get("tie_weights")), wanted, max(own["batch"] * own["context"] // wanted, 1),
        own.get("lr", LR),
    )  # fmt: skip


def corpus_of(size: Size) -> Corpus:
    """Return Python's manual in the tokens of a model; for long contexts, the standard library."""
    characters = characters_of(size.vocabulary)
    text = read_text(None if size.context <= MANUAL_CONTEXT else LIBRARY)
    return Corpus.from_text(spelled(text, characters), size.context, characters)


def batches_of(size: Size) -> Iterator[list[Any]]:
    """Yield batches of the text of a size, the same ones each time."""
    rng, corpus = np.random.default_rng(SEED), corpus_of(size)
    while True:
        yield [np.ascontiguousarray(x) for x in corpus.batch(rng, size.batch, size.context)]


def our_model(
    size: Size, device: str, precision: str, attention: str = "flash", recompute: bool = False
) -> minitorch.DecoderLM:
    """Return a model of this library, whose weights depend on size and precision only."""
    characters = characters_of(size.vocabulary)
    config = {
        "characters": characters, "prompt": PROMPT, "vocabulary": size.vocabulary, "dropout": 0.0,
        "width": size.width, "heads": size.heads, "layers": size.layers, "context": size.context,
        "attention": attention, "tie_weights": size.tied, "precision": precision,
    }  # fmt: skip
    minitorch.manual_seed(SEED)
    return build(config, BACKENDS[device], recompute)


class OurGPT:
    """A model of this library and its optimiser; the step is that of ``train_gpt``."""

    def __init__(
        self, model: minitorch.DecoderLM, lr: float, capture: Callable[..., Any] | None = None,
        clip: float | None = None, ranks: Any = ALONE,
    ):  # fmt: skip
        self.optimizer = minitorch.AdamW(
            model.parameters(), lr=lr, beta2=BETA2, weight_decay=WEIGHT_DECAY, max_norm=clip
        )

        def step(inputs: Any, targets: Any) -> Any:
            return train_step(model, self.optimizer, inputs, targets, ranks=ranks)

        self._step = step if capture is None else capture(step)

    def place(self, ids: Any) -> Any:
        """Return ids as a step takes them: an array, which goes to the device in each step."""
        return ids

    def step(self, inputs: Any, targets: Any, lr: float) -> Any:
        """Take one step; return the loss before it, unread."""
        self.optimizer.lr = lr
        return self._step(inputs, targets)


class Training:
    """A contestant in training."""

    def __init__(
        self, name: str, size: Size, device: str, precision: str, attention: str = "flash",
        source: minitorch.DecoderLM | None = None, clip: float | None = None,
        capture: Callable[..., Any] | None = None, recompute: bool = False, planned: int = 1,
    ):  # fmt: skip
        self.size, self.tokens, self.planned, self.unread = size, size.tokens, planned, list[Any]()
        self.model: minitorch.DecoderLM | None = None
        if name == OURS:
            model = self.model = our_model(size, device, precision, attention, recompute)
            self.gpt: Any = OurGPT(model, size.lr, capture, clip)
        else:  # a copy that is made for it needs no place on the device
            model = our_model(size, "cpu", precision, attention) if source is None else source
            fused = FUSED if name in (THEIRS, COMPILED) else name
            self.gpt = TorchGPT(
                model, MATH if attention == "naive" else fused, device, size.lr, BETA2, WEIGHT_DECAY,
                precision, clip, PARTS if precision == "float64" else 1, compiled=name == COMPILED,
            )  # fmt: skip
        self.flops, self._batches = flops_per_token(model, size.context), batches_of(size)

    def timed_step(self) -> Callable[[], Any]:
        """Return a step on batches that are drawn already, after some steps in which kernels compile."""
        drawn = islice(batches_of(self.size), BATCHES)
        turns = cycle([[self.gpt.place(x) for x in pair] for pair in drawn])

        def step() -> None:
            self.gpt.step(*next(turns), self.size.lr)

        for _ in range(WARM_UP):
            step()
        return step

    def take(self, count: int = 1) -> None:
        """Take so many of the planned steps, as ``train_gpt`` does."""
        for _ in range(count):
            lr = learning_rate(len(self.unread) / self.planned, self.size.lr)
            self.unread.append(self.gpt.step(*next(self._batches), lr))

    def losses(self, steps: int, title: str = "") -> list[float]:
        """Take so many steps in all; return the loss before each, nats a token."""
        self.planned = steps
        for _ in tqdm(range(steps - len(self.unread)), desc=title, unit="step", leave=False):
            self.take()
        return [loss.item() for loss in self.unread]


def peak_of_training(
    name: str, size: Size, device: str, precision: str, captured: bool = False, attention: str = "flash"
) -> int | None:  # fmt: skip
    """Return the most bytes that training takes, weights included; to be called in a fresh process.

    On a GPU these are the bytes of tensors in use; elsewhere, what is added to the process's resident
    memory.  None where another memory manager than ours is in charge of the device, or the peak is unknown.
    """

    def train(own: Size) -> None:
        gc.collect()  # a model that was only copied
        capture = minitorch.graph_step if captured else None
        Training(name, own, device, precision, attention, capture=capture).timed_step()

    peak = Peak(device, of_torch=name != OURS)
    if not peak.is_known:
        return None
    if device == "cpu":
        # Kernels and libraries are loaded before, by a model so small that what it leaves in the heap
        # is not used again.
        words = min(size.vocabulary, 256)
        small = {
            "layers": 1,
            "width": 16 * size.heads,
            "vocabulary": words,
            "batch": 1,
            "context": 16,
        }
        train(size._replace(**small))
        gc.collect()
    peak.begin()
    train(size)
    return peak.bytes() or None
