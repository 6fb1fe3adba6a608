"""Train a character-level GPT whose attention is `flash_attention`, and let it write.

python project/train_gpt.py                        on Python's own manual
python project/train_gpt.py --text file.txt        on a text of yours
python project/train_gpt.py --backend cuda         on a GPU
python project/train_gpt.py --load runs/gpt/model.safetensors --prompt "The "
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from text_data import PROMPT, Corpus, decode, encode, read_text
from tqdm import tqdm
from train_options import BACKENDS, check_config, parse_args
from training import check_backend, check_loss, learning_rate, make_folder

import minitorch
from minitorch.checkpoint import (
    CheckpointError,
    load_parameters,
    read_checkpoint,
    save_checkpoint,
)

#: Steps between two readings of the loss: a reading waits for the device, which else works ahead.
READ_EVERY = 10
#: Steps between two points of the held-out curve, and the windows that each of them judges.
JUDGE_EVERY, JUDGE_WINDOWS = 100, 48
#: How far the clock may run ahead of the steps before it takes over the learning rate.  The schedule's
#: last twentieth is nearly flat, so that a run within this slack needs no help from the clock.
CLOCK_SLACK = 0.05
#: The final evaluation takes at most this share of --max-seconds.
JUDGE_SHARE = 0.25


def build(config: dict[str, Any], backend: str) -> minitorch.DecoderLM:
    """Build the model that a configuration describes, in float32.

    Raises:
        ValueError: If it describes none.
    """
    check_config(config)
    return minitorch.DecoderLM(
        n_vocab=len(config["characters"]),
        n_embd=config["width"],
        n_head=config["heads"],
        n_positions=config["context"],
        p_dropout=config["dropout"],
        n_layer=config["layers"],
        middle_dim=4 * config["width"],
        attention=config["attention"],
        tie_weights=config["tie_weights"],
        backend=BACKENDS[backend],
        dtype=np.float32,
    )


class CtrlC:
    """Within the context, the first Ctrl-C only sets ``asked``; the second ends the program."""

    def __enter__(self) -> CtrlC:
        self.asked = False
        self.before = signal.getsignal(signal.SIGINT)
        if callable(
            self.before
        ):  # not where the signal is ignored, as in the background of a shell
            signal.signal(signal.SIGINT, self.first)
        return self

    def first(self, *_: Any) -> None:
        """Ask for the end."""
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("\nstopping after this step; Ctrl-C again ends at once", file=sys.stderr)

    def __exit__(self, *_: Any) -> None:
        if callable(self.before):
            signal.signal(signal.SIGINT, self.before)


@minitorch.no_grad()
def judge(
    model: minitorch.DecoderLM, inputs: Any, targets: Any, batch: int, seconds: float
) -> list[float]:
    """Return the loss of each window, as the mean of its batch, in nats per character.

    Windows are taken in their order; when the seconds are over, the rest is left out, but not the
    first batch.
    """
    start = time.perf_counter()
    losses: list[float] = []
    model.eval()
    with tqdm(total=len(inputs), desc="held out", unit="window", leave=False, delay=1) as bar:
        while len(losses) < len(inputs) and (not losses or time.perf_counter() - start < seconds):
            part = slice(len(losses), len(losses) + batch)
            count = len(inputs[part])
            losses += [model.loss(inputs[part], targets[part]).item()] * count
            bar.update(count)
    model.train()
    return losses


def train_step(
    model: minitorch.DecoderLM, optimizer: minitorch.Adam, inputs: Any, targets: Any
) -> minitorch.Tensor:
    """Take one step; return the loss before it, unread."""
    optimizer.zero_grad()
    loss = model.loss(inputs, targets)
    loss.backward()
    optimizer.step()
    return loss.detach()


def read_losses(unread: list[minitorch.Tensor], curve: dict[str, list[Any]], lr: float) -> None:
    """Move losses to the curve."""
    for loss in unread:
        step = len(curve["step"])
        curve["train"].append(check_loss(loss.item(), f"the loss at step {step}", lr))
        curve["step"].append(step)
    unread.clear()


def warm_up(model: minitorch.DecoderLM, corpus: Corpus, args: argparse.Namespace) -> None:
    """Compile what training needs, without a step."""
    if args.backend == "simple":
        print("the simple backend computes number by number in Python and compiles nothing; it is made "
              "for small models, such as --width 8 --heads 2 --layers 1 --context 8 --batch 2")  # fmt: skip
        return
    how_often = "once per checkout" if args.backend == "fast" else "in each run"
    print(f"compiling kernels ({how_often}) ...", flush=True)
    start = time.perf_counter()
    model.loss(*corpus.batch(np.random.default_rng(args.seed), 2, args.context)).backward()
    first = model.parameters()[0].value
    spare = minitorch.Parameter(first.detach())  # the optimiser's kernel too
    spare.value.grad = first.grad
    minitorch.Adam([spare]).step()
    for parameter in model.parameters():
        parameter.value.zero_grad_()
    print(f"... ready after {time.perf_counter() - start:.1f} s", flush=True)


def train(model: minitorch.DecoderLM, corpus: Corpus, args: argparse.Namespace) -> dict[str, Any]:
    """Train until the steps or the seconds are used up, or Ctrl-C; return the curve and the figures."""
    warm_up(model, corpus, args)
    optimizer = minitorch.Adam(model.parameters(), lr=args.lr, beta2=0.99, weight_decay=0.1)
    rng = np.random.default_rng(args.seed)
    curve: dict[str, list[Any]] = {"step": [], "train": [], "held_out_step": [], "held_out": []}
    unread: list[minitorch.Tensor] = []
    inputs, targets = (part[:JUDGE_WINDOWS] for part in corpus.held_out_windows(args.context))

    def add_point() -> None:
        read_losses(unread, curve, args.lr)
        losses = judge(model, inputs, targets, args.batch, JUDGE_SHARE * args.max_seconds)
        mean = check_loss(float(np.mean(losses)), "the held-out loss", args.lr)
        if len(losses) == len(inputs):  # a point of fewer windows is not comparable
            curve["held_out_step"].append(len(curve["step"]) - 1)
            curve["held_out"].append(mean)

    by_clock = False
    start = time.perf_counter()
    bar = tqdm(total=args.steps, unit="step", dynamic_ncols=True, mininterval=0.5)
    with bar, CtrlC() as ctrl_c:
        for step in range(args.steps):
            progress, clock = step / args.steps, (time.perf_counter() - start) / args.max_seconds
            # Once the clock decides, it stays so: until then, a run depends on its options only.
            by_clock = by_clock or clock > min(progress + CLOCK_SLACK, 1.0)
            if step > 0 and clock >= 1.0:
                by_clock = True
                break
            optimizer.lr = learning_rate(max(progress, clock) if by_clock else progress, args.lr)
            batch = corpus.batch(rng, args.batch, args.context)
            unread.append(train_step(model, optimizer, *batch))
            if step % READ_EVERY == READ_EVERY - 1:
                read_losses(unread, curve, args.lr)
            if step % JUDGE_EVERY == JUDGE_EVERY - 1:
                add_point()
            if curve["train"]:
                recent = float(np.mean(curve["train"][-20:]))
                rate = (step + 1) * args.batch * args.context / (time.perf_counter() - start)
                bar.set_postfix_str(f"loss {recent:.3f}, {rate:,.0f} tokens/s", refresh=False)
            bar.update()
            if ctrl_c.asked:
                break
    read_losses(unread, curve, args.lr)
    seconds, steps = time.perf_counter() - start, len(curve["step"])
    if steps % JUDGE_EVERY != 0:
        add_point()
    return {
        "curve": curve,
        "curve_windows": len(inputs),
        "steps": steps,
        "by_clock": by_clock,
        "stopped": ctrl_c.asked,
        "seconds": seconds,
        "tokens_per_second": steps * args.batch * args.context / seconds,
        "train_loss": float(np.mean(curve["train"][-50:])),
    }


def judge_finally(
    model: minitorch.DecoderLM, corpus: Corpus, args: argparse.Namespace, result: dict[str, Any]
) -> None:
    """Add the loss on the whole held-out text, or on what the time allows of it."""
    inputs, targets = corpus.held_out_windows(args.context)
    losses = judge(model, inputs, targets, args.batch, JUDGE_SHARE * args.max_seconds)
    done, of = len(losses), len(inputs)
    result["held_out_loss"] = check_loss(float(np.mean(losses)), "the held-out loss", args.lr)
    result["held_out_windows"] = (
        f"all {of} windows" if done == of else f"{done} of {of} windows, evenly spread: time was up"
    )


def report(result: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the figures of a training."""
    print(
        f"train loss     {result['train_loss']:.3f} nats per character "
        f"(last {min(50, result['steps'])} steps)\n"
        f"held-out loss  {result['held_out_loss']:.3f} nats per character "
        f"({result['held_out_windows']})\n"
        f"speed          {result['tokens_per_second']:,.0f} tokens/s over {result['steps']} steps, "
        f"{result['seconds']:.0f} s"
    )
    if result["by_clock"]:
        print(
            f"clock          shortened the run: {result['steps']} of {args.steps} steps; a larger "
            f"--max-seconds, now {args.max_seconds:g}, gives them all"
        )


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the loss curve, if matplotlib is there."""
    try:
        import matplotlib
    except ImportError:
        print("no picture of the loss curve: matplotlib is missing (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    curve = result["curve"]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
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
    axes.set(xlabel="step", ylabel="loss, nats per character")
    axes.set_ylim(top=min(max(curve["train"]), 4.0))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"loss curve     {path}")


def write(model: minitorch.DecoderLM, config: dict[str, Any], args: argparse.Namespace) -> None:
    """Print how the model continues the prompt, character by character."""
    ids = list(encode_prompt(config, args))
    print(decode(ids, config["characters"]), end="", flush=True)
    try:
        for token in model.continuation(ids, args.sample, args.temperature, args.seed):
            print(decode([token], config["characters"]), end="", flush=True)
    except ValueError as error:  # weights so large that the scores are no numbers
        sys.exit(f"\nthe model cannot write ({error}); train it again with a lower --lr")
    print()


def encode_prompt(config: dict[str, Any], args: argparse.Namespace) -> Any:
    """Return the ids of the prompt; exit with one line if it has none or unknown ones."""
    prompt = config["prompt"] if args.prompt is None else args.prompt
    if not prompt:
        sys.exit("--prompt must hold at least one character")
    try:
        return encode(prompt, config["characters"])
    except ValueError as error:
        sys.exit(f"--prompt {prompt!r} cannot be continued: {error}")


def load_and_write(args: argparse.Namespace) -> None:
    """Load a checkpoint and let it write; exit with one line if it cannot be read."""
    try:
        arrays, config = read_checkpoint(args.load)
        config = {"prompt": PROMPT, **config}  # which older checkpoints lack
        check_config(config)
        width = config["width"]
        least = (
            12 * config["layers"] * width**2
            + (len(config["characters"]) + config["context"]) * width
        )
        if least > sum(array.size for array in arrays.values()):  # before memory is taken for it
            sys.exit(f"{args.load}: its configuration describes a larger model than its weights")
        config["attention"] = args.attention or config["attention"]  # both have the same weights
        model = build(config, args.backend)
        load_parameters(model, arrays, args.load)
    except CheckpointError as error:
        sys.exit(str(error))
    except ValueError as error:
        sys.exit(f"{args.load}: {error}")
    write(model, config, args)


def train_and_write(args: argparse.Namespace) -> None:
    """Train, save, judge, draw and write."""
    begin = time.perf_counter()
    args.attention = args.attention or "flash"
    minitorch.manual_seed(args.seed)
    corpus = Corpus.from_text(read_text(args.text), args.context)
    keys = ("width", "heads", "layers", "context", "dropout", "attention", "tie_weights")
    config = {
        "characters": corpus.characters,
        "prompt": corpus.prompt,
        **{key: getattr(args, key) for key in keys},
    }
    encode_prompt(config, args)  # fail before the training, not after it
    try:
        model = build(config, args.backend)
    except ValueError as error:
        sys.exit(str(error))
    out = make_folder(args.out)
    weights = sum(p.value.size for p in model.parameters())
    print(
        f"text {len(corpus.train) + len(corpus.held_out):,} characters, {len(corpus.characters)} "
        f"different; model {weights:,} weights, {args.attention} attention"
    )
    result = train(model, corpus, args)
    try:
        save_checkpoint(out / "model.safetensors", model, config)
        judge_finally(model, corpus, args, result)
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
        sys.exit(f"stopped by Ctrl-C after {result['steps']} of {args.steps} steps; they are saved")
    print()
    write(model, config, args)
    print(f"\nall done in {time.perf_counter() - begin:.0f} s")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(__doc__, argv)
    # The model writes what it has read; a terminal of another encoding shows "?" for some of it.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    check_backend(f"--backend {args.backend}", BACKENDS[args.backend])
    try:
        with np.errstate(all="ignore"):  # what is no number ends the run with a line of its own
            (load_and_write if args.load else train_and_write)(args)
    except KeyboardInterrupt:
        sys.exit("stopped by Ctrl-C")
    except MemoryError:
        sys.exit("out of memory; take a smaller --batch, --context, --width or --layers")


if __name__ == "__main__":
    main()
