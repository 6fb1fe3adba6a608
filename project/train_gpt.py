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
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from common.command_line import replace_unprintable
from common.notebooks import show_picture
from data.text import Corpus, read_text
from training.gpt_files import build, load_run
from training.gpt_loop import JUDGE_SHARE, Trainer, judge, train_step, warm_up
from training.gpt_options import (
    BACKENDS,
    given_options,
    model_options,
    options_of_run,
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
from training.script_helpers import check_backend, check_loss, make_folder

import minitorch
from minitorch.autodiff import without_drawing
from minitorch.models.pretrained import Pretrained, load_pretrained
from minitorch.training.checkpoints import Checkpoints, TrainingState, remove_partials
from minitorch.training.model_files import (
    CheckpointError,
    save_checkpoint,
)

__all__ = ["build", "judge", "main", "train_step"]  # what the benchmarks and experiments take
#: The folders of the checkpoints and of the model for transformers, in that of the results.
CHECKPOINTS, PRETRAINED = "checkpoints", "pretrained"
OUT_OF_MEMORY = "out of memory; take a smaller --batch, --context, --width or --layers"


def judge_finally(
    model: minitorch.DecoderLM, corpus: Corpus, args: argparse.Namespace, result: dict[str, Any],
    ranks: Ranks,
) -> None:  # fmt: skip
    """Add the loss on the whole held-out text, or on what the time allows of it."""
    inputs, targets = corpus.held_out_windows(args.context)
    losses = judge(model, inputs, targets, args.batch, JUDGE_SHARE * args.max_seconds, ranks)
    done, of = len(losses), len(inputs)
    result["held_out_loss"] = check_loss(float(np.mean(losses)), "the held-out loss", args.lr)
    result["held_out_windows"] = (
        f"all {of} windows" if done == of else f"{done} of {of} windows, evenly spread: time was up"
    )


def report(result: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the figures of a training."""
    print(
        f"train loss     {result['train_loss']:.3f} nats per {result['unit']} "
        f"(last {min(50, result['steps'])} steps)\n"
        f"held-out loss  {result['held_out_loss']:.3f} nats per {result['unit']} "
        f"({result['held_out_windows']})\n"
        f"speed          {result['tokens_per_second']:,.0f} tokens/s over {result['steps']} steps, "
        f"{result['seconds']:.0f} s"
    )
    if ranks := result["ranks_ms"]:
        compute, waiting, overlapped = (float(np.mean([x[key] for x in ranks])) for key in ranks[0])
        least = min(range(len(ranks)), key=lambda rank: ranks[rank]["waiting"])
        print(
            f"ranks          a step computes for {compute:.1f} ms, with transfers under way for "
            f"{overlapped:.1f} ms of them, and waits for {waiting:.1f} ms; rank {least} waits least, "
            f"{ranks[least]['waiting']:.1f} ms: the others wait for it"
        )
    if result["utilisation"] is not None:
        print(
            f"utilisation    {result['utilisation']:.1%} of {result['peak_tflops']:g} TFLOP/s, at "
            f"{result['flops_per_token']:.3g} operations a token by the book"
        )
    if result["by_clock"]:
        print(
            f"clock          shortened the run: {result['steps']} of {args.steps} steps; a larger "
            f"--max-seconds, now {args.max_seconds:g}, gives them all"
        )


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the loss curve, if matplotlib is there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture of the loss curve: matplotlib is missing (pip install matplotlib)")
        return
    curve = result["curve"]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        curve["step"], curve["train"], color="#9db8d9", linewidth=0.8, label="train, each step"
    )
    axes.plot(
        curve["held_out_step"], curve["held_out"], "o-", color="#c2410c", markersize=4,
        label=f"held out, the same {result['curve_windows']} windows each time",
    )  # fmt: skip
    axes.plot(
        curve["step"][-1], result["held_out_loss"], "D", color="#166534", markersize=5,
        label=f"held out, {result['held_out_windows']}: {result['held_out_loss']:.3f}",
    )  # fmt: skip
    axes.set(xlabel="step", ylabel=f"loss, nats per {result['unit']}")
    axes.set_ylim(top=min(max(curve["train"]), 4.0))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    print(f"loss curve     {path}")
    show_picture(path)


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


def load_and_write(args: argparse.Namespace) -> None:
    """Load a checkpoint and let it write; exit with one line if it cannot be read."""
    model, config = load_run(args.load, args.backend, args.attention)
    write(model, config, args)


def start(
    args: argparse.Namespace, corpus: Corpus, kept: dict[str, Any], found: Pretrained | None,
    state: TrainingState | None, ranks: Ranks,
) -> Trainer:  # fmt: skip
    """Return a trainer that begins, or goes on from a state; exit with one line if it cannot.

    Args:
        args: The options.
        corpus: The text.
        kept: The part of the configuration that tells what tokens are.
        found: The weights to begin with, or None.
        state: Of the training to go on with; None for a new one.
        ranks: Those that train together.
    """
    config = with_defaults(
        {
            "characters": "",
            "prompt": corpus.prompt,
            **model_options(args),
            **kept,
        }
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
    out = make_folder(args.out)
    print(
        f"text {len(corpus.train) + len(corpus.held_out):,} tokens, {config['vocabulary']} "
        f"different; model {sum(p.value.size for p in model.parameters()):,} weights, "
        f"{args.attention} attention, {args.precision}"
    )
    checkpoints = Checkpoints(out / CHECKPOINTS, args.keep)
    if ranks.is_first:
        for folder in (out, checkpoints.folder):  # of a process that was killed while it wrote
            remove_partials(folder)
        if state is None and (before := checkpoints.set_aside()):
            print(
                f"the checkpoints of the run before are in {before}; --resume {before} goes on with it"
            )
    ranks.spread(model)
    warm_up(model, corpus, args, ranks)
    trainer = Trainer(model, config, corpus, args, checkpoints, ranks)
    if state is not None:
        try:
            trainer.resume(state)  # after what has drawn random numbers
        except CheckpointError as error:
            sys.exit(str(error))
        print(f"going on after step {state.step} of {args.steps}, from {state.source}")
    return trainer


def train_and_write(args: argparse.Namespace, state: TrainingState | None = None) -> None:
    """Train, save, judge, draw and write.

    Args:
        args: The options.
        state: Of the training to go on with; None for a new one.
    """
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
    if state is not None and state.notes["text"] != corpus.digest:
        sys.exit(
            f"{state.source}: its run learns another text than {args.text or 'the manual of this Python'}; "
            "name the same with --text"
        )
    ranks.check({"the text": corpus.digest})
    trainer = start(args, corpus, kept, found, state, ranks)
    model, config, out = trainer.model, trainer.config, Path(args.out)
    try:
        result = trainer.run()
        result["unit"] = "character" if config["tokenizer"] is None else "token"
        judge_finally(model, corpus, args, result, ranks)
        if not ranks.is_first:
            return
        ranks.join()
        save_checkpoint(out / "model.safetensors", model, config)
        record = json.dumps({**result, "args": vars(args)}, indent=1)
        (out / "result.json").write_text(record + "\n")
        report(result, args)
        print(f"checkpoint     {out / 'model.safetensors'}")
        if config["tokenizer"] is not None:
            save_for_transformers(model, config, out / PRETRAINED)
        draw(result, out / "loss.png")
    except CheckpointError as error:
        sys.exit(f"{error}; --lr is now {args.lr}")
    except OSError as error:
        sys.exit(f"--out {out} cannot be written ({error}); name another folder")
    if result["stopped"]:
        on = "; --resume goes on" if args.checkpoint_every else ""
        sys.exit(
            f"stopped by Ctrl-C after {result['steps']} of {args.steps} steps; they are saved{on}"
        )
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
    """Go on with a run; exit with one line if its checkpoint cannot be read, or is none of ours.

    Args:
        args: The options, with their defaults.
        given: Those that the command line names.
    """
    path, file = Path(args.resume or args.out), None
    if args.resume and not path.is_dir():
        folder, file = path.parent, path
    else:
        folder = path if any(path.glob("step-*")) else path / CHECKPOINTS
    try:
        state = Checkpoints(folder).read(file)
        missing = {"args", "seconds", "by_clock", "resumed", "text"} - state.notes.keys()
        if missing:
            sys.exit(f"{state.source}: not a checkpoint of this script, it has no {min(missing)}")
        args = options_of_run(args, given, state.notes["args"], state.source)
    except (CheckpointError, ValueError) as error:
        sys.exit(str(error))
    if "out" not in given and folder.name.startswith(CHECKPOINTS):
        args.out = str(folder.parent)
    check_backend(f"--backend {args.backend}", BACKENDS[args.backend])
    train_and_write(args, state)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(__doc__, argv)
    replace_unprintable()
    check_backend(f"--backend {args.backend}", BACKENDS[args.backend])
    try:
        with np.errstate(all="ignore"):  # what is no number ends the run with a line of its own
            if args.load:
                load_and_write(args)
            elif args.resume is not None:
                resume(args, given_options(argv))
            else:
                train_and_write(args)
    except KeyboardInterrupt:
        sys.exit("stopped by Ctrl-C")
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
