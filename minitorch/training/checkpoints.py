"""Save and resume a training run: all of its state in one safetensors file.

If each of several ranks keeps a share of the optimiser's state, every rank writes a file with its share.
The first rank's file holds everything else and the digests of the other files.  It is written last: until
then, the checkpoint does not exist.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kernels.common.arguments import shown

from ..module import Module
from ..optim import Optimizer
from ..tensor import Tensor
from ..tensors.factories import from_numpy
from .model_files import (
    BESIDE,
    Arrays,
    CheckpointError,
    check_finite,
    load_parameters,
    parameter_arrays,
    read_arrays,
    write_arrays,
)
from .random_states import Generators, prepared_random_state, random_state

#: Types of the parts of a training's state in JSON; older files have no "parts".
_KINDS = {"step": int, "optimizer": dict, "random": dict, "notes": dict, "parts": list}
_OPTIMIZER, _MORE = BESIDE + "optimizer/", BESIDE + "more/"


# -- one file ------------------------------------------------------------------------------------


@dataclass
class TrainingState:
    """The state of a training run between two steps.

    Attributes:
        step: Number of completed steps.
        config: The configuration of the model.
        parameters: The parameters, by name.
        optimizer: The state of ``Optimizer.state_dict``, with arrays for tensors.
        random: The state of :func:`random_state`.
        arrays: Other arrays of the caller, such as the losses so far.
        notes: Other values of the caller, in JSON types.
        source: The file from which it was read, for error messages.
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
        """Restore a model, its optimiser and all random generators.

        Args:
            model: A model built from ``config``.
            optimizer: An optimiser of the saved class, with the same parameters.
            generators: The caller's generators, by the names under which they were saved.

        Raises:
            CheckpointError: If a part of the state does not fit the model, the optimiser or a generator;
                nothing is changed then.
        """
        moments = {key: x for key, x in self.optimizer.items() if isinstance(x, np.ndarray)}
        check_finite(moments, self.source)
        tensors = {**self.optimizer, **{key: from_numpy(x) for key, x in moments.items()}}
        before = [(p, p.value) for p in model.parameters()]
        try:
            set_random_state = prepared_random_state(self.random, generators)
            load_parameters(model, self.parameters, self.source)
            optimizer.load_state_dict(tensors)  # its masters are those of the new parameters
        except ValueError as error:
            for p, value in before:
                p.value = value
            raise CheckpointError(f"{self.source}: {error}") from None
        set_random_state()


def save_training(
    path: str | os.PathLike[str],
    model: Module,
    optimizer: Optimizer,
    config: dict[str, Any],
    step: int,
    generators: Generators | None = None,
    arrays: Arrays | None = None,
    notes: dict[str, Any] | None = None,
    parts: Sequence[str] = (),
) -> None:
    """Write the state of a training run to a file, atomically, as ``save_checkpoint`` does.

    :func:`minitorch.training.model_files.read_checkpoint` reads the model alone from such a file.

    Args:
        path: The path of the file.
        model: The model whose parameters are saved.
        optimizer: The optimiser of these parameters.
        config: The configuration from which the model can be built, in JSON types.
        step: Number of completed steps.
        generators: The random generators of the data, by name.  For data that are read in order, store the
            position in ``notes``.
        arrays: Other arrays to save, by name.
        notes: Other values to save, in JSON types.
        parts: The digests that :func:`save_part` returned for the other parts, in their order.

    Raises:
        CheckpointError: If a parameter, a moment or an array is not finite; nothing is written.
    """
    beside = _moments(optimizer)
    state = optimizer.state_dict()
    numbers = {key: value for key, value in state.items() if _OPTIMIZER + key not in beside}
    beside |= {_MORE + key: np.asarray(value, order="C") for key, value in (arrays or {}).items()}
    training = {
        "step": step,
        "optimizer": numbers,
        "random": random_state(generators),
        "notes": notes or {},
        "parts": [*parts],
    }
    texts = {"config": json.dumps(config), "training": json.dumps(training)}
    write_arrays(path, parameter_arrays(model) | beside, texts)


def save_part(path: str | os.PathLike[str], optimizer: Optimizer, part: int, parts: int) -> str:
    """Write one rank's share of the optimiser's state to a separate file, atomically.

    Args:
        path: The path of the checkpoint, which :func:`save_training` writes afterwards.
        optimizer: The optimiser, whose state is this rank's share.
        part: The rank, 1 or above; rank 0 calls :func:`save_training`.
        parts: Number of ranks.

    Returns:
        The digest of the file, one of the ``parts`` of :func:`save_training`.

    Raises:
        CheckpointError: If a moment is not finite; nothing is written.
    """
    return write_arrays(_part_file(path, part, parts), _moments(optimizer), {"config": "null"})


def _moments(optimizer: Optimizer) -> Arrays:
    """Return the tensors of an optimiser's state, by their names in a file."""
    return {
        _OPTIMIZER + key: np.asarray(value.to_numpy(), order="C")
        for key, value in optimizer.state_dict().items()
        if isinstance(value, Tensor)
    }


def _part_file(path: str | os.PathLike[str], part: int, parts: int) -> Path:
    path = Path(path)
    return path.with_name(f"part-{part}-of-{parts}.{path.name}")


