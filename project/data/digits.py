"""Handwritten digits: scikit-learn's, which need no network, or MNIST from files of the user's."""

from __future__ import annotations

import gzip
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

#: The four files of MNIST as it was published, each also with .gz at the end.
IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
#: The four arrays of MNIST as one .npz file.
NPZ_NAMES = ("x_train", "y_train", "x_test", "y_test")
#: What of scikit-learn's digits is held out for validation.
HELD_OUT = 0.2


@dataclass(frozen=True)
class Images:
    """Images in classes.

    Attributes:
        X: (count, height, width), float32 from 0 to 1.
        y: (count,), the class of each, 0 to 9.
    """

    X: npt.NDArray[np.float32]
    y: npt.NDArray[np.int64]

    def first(self, count: int) -> Images:
        """Return the first so many."""
        return Images(self.X[:count], self.y[:count])


def scale(images: Any, labels: Any, white: float) -> Images:
    """Return images with values from 0 to 1.

    Args:
        images: (count, height, width), from 0 to ``white``.
        labels: (count,).
        white: The largest value.
    """
    X = np.divide(images, white, dtype=np.float32)
    return Images(X, np.asarray(labels, np.int64))


def sklearn_digits(rng: np.random.Generator) -> tuple[Images, Images]:
    """Return scikit-learn's 1797 digits of 8 x 8 pixels, shuffled: for training and for validation."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit(
            'the digits come with scikit-learn, which is missing: pip install -e ".[digits]", or pass '
            "MNIST's own files with --mnist"
        )
    digits: Any = load_digits()
    order = rng.permutation(len(digits.target))
    cut = int(len(order) * (1.0 - HELD_OUT))
    train, held_out = (
        scale(digits.images[rows], digits.target[rows], 16.0) for rows in (order[:cut], order[cut:])
    )
    return train, held_out


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read a file of MNIST's own format, packed by gzip or not.

    Raises:
        ValueError: If it is no such file, in one line.
        OSError: If it cannot be read.
    """
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: not a whole gzip file ({error})") from None
    # Two zero bytes, the type (8: unsigned byte), the number of dimensions, then each as 4 bytes.
    dims = data[3] if data[:3] == b"\0\0\x08" else 0
    start = 4 + 4 * dims
    if dims == 0 or len(data) < start:
        raise ValueError(f"{path}: not an idx file of bytes; it begins with {data[:4]!r}")
    shape = struct.unpack(f">{dims}I", data[4:start])
    if len(data) - start != int(np.prod(shape, dtype=object)):
        raise ValueError(
            f"{path}: {shape} items need {np.prod(shape, dtype=object)} bytes, the file holds "
            f"{len(data) - start}; it may be cut off, fetch it again"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_mnist(path: str) -> tuple[Images, Images]:
    """Read MNIST: a folder of its four idx files, or an .npz file; exit with one line if it fails.

    Args:
        path: Of either.

    Returns:
        Images for training and for validation.
    """
    place = Path(path)
    try:
        if place.is_dir():
            arrays = [read_idx(_present(place, name)) for name in IDX_FILES]
        else:
            with np.load(place, allow_pickle=False) as file:
                missing = [name for name in NPZ_NAMES if name not in file]
                if missing:
                    raise ValueError(f"{path}: {missing[0]} is missing; needed are {NPZ_NAMES}")
                arrays = [file[name] for name in NPZ_NAMES]
    except OSError as error:
        sys.exit(
            f"--mnist {path}: {error.strerror or error}; pass a folder of idx files or an .npz file"
        )
    except ValueError as error:
        text = str(error)
        sys.exit(text if path in text else f"--mnist {path}: not an .npz file of arrays ({text})")
    for images, labels in (arrays[:2], arrays[2:]):
        if images.ndim != 3 or labels.shape != images.shape[:1] or len(images) == 0:
            sys.exit(
                f"--mnist {path}: images of shape {images.shape} and labels of shape {labels.shape} do "
                "not fit; expected (count, height, width) and (count,)"
            )
        if labels.max() > 9:
            sys.exit(f"--mnist {path}: labels are digits from 0 to 9, got {labels.max()}")
    train, held_out = (scale(images, labels, 255.0) for images, labels in (arrays[:2], arrays[2:]))
    return train, held_out


def _present(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise ValueError(f"--mnist {folder}: {name} (or {name}.gz) is missing there")
