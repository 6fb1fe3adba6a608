"""Groups over MPI, for processes on the cores of one machine or of several."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np

from kernels.runtime.dtypes import is_half

from .group import REDUCTIONS, Group, Transfer
from .waiting import Waiting, end, timeout_of_environment


def _mpi() -> Any:
    """Return mpi4py's module, which starts MPI when it is first imported."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(
            f"minitorch.distributed needs mpi4py and an MPI library ({error}); install both with "
            "pip install 'minitorch-flash[mpi]'"
        ) from error
    return MPI


class _Request:
    """An operation of MPI that has begun; it keeps the arrays alive."""

    def __init__(self, waiting: Waiting, name: str, request: Any, *arrays: Any):
        self._waiting, self._request, self._arrays = waiting, request, arrays
        self._begun = waiting.begin(name)

    def wait(self) -> None:
        """Return when the operation is over."""
        if self._request is not None:
            self._waiting.until(self._request, *self._begun)
        self._request, self._arrays = None, ()


class _Mean:
    """A sum over ranks that has begun, and becomes a mean in place."""

    def __init__(self, total: Transfer, array: Any, size: int):
        self._total, self._array, self._size = total, array, size

    def wait(self) -> None:
        """Return when the array has the mean."""
        self._total.wait()
        if self._array is not None:
            self._array /= self._size
        self._array = None


def _contiguous(name: str, array: Any) -> Any:
    """Check that an array can be a message."""
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{name} must be a NumPy array, got {type(array).__name__}; MPI moves host memory, pass "
            "Tensor.to_numpy()"
        )
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{name} must be contiguous, got shape {array.shape} with strides {array.strides}; pass "
            "numpy.ascontiguousarray(array)"
        )
    return array


def _bytes(name: str, array: Any) -> Any:
    """Return an array as bytes, so that MPI can move dtypes that it does not know."""
    return _contiguous(name, array).reshape(-1).view(np.uint8)


def _numbers(name: str, array: Any) -> Any:
    """Return an array that MPI can add up."""
    if is_half(_contiguous(name, array).dtype):
        raise TypeError(
            f"{name} is {array.dtype}, of which MPI computes no sums; convert it to float32"
        )
    return array


def _check(array: Any, out: Any, expected: tuple[int, ...], size: int) -> None:
    """Check the shape of ``out``, and that both arrays have one dtype."""
    if out.shape != expected or out.dtype != array.dtype:
        raise ValueError(
            f"out must be {expected} of {array.dtype} for an array of shape {array.shape} in a group of "
            f"{size} ranks, got {out.shape} of {out.dtype}"
        )


def _check_parts(array: Any, size: int) -> None:
    """Check that an array has a part for each rank."""
    if array.shape[:1] != (size,):
        raise ValueError(
            f"array must have a part for each rank, (size, …), got shape {array.shape} in a group of "
            f"{size} ranks"
        )


