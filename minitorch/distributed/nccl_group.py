"""Groups over NCCL, for tensors on CUDA devices: one process a device, which must be the current one.

Operations run on a stream of their own, behind the kernels launched before them and beside those that
follow.  :meth:`Transfer.wait` puts the kernels launched after it behind them; the host does not wait.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NoReturn

import numpy as np

from kernels.runtime.targets import cuda, driver

from .group import REDUCTIONS, Group, Transfer
from .host_arrays import HostArrays
from .mpi import MPIGroup

#: What launchers such as ``torchrun`` set for each process.
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Where the ranks meet; NCCL reads it.
MEETING_PLACE = "NCCL_COMM_ID"


def _nccl() -> Any:
    """Return the module of nccl4py."""
    try:
        from nccl import core
    except ImportError as error:
        raise ImportError(
            f"NcclGroup needs nccl4py and NCCL ({error}); install both with "
            "pip install 'minitorch-flash[mpi,nccl]'"
        ) from error
    return core


class _Bytes:
    """The memory of a contiguous array as bytes: NCCL moves any dtype so."""

    def __init__(self, array: Any):
        about = array.__cuda_array_interface__
        size = math.prod(about["shape"]) * array.dtype.itemsize
        self.array = array  # keeps its memory
        self.__cuda_array_interface__ = {
            **about,
            "shape": (size,),
            "typestr": "|u1",
            "strides": None,
        }


class _Side:
    """A stream beside the default one, on which kernels run."""

    def __init__(self) -> None:
        self.handle = self._made(
            driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        )
        none = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self._event = self._made(driver.cuEventCreate(none))
        self._default = driver.CUstream(0)

    def follow(self) -> None:
        """Put what follows on this stream behind what has been launched on the default one."""
        self._order(self._default, self.handle)

    def lead(self) -> None:
        """Put what follows on the default stream behind what is on this one."""
        self._order(self.handle, self._default)

    def _order(self, first: Any, then: Any) -> None:
        self._made(driver.cuEventRecord(self._event, first))
        self._made(driver.cuStreamWaitEvent(then, self._event, 0))

    @staticmethod
    def _made(found: Any) -> Any:
        error, *results = found
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(
                f"the CUDA driver could not order NCCL's transfers: {error.name}; make the device of "
                "this process the current one before its NcclGroup"
            )
        return results[0] if results else None


class _Queued:
    """An operation that is on its way; its arrays live until it is waited for."""

    def __init__(self, side: _Side, *arrays: Any):
        self._side, self._arrays = side, arrays

    def wait(self) -> None:
        """Put later kernels behind it."""
        if self._arrays:
            self._side.lead()
            self._arrays = ()


def _launched() -> tuple[int, int, str]:
    """Return rank and number of the processes that a launcher has started, and where they meet.

    Raises:
        ValueError: If it has not set its variables.
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
    core, before = _nccl(), os.environ.get(MEETING_PLACE)
    os.environ[MEETING_PLACE] = place
    try:
        return core.Communicator.init(size, rank, core.get_unique_id())
    finally:
        del os.environ[MEETING_PLACE]
        if before is not None:
            os.environ[MEETING_PLACE] = before


def _introduced(host: Group) -> Any:
    """Return the communicator of the ranks of another group."""
    core = _nccl()
    own = core.get_unique_id(empty=host.rank != 0)
    identifier = np.frombuffer(own.as_bytes, np.uint8).copy()
    host.broadcast(identifier).wait()
    shared = core.UniqueId.from_bytes(identifier.tobytes())
    return core.Communicator.init(host.size, host.rank, shared)


class NcclGroup(Group):
    """Ranks whose arrays lie on the current CUDA device of each.

    Args:
        host: A group over MPI, by which the ranks agree on an identifier and exchange host arrays; when
            None, the ranks are the processes of a launcher such as ``torchrun``.
        communicator: Of the same ranks; a new one when None.

    Raises:
        ImportError: If nccl4py or NCCL is missing.
        ValueError: If there is neither a group nor such a launcher.
    """

    on_host = False

    def __init__(self, host: Group | None = None, communicator: Any = None):
        if communicator is None:
            communicator = _met(*_launched()) if host is None else _introduced(host)
        self.communicator, self._core = communicator, _nccl()
        self.rank, self.size = communicator.rank, communicator.nranks
        self._host = HostArrays(self) if host is None else host
        self._side = _Side()

    @property
    def host(self) -> Group:
        """See :attr:`Group.host`."""
        return self._host

    def together(self) -> Any:
        """See :meth:`Group.together`."""
        return self._core.group()

    def _begin(self, run: Callable[..., None], arrays: tuple[Any, ...], *about: Any) -> Transfer:
        self._side.follow()
        run(*arrays, *about, stream=int(self._side.handle))
        return _Queued(self._side, *arrays)

    def send(self, array: Any, to: int) -> Transfer:
        """See :meth:`Group.send`."""
        self.check_rank("to", to)
        return self._begin(self.communicator.send, (_Bytes(array),), to)

    def receive(self, array: Any, source: int) -> Transfer:
        """See :meth:`Group.receive`."""
        self.check_rank("source", source)
        return self._begin(self.communicator.recv, (_Bytes(array),), source)

    def all_reduce(self, array: Any, operation: str = "sum") -> Transfer:
        """See :meth:`Group.all_reduce`."""
        if operation not in REDUCTIONS:
            raise ValueError(f"operation must be one of {REDUCTIONS}, got {operation!r}")
        kind = getattr(self._core, operation.upper())
        return self._begin(self.communicator.allreduce, (array, array), kind)

    def all_gather(self, array: Any, out: Any) -> Transfer:
        """See :meth:`Group.all_gather`."""
        return self._begin(self.communicator.allgather, (_Bytes(array), _Bytes(out)))

    def reduce_scatter(self, array: Any, out: Any) -> Transfer:
        """See :meth:`Group.reduce_scatter`."""
        return self._begin(self.communicator.reduce_scatter, (array, out), self._core.SUM)

    def all_to_all(self, array: Any, out: Any) -> Transfer:
        """See :meth:`Group.all_to_all`."""
        return self._begin(self.communicator.alltoall, (_Bytes(array), _Bytes(out)))

    def broadcast(self, array: Any, root: int = 0) -> Transfer:
        """See :meth:`Group.broadcast`."""
        self.check_rank("root", root)
        own = _Bytes(array)
        return self._begin(self.communicator.broadcast, (own, own), root)

    def barrier(self) -> None:
        """See :meth:`Group.barrier`; devices may still be behind."""
        self._host.barrier()

    def split(self, color: int) -> NcclGroup:
        """See :meth:`Group.split`."""
        host = None if isinstance(self._host, HostArrays) else self._host.split(color)
        return NcclGroup(host, self.communicator.split(color, self.rank))

    def abort(self, reason: str) -> NoReturn:
        """See :meth:`Group.abort`."""
        self._host.abort(reason)


def on_devices(host: MPIGroup) -> Group:
    """Return the ranks with a CUDA device each, or the group itself if there are too few, or no NCCL.

    A rank selects the device of its number on its machine.
    """
    number, size = host.place_on_machine()
    has_own = np.array([find_spec("nccl") is not None and len(cuda.gpus) >= size], np.int64)
    host.all_reduce(has_own, "min").wait()
    if not has_own[0]:
        return host
    cuda.select_device(number)
    return NcclGroup(host)
