"""Train a BERT: predict masked tokens with attention in both directions, then classify texts.

python project/train_bert.py                       on Python's own manual
python project/train_bert.py --text file.txt       on a text of yours
python project/train_bert.py --padded              with padding; else sequences are packed without any
python project/train_bert.py --backend cuda --preset bert-base --precision bfloat16 --max-seconds 3600
python project/train_bert.py --resume              on, from where the last run was killed or stopped
python project/train_bert.py --finetune            tell the sentiment of sentences with runs/bert
python project/train_bert.py --finetune MODEL --data DIR     classes of texts, DIR/class/*.txt

A sequence is a paragraph of the text, or a part of a longer one, behind a token [CLS].
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np
from common.command_line import COUNT, OneLineParser, replace_unprintable
from data.encoder_text import (
    PREDICTED,
    ClassifiedTexts,
    MaskedText,
    first_id,
    packed,
    read_classified,
)
from data.text import read_text
from training.gpt_loop import Trainer
from training.gpt_presets import BYTES
from training.gpt_tokens import LEAST, text_encoder, tokenizer_of, train_byte_pairs
from training.loop_options import BACKENDS, FREE, given_options, loop_parser
from training.runs import check_text, make_trainer, run_to_end, run_to_resume
from training.script_helpers import check_backend, ends_in_one_line

import minitorch
from kernels.traffic.formulas import training_flops
from minitorch.models.encoder_lm import EncoderClassifier, EncoderLM
from minitorch.training.checkpoints import TrainingState
from minitorch.training.model_files import CheckpointError, load_parameters, read_checkpoint

#: Sizes by name: that of the smallest BERT of Turc et al. (2019), and of BERT-base.
PRESETS: dict[str, dict[str, Any]] = {
    "bert-tiny": {"layers": 2, "width": 128, "heads": 2, "context": 128, "batch": 16},
    "bert-base": {
        "layers": 12, "width": 768, "heads": 12, "context": 512, "batch": 64, "vocabulary": 30_528,
        "lr": 1e-4, "clip": 1.0, "dropout": 0.1,
    },
}  # fmt: skip
#: Different totals of packed batches on a GPU: so few that a step of each can be captured as a CUDA graph.
TOTALS = 16
#: What a configuration keeps of the options.
KEPT = ("width", "heads", "layers", "context", "dropout", "attention", "precision")
#: The defaults of --finetune.
FINE_TUNING: dict[str, Any] = {
    "out": "runs/bert-classifier",
    "lr": 3e-4,
    "dropout": 0.1,
    "steps": 600,
}


class Packing:
    """What a model does that packs padded batches."""

    def loss(self, idx: Any, targets: Any, lengths: Any = None, segments: Any = None) -> Any:
        """Return the loss of a batch, padded or packed."""
        batch = packed(idx, targets, lengths) if np.ndim(idx) == 2 else (idx, targets, lengths)
        return super().loss(*batch, segments)  # type: ignore[misc]  # of the model


class PackedLM(Packing, EncoderLM):
    """An encoder that packs padded batches."""


class PackedClassifier(Packing, EncoderClassifier):
    """A classifier that packs padded batches."""


class BertTrainer(Trainer):
    """A training whose batches and masks follow from the seed and the step alone."""

    most_shapes = TOTALS

    def __init__(self, *args: Any):
        super().__init__(*args)
        options = self.args
        self.tokens = round(self.corpus.mean_length * options.batch * options.accumulate)

    def _batch(self) -> tuple[Any, ...]:
        args = self.args
        self.rng = np.random.default_rng((args.seed, self.done))
        ids, targets, lengths = super()._batch()
        if args.padded:
            return ids, targets, lengths
        totals = TOTALS if args.backend == "cuda" else None
        return packed(ids, targets, lengths, args.accumulate, totals)

    def flops_per_token(self) -> float:
        """Return the operations that training with one token takes by the book."""
        encoder = self.model if isinstance(self.model, EncoderLM) else self.model.encoder
        scored = round(PREDICTED * encoder.n_vocab) if encoder is self.model else 0
        # The formula is for causal attention: without a mask, a token costs as in a text twice as long.
        length = round(2 * self.corpus.mean_length)
        sizes = len(encoder.layer_names), encoder.n_embd, 4 * encoder.n_embd, scored
        return training_flops(length, *sizes) / length


def bert_parser(description: str | None = None) -> OneLineParser:
    """Return the parser of the script."""
    parser = loop_parser(
        description, PRESETS,
        "sizes of a model, which other options change one by one: bert-tiny has 2 layers, bert-base is "
        "BERT with its 110 million weights; both clip gradients at norm 1",
    )  # fmt: skip
    add = parser.add_argument
    parser.choice("--tokenizer", ("bytes", "bpe"), "bytes", "byte pairs are learnt from the text")
    add(
        "--vocabulary",
        type=COUNT,
        metavar="N",
        help="rows of the table of tokens (default: as many)",
    )
    parser.choice("--attention", ("flash", "naive"), "flash", "naive needs --padded")
    layout = parser.add_mutually_exclusive_group()
    layout.add_argument("--padded", action="store_true", help="fill sequences up to --context")
    layout.add_argument(
        "--packed", dest="padded", action="store_false", help="compute without padding (default)"
    )
    add(
        "--finetune", nargs="?", const="runs/bert/model.safetensors", metavar="MODEL",
        help="train a classifier that begins with the weights of a pre-trained model (without MODEL: "
        "%(const)s); the defaults are then "
        + " ".join(f"--{name} {value}" for name, value in FINE_TUNING.items()),
    )  # fmt: skip
    add(
        "--data", metavar="PATH",
        help="with --finetune: a folder of texts, class/*.txt, or a file with lines of a sentence, a tab, "
        "and 0 or 1 (default: sentences made by a rule)",
    )  # fmt: skip
    parser.set_defaults(out="runs/bert", steps=3000, max_seconds=300.0, lr=2e-3, clip=1.0,
                        checkpoint_every=200, **PRESETS["bert-tiny"])  # fmt: skip
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; exit with one line and code 2 if it cannot be."""
    parser = bert_parser(__doc__)
    args, given = parser.parse_args(argv), given_options(bert_parser(), argv)
    vars(args).update({**PRESETS.get(args.preset, {}), **given})
    if args.finetune is not None:
        vars(args).update({**FINE_TUNING, **given})
    elif args.data is not None:
        parser.error("--data belongs to --finetune; pass a text to pre-train on with --text")
    if args.attention == "naive" and not args.padded:
        parser.error("packed sequences need flash attention; pass --padded with --attention naive")
    if args.tokenizer == "bpe" and args.vocab_size < LEAST:
        parser.error(
            f"--vocab-size must be {LEAST} or more, for each byte and the end of a text; got "
            f"{args.vocab_size}"
        )
    return args


