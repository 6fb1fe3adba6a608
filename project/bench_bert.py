"""A training step of BERT, with padding and without, beside PyTorch's with padding.

    python project/bench_bert.py --device cuda            BERT-base in bfloat16
    python project/bench_bert.py --device cpu             a BERT of two layers in float32
    python project/bench_bert.py --device cpu --context 128 512 --publish
                                                          also write docs/results/DEVICE/bert.json

Sequences are paragraphs of Python's manual as bytes, so that their lengths are those of a real text;
longer ones are cut at the context.  All contestants begin with the same weights and take the same batches:
forward, backward, AdamW, no clipping, no dropout, no loss read, logits of the masked tokens only.  PyTorch
is eager, with its fused attention under a key padding mask, its fused AdamW, and batches that lie on the
device before; its bfloat16 is autocast.  Our steps are those of ``train_bert.py``.  On a GPU, packed
batches are filled up with padding to one of 16 totals; the padded step, and the packed ones of each total,
are captured as CUDA graphs, and both are timed without graphs, too.  Losses are compared before anything is
timed.  A ratio is the other's time over ours, the median of those within rounds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import cycle, groupby, islice
from typing import Any

import numpy as np
from bench.measuring import (
    command_line,
    interleaved,
    name_of,
    published_file,
    ratio,
    spread,
    timing_note,
    write_record,
)
from bench.torch_attention import load_torch
from bench.torch_bert import TorchBERT
from bench.training_contestants import BACKENDS, BETA2, SEED, WARM_UP, WEIGHT_DECAY
from common.command_line import COUNT, POSITIVE, OneLineParser
from data.encoder_text import MaskedText, packed
from data.text import read_text
from train_bert import KEPT, PRESETS, TOTALS, build, config_of, parse_args
from training.gpt_loop import train_step
from training.gpt_tokens import text_encoder

import minitorch
from kernels.runtime.targets import why_no_cuda

Step = Callable[[], Any]
PACKED, PADDED, THEIRS = "packed", "padded", "PyTorch"
#: What is added to the names of steps without a graph.
EAGER = ", eager"
#: Batches that steps take in turn: so many that hardly any lengths come twice.
BATCHES = 64
#: How far losses may be apart, relative to PyTorch's.
ALLOWED = {"float32": 1e-4, "tf32": 1e-2, "bfloat16": 1e-2}
TINY = {"layers": 1, "width": 16, "heads": 2, "context": 32, "batch": 4, "vocabulary": 258}


class Contest:
    """The contestants, of equal weights, and their batches.

    Args:
        sizes: Options of ``train_bert.py``.
        device: "cpu" or "cuda".
        torch: PyTorch, or None.
    """

    def __init__(self, sizes: argparse.Namespace, device: str, torch: Any):
        self.sizes, self.device = sizes, device
        text = read_text(None)
        self.config = config_of(sizes, text)
        self.corpus = MaskedText(
            text, text_encoder(self.config), self.config["words"], sizes.context, sizes.batch
        )
        drawn = [
            self.corpus.batch(np.random.default_rng((SEED, i)), sizes.batch, sizes.context)
            for i in range(BATCHES)
        ]
        longest = max(int(lengths.max()) for *_, lengths in drawn)
        self.batches = [
            (
                np.ascontiguousarray(ids[:, :longest]),
                np.ascontiguousarray(targets[:, :longest]),
                lengths,
            )
            for ids, targets, lengths in drawn
        ]
        self.longest = longest
        self.losses: dict[str, float] = {}
        self.steps: dict[str, Step] = {}
        for name in (PACKED, PADDED):
            self._add_ours(name)
            if device == "cuda":
                self._add_ours(name + EAGER)
        if torch is not None:
            self._add_theirs()

    def _model(self, device: str, padded: bool) -> Any:
        minitorch.manual_seed(SEED)
        return build(self.config, BACKENDS[device], padded)

    def _add_ours(self, name: str) -> None:
        is_padded, batches = name.startswith(PADDED), self.batches
        if not is_padded:
            totals = TOTALS if self.device == "cuda" else None
            batches = [packed(*batch, totals=totals) for batch in batches]
        model = self._model(self.device, is_padded)
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
        self._add(name, take, batches, first)

    def _add_theirs(self) -> None:
        source = self._model("cpu", True)
        peer = TorchBERT(
            source, self.device, self.sizes.lr, BETA2, WEIGHT_DECAY, self.sizes.precision
        )
        placed = [peer.placed(*batch) for batch in self.batches]
        self.losses[THEIRS] = float(peer.gradients(*placed[0]))

        def step(*batch: Any) -> Any:
            return peer.step(batch[0], batch[1], self.sizes.lr)

        self._add(THEIRS, step, placed, placed[:WARM_UP])

    def _add(
        self, name: str, step: Callable[..., Any], batches: list[Any], first: list[Any]
    ) -> None:
        for batch in first:
            step(*batch)
        turns = cycle(batches)
        self.steps[name] = lambda: step(*next(turns))

    def check_losses(self) -> float:
        """Return the largest relative difference of losses; exit with one line if it is too large."""
        among = self.losses.get(THEIRS, self.losses[PADDED])
        difference = max(abs(loss - among) for loss in self.losses.values()) / among
        if not difference <= ALLOWED[self.sizes.precision]:
            sys.exit(
                f"the losses differ by {difference:.2g}, so that times mean nothing: {self.losses}"
            )
        return difference

    def row(self, seconds: float) -> dict[str, Any]:
        """Time the steps and return the row of the record."""
        difference = self.check_losses()
        times = interleaved(self.steps, self.device, seconds)
        tokens = float(np.mean([lengths.sum() for *_, lengths in self.batches]))
        lengths = np.concatenate([lengths for *_, lengths in self.batches])
        row: dict[str, Any] = {
            **{key: self.config[key] for key in (*KEPT, "vocabulary")},
            "preset": self.sizes.preset,
            "batch": self.sizes.batch,
            "padded_length": self.longest,
            "mean_length": float(lengths.mean()),
            "length_quartiles": np.quantile(lengths, [0.25, 0.5, 0.75]).tolist(),
            "padding": 1.0 - tokens / (self.sizes.batch * self.longest),
            "losses": self.losses,
            "loss_difference": difference,
            "ms": {name: spread(found, 1e3) for name, found in times.items()},
            "tokens_per_second": {
                name: tokens / float(np.median(found)) for name, found in times.items()
            },
            "unpadding": ratio(times[PADDED], times[PACKED]),
        }
        if THEIRS in times:
            ours = [name for name in times if name != THEIRS]
            row["ratio"] = {name: ratio(times[THEIRS], times[name]) for name in ours}
        return row


def _size(batch: tuple[Any, ...]) -> int:
    return batch[0].size


def line(row: dict[str, Any]) -> str:
    """Return a row in words."""
    times = ", ".join(f"{name} {found['median']:.2f} ms" for name, found in row["ms"].items())
    ratios = "".join(
        f"; {name} {found['median']:.2f} times as fast as PyTorch"
        for name, found in row.get("ratio", {}).items()
    )
    return (
        f"{row['preset']}, {row['precision']}, {row['batch']} sequences of {row['mean_length']:.0f} tokens "
        f"on average, {row['padded_length']} at most, {row['padding']:.0%} padding\n"
        f"a step: {times}; packed {row['unpadding']['median']:.2f} times as fast as padded{ratios}\n"
        f"losses differ by {row['loss_difference']:.1g}"
    )


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="(default: cuda where there is one, else cpu)")
    add("--preset", choices=PRESETS, help="(default: bert-base on a GPU, else bert-tiny)")
    add("--precision", choices=ALLOWED, help="(default: bfloat16 on a GPU, else float32)")
    add("--context", type=COUNT, nargs="+", metavar="N",
        help="several make a row each, of as many padded tokens (default: the preset's)")  # fmt: skip
    add("--batch", type=COUNT, help="(default: the preset's)", metavar="N")
    parser.option("--seconds", POSITIVE, 10.0, "to time for")
    add("--quick", action="store_true", help="tiny sizes: what is printed is no figure")
    add("--json", metavar="FILE", help="also write the record there")
    add("--publish", action="store_true", help="write it to docs/results")
    args = parser.parse_args(argv)
    device = args.device or ("cpu" if why_no_cuda() else "cuda")
    preset = args.preset or ("bert-base" if device == "cuda" else "bert-tiny")
    sizes = parse_args(["--preset", preset])
    sizes.precision = args.precision or ("bfloat16" if device == "cuda" else "float32")
    sizes.dropout = 0.0
    vars(sizes).update(
        {**(TINY if args.quick else {}), **({"batch": args.batch} if args.batch else {})}
    )
    torch = load_torch()
    if torch is None:
        print("PyTorch is not installed (pip install torch): only our own steps are timed")
    print(name_of(device))
    path = published_file(device, "bert") if args.publish else args.json
    rows, tokens = list[dict[str, Any]](), sizes.batch * sizes.context
    for context in args.context or [sizes.context]:
        sizes.context, sizes.batch = context, max(tokens // context, 1)
        rows.append(Contest(sizes, device, torch).row(args.seconds))
        print(line(rows[-1]), flush=True)
        if path:
            command = command_line("project/bench_bert.py", argv)
            write_record(path, command, name_of(device), timing=timing_note(device), rows=rows)


if __name__ == "__main__":
    main()
