"""The training loop of the Long-Range Arena: steps, validation, the best model, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from common.notebooks import without_bar
from data.long_range import LraTask
from data.sequence_sets import Examples
from tqdm import tqdm

import minitorch
from minitorch.backends.matmul_precision import find_precision
from minitorch.training.checkpoints import Checkpoints, remove_partials
from minitorch.training.model_files import (
    CheckpointError,
    load_parameters,
    parameter_arrays,
    read_checkpoint,
    save_checkpoint,
)
from training.lra_methods import Settings, build, depends_on_length, learning_rate_of
from training.runs import CHECKPOINTS
from training.script_helpers import CtrlC, check_loss, learning_rate

#: Steps between two readings of the loss: a reading waits for the device, which else works ahead.
READ_EVERY = 10
#: The curve's parts, with their dtypes in a checkpoint.
CURVE = {
    "train": np.float64, "valid_step": np.int64, "valid_accuracy": np.float64,
    "valid_loss": np.float64, "step_seconds": np.float64,
}  # fmt: skip
BEST = "best.safetensors"
#: Training losses in a record; of longer trainings it has every second one, or every third, and so on.
MOST_POINTS = 200


class Judged(NamedTuple):
    """How well a model classifies: the share of right classes, and the mean cross entropy in nats."""

    accuracy: float
    loss: float


@minitorch.no_grad()
def judge(
    model: minitorch.SequenceClassifier, examples: Examples, batch: int, desc: str = "validation"
) -> Judged:
    """Return how well a model classifies examples, without dropout.

    Args:
        model: The classifier; it is in training mode afterwards.
        examples: All of them count.
        batch: Examples that are in memory at a time.
        desc: What the progress bar shows.
    """
    model.eval()
    right, loss = 0, 0.0
    starts = range(0, len(examples.y), batch)
    for start in tqdm(starts, desc=desc, unit="batch", leave=False, delay=1, disable=without_bar()):
        y = examples.y[start : start + batch]
        logits = model(examples.X[start : start + batch]).to_numpy().astype(np.float64)
        right += int((logits.argmax(-1) == y).sum())
        logits -= logits.max(-1, keepdims=True)
        own = logits[np.arange(len(y)), y]
        loss += float((np.log(np.exp(logits).sum(-1)) - own).sum())
    model.train()
    return Judged(right / len(examples.y), loss / len(examples.y))


def turned(images: npt.NDArray[np.uint8], random: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return square images, (batch, side²), each turned by right angles and mirrored at random."""
    side = math.isqrt(images.shape[1])
    out = images.reshape(-1, side, side).copy()
    down, across, diagonal = random.integers(0, 2, (3, len(out))).astype(bool)
    out[down] = out[down, ::-1]
    out[across] = out[across, :, ::-1]
    out[diagonal] = out[diagonal].transpose(0, 2, 1)
    return out.reshape(images.shape)


