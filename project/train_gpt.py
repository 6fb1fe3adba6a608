"""Train a character-level GPT whose attention is `flash_attention`, and let it write.

python project/train_gpt.py                        on Python's own manual
python project/train_gpt.py --text file.txt        on a text of yours
python project/train_gpt.py --backend cuda         on a GPU
python project/train_gpt.py --load runs/gpt/model.safetensors --prompt "The "
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from text_data import Corpus, decode, encode, read_text
from tqdm import tqdm

import minitorch
from minitorch.checkpoint import (
    CheckpointError,
    load_parameters,
    read_checkpoint,
    save_checkpoint,
)

BACKENDS = {
    "cuda": minitorch.CudaBackend,
    "fast": minitorch.FastBackend,
    "simple": minitorch.SimpleBackend,
}
#: Steps between two readings of the loss: a reading waits for the device, which else works ahead.
READ_EVERY = 10


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", metavar="FILE", help="text to learn, UTF-8 (default: Python's own manual)")
    add("--out", default="runs/gpt", metavar="DIR", help="where results go (default: %(default)s)")
    add("--steps", type=positive_int, default=550, help="optimiser steps (default: %(default)s)")
    add(
        "--max-seconds",
        type=positive_float,
        default=72.0,
        metavar="S",
        help="anneal and stop by then, compilation not counted (default: %(default)s)",
    )
    add("--batch", type=positive_int, default=16, help="windows a step (default: %(default)s)")
    add(
        "--context",
        type=positive_int,
        default=128,
        help="characters a window (default: %(default)s)",
    )
    add("--width", type=positive_int, default=128, help="width of the model (default: %(default)s)")
    add("--heads", type=positive_int, default=4, help="attention heads (default: %(default)s)")
    add("--layers", type=positive_int, default=2, help="transformer layers (default: %(default)s)")
    add("--dropout", type=float, default=0.0, help="probability of dropping (default: %(default)s)")
    add(
        "--lr",
        type=positive_float,
        default=5e-3,
        help="highest learning rate (default: %(default)s)",
    )
    add("--attention", choices=("flash", "naive"), default="flash", help="(default: %(default)s)")
    add("--backend", choices=sorted(BACKENDS), default="fast", help="(default: %(default)s)")
    add("--tie-weights", action="store_true", help="score tokens with the embedding table")
    add("--seed", type=int, default=0, help="of everything that is random (default: %(default)s)")
    add("--sample", type=int, default=400, metavar="N", help="characters to write at the end")
    add("--temperature", type=float, default=0.8, help="of the writing; 0 is greedy")
    add("--prompt", default="The ", help="what the writing begins with (default: %(default)r)")
    add("--load", metavar="FILE", help="do not train: load this checkpoint and write")
    return parser.parse_args(argv)  # fmt: skip


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


def check_backend(backend: str) -> None:
    """Exit with one line if the machine does not have what a backend needs."""
    reason = BACKENDS[backend].attention.memory.why_not()
    if reason is not None:
        sys.exit(f"--backend {backend} cannot run: {reason}")


def build(config: dict[str, Any], backend: str) -> minitorch.DecoderLM:
    """Build the model that a configuration describes, in float32."""
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


def learning_rate(progress: float, highest: float) -> float:
    """Rise linearly over the first 5 %, then fall to a tenth along a cosine."""
    if progress < 0.05:
        return highest * max(progress, 0.001) / 0.05
    return highest * (0.1 + 0.45 * (1.0 + math.cos(math.pi * (progress - 0.05) / 0.95)))


def held_out_loss(
    model: minitorch.DecoderLM, corpus: Corpus, context: int, batch: int, windows: int | None = None
) -> float:
    """Return the loss on the held-out text in nats per character.

    Over all its windows, or over so many of them, evenly spread.
    """
    inputs, targets = corpus.held_out_windows(context)
    chosen = np.linspace(0, len(inputs) - 1, min(windows or len(inputs), len(inputs))).astype(int)
    inputs, targets = inputs[chosen], targets[chosen]
    model.eval()
    total = 0.0
    for start in range(0, len(inputs), batch):
        part = inputs[start : start + batch]
        total += model.loss(part, targets[start : start + batch]).item() * len(part)
    model.train()
    return total / len(inputs)


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
    """Move losses to the curve; exit with one line if one is no number."""
    for loss in unread:
        step, value = len(curve["step"]), loss.item()
        if not math.isfinite(value):
            sys.exit(f"the loss is {value} at step {step}; lower --lr, now {lr}")
        curve["step"].append(step)
        curve["train"].append(value)
    unread.clear()


def train(model: minitorch.DecoderLM, corpus: Corpus, args: argparse.Namespace) -> dict[str, Any]:
    """Train until the steps or the seconds are used up; return the curve and the figures."""
    optimizer = minitorch.Adam(model.parameters(), lr=args.lr, beta2=0.99, weight_decay=0.1)
    rng = np.random.default_rng(args.seed)
    curve: dict[str, list[Any]] = {"step": [], "train": [], "held_out_step": [], "held_out": []}
    unread: list[minitorch.Tensor] = []
    print("compiling kernels (once per machine) …", flush=True)
    warm_start = time.perf_counter()
    model.loss(*corpus.batch(np.random.default_rng(args.seed), 2, args.context)).backward()
    first = model.parameters()[0].value
    spare = minitorch.Parameter(first.detach())  # the optimiser's kernel too, without a step
    spare.value.grad = first.grad
    minitorch.Adam([spare]).step()
    optimizer.zero_grad()
    print(f"… ready after {time.perf_counter() - warm_start:.1f} s", flush=True)

    start = time.perf_counter()
    bar = tqdm(total=args.steps, unit="step", dynamic_ncols=True, mininterval=0.5)
    for step in range(args.steps):
        elapsed = time.perf_counter() - start
        progress = max(step / args.steps, elapsed / args.max_seconds)
        if progress >= 1.0:
            break
        optimizer.lr = learning_rate(progress, args.lr)
        unread.append(train_step(model, optimizer, *corpus.batch(rng, args.batch, args.context)))
        if step % READ_EVERY == READ_EVERY - 1:
            read_losses(unread, curve, args.lr)
        if step % 100 == 99:
            curve["held_out_step"].append(step)
            curve["held_out"].append(held_out_loss(model, corpus, args.context, args.batch, 48))
        if curve["train"]:
            recent = float(np.mean(curve["train"][-20:]))
            rate = (step + 1) * args.batch * args.context / (time.perf_counter() - start)
            bar.set_postfix_str(f"loss {recent:.3f}, {rate:,.0f} tokens/s", refresh=False)
        bar.update()
    read_losses(unread, curve, args.lr)
    bar.close()
    seconds = time.perf_counter() - start
    final = held_out_loss(model, corpus, args.context, args.batch)
    curve["held_out_step"].append(len(curve["step"]) - 1)
    curve["held_out"].append(final)
    return {
        "curve": curve,
        "steps": len(curve["step"]),
        "seconds": seconds,
        "tokens_per_second": len(curve["step"]) * args.batch * args.context / seconds,
        "train_loss": float(np.mean(curve["train"][-50:])),
        "held_out_loss": final,
    }


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
        label=f"held out, finally {result['held_out_loss']:.3f}",
    )  # fmt: skip
    axes.set(xlabel="step", ylabel="loss, nats per character")
    axes.set_ylim(top=min(max(curve["train"]), 4.0))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"loss curve     {path}")


def write(model: minitorch.DecoderLM, config: dict[str, Any], args: argparse.Namespace) -> str:
    """Let the model continue the prompt."""
    prompt = encode(args.prompt, config["characters"])
    if len(prompt) == 0:
        sys.exit("--prompt must hold at least one character")
    ids = model.generate(prompt, args.sample, args.temperature, seed=args.seed)
    return decode(ids, config["characters"])


def load_and_write(args: argparse.Namespace) -> None:
    """Load a checkpoint and let it write; exit with one line if it cannot be read."""
    try:
        arrays, config = read_checkpoint(args.load)
        model = build(config, args.backend)
        load_parameters(model, arrays, args.load)
    except CheckpointError as error:
        sys.exit(str(error))
    print(write(model, config, args))


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    check_backend(args.backend)
    if args.load:
        return load_and_write(args)
    begin = time.perf_counter()
    minitorch.manual_seed(args.seed)
    corpus = Corpus.from_text(read_text(args.text), args.context)
    encode(args.prompt, corpus.characters)  # fail before the training, not after it
    keys = ("width", "heads", "layers", "context", "dropout", "attention", "tie_weights")
    config = {"characters": corpus.characters, **{key: getattr(args, key) for key in keys}}
    try:
        model = build(config, args.backend)
    except ValueError as error:
        sys.exit(str(error))
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    weights = sum(p.value.size for p in model.parameters())
    print(
        f"text {len(corpus.train) + len(corpus.held_out):,} characters, {len(corpus.characters)} "
        f"different; model {weights:,} weights, {args.attention} attention"
    )
    result = train(model, corpus, args)
    save_checkpoint(out / "model.safetensors", model, config)
    (out / "result.json").write_text(json.dumps({**result, "args": vars(args)}, indent=1) + "\n")
    print(
        f"train loss     {result['train_loss']:.3f} nats per character (last 50 steps)\n"
        f"held-out loss  {result['held_out_loss']:.3f} nats per character\n"
        f"speed          {result['tokens_per_second']:,.0f} tokens/s over {result['steps']} steps, "
        f"{result['seconds']:.0f} s\n"
        f"checkpoint     {out / 'model.safetensors'}"
    )
    draw(result, out / "loss.png")
    print(f"\n{write(model, config, args)}\n\nall done in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
