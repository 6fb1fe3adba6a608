"""Interrupt a training and go on as if nothing had happened: all of its state in one safetensors file."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..module import Module
from ..optim import Optimizer
from ..tensor import Tensor
from ..tensors.factories import from_numpy
from .model_files import (
    BESIDE,
    Arrays,
    CheckpointError,
    load_parameters,
    parameter_arrays,
    read_arrays,
    write_arrays,
)

Generators = Mapping[str, np.random.Generator]
_OPTIMIZER, _MORE = BESIDE + "optimizer/", BESIDE + "more/"


# -- random numbers ------------------------------------------------------------------------------


def random_state(generators: Generators | None = None) -> dict[str, Any]:
    """Return where all random numbers stand, as JSON holds it.

    Args:
        generators: Of the caller, by name.  Python's ``random``, from which dropout takes its seeds, and
            ``numpy.random`` are always among them.
    """
    version, words, gauss = random.getstate()
    return {
        "python": [version, [*words], gauss],
        "numpy": _plain(np.random.get_state(legacy=False)),
        "generators": {
            name: _plain(rng.bit_generator.state) for name, rng in (generators or {}).items()
        },
    }


def set_random_state(state: Mapping[str, Any], generators: Generators | None = None) -> None:
    """Have all random numbers go on from a state of :func:`random_state`.

    Args:
        state: What it returned, from JSON or not.
        generators: By the names given there.

    Raises:
        ValueError: If a state is missing, or of another kind of generator.
    """
    generators = generators or {}
    try:
        if generators.keys() != state["generators"].keys():
            raise ValueError(
                f"generators {sorted(generators)}, saved were {sorted(state['generators'])}"
            )
        for name, rng in generators.items():
            rng.bit_generator.state = _arrays(state["generators"][name])
        np.random.set_state(_arrays(state["numpy"]))
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the state of the random numbers cannot be restored ({error})") from None


def _plain(x: Any) -> Any:
    """Return a generator's state with lists for arrays."""
    if isinstance(x, Mapping):
        return {key: _plain(value) for key, value in x.items()}
    return x.tolist() if isinstance(x, (np.ndarray, np.generic)) else x


def _arrays(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {key: _arrays(value) for key, value in x.items()}
    return np.array(x, np.uint64) if isinstance(x, list) else x


# -- one file ------------------------------------------------------------------------------------


@dataclass
class TrainingState:
    """A training between two of its steps.

    Attributes:
        step: Steps that are done.
        config: What is needed to build the model.
        parameters: By name.
        optimizer: As ``Optimizer.state_dict`` returns it, with arrays for tensors.
        random: As :func:`random_state` returns it.
        arrays: Whatever else the caller keeps, such as the losses so far.
        notes: Likewise, anything that JSON holds.
        source: Where it was read from, for errors.
    """

    step: int
    config: dict[str, Any]
    parameters: Arrays
    optimizer: dict[str, Any]
    random: dict[str, Any]
    arrays: Arrays = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    source: str = ""

    def restore(
        self, model: Module, optimizer: Optimizer, generators: Generators | None = None
    ) -> None:
        """Put a model, its optimiser and all random numbers where they were.

        Args:
            model: Built from ``config``.
            optimizer: Of the same class as the saved one, over the same parameters.
            generators: By the names that they were saved under.

        Raises:
            CheckpointError: If something of it belongs to another model, optimiser or generator.
        """
        load_parameters(model, self.parameters, self.source)
        tensors = {
            key: from_numpy(value) if isinstance(value, np.ndarray) else value
            for key, value in self.optimizer.items()
        }
        try:
            optimizer.load_state_dict(tensors)
            set_random_state(self.random, generators)
        except ValueError as error:
            raise CheckpointError(f"{self.source}: {error}") from None


def save_training(
    path: str | os.PathLike[str],
    model: Module,
    optimizer: Optimizer,
    config: dict[str, Any],
    step: int,
    generators: Generators | None = None,
    arrays: Arrays | None = None,
    notes: dict[str, Any] | None = None,
) -> None:
    """Write all that a training needs to go on; as safe from kills as ``save_checkpoint``.

    :func:`minitorch.training.model_files.read_checkpoint` reads the model alone from such a file.

    Args:
        path: Of the file.
        model: Whose parameters to save.
        optimizer: That moves them.
        config: What is needed to build the model again; anything that JSON holds.
        step: Steps that are done.
        generators: From which the data are drawn, by name.  Where data come in an order, their place is one
            of ``notes``.
        arrays: What else to keep, by name.
        notes: Likewise, anything that JSON holds.

    Raises:
        CheckpointError: If a parameter, a moment or an array is not finite; nothing is written.
    """
    state = optimizer.state_dict()
    held = {key: value.to_numpy() for key, value in state.items() if isinstance(value, Tensor)}
    numbers = {key: value for key, value in state.items() if key not in held}
    beside = {_OPTIMIZER + key: value for key, value in held.items()}
    beside |= {_MORE + key: value for key, value in (arrays or {}).items()}
    training = {
        "step": step,
        "optimizer": numbers,
        "random": random_state(generators),
        "notes": notes or {},
    }
    write_arrays(
        path,
        parameter_arrays(model)
        | {key: np.asarray(value, order="C") for key, value in beside.items()},
        {"config": json.dumps(config), "training": json.dumps(training)},
    )


def read_training(path: str | os.PathLike[str]) -> TrainingState:
    """Read what :func:`save_training` wrote.

    Raises:
        CheckpointError: If the file is missing, truncated, changed since it was written, or holds a model
            and no training; one line that names the file.
    """
    arrays, texts = read_arrays(path)
    if "training" not in texts:
        raise CheckpointError(
            f"{path}: holds a model, but not the state of its training; take a file of its folder of "
            "checkpoints"
        )
    training = texts["training"]

    def beside(prefix: str) -> Arrays:
        return {
            name.removeprefix(prefix): array
            for name, array in arrays.items()
            if name.startswith(prefix)
        }

    try:
        return TrainingState(
            step=training["step"],
            config=texts["config"],
            parameters={name: x for name, x in arrays.items() if not name.startswith(BESIDE)},
            optimizer={**training["optimizer"], **beside(_OPTIMIZER)},
            random=training["random"],
            arrays=beside(_MORE),
            notes=training["notes"],
            source=str(path),
        )
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: not the state of a training ({error!r} is missing)"
        ) from None


