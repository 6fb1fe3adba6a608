"""Exchange host arrays through devices, where there is no MPI."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from kernels.cuda.backend import empty_device, to_device, to_host

from .group import Group, Transfer
from .waiting import announce


class _Landing:
    """An operation that fills a device array, which is then copied to a host array."""

    def __init__(self, transfer: Transfer, source: Any, out: Any):
        self._transfer, self._source, self._out = transfer, source, out

    def wait(self) -> None:
        """Return when the host array is filled."""
        self._transfer.wait()
        np.copyto(self._out, to_host(self._source))


class HostArrays(Group):
    """The ranks of a group of devices, for arrays on the host.

    Args:
        devices: The group that moves copies of the arrays.
    """

    on_host = True

    def __init__(self, devices: Group):
        self.rank, self.size, self._devices = devices.rank, devices.size, devices

    def _filled(self, begin: Callable[[Any, Any], Transfer], array: Any, out: Any) -> Transfer:
        """Begin an operation of the devices that fills one array from another."""
        landing = empty_device(out.shape, out.dtype)
        return _Landing(begin(to_device(array), landing), landing, out)

    def together(self) -> Any:
        """See :meth:`Group.together`."""
        return self._devices.together()

    def send(self, array: Any, to: int) -> Transfer:
        """See :meth:`Group.send`."""
        return self._devices.send(to_device(array), to)

    def receive(self, array: Any, source: int) -> Transfer:
        """See :meth:`Group.receive`."""
        landing = empty_device(array.shape, array.dtype)
        return _Landing(self._devices.receive(landing, source), landing, array)

    def all_reduce(self, array: Any, operation: str = "sum") -> Transfer:
        """See :meth:`Group.all_reduce`."""
        own = to_device(array)
        return _Landing(self._devices.all_reduce(own, operation), own, array)

    def all_gather(self, array: Any, out: Any) -> Transfer:
        """See :meth:`Group.all_gather`."""
        return self._filled(self._devices.all_gather, array, out)

    def reduce_scatter(self, array: Any, out: Any) -> Transfer:
        """See :meth:`Group.reduce_scatter`."""
        return self._filled(self._devices.reduce_scatter, array, out)

    def all_to_all(self, array: Any, out: Any) -> Transfer:
        """See :meth:`Group.all_to_all`."""
        return self._filled(self._devices.all_to_all, array, out)

    def broadcast(self, array: Any, root: int = 0) -> Transfer:
        """See :meth:`Group.broadcast`."""
        own = to_device(array)
        return _Landing(self._devices.broadcast(own, root), own, array)

    def barrier(self) -> None:
        """See :meth:`Group.barrier`."""
        self.all_reduce(np.zeros(1)).wait()

    def split(self, color: int) -> Group:
        """See :meth:`Group.split`."""
        return self._devices.split(color).host

    def abort(self, reason: str) -> NoReturn:
        """See :meth:`Group.abort`; the launcher ends the other processes."""
        announce(self.rank, self.size, reason)
        os._exit(1)
