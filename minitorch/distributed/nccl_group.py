"""Groups over NCCL, for tensors on CUDA devices: one process per device, its current device.

Operations run on a separate stream, after the kernels launched before them and concurrently with later
ones.  Kernels launched after :meth:`Transfer.wait` wait for the operation; the host does not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, NoReturn

import numpy as np

from kernels.cuda.backend import between_launches
from kernels.runtime.targets import cuda

from .group import REDUCTIONS, Group, Transfer
from .host_arrays import HostArrays
from .mpi import MPIGroup
from .side_stream import SideStream

#: Environment variables that launchers such as ``torchrun`` set for each process.
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Environment variable with the address where the ranks meet; NCCL reads it.
MEETING_PLACE = "NCCL_COMM_ID"


def _nccl() -> tuple[Any, Any]:
    """Return nccl4py, and its bindings to the C functions."""
    try:
        from nccl import core
        from nccl.bindings import nccl as bindings
    except ImportError as error:
        raise ImportError(
            f"NcclGroup needs nccl4py and NCCL ({error}); install both with "
            "pip install 'minitorch-flash[mpi,nccl]'"
        ) from error
    return core, bindings


class _Queued:
    """An operation that was queued; it keeps its arrays alive until it is waited for."""

    def __init__(self, side: SideStream, *arrays: Any):
        self._side, self._arrays = side, arrays

    def wait(self) -> None:
        """Make later kernels wait for it."""
        if self._arrays:
            between_launches(self._side.lead)
            self._arrays = ()


def _launched() -> tuple[int, int, str]:
    """Return this rank, the number of processes that a launcher has started, and where they meet.

    Raises:
        ValueError: If the variables of a launcher are not set.
    """
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(
            f"NcclGroup() takes its ranks from {', '.join(VARIABLES)}, and {', '.join(missing)} are not "
            "set; start the program with a launcher such as torchrun, or with mpiexec and pass world()"
        )
    rank, size, address, port = (os.environ[name] for name in VARIABLES)
    # The launcher may listen at its port itself.
    place = os.environ.get(MEETING_PLACE) or f"{address}:{int(port) + 1}"
    return int(rank), int(size), place


def _met(rank: int, size: int, place: str) -> Any:
    """Return the communicator of processes that meet at an address: rank 0 listens there meanwhile."""
    (core, _), before = _nccl(), os.environ.get(MEETING_PLACE)
    os.environ[MEETING_PLACE] = place
    try:
        return core.Communicator.init(size, rank, core.get_unique_id())
    finally:
        del os.environ[MEETING_PLACE]
        if before is not None:
            os.environ[MEETING_PLACE] = before


def _introduced(host: Group) -> Any:
    """Return the communicator of the ranks of another group."""
    core, _ = _nccl()
    own = core.get_unique_id(empty=host.rank != 0)
    identifier = np.frombuffer(own.as_bytes, np.uint8).copy()
    host.broadcast(identifier).wait()
    shared = core.UniqueId.from_bytes(identifier.tobytes())
    return core.Communicator.init(host.size, host.rank, shared)


class NcclGroup(Group):
    """Ranks whose arrays lie on the current CUDA device of each.

    Args:
        host: A group over MPI, through which the ranks agree on an identifier and exchange host arrays;
            when None, the ranks are the processes of a launcher such as ``torchrun``.
        communicator: An NCCL communicator of the same ranks; None creates one.

    Raises:
        ImportError: If nccl4py or NCCL is missing.
        ValueError: If ``host`` is None and no such launcher has started the process.
    """

    on_host = False

    def __init__(self, host: Group | None = None, communicator: Any = None):
        if communicator is None:
            communicator = _met(*_launched()) if host is None else _introduced(host)
        self.communicator, (self._core, self._bindings) = communicator, _nccl()
        self._byte = int(self._core.NcclDataType.UINT8)  # NCCL moves any dtype so
        self.rank, self.size = communicator.rank, communicator.nranks
        self._host = HostArrays(self) if host is None else host
        self._side, self._is_grouped = SideStream(self.rank, self.size), False
        #: The last arguments of each function of NCCL.
        self._ends = self._bindings.Comm(communicator.ptr), int(self._side.handle)

    @property
    def host(self) -> Group:
        """See :attr:`Group.host`."""
        return self._host

    @contextmanager
    def together(self) -> Iterator[None]:
        """See :meth:`Group.together`."""
        between_launches(self._core.group_start)
        self._is_grouped = True
        try:
            yield
        finally:
            self._is_grouped = False
            between_launches(partial(self._side.watched, self._core.group_end))

    def _begin(self, name: str, arrays: tuple[Any, ...], *numbers: int) -> Transfer:
        """Call a function of NCCL that takes addresses, numbers, the communicator and a stream.

        These are nccl4py's bindings to C.  The methods of its communicator ask the driver on which device
        each array lies, and for memory from a pool, the driver always returns 0 (CUDA 13.0).
        """
        function, is_grouped = getattr(self._bindings, name), self._is_grouped

        def begin(*addresses: int) -> None:
            self._side.follow()
            run = partial(function, *addresses, *numbers, *self._ends)
            if is_grouped:
                run()
            else:
                self._side.watched(run)

        between_launches(begin, *arrays)
        return _Queued(self._side, *arrays)

    def _kind(self, array: Any) -> int:
        """Return NCCL's number of an array's dtype."""
        return int(self._core.NcclDataType(array.dtype))

    def send(self, array: Any, to: int) -> Transfer:
        """See :meth:`Group.send`."""
        self.check_rank("to", to)
        return self._begin("send", (array,), array.nbytes, self._byte, to)

    def receive(self, array: Any, source: int) -> Transfer:
        """See :meth:`Group.receive`."""
        self.check_rank("source", source)
        return self._begin("recv", (array,), array.nbytes, self._byte, source)

    def all_reduce(self, array: Any, operation: str = "sum") -> Transfer:
        """See :meth:`Group.all_reduce`."""
        if operation not in REDUCTIONS:
            raise ValueError(f"operation must be one of {REDUCTIONS}, got {operation!r}")
        reduction = "AVG" if operation == "mean" else operation.upper()
        about = self._kind(array), int(getattr(self._core, reduction))
        return self._begin("all_reduce", (array, array), array.size, *about)

    def all_gather(self, array: Any, out: Any) -> Transfer:
        """See :meth:`Group.all_gather`."""
        return self._begin("all_gather", (array, out), array.nbytes, self._byte)

    def reduce_scatter(self, array: Any, out: Any) -> Transfer:
        """See :meth:`Group.reduce_scatter`."""
        about = self._kind(out), int(self._core.SUM)
        return self._begin("reduce_scatter", (array, out), out.size, *about)

    def all_to_all(self, array: Any, out: Any) -> Transfer:
        """See :meth:`Group.all_to_all`."""
        return self._begin("allto_all", (array, out), array.nbytes // self.size, self._byte)

    def broadcast(self, array: Any, root: int = 0) -> Transfer:
        """See :meth:`Group.broadcast`."""
        self.check_rank("root", root)
        return self._begin("broadcast", (array, array), array.nbytes, self._byte, root)

    def barrier(self) -> None:
        """See :meth:`Group.barrier`; devices may still have work to do."""
        self._host.barrier()

    def split(self, color: int) -> NcclGroup:
        """See :meth:`Group.split`."""
        host = None if isinstance(self._host, HostArrays) else self._host.split(color)
        return NcclGroup(host, self.communicator.split(color, self.rank))

    def abort(self, reason: str) -> NoReturn:
        """See :meth:`Group.abort`."""
        self._host.abort(reason)


def on_devices(host: MPIGroup) -> Group:
    """Return a group with a CUDA device for each rank, or ``host`` if devices or NCCL are missing.

    Each rank selects the device whose number is the index of the rank on its machine.
    """
    number, size = host.place_on_machine()
    has_own = np.array([find_spec("nccl") is not None and len(cuda.gpus) >= size], np.int64)
    host.all_reduce(has_own, "min").wait()
    if not has_own[0]:
        return host
    cuda.select_device(number)
    return NcclGroup(host)
