"""Save and load a model: one safetensors file, replaced in one step so that a kill loses nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from .factories import from_numpy
from .module import Module

FORMAT = "minitorch-1"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read, or that belongs to another model."""


def save_checkpoint(path: str | os.PathLike[str], model: Module, config: dict[str, Any]) -> None:
    """Write the parameters of a model and its configuration.

    The new file is written beside the old one, flushed to the disk, and renamed over it: whenever
    the process is killed, one of the two is whole.

    Args:
        path: Of the file.
        model: Whose parameters to save.
        config: What is needed to build the model again; anything that JSON holds.

    Raises:
        CheckpointError: If a parameter is not finite: it could not be loaded again, and the old file
            stays.
    """
    path = Path(path)
    arrays = {
        name: np.ascontiguousarray(p.value.to_numpy()) for name, p in model.named_parameters()
    }
    _check_finite(arrays, f"{path}: not saved")
    payload = save(arrays, metadata={"format": FORMAT, "config": json.dumps(config)})
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_checkpoint(
    path: str | os.PathLike[str],
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Read the arrays and the configuration of a checkpoint.

    Raises:
        CheckpointError: If the file is missing, truncated, or no checkpoint of ours; one line that
            names the file.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint; train one first, or mend the path")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.get("format") != FORMAT:
            raise CheckpointError(f"{path}: a safetensors file, but no checkpoint of minitorch")
        config = json.loads(metadata["config"])
    # A TypeError: weights of a dtype that NumPy lacks, such as float8.
    except (SafetensorError, KeyError, OSError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not a readable checkpoint ({error}); delete it or restore an older one"
        ) from None
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{path}: its configuration is {json.dumps(config)[:40]}, expected an object of names and "
            "values; train the model again"
        )
    return arrays, config


def load_parameters(model: Module, arrays: dict[str, npt.NDArray[Any]], source: str = "") -> None:
    """Set every parameter of a model from a checkpoint's arrays; all of them fit, or none is set.

    Args:
        model: Its parameters keep their backend.
        arrays: As :func:`read_checkpoint` returned them.
        source: Named in errors.

    Raises:
        CheckpointError: If a parameter is missing, unknown, of another shape or dtype, or not finite.
    """
    named = dict(model.named_parameters())
    if named.keys() != arrays.keys():
        odd = sorted(named.keys() ^ arrays.keys())
        raise CheckpointError(
            f"{source}: holds the parameters of another model (first difference: {odd[0]}); build "
            "the model from the checkpoint's own configuration"
        )
    for name, parameter in named.items():
        if arrays[name].shape != parameter.value.shape:
            raise CheckpointError(
                f"{source}: {name} has shape {arrays[name].shape}, the model's has "
                f"{parameter.value.shape}; build the model from the checkpoint's own configuration"
            )
        if arrays[name].dtype != parameter.value.dtype:
            raise CheckpointError(
                f"{source}: {name} is {arrays[name].dtype}, the model's is {parameter.value.dtype}; "
                "convert the weights, or build the model with their dtype"
            )
    _check_finite(arrays, source)
    for name, parameter in named.items():
        parameter.update(from_numpy(arrays[name], parameter.value.backend))


def _check_finite(arrays: dict[str, npt.NDArray[Any]], source: str) -> None:
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise CheckpointError(
                f"{source}: {name} holds NaN or infinity; train again with a lower learning rate"
            )
