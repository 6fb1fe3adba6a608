"""One launch for a list of tensors: a table of addresses, and the division of work among blocks.

A training step updates hundreds of small tensors, for which separate launches take longer than the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from kernels.common.geometry import ceil_div
from kernels.cuda.device.half import form
from kernels.cuda.ptx.llvm import at_address
from kernels.cuda.runtime.arrays import device_pointer, device_view, element_strides, to_device
from kernels.cuda.runtime.kernel import scalar_type
from kernels.cuda.runtime.recorder import active, recorded_by
from kernels.cuda.runtime.sizes import SIZES
from kernels.runtime.targets import current_device
from kernels.runtime.types import int64

#: Number of elements per block, all of one tensor, and number of threads.
CHUNK, THREADS = SIZES.list_chunk, SIZES.list_threads
#: Numba's type of a table and of the work.
MATRIX = int64[:, ::1]


class Access(NamedTuple):
    """Functions that load and store the elements of one dtype in a kernel, 16-bit elements as uint16."""

    load: Callable[..., Any]  # ``(address, i)``: element i of the array at an address
    #: ``(address, i, value)``: writes element i of the array at an address.
    store: Callable[..., None]


@cache
def make_access(dtype: np.dtype[Any]) -> Access:
    """Return the functions for the storage of one dtype."""
    return Access(*at_address(scalar_type(form(dtype).stored)))


class TensorList(NamedTuple):
    """A list of tensors as arguments of a kernel."""

    #: (tensors, columns + 1) int64 on the device: for each tensor, the address of an array or a number in
    #: each column, and its size in the last.
    table: Any
    #: (parts, 2) int64 on the device: for each part, the row in the table and the first element.
    work: Any

    @property
    def parts(self) -> int:
        """Number of blocks of a launch."""
        return int(self.work.shape[0])


def tensor_list(columns: Sequence[Sequence[Any]], sizes: Sequence[int]) -> TensorList:
    """Return the list for contiguous arrays on the device.

    Lists are cached, because a training step allocates the same addresses again.  Each column of the table
    has one array or whole number per tensor, and sizes are at least 1.
    """
    numbers = [[x if isinstance(x, int) else None for x in column] for column in columns]
    arrays = [x for column in columns for x in column if not isinstance(x, int)]

    def table_of(*addresses: int) -> tuple[Any, int]:
        given = iter(addresses)
        own = (tuple(next(given) if x is None else x for x in column) for column in numbers)
        with recorded_by(None):  # the table is made once for these addresses, and kept
            table = _table((*own, tuple(sizes)), current_device())
            return table, device_pointer(table)

    with recorded_by(None):
        work = _work(tuple(sizes), current_device())
    recording, (table, _) = active(), table_of(*map(device_pointer, arrays))
    if recording is not None:
        table = device_view(table, table.shape, element_strides(table))
        recording.mapped(table, arrays, table_of)
    return TensorList(table, work)


@lru_cache(maxsize=64)
def _table(columns: tuple[tuple[int, ...], ...], device: int) -> Any:
    return to_device(np.array([*zip(*columns, strict=True)], np.int64))


@lru_cache(maxsize=64)
def _work(sizes: tuple[int, ...], device: int) -> Any:
    work = [
        (tensor, part * CHUNK)
        for tensor, size in enumerate(sizes)
        for part in range(ceil_div(size, CHUNK))
    ]
    return to_device(np.array(work, np.int64))
