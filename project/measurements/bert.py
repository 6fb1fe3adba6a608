"""A training step of BERT, with padding and without, beside PyTorch's with padding.

Sequences are paragraphs of Python's manual as bytes, so that their lengths are those of a real text;
longer ones are cut at the context.  All contestants begin with the same weights and take the same
batches: forward, backward, AdamW, no clipping, no dropout, no loss read, logits of the masked tokens
only.  PyTorch is eager, with its fused attention under a key padding mask, its fused AdamW, and batches
that are already on the device; its bfloat16 is autocast.  Our steps are those of ``train_bert.py``.  On
a GPU, packed batches are filled up with padding to one of 16 totals; the padded step, and the packed
ones of each total, are captured as CUDA graphs, and both are timed without graphs, too.  Losses are
compared before anything is timed.  A ratio is the other's time over ours, the median of those within
rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, groupby, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
from bench.kit import Case, Measurement, Record, Run, ratio, spread
from bench.torch_bert import TorchBERT
from bench.training_contestants import BACKENDS, BETA2, SEED, WARM_UP, WEIGHT_DECAY
from data.encoder_text import MaskedText, packed
from data.text import read_text
from train_bert import KEPT, PRESETS, TOTALS, build, config_of, parse_args
from training.gpt_loop import train_step
from training.gpt_tokens import text_encoder

import minitorch

Step = Callable[..., Any]
PACKED, PADDED, THEIRS = "packed", "padded", "PyTorch"
#: What is added to the names of steps without a graph.
EAGER = ", eager"
#: Batches that steps take in turn: so many that hardly any lengths come twice.
BATCHES = 64
#: How far losses may be apart, relative to PyTorch's.
ALLOWED = {"float32": 1e-4, "tf32": 1e-2, "bfloat16": 1e-2}
TINY = {"layers": 1, "width": 16, "heads": 2, "vocabulary": 258}


class Contest:
    """The contestants, of equal weights, and their batches."""

    def __init__(self, run: Run, sizes: SimpleNamespace):
        self.sizes, self.device, text = sizes, run.device, read_text(None)
        self.config: Record = config_of(sizes, text)  # type: ignore[arg-type]
        words, shape = self.config["words"], (sizes.batch, sizes.context)
        corpus = MaskedText(text, text_encoder(self.config), words, sizes.context, sizes.batch)
        drawn = [corpus.batch(np.random.default_rng((SEED, i)), *shape) for i in range(BATCHES)]
        self.longest = max(int(lengths.max()) for *_, lengths in drawn)
        self.batches: list[Any] = [
            (*(np.ascontiguousarray(x[:, : self.longest]) for x in (ids, targets)), lengths)
            for ids, targets, lengths in drawn
        ]
        self.losses, self.steps = dict[str, float](), dict[str, Step]()
        for name in (PACKED, PADDED):
            self.add_ours(name)
            if run.device == "cuda":
                self.add_ours(name + EAGER)
        if run.torch is not None:
            self.add_theirs()
        among = self.losses.get(THEIRS, self.losses[PADDED])
        self.difference = max(abs(loss - among) for loss in self.losses.values()) / among
        if not self.difference <= ALLOWED[sizes.precision]:
            raise ArithmeticError(f"the losses differ by {self.difference:.2g}: {self.losses}")

    def model(self, device: str, padded: bool) -> Any:
        """Return a model with the weights of the seed."""
        minitorch.manual_seed(SEED)
        return build(self.config, BACKENDS[device], padded)

    def add_ours(self, name: str) -> None:
        """Add a step of ours."""
        is_padded, batches = name.startswith(PADDED), self.batches
        if not is_padded:
            totals = TOTALS if self.device == "cuda" else None
            batches = [packed(*batch, totals=totals) for batch in batches]
        model = self.model(self.device, is_padded)
        self.losses[name] = model.loss(*batches[0]).item()
        optimizer = minitorch.AdamW(
            model.parameters(), lr=self.sizes.lr, beta2=BETA2, weight_decay=WEIGHT_DECAY
        )

        def step(*batch: Any) -> Any:
            return train_step(model, optimizer, *batch)

        take: Step = step if EAGER in name else minitorch.graph_step(step, most_shapes=TOTALS)
        first = batches[:WARM_UP]
        if self.device == "cuda":  # each total, the largest first, whose memory the others share
            alike = groupby(sorted(batches, key=_size, reverse=True), _size)
            first = [batch for _, own in alike for batch in islice(cycle(own), WARM_UP)]
        self.add(name, take, batches, first)

    def add_theirs(self) -> None:
        """Add PyTorch's step."""
        lr, given = self.sizes.lr, (BETA2, WEIGHT_DECAY, self.sizes.precision)
        peer = TorchBERT(self.model("cpu", True), self.device, lr, *given)
        placed = [peer.placed(*batch) for batch in self.batches]
        self.losses[THEIRS] = float(peer.gradients(*placed[0]))
        step = lambda inputs, targets: peer.step(inputs, targets, lr)  # noqa: E731
        self.add(THEIRS, step, placed, placed[:WARM_UP])

    def add(self, name: str, step: Step, batches: list[Any], first: list[Any]) -> None:
        """Run a step on the first batches, which compiles, and add it."""
        for batch in first:
            step(*batch)
        turns = cycle(batches)
        self.steps[name] = lambda: step(*next(turns))