class Training:
    """The training of one method on one task, which goes on from its last checkpoint.

    Args:
        task: With its examples.
        attention: One of ``METHODS``.
        settings: Of the model and the training.
        seed: Of everything that is random.
        backend: "fast" or "cuda".
        folder: Of the checkpoints and the best model.
        lr: The learning rate; that of the task when None.
        goes_on: Whether to go on from a checkpoint in the folder, if there is one.
        eager: Whether to launch the kernels of a step one by one, rather than to capture them.
        start: Returns the parameters with which a training begins, random ones when None; those whose shape
            depends on the length may be missing, and are random then.  Not called by one that goes on.
        more: Other arguments of :func:`training.lra_methods.build`.

    Attributes:
        curve: The losses that have been read, and the validations by their step.
        done: Steps so far.
        resumed: The steps from which it went on.
        take_step: Takes a step on ids and classes, and returns the loss before it, unread.

    Raises:
        CheckpointError: If a checkpoint cannot be read, or is of a training with other settings.
    """

    def __init__(
        self, task: LraTask, attention: str, settings: Settings, seed: int, backend: str, folder: Path,
        lr: float | None = None, goes_on: bool = False, eager: bool = False,
        start: Callable[[], Mapping[str, npt.NDArray[Any]]] | None = None, **more: Any,
    ):  # fmt: skip
        self.task, self.settings, self.folder = task, settings, folder
        self.lr = learning_rate_of(task.name) if lr is None else lr
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, 1)
        goes_on = goes_on and bool(self.checkpoints.files())
        given = None if start is None or goes_on else start()  # may train, with a seed of its own
        minitorch.manual_seed(seed)
        self.rng = np.random.default_rng(seed)
        self.model = self.built(attention, backend, seed, **more)
        if given is not None:
            own = parameter_arrays(self.model)
            random = {name: x for name, x in own.items() if depends_on_length(name)}
            load_parameters(self.model, random | {**given})
        self.optimizer = minitorch.AdamW(
            self.model.parameters(), lr=self.lr, weight_decay=settings.weight_decay,
            max_norm=settings.clip,
        )  # fmt: skip
        self.config = {
            "task": task.name, "source": task.source, "attention": attention, "seed": seed,
            "lr": self.lr, **asdict(settings),
        }  # fmt: skip
        if more.get("options") is not None:
            self.config["options"] = more["options"]
        self.take_step = self._step if eager else minitorch.graph_step(self._step)
        self.curve: dict[str, list[Any]] = {name: [] for name in CURVE}
        self.done, self.resumed, self._seconds = 0, [], 0.0
        self._unread: list[minitorch.Tensor] = []
        for place in (folder, self.checkpoints.folder):
            remove_partials(place)
        if goes_on:
            self._go_on()
        else:
            self.checkpoints.set_aside()

    def _go_on(self) -> None:
        state = self.checkpoints.read()
        if state.config != self.config:
            known = state.config if isinstance(state.config, dict) else {}
            other = [key for key, value in self.config.items() if known.get(key) != value]
            raise CheckpointError(
                f"{state.source}: its training had other values of {', '.join(other)} than this one; "
                "pass the same options, or another --out"
            )
        state.restore(self.model, self.optimizer, {"data": self.rng})
        self.curve = {name: state.arrays[name].tolist() for name in CURVE}
        self.done, self._seconds = state.step, state.notes["seconds"]
        self.resumed = [*state.notes["resumed"], state.step]

    def built(
        self, attention: str, backend: str, seed: int, **more: Any
    ) -> minitorch.SequenceClassifier:
        """Return the model before its training."""
        return build(self.task, attention, self.settings, backend, seed, **more)

    def loss(self, *inputs: Any) -> minitorch.Tensor:
        """Return the loss of a batch."""
        return self.model.loss(*inputs)

    def judged(self, examples: Examples, desc: str = "validation") -> Judged:
        """Return how well the model classifies examples."""
        return judge(self.model, examples, self.settings.batch, desc)

    def _step(self, *inputs: Any) -> minitorch.Tensor:
        """Take one step; return the loss before it, unread."""
        self.optimizer.zero_grad()
        own = find_precision(self.settings.precision)
        with minitorch.matmul_precision(own.products):  # in the backward pass, too
            loss = self.loss(*inputs)
            loss.backward()
        self.optimizer.step()
        return loss.detach()

    @property
    def is_captured(self) -> bool:
        """Whether the steps are replays of a CUDA graph."""
        return isinstance(self.take_step, minitorch.GraphStep) and self.take_step.is_captured

    def _drawn(self) -> Generator[Examples, None, None]:
        """Return the batches of the steps that are left."""
        train = self.task.parts["train"]
        while True:
            rows = self.rng.integers(0, len(train.y), self.settings.batch)
            yield Examples(train.X[rows], train.y[rows])

    def inputs(self) -> Generator[tuple[Any, ...], None, None]:
        """Return the arguments of :meth:`loss` for the steps that are left."""
        fresh = self.task.fresh
        with closing(
            fresh(self.done, self.settings.batch) if fresh is not None else self._drawn()
        ) as batches:
            for X, y in batches:
                own = turned(X, self.rng) if self.task.turns else X
                yield own.astype(np.int64), y

    def run(self) -> dict[str, Any]:
        """Train until the steps are done, or Ctrl-C; return the row of the record.

        The row has ``"done": False`` after Ctrl-C, and no test accuracy then.
        """
        settings, valid = self.settings, self.task.parts["valid"]
        valid = Examples(valid.X[: settings.judged], valid.y[: settings.judged])
        start = time.perf_counter() - self._seconds
        bar = tqdm(total=settings.steps, initial=self.done, unit="step", dynamic_ncols=True,
                   disable=without_bar(), desc=f"{self.task.name}, {self.config['attention']}")  # fmt: skip
        read_at, is_first = time.perf_counter(), True
        with bar, CtrlC() as ctrl_c, closing(self.inputs()) as batches:
            while self.done < settings.steps and not ctrl_c.asked:
                self.optimizer.lr = learning_rate(self.done / settings.steps, self.lr)
                self._unread.append(self.take_step(*next(batches)))
                self.done += 1
                bar.update()
                is_judged = self.done % settings.judge_every == 0 or self.done == settings.steps
                if self.done % READ_EVERY == 0 or is_judged or ctrl_c.asked:
                    count = len(self._unread)
                    self._read()
                    now = time.perf_counter()
                    if not is_first:  # the first steps compile
                        self.curve["step_seconds"].append((now - read_at) / count)
                    is_first = False
                    if is_judged:
                        self._judge(valid)
                    self._seconds = time.perf_counter() - start
                    if is_judged or ctrl_c.asked:
                        self._save()
                    read_at = time.perf_counter()
                    self._show(bar)
        return self._row(self.done == settings.steps)

    def _show(self, bar: Any) -> None:
        accuracies = self.curve["valid_accuracy"]
        shown = f", validation {accuracies[-1]:.1%}" if accuracies else ""
        recent = float(np.mean(self.curve["train"][-20:]))
        bar.set_postfix_str(f"loss {recent:.3f}{shown}", refresh=False)

    def _read(self) -> None:
        for loss in self._unread:
            step = len(self.curve["train"])
            self.curve["train"].append(check_loss(loss.item(), f"the loss at step {step}", self.lr))
        self._unread.clear()

    def _judge(self, valid: Examples) -> None:
        judged = self.judged(valid)
        best = max(self.curve["valid_accuracy"], default=-1.0)
        self.curve["valid_step"].append(self.done)
        self.curve["valid_accuracy"].append(judged.accuracy)
        self.curve["valid_loss"].append(judged.loss)
        if judged.accuracy > best:
            save_checkpoint(self.folder / BEST, self.model, self.config)

    def _save(self) -> None:
        notes = {"seconds": self._seconds, "resumed": self.resumed}
        arrays = {name: np.array(self.curve[name], dtype) for name, dtype in CURVE.items()}
        self.checkpoints.save(
            self.model, self.optimizer, self.config, self.done, {"data": self.rng}, arrays, notes
        )

    def _row(self, is_done: bool) -> dict[str, Any]:
        accuracies = self.curve["valid_accuracy"]
        row = {
            **self.config,
            "stand_in": self.task.is_stand_in,
            "length": self.task.length,
            "done": is_done,
            "resumed": self.resumed,
            "seconds": self._seconds,
            "captured": self.is_captured,
            "curve": {
                "train_every": -(-max(self.done, 1) // MOST_POINTS),
                "train": self.curve["train"][:: -(-max(self.done, 1) // MOST_POINTS)],
                **{name: self.curve[name] for name in CURVE if name.startswith("valid")},
            },
        }
        if not is_done:
            return row
        best_model = self.folder / BEST
        if not best_model.exists():
            raise CheckpointError(
                f"{best_model}: the best model of this finished training is missing; delete "
                f"{self.checkpoints.folder} to train again"
            )
        load_parameters(self.model, read_checkpoint(best_model)[0], str(best_model))
        test = self.judged(self.task.parts["test"], "test")
        best = int(np.argmax(accuracies))
        times = self.curve["step_seconds"]
        return {
            **row,
            "best_step": self.curve["valid_step"][best],
            "valid_accuracy": accuracies[best],
            "test_accuracy": test.accuracy,
            "test_loss": test.loss,
            "tested": len(self.task.parts["test"].y),
            "step_ms": 1e3 * median_low(times) if times else None,  # of two, one may have compiled
        }