def config_of(args: argparse.Namespace, text: str) -> dict[str, Any]:
    """Return the configuration of a new model, with its tokenizer; exit with one line if it fits none."""
    kept: dict[str, Any] = {"tokenizer": None, "characters": BYTES, "vocabulary": sys.maxsize}
    words = len(BYTES)
    if args.tokenizer == "bpe":
        kept["tokenizer"] = train_byte_pairs(text, args.vocab_size)
        words = tokenizer_of(kept).get_vocab_size()
    least = first_id(words) + 1
    rows = args.vocabulary or least
    if rows < least:
        sys.exit(
            f"--vocabulary must be {least} or more, for {words} tokens, [MASK] and [CLS]; got {rows}"
        )
    own = {key: getattr(args, key) for key in KEPT}
    return {**own, **kept, "vocabulary": rows, "words": words, "classes": None}


def build(config: dict[str, Any], backend: str, padded: bool) -> EncoderLM | EncoderClassifier:
    """Build the model that a configuration describes."""
    try:
        sizes = [config[key] for key in ("vocabulary", "width", "heads", "context", "dropout")]
        encoder = (EncoderLM if padded else PackedLM)(
            *sizes, n_layer=config["layers"], attention=config["attention"],
            attention_dropout=config["dropout"], precision=config["precision"],
            backend=BACKENDS[backend],
        )  # fmt: skip
        if config["classes"] is None:
            return encoder
        classifier = EncoderClassifier if padded else PackedClassifier
        return classifier(encoder, len(config["classes"]), config["dropout"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"the configuration describes no encoder ({error!r})") from None


def pretraining(
    args: argparse.Namespace, state: TrainingState | None
) -> tuple[Any, dict[str, Any], MaskedText]:
    """Return the model, its configuration and the text of a pre-training."""
    text = read_text(args.text)
    config = config_of(args, text) if state is None else state.config
    corpus = MaskedText(
        text, text_encoder(config), config["words"], config["context"], args.batch, args.accumulate
    )
    model = build(config, args.backend, args.padded)
    full = len(corpus.train.lengths) * config["context"]
    print(
        f"text {corpus.train.ids.size + corpus.held_out.ids.size:,} tokens in "
        f"{len(corpus.train.lengths) + len(corpus.held_out.lengths):,} sequences, "
        f"{1.0 - corpus.mean_length * len(corpus.train.lengths) / full:.0%} of padded ones are padding"
    )
    return model, config, corpus


def fine_tuning(
    args: argparse.Namespace, state: TrainingState | None
) -> tuple[Any, dict[str, Any], ClassifiedTexts]:
    """Return the classifier, its configuration and the texts of a fine-tuning."""
    texts, classes, names = read_classified(args.data)
    arrays = {}
    if state is not None:
        config = state.config
    else:
        arrays, found = read_checkpoint(args.finetune)
        if found.get("classes") is not None:
            sys.exit(f"{args.finetune} is a classifier already; pass a model of a pre-training")
        config = {**found, "classes": names, "dropout": args.dropout}
    model = build(config, args.backend, args.padded)
    if arrays:
        load_parameters(model.encoder, arrays, args.finetune)
    args.context = config["context"]
    corpus = ClassifiedTexts(
        texts, classes, text_encoder(config), config["words"], args.context, args.seed
    )
    cut = f"; {corpus.cut} are cut to {args.context} tokens" if corpus.cut else ""
    print(f"{len(corpus.train)} texts to learn from, {len(corpus.held_out)} held out, of "
          f"{len(names)} classes{cut}")  # fmt: skip
    return model, config, corpus


def train(args: argparse.Namespace, state: TrainingState | None = None) -> None:
    """Train, save, judge and draw."""
    begin = time.perf_counter()
    minitorch.manual_seed(args.seed)
    try:
        start = pretraining if args.finetune is None else fine_tuning
        model, config, corpus = start(args, state)
    except (CheckpointError, ValueError) as error:
        sys.exit(str(error))
    check_text(args, corpus, state)
    print(
        f"model {sum(p.value.size for p in model.parameters()):,} weights, "
        f"{'padded' if args.padded else 'packed'} batches, {config['precision']}"
    )
    trainer = make_trainer(BertTrainer, model, config, corpus, args, state)

    def more(result: dict[str, Any]) -> None:
        if isinstance(corpus, ClassifiedTexts):
            ids, classes, lengths = corpus.held_out_windows(args.context)
            starts = range(0, len(ids), args.batch)
            predicted = [model.predict(ids[i : i + args.batch], lengths[i : i + args.batch])
                         for i in starts]  # fmt: skip
            result["accuracy"] = float((np.concatenate(predicted) == classes).mean())
            print(f"accuracy       {result['accuracy']:.1%} of {len(classes)} held-out texts")

    run_to_end(trainer, "masked token" if config["classes"] is None else "text", more)
    print(f"all done in {time.perf_counter() - begin:.0f} s")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    replace_unprintable()
    check_backend(f"--backend {args.backend}", BACKENDS[args.backend])
    with ends_in_one_line("--batch, --context, --width or --layers"):
        if args.resume is None:
            train(args)
        else:
            train(*run_to_resume(args, given_options(bert_parser(), argv), FREE))


if __name__ == "__main__":
    main()