# -- the last few --------------------------------------------------------------------------------


class Checkpoints:
    """A folder with the last checkpoints of one training; one process at a time writes to it.

    Args:
        folder: Made when the first is saved.
        keep: How many stay.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3):
        if keep < 1:
            raise ValueError(f"keep is the number of checkpoints that stay, 1 or more; got {keep}")
        self.folder, self.keep = Path(folder), keep

    @property
    def _aside(self) -> Path:
        return self.folder.with_name(self.folder.name + ".before")

    def files(self) -> list[Path]:
        """Return the files that are there, the oldest step first."""
        return sorted(self.folder.glob("step-*.safetensors"), key=_step_of)

    def save(
        self,
        model: Module,
        optimizer: Optimizer,
        config: dict[str, Any],
        step: int,
        generators: Generators | None = None,
        arrays: Arrays | None = None,
        notes: dict[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint, then remove those that are too many; return its file.

        Arguments as for :func:`save_training`.  Later steps than this one, which a training finds that has
        gone on from an earlier checkpoint, stay until it comes to them.
        """
        path = self.folder / f"step-{step:08d}.safetensors"
        save_training(path, model, optimizer, config, step, generators, arrays, notes)
        for old in [file for file in self.files() if _step_of(file) <= step][: -self.keep]:
            old.unlink()
        return path

    def read(self, path: str | os.PathLike[str] | None = None) -> TrainingState:
        """Read a checkpoint.

        Args:
            path: Of one of the files; the last one if None.

        Raises:
            CheckpointError: If there is none, or it cannot be read: the error then names the one before it
                that can.
        """
        files = self.files()
        if path is None and not files:
            before = Checkpoints(self._aside).files()
            more = f"; the training before it got to {before[-1]}" if before else ""
            raise CheckpointError(f"{self.folder}: holds no checkpoint to go on from{more}")
        path = files[-1] if path is None else Path(path)
        try:
            return read_training(path)
        except CheckpointError as error:
            for earlier in reversed([file for file in files if _step_of(file) < _step_of(path)]):
                try:
                    read_training(earlier)
                except CheckpointError:
                    continue
                raise CheckpointError(f"{error}; the one before it is whole: {earlier}") from None
            raise

    def set_aside(self) -> Path | None:
        """Move the folder out of the way of a new training; return where it is, None if there was none.

        What was set aside before is removed.
        """
        if not self.files():
            return None
        if self._aside.exists():
            shutil.rmtree(self._aside)
        self.folder.rename(self._aside)
        return self._aside


def remove_partials(folder: str | os.PathLike[str]) -> None:
    """Remove what a process has left in a folder that was killed while it wrote a checkpoint."""
    for partial in Path(folder).glob("*.safetensors.*.partial"):
        partial.unlink(missing_ok=True)


def _step_of(file: Path) -> int:
    digits = file.stem.removeprefix("step-")
    return int(digits) if digits.isdecimal() else -1
