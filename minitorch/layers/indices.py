"""Token ids and class indices, checked."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from kernels.common.arguments import as_host_array, shown
from kernels.runtime.dtypes import is_floating

from ..backends.memory import memories
from ..functions.base import is_tensor


def integer_array(ids: Any, limit: int, name: str) -> Any:
    """Return indices as an integer array.

    Args:
        ids: A tensor or array of whole numbers.
        limit: One more than the largest index allowed.
        name: The name of the argument in error messages.

    Raises:
        TypeError: If the ids are not whole numbers.
        ValueError: If an id is below 0 or not below ``limit``.
    """
    given = ids.to_numpy() if is_tensor(ids) else as_host_array(name, ids)
    if given.dtype == np.int64 and given.base is None and not given.flags.writeable:
        return _checked_ids(given, limit, name, ids)  # read-only, so it need not be copied
    return memories.computed(lambda: _checked_ids(given, limit, name, ids).astype(np.int64), given)


def _checked_ids(array: Any, limit: int, name: str, given: Any) -> Any:
    """Check an array of indices for :func:`integer_array`, and return it."""
    is_whole = array.dtype.kind in "iub" or (
        is_floating(array.dtype) and bool((array == np.floor(array)).all())
    )
    if not is_whole:
        kind = f"{array.dtype} with fractions" if is_floating(array.dtype) else shown(given)
        raise TypeError(f"{name} must be whole numbers, got {kind}; convert them with astype(int)")
    if array.size and not (array.min() >= 0 and array.max() < limit):
        least, largest = float(array.min()), float(array.max())
        found = f"{largest:g}" if least == largest else f"{least:g} to {largest:g}"
        raise ValueError(
            f"{name} must be from 0 to {limit - 1}, got {found}; correct the value, or make the table or "
            "the number of classes larger"
        )
    return array


@lru_cache(maxsize=64)
def kept_range(start: int, stop: int, step: int = 1) -> Any:
    """Return a range as a read-only array, which is copied to a device once."""
    found = np.arange(start, stop, step)
    found.setflags(write=False)
    return found
