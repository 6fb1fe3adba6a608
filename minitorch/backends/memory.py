"""Memory of the host and of a CUDA device: how storages are made, moved, viewed and converted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernels.runtime.dtypes import BITS, rounded

Ints = tuple[int, ...]


class PlainHost:  # beyond module 2
    """NumPy arrays."""

    def why_not(self) -> str | None:
        """Return why this machine does not have the memory, or None."""
        return None

    def view(self, storage: Any, shape: Ints, strides: Ints) -> Any:
        """View a flat storage with a shape and strides in elements."""
        steps = [step * storage.itemsize for step in strides]
        return np.ndarray(shape, storage.dtype, storage, 0, steps)

    def flat(self, array: Any) -> tuple[Any, Ints | None]:
        """Return an array as a flat storage and its strides in elements, None for row-major."""
        return array.reshape(-1), None

    def bring(self, array: Any) -> Any:
        """Return an array of the host in this memory, copied if necessary."""
        return array

    def to_host(self, array: Any) -> Any:
        """Return an array of this memory on the host, copied if necessary."""
        return array

    def bits(self, array: Any) -> Any:
        """View an array of 16-bit numbers as uint16."""
        return array.view(BITS)

    def convert(self, array: Any, dtype: np.dtype[Any]) -> Any:
        """Return an array in another floating dtype, itself if unchanged; each number is rounded once."""
        return array if array.dtype == dtype else self.bring(rounded(self.to_host(array), dtype))

    def convert_into(self, source: Any, out: Any) -> None:
        """Write a flat array to another one of any floating dtype; each number is rounded once."""
        out[:] = rounded(source, out.dtype)


class Memories:  # beyond module 2
    """The memory of this process, and what a step that is captured as a CUDA graph has to know of it.

    Attributes:
        host: Of the host.
        device: Of the CUDA device; None where there is no CUDA backend.
    """

    host: Any = PlainHost()
    device: Any = None

    def computed(self, compute: Callable[[], Any], *sources: Any) -> Any:
        """Return what the host computes from arrays; each replay of a captured step computes it again."""
        return compute()

    def refuse(self, what: str, remedy: str, on_host: bool = False) -> None:
        """Raise an error if a step is being captured; see ``kernels.cuda.backend.refuse``."""


memories = Memories()  # beyond module 2


def is_device_storage(array: Any) -> bool:
    """Tell whether a storage lives on a CUDA device (or an emulated one)."""
    return bool(getattr(array, "__cuda_ndarray__", False))
