"""The training loop of language models: steps, losses, checkpoints, and the end by a loss of NaN."""

from __future__ import annotations

import argparse
import math
import sys
import time
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple, NoReturn

import numpy as np
from tqdm import tqdm

import minitorch
from kernels.runtime.dtypes import acc_dtype
from minitorch.training.checkpoints import Checkpoints, TrainingState
from minitorch.training.model_files import CheckpointError
from minitorch.training.random_states import random_state, set_random_state
from training.gpt_presets import flops_per_token, peak_tflops, utilisation
from training.gpt_ranks import Ranks
from training.script_helpers import CtrlC, learning_rate, remedy

#: Steps between two readings of the loss: a reading waits for the device, which else works ahead.
READ_EVERY = 10
#: Steps between two points of the held-out curve, and the windows that each of them judges.
JUDGE_EVERY, JUDGE_WINDOWS = 100, 48
#: How far the clock may run ahead of the steps before it takes over the learning rate.  The schedule's
#: last twentieth is nearly flat, so that a run within this slack needs no help from the clock.
CLOCK_SLACK = 0.05
#: The final evaluation takes at most this share of --max-seconds.
JUDGE_SHARE = 0.25
#: The curve's parts, with their dtypes in a checkpoint.
CURVE = {"step": np.int64, "train": np.float64, "held_out_step": np.int64, "held_out": np.float64}


#: One process alone.
ALONE = Ranks()


@minitorch.no_grad()
def judge(
    model: Any, windows: tuple[Any, ...], batch: int, seconds: float, ranks: Ranks = ALONE
) -> list[float]:
    """Return the loss of each window, as the mean of its batch, in nats per token.

    Windows are taken in their order; when the seconds are over, the rest is left out, but not the
    first batch.  Several ranks take all windows.

    Args:
        model: The model, whose ``loss`` takes the windows.
        windows: Arrays with a row for each window: inputs and targets.
        batch: Windows at a time.
        seconds: See above.
        ranks: Those that share each window.
    """
    start = time.perf_counter()
    seconds = seconds if ranks.size == 1 else math.inf
    windows = tuple(map(ranks.columns, windows))
    total, losses = len(windows[0]), list[float]()
    model.eval()
    with tqdm(total=total, desc="held out", unit="window", leave=False, delay=1) as bar:
        while len(losses) < total and (not losses or time.perf_counter() - start < seconds):
            part = [array[len(losses) : len(losses) + batch] for array in windows]
            count = len(part[0])
            losses += [model.loss(*part).item()] * count
            bar.update(count)
    model.train()
    return ranks.mean(losses)


def train_step(
    model: Any, optimizer: minitorch.Adam, *batch: Any, accumulate: int = 1, ranks: Ranks = ALONE
) -> minitorch.Tensor:
    """Take one step; return the loss before it, unread: that of this rank's part.

    Args:
        model: To be trained.
        optimizer: Over its parameters.
        batch: What the model's ``loss`` takes, with a row for each example: inputs and targets.
        accumulate: Into how many parts the batch is cut, so that one is in memory at a time.
        ranks: Those that share the batch.
    """
    optimizer.zero_grad()
    own_rows = [ranks.columns(ranks.rows(x, accumulate)) for x in batch]
    own = model.precision
    # A backward pass multiplies by the setting that holds where it is called.
    with minitorch.matmul_precision("float32" if own is None else own.products):
        if accumulate == 1:
            loss = model.loss(*own_rows)
            with ranks.during_backward():
                loss.backward()
        else:
            parts = zip(*(np.split(x, accumulate) for x in own_rows), strict=True)
            loss = _accumulated(model, optimizer, [*parts])
            with ranks.during_backward():
                pass  # the sums are complete
    optimizer.step()
    return loss.detach()


def _accumulated(
    model: Any, optimizer: minitorch.Adam, parts: list[tuple[Any, ...]]
) -> minitorch.Tensor:
    """Return the mean loss of a batch's parts, and leave its gradients, which are summed in float32."""
    total: minitorch.Tensor | None = None
    sums: dict[minitorch.Parameter, minitorch.Tensor] = {}
    for part in parts:
        optimizer.zero_grad()
        loss = model.loss(*part) * (1.0 / len(parts))
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
        for p in optimizer.parameters:
            if p.value.grad is not None:
                grad = p.value.grad.to(acc_dtype(p.value.dtype))
                sums[p] = sums[p] + grad if p in sums else grad
    for p, grad in sums.items():
        p.value.grad = grad
    assert total is not None, "a batch has a part"
    return total


