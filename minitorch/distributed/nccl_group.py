"""Groups over NCCL, for tensors on CUDA devices: one process a device, which must be the current one.

Operations run on the default stream, behind the kernels launched before them and before those that follow.
What they move is therefore ready when a later kernel reads it, and the host does not wait.

No test has run this module on a GPU yet.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from .group import REDUCTIONS, Group, Transfer


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


class _Queued:
    """An operation in the order of the stream."""

    def wait(self) -> None:
        """Return at once: later kernels run behind the operation."""


class NcclGroup(Group):
    """The ranks of another group, whose arrays lie on the current CUDA device of each.

    Args:
        host: A group over MPI, by which the ranks agree on an identifier and exchange host arrays.
        communicator: Of the same ranks; a new one when None.
    """

    on_host = False

    def __init__(self, host: Group, communicator: Any = None):
        self.rank, self.size, self._host = host.rank, host.size, host
        self._core = _nccl()
        if communicator is None:
            own = self._core.get_unique_id(empty=host.rank != 0)
            identifier = np.frombuffer(own.as_bytes, np.uint8).copy()
            host.broadcast(identifier).wait()
            shared = self._core.UniqueId.from_bytes(identifier.tobytes())
            communicator = self._core.Communicator.init(host.size, host.rank, shared)
        self.communicator = communicator

    @property
    def host(self) -> Group:
        """See :attr:`Group.host`."""
        return self._host

    def together(self) -> Any:
        """See :meth:`Group.together`."""
        return self._core.group()

    def send(self, array: Any, to: int) -> Transfer:
        """See :meth:`Group.send`."""
        self.check_rank("to", to)
        self.communicator.send(array, to)
        return _Queued()

    def receive(self, array: Any, source: int) -> Transfer:
        """See :meth:`Group.receive`."""
        self.check_rank("source", source)
        self.communicator.recv(array, source)
        return _Queued()

    def all_reduce(self, array: Any, operation: str = "sum") -> Transfer:
        """See :meth:`Group.all_reduce`."""
        if operation not in REDUCTIONS:
            raise ValueError(f"operation must be one of {REDUCTIONS}, got {operation!r}")
        self.communicator.allreduce(array, array, getattr(self._core, operation.upper()))
        return _Queued()

    def all_gather(self, array: Any, out: Any) -> Transfer:
        """See :meth:`Group.all_gather`."""
        self.communicator.allgather(array, out)
        return _Queued()

    def reduce_scatter(self, array: Any, out: Any) -> Transfer:
        """See :meth:`Group.reduce_scatter`."""
        self.communicator.reduce_scatter(array, out, self._core.SUM)
        return _Queued()

    def all_to_all(self, array: Any, out: Any) -> Transfer:
        """See :meth:`Group.all_to_all`."""
        self.communicator.alltoall(array, out)
        return _Queued()

    def broadcast(self, array: Any, root: int = 0) -> Transfer:
        """See :meth:`Group.broadcast`."""
        self.check_rank("root", root)
        self.communicator.broadcast(array, array, root)
        return _Queued()

    def barrier(self) -> None:
        """See :meth:`Group.barrier`; devices may still be behind."""
        self._host.barrier()

    def split(self, color: int) -> NcclGroup:
        """See :meth:`Group.split`."""
        return NcclGroup(self._host.split(color), self.communicator.split(color, self.rank))

    def abort(self, reason: str) -> NoReturn:
        """See :meth:`Group.abort`."""
        self._host.abort(reason)