def _size(batch: tuple[Any, ...]) -> int:
    return batch[0].size


def cases(run: Run) -> Iterator[Case]:
    sizes = SimpleNamespace(**vars(parse_args(["--preset", run.preset])))
    sizes.precision, sizes.dropout = run.precision, 0.0
    vars(sizes).update(TINY if run.is_quick else {})
    tokens = (run.batch or sizes.batch) * sizes.context
    for context in run.contexts or (sizes.context,):  # as many padded tokens in each
        sizes.context, sizes.batch = context, max(tokens // context, 1)
        if run.is_quick:
            sizes.batch = 4
        yield {"context": context}, partial(row, run, sizes)


def row(run: Run, sizes: SimpleNamespace) -> Record:
    contest = Contest(run, sizes)
    times = run.timed(contest.steps)
    lengths = np.concatenate([lengths for *_, lengths in contest.batches])
    tokens = float(lengths.sum()) / BATCHES
    row: Record = {
        **{key: contest.config[key] for key in (*KEPT, "vocabulary")},
        "preset": sizes.preset, "batch": sizes.batch, "padded_length": contest.longest,
        "mean_length": float(lengths.mean()),
        "length_quartiles": np.quantile(lengths, [0.25, 0.5, 0.75]).tolist(),
        "padding": 1.0 - tokens / (sizes.batch * contest.longest),
        "losses": contest.losses, "loss_difference": contest.difference,
        "ms": {name: spread(found, 1e3) for name, found in times.items()},
        "tokens_per_second": {n: tokens / float(np.median(found)) for n, found in times.items()},
        "unpadding": ratio(times[PADDED], times[PACKED]),
    }  # fmt: skip
    if THEIRS in times:
        row["ratio"] = {n: ratio(times[THEIRS], times[n]) for n in times if n != THEIRS}
    return row


CHOICES = {"preset": tuple(PRESETS), "precision": tuple(ALLOWED)}
MEASUREMENT = Measurement(
    "bert", "What does training BERT gain without padding, and how fast is it beside PyTorch?", cases,
    {"cpu": {"normal": {"preset": "bert-tiny", "precision": "float32", "contexts": (128, 512),
                        "batch": 0, "seconds": 90.0},
             "quick": {"contexts": (32,), "seconds": 0.1}},
     "cuda": {"normal": {"preset": "bert-base", "precision": "bfloat16", "contexts": (), "batch": 0,
                         "seconds": 10.0},
              "quick": {"contexts": (32,), "seconds": 0.1}}},
    minutes={"cpu": 4, "cuda": 2}, choices=CHOICES,
)  # fmt: skip
