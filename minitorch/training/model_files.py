"""Save and load a model as one safetensors file with a digest, written atomically."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..module import Module
from ..tensors.factories import from_numpy

Arrays = dict[str, npt.NDArray[Any]]
FORMAT = "minitorch-2"
#: The format without a digest, which can still be read.
FIRST_FORMAT = "minitorch-1"
#: Prefix of arrays that are not parameters; see :mod:`minitorch.training.checkpoints`.
BESIDE = "training/"
#: The text before the digest in the header, and the placeholder while it is computed.
_KEY, _BLANK = b'"digest":"', b"0" * 64


#: Errors that reading a damaged file may raise.  Weights of a dtype that NumPy does not have, such as
#: float8, raise an AttributeError or a TypeError.  Deeply nested JSON raises a RecursionError.
UNREADABLE = (
    SafetensorError, AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError,
)  # fmt: skip


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read, or that belongs to a different model."""


# -- models --------------------------------------------------------------------------------------


def save_checkpoint(path: str | os.PathLike[str], model: Module, config: dict[str, Any]) -> None:
    """Write the parameters of a model and its configuration.

    The new file is written beside the old one, flushed to the disk, and renamed over it: whenever
    the process is killed, one of the two files is complete.

    Args:
        path: The path of the file.
        model: The model whose parameters are saved.
        config: The configuration from which the model can be built, in JSON types.

    Raises:
        CheckpointError: If a parameter is not finite, and so could not be loaded again; the old file stays.
    """
    write_arrays(path, parameter_arrays(model), {"config": json.dumps(config)})


def read_checkpoint(path: str | os.PathLike[str]) -> tuple[Arrays, dict[str, Any]]:
    """Read the parameters and the configuration of a model.

    Args:
        path: The path of a file of :func:`save_checkpoint` or :func:`save_training`.

    Raises:
        CheckpointError: If the file is missing, truncated, changed since it was written, or not a
            checkpoint of this library; the message is one line that names the file.
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
    """Set every parameter of a model from a checkpoint's arrays; on an error, none is changed.

    Args:
        model: The model, whose parameters keep their backend.
        arrays: The arrays of :func:`read_checkpoint`.
        source: The file, for error messages.

    Raises:
        CheckpointError: If a parameter is missing, unknown or not finite, or has the wrong shape or dtype.
    """
    check_finite(arrays, source)
    try:
        state = {name: from_numpy(array) for name, array in arrays.items()}
        model.load_state_dict(state, assign=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: {error}") from None


def check_finite(arrays: Arrays, source: str) -> None:
    """Check that no array holds NaN or infinity."""
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise CheckpointError(
                f"{source}: {name} holds NaN or infinity; train again with a lower learning rate"
            )


# -- files ---------------------------------------------------------------------------------------


def write_arrays(path: str | os.PathLike[str], arrays: Arrays, metadata: dict[str, str]) -> str:
    """Write arrays and texts to a file atomically: an interrupted write leaves the old file intact.

    The header contains a digest of the file, computed with zeros in its own place.  It detects accidental
    changes and is not a signature.

    Args:
        path: The path of the file, whose folder is created if necessary.
        arrays: Arrays by name, contiguous and finite.
        metadata: JSON texts by name.

    Returns:
        The digest.

    Raises:
        CheckpointError: If an array is not finite; nothing is written.
    """
    path = Path(path)
    check_finite(arrays, f"{path}: not saved")
    payload = bytearray(
        save(arrays, metadata={**metadata, "format": FORMAT, "digest": _BLANK.decode()})
    )
    place = _digest_place(payload)
    assert place is not None, "the header has no digest; safetensors writes JSON in another way now"
    digest = hashlib.sha256(payload).hexdigest()
    payload[place : place + len(_BLANK)] = digest.encode()
    write_file(path, payload)
    return digest


def write_file(path: Path, payload: bytes | bytearray) -> None:
    """Write a file atomically, with its folder if necessary; see :func:`replacing`."""
    with replacing(path) as file:
        file.write(payload)


@contextmanager
def replacing(path: Path) -> Generator[BinaryIO, None, None]:
    """Return a context with a new file, which replaces the file at ``path`` at the end.

    An interrupted write leaves the old file intact.  Several threads, processes and machines may replace a
    file at the same time; the complete file of one of them remains.

    Args:
        path: The path of the file, whose folder is created if necessary.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def read_arrays(path: str | os.PathLike[str]) -> tuple[Arrays, dict[str, Any]]:
    """Read a file that :func:`write_arrays` wrote.

    Returns:
        New arrays by name, and the decoded JSON texts by name, with the digest among them.

    Raises:
        CheckpointError: If the file is missing, truncated, changed since it was written, or no checkpoint
            of this library; the message is one line that names the file.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(
            f"{path}: there is no such checkpoint; train one first, or correct the path"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            kind = metadata.pop("format", None)
            if kind not in (FORMAT, FIRST_FORMAT):
                raise CheckpointError(
                    f"{path}: this safetensors file is not a checkpoint of minitorch"
                )
            if kind == FORMAT or "digest" in metadata:
                _check_digest(path.read_bytes())
            digest = metadata.pop("digest", "")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        texts = {name: json.loads(text) for name, text in metadata.items()} | {"digest": digest}
        if "config" not in texts:
            raise ValueError("it has no configuration")
    except UNREADABLE as error:
        raise CheckpointError(
            f"{path}: the checkpoint cannot be read ({error}); delete it or restore an older one"
        ) from None
    return arrays, texts


def _digest_place(payload: bytes | bytearray) -> int | None:
    """Return the position of the digest in a safetensors file; None if it has none."""
    end = 8 + int.from_bytes(payload[:8], "little")
    # The match is unique: quotes within a text are escaped, and the header is followed by binary data.
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
    """Flush the new file name to disk, where the system supports it for folders."""
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
