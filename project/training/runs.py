"""What training scripts do around the loop: begin a run or go on with one, and end it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from common.notebooks import show_picture

from minitorch.training.checkpoints import Checkpoints, TrainingState, remove_partials
from minitorch.training.model_files import CheckpointError, save_checkpoint
from training.gpt_loop import ALONE, JUDGE_SHARE, Trainer, judge, warm_up
from training.gpt_ranks import Ranks
from training.loop_options import BACKENDS, options_of_run
from training.script_helpers import check_backend, check_loss, make_folder

#: The folder of the checkpoints, in that of the results.
CHECKPOINTS = "checkpoints"


@contextmanager
def resumable(out: str) -> Iterator[None]:
    """Turn a checkpoint that cannot be read and a folder that cannot be written into one line.

    Args:
        out: The folder of a script whose command goes on where it ended.
    """
    try:
        yield
    except CheckpointError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(
            f"--out {out} cannot be written ({error}); make room and run the same command again"
        )


def run_to_resume(
    args: argparse.Namespace, given: dict[str, Any], free: Sequence[str]
) -> tuple[argparse.Namespace, TrainingState]:
    """Return the options and the state of the run that --resume names.

    Exit with one line if its checkpoint cannot be read, or is none of ours.

    Args:
        args: The options, with their defaults.
        given: Those that the command line names.
        free: Names of those that may be given anew.
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
        args = options_of_run(args, given, state.notes["args"], state.source, free)
    except (CheckpointError, ValueError) as error:
        sys.exit(str(error))
    if "out" not in given and folder.name.startswith(CHECKPOINTS):
        args.out = str(folder.parent)
    check_backend(f"--backend {args.backend}", BACKENDS[args.backend])
    return args, state


def check_text(args: argparse.Namespace, corpus: Any, state: TrainingState | None) -> None:
    """Exit with one line if the run to go on with learns another text."""
    if state is not None and state.notes["text"] != corpus.digest:
        sys.exit(
            f"{state.source}: its run learns another text than {args.text or 'the manual of this Python'}; "
            "name the same with --text"
        )


def make_trainer(
    make: type[Trainer], model: Any, config: dict[str, Any], corpus: Any, args: argparse.Namespace,
    state: TrainingState | None = None, ranks: Ranks = ALONE,
) -> Trainer:  # fmt: skip
    """Return a trainer that begins, or goes on from a state; exit with one line if it cannot.

    Args:
        make: The class.
        model: To be trained.
        config: Of the model.
        corpus: The text.
        args: The options.
        state: Of the training to go on with; None for a new one.
        ranks: Those that train together.
    """
    out = make_folder(args.out)
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
    trainer = make(model, config, corpus, args, checkpoints, ranks)
    if state is not None:
        try:
            trainer.resume(state)  # after what has drawn random numbers
        except CheckpointError as error:
            sys.exit(str(error))
        print(f"going on after step {state.step} of {args.steps}, from {state.source}")
    return trainer


def run_to_end(
    trainer: Trainer, unit: str, more: Callable[[dict[str, Any]], None] = lambda result: None
) -> bool:
    """Train, judge, save and draw; return whether this rank writes.

    Exit with one line if the files cannot be written, or Ctrl-C has stopped the training.

    Args:
        trainer: The training.
        unit: What losses are counted by.
        more: Called with the figures, before they are written, to add some.
    """
    model, args, out, ranks = trainer.model, trainer.args, Path(trainer.args.out), trainer.ranks
    try:
        result = trainer.run()
        result["unit"] = unit
        judge_finally(model, trainer.corpus, args, result, ranks)
        if not ranks.is_first:
            return False
        ranks.join()
        save_checkpoint(out / "model.safetensors", model, trainer.config)
        more(result)
        record = json.dumps({**result, "args": vars(args)}, indent=1)
        (out / "result.json").write_text(record + "\n")
        report(result, args)
        print(f"checkpoint     {out / 'model.safetensors'}")
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
    return True


def judge_finally(
    model: Any, corpus: Any, args: argparse.Namespace, result: dict[str, Any], ranks: Ranks
) -> None:
    """Add the loss on the whole held-out text, or on what the time allows of it."""
    windows = corpus.held_out_windows(args.context)
    losses = judge(model, windows, args.batch, JUDGE_SHARE * args.max_seconds, ranks)
    done, of = len(losses), len(windows[0])
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
        shortest = ranks[least]["waiting"]
        print(
            f"ranks          per step, {compute:.1f} ms computing (transfers under way for "
            f"{overlapped:.1f} ms of it) and {waiting:.1f} ms waiting; rank {least} waits least "
            f"({shortest:.1f} ms), so the others wait for it"
        )
    if result["utilisation"] is not None:
        print(
            f"utilisation    {result['utilisation']:.1%} of {result['peak_tflops']:g} TFLOP/s, at "
            f"{result['flops_per_token']:.3g} operations per token, by the textbook count"
        )
    if result["by_clock"]:
        print(
            f"time limit     shortened the run: {result['steps']} of {args.steps} steps; a larger "
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
