"""Save and load a model: one safetensors file with a digest, which no kill leaves half written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..module import Module
from ..tensors.factories import from_numpy

Arrays = dict[str, npt.NDArray[Any]]
FORMAT = "minitorch-2"
#: Without a digest; such files can still be read.
FIRST_FORMAT = "minitorch-1"
#: Before the names of arrays that are no parameters; see :mod:`minitorch.training.checkpoints`.
BESIDE = "training/"
#: What stands before the digest in the header, and what stands in its place while it is computed.
_KEY, _BLANK = b'"digest":"', b"0" * 64


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read, or that belongs to another model."""


# -- models --------------------------------------------------------------------------------------


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
    write_arrays(path, parameter_arrays(model), {"config": json.dumps(config)})


def read_checkpoint(path: str | os.PathLike[str]) -> tuple[Arrays, dict[str, Any]]:
    """Read the parameters and the configuration of a model.

    Args:
        path: Of a file of :func:`save_checkpoint`, or of a training that was interrupted.

    Raises:
        CheckpointError: If the file is missing, truncated, changed since it was written, or no checkpoint
            of ours; one line that names the file.
    """
    arrays, metadata = read_arrays(path)
    config = metadata["config"]
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{path}: its configuration is {json.dumps(config)[:40]}, expected an object of names and "
            "values; train the model again"
        )
    return {name: array for name, array in arrays.items() if not name.startswith(BESIDE)}, config


def parameter_arrays(model: Module) -> Arrays:
    """Return the parameters of a model by name, contiguous and on the host."""
    # Not ascontiguousarray, which makes a vector of a number.
    return {name: np.asarray(p.value.to_numpy(), order="C") for name, p in model.named_parameters()}


def load_parameters(model: Module, arrays: Arrays, source: str = "") -> None:
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


def _check_finite(arrays: Arrays, source: str) -> None:
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise CheckpointError(
                f"{source}: {name} holds NaN or infinity; train again with a lower learning rate"
            )


# -- files ---------------------------------------------------------------------------------------


def write_arrays(path: str | os.PathLike[str], arrays: Arrays, metadata: dict[str, str]) -> None:
    """Write arrays and texts so that either the whole new file is there or what was there before.

    A digest of the file, computed with zeros in its own place, stands in its header.  It shows that a byte
    has changed, not who has changed it: it is no signature.

    Args:
        path: Of the file; its folder is made if need be.
        arrays: By name, contiguous and finite.
        metadata: By name; each a JSON text.

    Raises:
        CheckpointError: If an array is not finite; nothing is written.
    """
    path = Path(path)
    _check_finite(arrays, f"{path}: not saved")
    payload = bytearray(
        save(arrays, metadata={**metadata, "format": FORMAT, "digest": _BLANK.decode()})
    )
    place = _digest_place(payload)
    assert place is not None, "the header has no digest; safetensors writes JSON in another way now"
    payload[place : place + len(_BLANK)] = hashlib.sha256(payload).hexdigest().encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def read_arrays(path: str | os.PathLike[str]) -> tuple[Arrays, dict[str, Any]]:
    """Read what :func:`write_arrays` wrote.

    Returns:
        Arrays of the caller's own, by name; and what the texts say as JSON, by name.

    Raises:
        CheckpointError: If the file is missing, truncated, changed since it was written, or no checkpoint
            of ours; one line that names the file.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint; train one first, or mend the path")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            kind = metadata.pop("format", None)
            if kind not in (FORMAT, FIRST_FORMAT):
                raise CheckpointError(f"{path}: a safetensors file, but no checkpoint of minitorch")
            if kind == FORMAT or "digest" in metadata:
                _check_digest(path.read_bytes())
                metadata.pop("digest")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        texts = {name: json.loads(text) for name, text in metadata.items()}
        if "config" not in texts:
            raise ValueError("it has no configuration")
    # A TypeError: weights of a dtype that NumPy lacks, such as float8.
    except (SafetensorError, KeyError, OSError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not a readable checkpoint ({error}); delete it or restore an older one"
        ) from None
    return arrays, texts


def _digest_place(payload: bytes | bytearray) -> int | None:
    """Return where the digest stands in a safetensors file; None if it has none."""
    end = 8 + int.from_bytes(payload[:8], "little")
    # Only here: within a text the quotes are escaped, and after the header stand numbers.
    found = payload.find(_KEY, 8, end)
    return None if found < 0 else found + len(_KEY)


def _check_digest(payload: bytes) -> None:
    place = _digest_place(payload)
    if place is None:
        raise ValueError("its digest is missing")
    digest = hashlib.sha256(payload[:place])
    digest.update(_BLANK)
    digest.update(memoryview(payload)[place + len(_BLANK) :])
    if digest.hexdigest().encode() != payload[place : place + len(_BLANK)]:
        raise ValueError("its bytes do not match its digest: it was changed after it was written")


def _sync_folder(folder: Path) -> None:
    """Have the disk know the new name too, where the system can do that to a folder."""
    try:
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
    except OSError as error:
        if error.errno not in (
            errno.EACCES,
            errno.EINVAL,
            errno.ENOTSUP,
        ):  # Windows, network drives
            raise