def warm_up(model: Any, corpus: Any, args: argparse.Namespace, ranks: Ranks = ALONE) -> None:
    """Compile what training needs, and leave the model as it is."""
    if args.backend == "simple":
        print("the simple backend computes number by number in Python and compiles nothing; it is made "
              "for small models, such as --width 8 --heads 2 --layers 1 --context 8 --batch 2")  # fmt: skip
        return
    how_often = "once per checkout" if args.backend == "fast" else "in each run"
    print(f"compiling kernels ({how_often}) ...", flush=True)
    start = time.perf_counter()
    # A step as all others, for large arrays take other kernels than small ones; it moves nothing.
    still = minitorch.AdamW(model.parameters(), lr=0.0, max_norm=args.clip)
    parts = min(args.accumulate, 2)
    batch = corpus.batch(np.random.default_rng(args.seed), parts * args.batch, args.context)
    train_step(model, still, *batch, accumulate=parts, ranks=ranks).item()
    still.zero_grad()
    print(f"... ready after {time.perf_counter() - start:.1f} s", flush=True)


class Moment(NamedTuple):
    """All that decides the steps to come, in memory.

    Attributes:
        step: The next one.
        values: Of the parameters, copied, all finite.
        optimizer: Its state.
        random: Of all random numbers.
    """

    step: int
    values: list[minitorch.Tensor]
    optimizer: dict[str, Any]
    random: dict[str, Any]