class MPIGroup(Group):
    """The ranks of an MPI communicator.

    Args:
        communicator: An intracommunicator of mpi4py.
        waiting: The object that waits for operations; None creates a ``Waiting`` for the communicator.
        name: The name of the group, the same on all its ranks.  No other group may have this name.

    Attributes:
        waiting: Measures how long this rank waits in this group and in the groups split from it.
    """

    on_host = True

    def __init__(self, communicator: Any, waiting: Waiting | None = None, name: str = "world"):
        self.communicator = communicator
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()
        self.waiting = waiting or Waiting(communicator, timeout_of_environment())
        self._name, self._splits = name, 0
        for other in range(self.size):
            self.waiting.take_part(self._message(self.rank, other), self._message(other, self.rank))
        self.waiting.take_part(name)

    def place_on_machine(self) -> tuple[int, int]:
        """Return the index of this rank among those on its machine, and the number of ranks there."""
        own = self.communicator.Split_type(_mpi().COMM_TYPE_SHARED)
        return own.Get_rank(), own.Get_size()

    def _message(self, source: int, to: int) -> str:
        """Return the name of the messages from one rank to another."""
        return f"{self._name} {source}>{to}"

    def _begun(self, request: Any, *arrays: Any) -> Transfer:
        return _Request(self.waiting, self._name, request, *arrays)

    def send(self, array: Any, to: int) -> Transfer:
        """See :meth:`Group.send`."""
        self.check_rank("to", to)
        message = _bytes("array", array)
        name, request = self._message(self.rank, to), self.communicator.Isend(message, to)
        return _Request(self.waiting, name, request, message)

    def receive(self, array: Any, source: int) -> Transfer:
        """See :meth:`Group.receive`."""
        self.check_rank("source", source)
        message = _bytes("array", array)
        name, request = self._message(source, self.rank), self.communicator.Irecv(message, source)
        return _Request(self.waiting, name, request, message)

    def all_reduce(self, array: Any, operation: str = "sum") -> Transfer:
        """See :meth:`Group.all_reduce`."""
        if operation not in REDUCTIONS:
            raise ValueError(f"operation must be one of {REDUCTIONS}, got {operation!r}")
        mpi, array = _mpi(), _numbers("array", array)
        reduction = mpi.SUM if operation == "mean" else getattr(mpi, operation.upper())
        request = self._begun(self.communicator.Iallreduce(mpi.IN_PLACE, array, reduction), array)
        return _Mean(request, array, self.size) if operation == "mean" else request

    def all_gather(self, array: Any, out: Any) -> Transfer:
        """See :meth:`Group.all_gather`."""
        _check(array, out, (self.size, *array.shape), self.size)
        own, whole = _bytes("array", array), _bytes("out", out)
        return self._begun(self.communicator.Iallgather(own, whole), own, whole)

    def reduce_scatter(self, array: Any, out: Any) -> Transfer:
        """See :meth:`Group.reduce_scatter`."""
        _check_parts(array, self.size)
        _check(array, out, array.shape[1:], self.size)
        own, whole = _numbers("out", out), _numbers("array", array)
        return self._begun(self.communicator.Ireduce_scatter_block(whole, own), own, whole)

    def all_to_all(self, array: Any, out: Any) -> Transfer:
        """See :meth:`Group.all_to_all`."""
        _check_parts(array, self.size)
        _check(array, out, array.shape, self.size)
        own, whole = _bytes("array", array), _bytes("out", out)
        return self._begun(self.communicator.Ialltoall(own, whole), own, whole)

    def broadcast(self, array: Any, root: int = 0) -> Transfer:
        """See :meth:`Group.broadcast`."""
        self.check_rank("root", root)
        message = _bytes("array", array)
        return self._begun(self.communicator.Ibcast(message, root), message)

    def barrier(self) -> None:
        """See :meth:`Group.barrier`."""
        self._begun(self.communicator.Ibarrier()).wait()

    def split(self, color: int) -> MPIGroup:
        """See :meth:`Group.split`."""
        self._splits += 1
        name = f"{self._name}/{self._splits}.{color}"
        return MPIGroup(self.communicator.Split(color, self.rank), self.waiting, name)

    def abort(self, reason: str) -> NoReturn:
        """See :meth:`Group.abort`."""
        end(self.communicator, reason)


@lru_cache(maxsize=1)
def world() -> MPIGroup:
    """Return the group of all processes that ``mpiexec`` has started together.

    From then on, an uncaught exception or ``os._exit`` in one process ends all of them, because the others
    would wait for it forever.  So does a wait of more than ``MINITORCH_RANK_TIMEOUT`` seconds, 300 by
    default, and a wait for a process whose program has ended.  A process that was started alone forms a
    group of one.

    Raises:
        ImportError: If mpi4py or an MPI library is missing.
        ValueError: If ``MINITORCH_RANK_TIMEOUT`` is not a number above 0.
    """
    group = MPIGroup(_mpi().COMM_WORLD.Dup())
    if group.size > 1:

        def abort(kind: Any, error: Any, trace: Any) -> None:
            traceback.print_exception(kind, error, trace)
            group.abort(f"{kind.__name__}: {error}")

        sys.excepthook = abort
        _watch_ends(group)
    return group


def _watch_ends(group: MPIGroup) -> None:
    """Have other ranks learn when the program of this one ends, also by ``os._exit``."""
    own, exit_now = os.getpid(), os._exit

    def is_rank() -> bool:  # no child of it, and it is still connected with the others
        return os.getpid() == own and not _mpi().Is_finalized()

    def leave() -> None:
        if is_rank():
            group.waiting.leave()

    def leave_now(status: int) -> NoReturn:
        # MPICH would kill the others without a word, with status 0.
        if is_rank():
            end(
                group.communicator,
                f"os._exit({status}) ended this rank; call sys.exit",
                status or 1,
            )
        exit_now(status)

    atexit.register(leave)
    os._exit = leave_now