def _part_files(path: Path) -> list[Path]:
    """Return the files of the other parts of a checkpoint."""
    return [*path.parent.glob(f"part-*-of-*.{path.name}")]


def _read_parts(path: str | os.PathLike[str], digests: Sequence[str]) -> Arrays:
    """Read the other parts of a checkpoint.

    Raises:
        CheckpointError: If a part is missing, is damaged, or belongs to a different checkpoint.
    """
    found: Arrays = {}
    for part, digest in enumerate(digests, 1):
        file = _part_file(path, part, len(digests) + 1)
        arrays, texts = read_arrays(file)
        if texts["digest"] != digest:
            raise CheckpointError(
                f"{file}: the file is not the part that belongs to {path}; delete both, or restore them"
            )
        found |= arrays
    return found


def read_training(path: str | os.PathLike[str]) -> TrainingState:
    """Read a file that :func:`save_training` wrote.

    Raises:
        CheckpointError: If the file is missing, truncated, changed since it was written, or holds only a
            model; the message is one line that names the file.
    """
    arrays, texts = read_arrays(path)
    if "training" not in texts:
        raise CheckpointError(
            f"{path}: the file holds a model, but not the state of its training; pass a file of its folder "
            "of checkpoints"
        )
    training = texts["training"]
    for name, kind in _KINDS.items():
        found = training.get(name) if isinstance(training, dict) else None
        if type(found) is not kind and not (name == "parts" and found is None):
            raise CheckpointError(
                f"{path}: the file is not the state of a training: its {name} is {shown(found)}, expected "
                f"{kind.__name__}; delete it or restore an older one"
            )
    arrays |= _read_parts(path, training.get("parts", ()))

    def beside(prefix: str) -> Arrays:
        return {
            name.removeprefix(prefix): array
            for name, array in arrays.items()
            if name.startswith(prefix)
        }

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


# -- the last few --------------------------------------------------------------------------------


class Checkpoints:
    """A folder with the last checkpoints of one training run; one process at a time writes to it.

    Args:
        folder: The folder, which is created when the first checkpoint is saved.
        keep: Number of checkpoints to keep.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3):
        if keep < 1:
            raise ValueError(
                f"keep must be the number of checkpoints to keep, at least 1; got {keep}"
            )
        self.folder, self.keep = Path(folder), keep

    @property
    def _aside(self) -> Path:
        return self.folder.with_name(self.folder.name + ".before")

    def files(self) -> list[Path]:
        """Return the existing files, the oldest step first."""
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
        parts: Sequence[str] = (),
    ) -> Path:
        """Write a checkpoint, then remove the oldest beyond ``keep``; return its file.

        The arguments are those of :func:`save_training`.  Files of later steps, which exist after resuming
        from an earlier checkpoint, stay until the run reaches their steps.
        """
        path = self._file(step)
        save_training(path, model, optimizer, config, step, generators, arrays, notes, parts)
        for old in [file for file in self.files() if _step_of(file) <= step][: -self.keep]:
            for file in (old, *_part_files(old)):  # it first: without it, its parts are none
                file.unlink()
        return path

    def save_part(self, optimizer: Optimizer, step: int, part: int, parts: int) -> str:
        """Write one rank's share of the optimiser's state, before the first rank calls :meth:`save`.

        The arguments other than the step are those of :func:`save_part`.
        """
        return save_part(self._file(step), optimizer, part, parts)

    def _file(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.safetensors"

    def read(self, path: str | os.PathLike[str] | None = None) -> TrainingState:
        """Read a checkpoint.

        Args:
            path: One of the files; the file of the last step if None.

        Raises:
            CheckpointError: If there is no file, or it cannot be read; the message then names the latest
                earlier checkpoint that can be read.
        """
        files = self.files()
        if path is None and not files:
            before = Checkpoints(self._aside).files()
            more = f"; the training before it got to {before[-1]}" if before else ""
            raise CheckpointError(
                f"{self.folder}: the folder holds no checkpoint to resume from{more}"
            )
        path = files[-1] if path is None else Path(path)
        try:
            return read_training(path)
        except CheckpointError as error:
            for earlier in reversed([file for file in files if _step_of(file) < _step_of(path)]):
                try:
                    read_training(earlier)
                except CheckpointError:
                    continue
                raise CheckpointError(
                    f"{error}; the previous checkpoint is intact: {earlier}"
                ) from None
            raise

    def set_aside(self) -> Path | None:
        """Rename the folder to make room for a new run; return the new path, None if there was no folder.

        A folder that was set aside earlier is removed.
        """
        if not self.files():
            return None
        if self._aside.exists():
            shutil.rmtree(self._aside)
        self.folder.rename(self._aside)
        return self._aside


def remove_partials(folder: str | os.PathLike[str]) -> None:
    """Remove partial files of processes that were killed while they wrote a checkpoint."""
    for partial in Path(folder).glob("*.safetensors.*.partial"):
        partial.unlink(missing_ok=True)
    for part in Path(folder).glob("part-*.safetensors"):
        if not part.with_name(part.name.partition(".")[2]).exists():
            part.unlink(missing_ok=True)


def _step_of(file: Path) -> int:
    digits = file.stem.removeprefix("step-")
    return int(digits) if digits.isdecimal() else -1
