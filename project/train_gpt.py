"""Train a GPT whose attention is `flash_attention`, and let it write.

python project/train_gpt.py                        on Python's own manual
python project/train_gpt.py --text file.txt        on a text of yours
python project/train_gpt.py --backend cuda         on a GPU
python project/train_gpt.py --backend cuda --preset gpt2-small --precision bfloat16 --max-seconds 3600
python project/train_gpt.py --tokenizer bpe        tokens are byte pairs instead of characters
python project/train_gpt.py --text library --context 8192 --batch 2 --positions rotary --recompute
python project/train_gpt.py --window 256 --sinks   a token attends to the last 256, and heads have sinks
python project/train_gpt.py --init DIR             go on with a GPT-2 or a Llama of Hugging Face
mpiexec -n 4 python project/train_gpt.py --data-parallel 2 --ring 2     by four processes together
python project/train_gpt.py --resume               on, from where the last run was killed or stopped
python project/train_gpt.py --load runs/gpt/model.safetensors --prompt "The "
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from common.command_line import replace_unprintable
from data.text import Corpus, read_text
from training.gpt_files import build, load_run
from training.gpt_loop import Trainer, judge, train_step
from training.gpt_options import (
    FREE,
    check_ranks,
    gpt_parser,
    model_options,
    parse_args,
    with_defaults,
)
from training.gpt_ranks import Ranks, check_launch
from training.gpt_tokens import (
    byte_pairs_of,
    encoded,
    folder_of,
    text_reader,
    tokenizer_of,
    tokens_of,
)
from training.loop_options import BACKENDS, given_options
from training.runs import check_text, make_trainer, run_to_end, run_to_resume
from training.script_helpers import check_backend

import minitorch
from minitorch.models.pretrained import Pretrained, load_pretrained
from minitorch.scalars.modes import without_drawing
from minitorch.training.checkpoints import TrainingState
from minitorch.training.model_files import CheckpointError

__all__ = ["build", "judge", "main", "train_step"]  # what the benchmarks and experiments take
#: The folder of the model for transformers, in that of the results.
PRETRAINED = "pretrained"
OUT_OF_MEMORY = "out of memory; take a smaller --batch, --context, --width or --layers"


def write(model: minitorch.DecoderLM, config: dict[str, Any], args: argparse.Namespace) -> None:
    """Print how the model continues the prompt, token by token."""
    ids, read = list(encode_prompt(config, args)), text_reader(config)
    print(read(ids), end="", flush=True)
    try:
        for token in model.continuation(ids, args.sample, args.temperature, args.seed):
            if token == model.eos_token_id:
                break
            print(read([token]), end="", flush=True)
    except ValueError as error:  # weights so large that the scores are no numbers
        sys.exit(f"\nthe model cannot write ({error}); train it again with a lower --lr")
    print()


def encode_prompt(config: dict[str, Any], args: argparse.Namespace) -> Any:
    """Return the ids of the prompt; exit with one line if it has none or unknown ones."""
    prompt = config["prompt"] if args.prompt is None else args.prompt
    if not prompt:
        sys.exit("--prompt must hold at least one character")
    try:
        return encoded(prompt, config)
    except ValueError as error:
        sys.exit(f"--prompt {prompt!r} cannot be continued: {error}")


def start(
    args: argparse.Namespace, corpus: Corpus, kept: dict[str, Any], found: Pretrained | None,
    state: TrainingState | None, ranks: Ranks,
) -> Trainer:  # fmt: skip
    """Return a trainer that begins, or goes on from a state; exit with one line if it cannot."""
    config = with_defaults(
        {"characters": "", "prompt": corpus.prompt, **model_options(args), **kept}
    )
    encode_prompt(config, args)  # fail before the training, not after it
    try:
        if found is None:
            model = build(config, args.backend, args.recompute)
        else:
            with without_drawing():
                model = build(config, args.backend, args.recompute)
            load_pretrained(model, found)
    except (CheckpointError, ValueError) as error:
        sys.exit(str(error))
    print(
        f"text {len(corpus.train) + len(corpus.held_out):,} tokens, {config['vocabulary']} "
        f"different; model {sum(p.value.size for p in model.parameters()):,} weights, "
        f"{args.attention} attention, {args.precision}"
    )
    return make_trainer(Trainer, model, config, corpus, args, state, ranks)


def train_and_write(args: argparse.Namespace, state: TrainingState | None = None) -> None:
    """Train, save, judge, draw and write."""
    check_launch(args.data_parallel * args.ring)
    ranks = Ranks(args.data_parallel, args.ring, on_gpus=args.backend == "cuda")
    try:
        options = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items()}
        ranks.check({**options, "the step to go on from": state and state.step})
        _train_and_write(args, state, ranks)
    except (SystemExit, MemoryError) as stop:
        ranks.end(stop.code if isinstance(stop, SystemExit) else OUT_OF_MEMORY)
        raise


def _train_and_write(args: argparse.Namespace, state: TrainingState | None, ranks: Ranks) -> None:
    """Do what :func:`train_and_write` does, on one of several ranks."""
    begin = time.perf_counter()
    args.attention = args.attention or "flash"
    minitorch.manual_seed(args.seed)
    text, found = read_text(args.text), None
    if args.init is None and args.tokenizer == "characters":
        corpus, kept = tokens_of(args, text)
    else:
        if state is not None:  # with the tokenizer that the run began with
            names = "tokenizer", "model", "vocabulary", "eos_token_id"
            kept = {name: state.config[name] for name in names}
        elif args.init is not None:
            found, kept = folder_of(args)
        else:
            kept = byte_pairs_of(args, text)
        try:
            ids = encoded(text, kept)
        except ValueError as error:
            sys.exit(str(error))
        corpus = Corpus.from_ids(text, ids, args.context)
    check_text(args, corpus, state)
    ranks.check({"the text": corpus.digest})
    trainer = start(args, corpus, kept, found, state, ranks)
    model, config = trainer.model, trainer.config

    def more(_: dict[str, Any]) -> None:
        if config["tokenizer"] is not None:
            save_for_transformers(model, config, Path(args.out) / PRETRAINED)

    if not run_to_end(trainer, "character" if config["tokenizer"] is None else "token", more):
        return
    print()
    write(model, config, args)
    print(f"\nall done in {time.perf_counter() - begin:.0f} s")


def save_for_transformers(model: minitorch.DecoderLM, config: dict[str, Any], folder: Path) -> None:
    """Write a model and its tokenizer in the format of Hugging Face, if its structure is known there."""
    try:
        model.save_pretrained(folder, tokenizer_of(config))
    except ValueError as error:
        print(f"no folder for transformers: {error}")
        return
    print(f"transformers   {folder}, also for project/generate.py")


def resume(args: argparse.Namespace, given: dict[str, Any]) -> None:
    """Go on with a run."""
    args, state = run_to_resume(args, given, FREE)
    try:
        check_ranks(args)
    except ValueError as error:
        sys.exit(str(error))
    train_and_write(args, state)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(__doc__, argv)
    replace_unprintable()
    check_backend(f"--backend {args.backend}", BACKENDS[args.backend])
    try:
        with np.errstate(all="ignore"):  # NaN or infinity ends the run with a line of its own
            if args.load:
                write(*load_run(args.load, args.backend, args.attention), args)
            elif args.resume is not None:
                resume(args, given_options(gpt_parser(), argv))
            else:
                train_and_write(args)
    except KeyboardInterrupt:
        sys.exit("stopped by Ctrl-C")
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
