"""Count the elements of each array that kernels read and write in global memory, on the emulated GPU.

The FlashAttention papers argue by the number of elements moved.  This module measures the kernels
themselves instead of a model: while a meter is open, every array argument of a kernel counts each access to
an element.  ``formulas`` has the expected counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.cuda.runtime.arrays import is_device_array
from kernels.cuda.runtime.kernel import Kernel
from kernels.runtime.targets import EMULATED
from kernels.traffic.formulas import Traffic, total

__all__ = ["Counted", "IOMeter", "Traffic", "total"]

#: The operands of the general matrix product, whose names a, b and out do not identify the arrays.
UNTELLING = "product"

_Counts = npt.NDArray[np.int64]


def _owner(array: Any) -> npt.NDArray[Any]:
    """Return the array that owns the memory of a view, through any number of views."""
    owner = array
    while array is not None:
        if isinstance(array, np.ndarray):
            owner = array
        array = getattr(array, "base", None)
    return owner


def _host(array: Any) -> npt.NDArray[Any]:
    """Return the NumPy array of an emulated one."""
    return getattr(array, "_ary", array)


class _Ledger:
    """The accesses to each element of an allocation, kept alive so that its address is not reused."""

    def __init__(self, owner: npt.NDArray[Any]):
        self.owner = owner
        self.name, self.is_named = "other", False
        self.reads: _Counts = np.zeros(owner.nbytes // owner.itemsize, np.int64)
        self.writes: _Counts = np.zeros_like(self.reads)

    def seen_as(self, view: npt.NDArray[Any]) -> tuple[_Counts, _Counts]:
        """Return reads and writes in the shape of a view: the same cells, not copies."""
        first, start = (x.__array_interface__["data"][0] for x in (view, self.owner))
        steps = tuple(step // view.itemsize * 8 for step in view.strides)
        offset = (first - start) // view.itemsize * 8
        reads, writes = (
            np.ndarray(view.shape, np.int64, counts, offset, steps)
            for counts in (self.reads, self.writes)
        )
        return reads, writes

    @property
    def traffic(self) -> Traffic:
        """The traffic of the whole allocation."""
        return Traffic(int(self.reads.sum()), int(self.writes.sum()))


class Counted:
    """An array in global memory that counts its accesses by a kernel, from given numbers of them on."""

    def __init__(self, array: npt.NDArray[Any], reads: _Counts, writes: _Counts):
        self.array, self.reads, self.writes = array, reads, writes
        self.shape, self.dtype, self.strides = array.shape, array.dtype, array.strides

    def __getitem__(self, key: Any) -> Any:
        value = self.array[key]
        if isinstance(value, np.ndarray):  # a view: no element has been read yet
            return Counted(value, self.reads[key], self.writes[key])
        self.reads[key] += 1
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        self.writes[key] += 1
        self.array[key] = value

    def update(self, key: Any, change: Callable[[Any], Any]) -> Any:
        """Change an element atomically and return its old value, counted as one read and one write."""
        before = self.array[key]
        self.reads[key] += 1
        self.writes[key] += 1
        self.array[key] = change(before)
        return before

    def __len__(self) -> int:
        return len(self.array)


class IOMeter:
    """Count the memory traffic of every kernel that is launched inside the ``with``.

    ::

        with IOMeter() as meter:
            out, lse, _ = launch.forward(launch.CUDA, problem, operands)
        meter.counts(q=q, k=k, v=v, out=out, lse=lse)["q"].reads

    It counts the kernels of this package, on the emulated GPU only.

    Raises:
        RuntimeError: On entering, where no GPU is emulated.
    """

    def __init__(self) -> None:
        self._ledgers: dict[int, _Ledger] = {}
        self._unmetered: Any = None

    def __enter__(self) -> Any:
        if not EMULATED:
            raise RuntimeError(
                "the IO meter works only on the emulated GPU, which is off in this process; set "
                "MINITORCH_EMULATE=1 before starting Python"
            )
        self._unmetered = Kernel.__getitem__

        def metered(kernel: Kernel, size: Any) -> Any:
            return lambda *args: self.launch(kernel, size, args)

        Kernel.__getitem__ = metered  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        Kernel.__getitem__ = self._unmetered  # type: ignore[method-assign]

    def launch(self, kernel: Kernel, size: Any, args: tuple[Any, ...]) -> None:
        """Launch a kernel on a (grid, block), with arrays that count in place of its arguments."""
        names = inspect.signature(kernel.source).parameters
        touched: list[tuple[str, _Ledger, int]] = []
        counted = [self._counted(*pair, touched) for pair in zip(names, args, strict=True)]
        self._unmetered(kernel, size)(*counted)
        for name, ledger, reads in touched:
            # A temporary is named by the kernel that first reads it, or else by the one that wrote it.
            if not ledger.is_named and kernel.name != UNTELLING:
                ledger.name, ledger.is_named = name, ledger.traffic.reads > reads

    def _counted(self, name: str, arg: Any, touched: list[tuple[str, _Ledger, int]]) -> Any:
        """Return an argument with every array in it replaced by one that counts."""
        if hasattr(arg, "_fields"):  # the options of a call
            pairs = zip(arg._fields, arg, strict=True)
            return arg._make(self._counted(*pair, touched) for pair in pairs)
        if not is_device_array(arg):
            return arg
        array = _host(arg)
        ledger = self._ledger(array)
        touched.append((name, ledger, ledger.traffic.reads))
        return Counted(array, *ledger.seen_as(array))

    def _ledger(self, array: npt.NDArray[Any]) -> _Ledger:
        owner = _owner(array)
        return self._ledgers.setdefault(id(owner), _Ledger(owner))

    def elements(self, array: Any) -> tuple[_Counts, _Counts]:
        """Return how often each element of an array was read, and how often written, as two arrays.

        It is an array argument of a kernel, or any view of it.
        """
        host = _host(array)
        reads, writes = self._ledger(host).seen_as(host)
        return reads.copy(), writes.copy()

    def counts(self, **arrays: Any) -> dict[str, Traffic]:
        """Return the traffic of each array, by name.

        All others, which a rung allocated, are named by the parameter of the kernel that first
        read them.
        """
        result: dict[str, Traffic] = {}
        for name, array in arrays.items():
            host = _host(array)
            once = tuple(slice(None) if step else slice(1) for step in host.strides)
            reads, writes = (counts[once] for counts in self.elements(host))
            result[name] = Traffic(int(reads.sum()), int(writes.sum()))
        called = self.called(**arrays)
        for key, more in self.traffic().items():
            name = called[key]
            if name not in arrays and more.moved:
                before = result.get(name, Traffic(0, 0))
                result[name] = Traffic(before.reads + more.reads, before.writes + more.writes)
        return result

    def traffic(self) -> dict[int, Traffic]:
        """Return the traffic so far by the number of each allocation; see :meth:`called`."""
        return {key: ledger.traffic for key, ledger in self._ledgers.items()}

    def called(self, **arrays: Any) -> dict[int, str]:
        """Return the name of each allocation; a temporary named as one of ``arrays`` is a copy of it."""
        names = {
            key: f"{ledger.name} copy" if ledger.name in arrays else ledger.name
            for key, ledger in self._ledgers.items()
        }
        return names | {self.number(array): name for name, array in arrays.items()}

    def number(self, array: Any) -> int:
        """Return the number of the allocation that contains an array."""
        return id(_owner(_host(array)))