class Trainer:
    """A training that can be interrupted at any moment and goes on from its last checkpoint.

    Args:
        model: To be trained; compiled by :func:`warm_up`.
        config: Of the model.
        corpus: The text: a :class:`data.text.Corpus`, or another class with its ``batch``,
            ``held_out_windows`` and ``digest``.
        args: The options.
        checkpoints: Where they go.
        ranks: Those that train together.

    Attributes:
        curve: The losses that have been read: train by step, and the held-out loss by its step.
        done: Steps so far.
        by_clock: Whether the clock has taken over the learning rate.
        resumed: The steps from which it went on.
        most_shapes: Number of different shapes of batches, each of which has a captured step.
    """

    most_shapes = 1

    def __init__(
        self,
        model: Any,
        config: dict[str, Any],
        corpus: Any,
        args: argparse.Namespace,
        checkpoints: Checkpoints,
        ranks: Ranks = ALONE,
    ):
        self.ranks = ranks
        self.model, self.config, self.corpus, self.args = model, config, corpus, args
        self.checkpoints = checkpoints
        self.optimizer: Any = ranks.optimizer(
            model, lr=args.lr, beta2=0.99, weight_decay=0.1, max_norm=args.clip
        )

        def step(*batch: Any) -> minitorch.Tensor:
            return train_step(
                self.model, self.optimizer, *batch, accumulate=args.accumulate, ranks=ranks
            )

        is_eager = args.eager or not ranks.can_capture(args.dropout)
        self._take_step = (
            step if is_eager else minitorch.graph_step(step, most_shapes=self.most_shapes)
        )
        self.tokens = args.batch * args.accumulate * args.context  # of a step
        self.flops = self.flops_per_token()
        self.peak = args.peak or peak_tflops(args.backend, args.precision)
        self.rng = np.random.default_rng(args.seed)
        self.resumed: list[int] = []
        self.curve: dict[str, list[Any]] = {name: [] for name in CURVE}
        self.done, self.by_clock = 0, False
        windows = corpus.held_out_windows(args.context)
        self.judged_by = tuple(array[:JUDGE_WINDOWS] for array in windows)
        self._unread: list[minitorch.Tensor] = []
        self._moment: Moment | None = None  # from which the last steps can be run again
        self._rates: dict[int, float] = {}  # of the steps since then
        self._seconds, self._start = 0.0, math.nan
        self._saved = -1  # steps that the last checkpoint knows

    def flops_per_token(self) -> float:
        """Return the operations that training with one token takes by the book."""
        return flops_per_token(self.model, self.args.context)

    # -- the loop --------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train until the steps or the seconds are used up, or Ctrl-C; return the curve and the figures."""
        args, curve = self.args, self.curve
        self._start = time.perf_counter() - self._seconds
        bar = tqdm(
            total=args.steps, initial=self.done, unit="step", dynamic_ncols=True, mininterval=0.5
        )
        with bar, CtrlC() as ctrl_c:
            while self.done < args.steps and self._set_rate():
                if self.done % READ_EVERY == 0 or self._moment is None:
                    self._note_moment()
                try:
                    with self.ranks.measured():
                        self._unread.append(self._step())
                except minitorch.AnomalyError as error:  # MINITORCH_DETECT_ANOMALY=1
                    self._exit(f"at step {self.done} {error}")
                self.done += 1
                if self.done % READ_EVERY == 0:
                    self._read()
                if self.done % JUDGE_EVERY == 0:
                    self._add_point()
                if args.checkpoint_every and self.done % args.checkpoint_every == 0:
                    self._save()
                if curve["train"]:
                    recent = float(np.mean(curve["train"][-20:]))
                    rate = self.done * self.tokens / self.seconds
                    used = utilisation(rate, self.flops, self.peak)
                    of_peak = "" if used is None else f", {used:.1%} of the peak"
                    bar.set_postfix_str(
                        f"loss {recent:.3f}, {rate:,.0f} tokens/s{of_peak}", refresh=False
                    )
                bar.update()
                if self.ranks.largest(ctrl_c.asked):
                    break
        self._read()
        if args.checkpoint_every and self._saved != self.done:
            self._save()
        seconds = self.seconds
        if self.done % JUDGE_EVERY != 0:
            self._add_point()
        rate = self.done * self.tokens / seconds
        return {
            "curve": curve,
            "curve_windows": len(self.judged_by[0]),
            "steps": self.done,
            "by_clock": self.by_clock,
            "stopped": bool(self.ranks.largest(ctrl_c.asked)),
            "resumed": self.resumed,
            "seconds": seconds,
            "ranks_ms": self.ranks.times(),
            "tokens_per_second": rate,
            "flops_per_token": self.flops,
            "peak_tflops": self.peak,
            "utilisation": utilisation(rate, self.flops, self.peak),
            "train_loss": float(np.mean(curve["train"][-50:])),
        }

    @property
    def seconds(self) -> float:
        """How long the training has taken, the parts before a checkpoint included."""
        return time.perf_counter() - self._start

    def _set_rate(self) -> bool:
        """Set the learning rate of the next step; return whether the clock allows one."""
        args = self.args
        progress = self.done / args.steps
        clock = self.ranks.largest(self.seconds / args.max_seconds)
        # Once the clock decides, it stays so: until then, a run depends on its options only.
        self.by_clock = self.by_clock or clock > min(progress + CLOCK_SLACK, 1.0)
        if self.done > 0 and clock >= 1.0:
            self.by_clock = True
            return False
        progress = max(progress, clock) if self.by_clock else progress
        self.optimizer.lr = self._rates[self.done] = learning_rate(
            progress, args.lr, args.schedule, args.warm_up
        )
        return True

    def _batch(self) -> tuple[Any, ...]:
        """Return the batch of the next step."""
        args = self.args
        return self.corpus.batch(self.rng, args.batch * args.accumulate, args.context)

    def _step(self) -> minitorch.Tensor:
        return self._take_step(*self._batch())

    def _read(self) -> None:
        """Move the losses of the last steps to the curve."""
        for value in self.ranks.mean([loss.item() for loss in self._unread]):
            step = len(self.curve["step"])
            if not math.isfinite(value):
                self._fail(step, f"the loss at step {step} is {value}")
            self.curve["train"].append(value)
            self.curve["step"].append(step)
        self._unread.clear()

    def _add_point(self) -> None:
        """Add a point to the held-out curve."""
        self._read()
        seconds = JUDGE_SHARE * self.args.max_seconds
        losses = judge(self.model, self.judged_by, self.args.batch, seconds, self.ranks)
        mean = float(np.mean(losses))
        if not math.isfinite(mean):
            self._fail(self.done, f"the held-out loss after {self.done} steps is {mean}")
        if len(losses) == len(self.judged_by[0]):  # a point of fewer windows is not comparable
            self.curve["held_out_step"].append(self.done - 1)
            self.curve["held_out"].append(mean)

    # -- checkpoints -----------------------------------------------------------------------------

    def _save(self) -> None:
        self._read()
        self._saved = self.done
        error = ""
        try:
            self._write()
        except CheckpointError as found:
            error = str(found)
        if self.ranks.largest(bool(error)):  # all of them run the last steps again
            self._fail(self.done, error or "rank 0 could not save its part")

    def _write(self) -> None:
        """Write a checkpoint; the first rank after all others."""
        parts = self.ranks.save_parts(
            partial(self.checkpoints.save_part, self.optimizer, self.done)
        )
        if not self.ranks.is_first:
            return
        notes = {
            "args": vars(self.args),
            "seconds": self.seconds,
            "by_clock": self.by_clock,
            "resumed": self.resumed,
            "text": self.corpus.digest,
        }
        curve = {name: np.array(self.curve[name], dtype) for name, dtype in CURVE.items()}
        self.checkpoints.save(
            self.model,
            self.optimizer,
            self.config,
            self.done,
            {"data": self.rng},
            curve,
            notes,
            parts,
        )

    def resume(self, state: TrainingState) -> None:
        """Go on from a checkpoint.

        Raises:
            CheckpointError: If it is of another model.
        """
        state.restore(self.model, self.optimizer, {"data": self.rng})
        self.done = self._saved = state.step
        self._seconds = state.notes["seconds"]
        self.by_clock = state.notes["by_clock"]
        self.resumed = [*state.notes["resumed"], state.step]
        self.curve = {name: state.arrays[name].tolist() for name in CURVE}

    # -- when a number is none -------------------------------------------------------------------

    def _note_moment(self) -> None:
        values = [p.value.detach() * 1.0 for p in self.optimizer.parameters]  # it may move in place
        # 0 times a number is 0, and 0 times what is none is NaN: one number to read for all of them.
        if not math.isfinite(reduce(add, ((x * 0.0).sum() for x in values)).item()):
            self._fail(self.done, f"a parameter is no number after {self.done} steps")
        random = random_state({"data": self.rng})
        self._moment = Moment(self.done, values, self.optimizer.state_dict(), random)
        self._rates = {self.done: self._rates[self.done]}

    def _fail(self, step: int, what: str) -> NoReturn:
        """Exit with the operation at fault, which the steps up to this one show when they are run again.

        Args:
            step: The first whose loss is no number, or the number of steps if none is.
            what: What is at fault, as far as it is known.
        """
        found = "" if self._moment is None else f"; {self._replay(self._moment, step)}"
        self._exit(f"{what}{found}")

    def _exit(self, what: str) -> NoReturn:
        files = self.checkpoints.files()
        kept = f"the last good checkpoint is {files[-1]}; " if files else ""
        clip = "" if self.args.clip else ", or clip the gradients with --clip 1"
        sys.exit(f"{what}; {kept}{remedy(self.args.lr)}{clip}")

    def _replay(self, moment: Moment, last: int) -> str:
        """Run steps again with every number looked at; return in words what was found."""
        print(f"\nrunning again from step {moment.step} to find the operation ...", flush=True)
        for p, value in zip(self.optimizer.parameters, moment.values, strict=True):
            p.update(value)
        self.optimizer.load_state_dict(moment.optimizer)
        set_random_state(moment.random, {"data": self.rng})
        step = moment.step
        try:
            with minitorch.detect_anomaly():
                for step in (step for step in self._rates if step <= last):
                    self.done, self.optimizer.lr = step, self._rates[step]
                    self._step()
                judge(self.model, self.judged_by, self.args.batch, 0.0, self.ranks)
        except minitorch.AnomalyError as error:
            return f"at step {step} {error}"
        return f"run again, the steps from {moment.step} to {step} were finite"
