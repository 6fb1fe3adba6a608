"""The interface of groups of ranks that exchange arrays, for any engine that moves the arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, NoReturn, Protocol

#: Names of the reductions over the ranks.
REDUCTIONS = ("sum", "mean", "max", "min")


class Transfer(Protocol):
    """An operation that has begun.  Its arrays must not be read or changed before it is over."""

    def wait(self) -> None:
        """Return when the operation is over."""
        ...


class Group(ABC):
    """Ranks that exchange arrays.

    ``send``, ``receive``, ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` and
    ``broadcast`` begin an operation and return a :class:`Transfer` at once.  The last five of these, and
    ``barrier`` and ``split``, are collective: all ranks of the group must call them in the same order.
    Arrays must be contiguous, and the arrays of one operation have the same shape and dtype on all ranks.

    Attributes:
        rank: Number of this process in the group, from 0.
        size: Number of ranks.
        on_host: Whether arrays are NumPy arrays; otherwise they lie on a CUDA device.
    """

    rank: int
    size: int
    on_host: bool

    @property
    def host(self) -> Group:
        """The group of the same ranks for arrays on the host."""
        return self

    def together(self) -> AbstractContextManager[Any]:
        """Return a context whose sends and receives begin together, at the end of the context.

        A rank that both sends and receives must begin both operations in one context.  Otherwise, a device
        may run the two operations one after the other, and all ranks may wait for each other.
        """
        return nullcontext()

    @abstractmethod
    def send(self, array: Any, to: int) -> Transfer:
        """Send an array to a rank, which must receive it; messages between two ranks keep their order."""

    @abstractmethod
    def receive(self, array: Any, source: int) -> Transfer:
        """Fill an array with the next array that a rank sends."""

    @abstractmethod
    def all_reduce(self, array: Any, operation: str = "sum") -> Transfer:
        """Replace an array by the sum of the arrays of all ranks; every rank gets the same bits.

        Args:
            array: float32, float64 or integers; no integers for a mean.
            operation: "sum", "mean", "max" or "min".
        """

    @abstractmethod
    def all_gather(self, array: Any, out: Any) -> Transfer:
        """Fill ``out``, (size, …), with the arrays of all ranks."""

    @abstractmethod
    def reduce_scatter(self, array: Any, out: Any) -> Transfer:
        """Fill ``out`` with the sum of ``array[rank]`` over all ranks; ``rank`` is that of the caller.

        Args:
            array: (size, …), float32, float64 or integers.
            out: (…).
        """

    @abstractmethod
    def all_to_all(self, array: Any, out: Any) -> Transfer:
        """Fill ``out[i]`` with row ``rank`` of the array of rank i, where ``rank`` is the caller's own.

        Both arrays have the shape (size, …).
        """

    @abstractmethod
    def broadcast(self, array: Any, root: int = 0) -> Transfer:
        """Fill the arrays of all ranks with the array of rank ``root``."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks have called this method."""

    @abstractmethod
    def split(self, color: int) -> Group:
        """Return the group of the ranks that pass the same color, in their order in this group."""

    @abstractmethod
    def abort(self, reason: str) -> NoReturn:
        """End all processes that were launched together; print one line that names this rank."""
        raise SystemExit(reason)

    def check_rank(self, name: str, rank: int) -> None:
        """Check that an argument is a rank of the group.

        Raises:
            ValueError: If it is not; the message names the argument.
        """
        if not 0 <= rank < self.size:
            raise ValueError(
                f"{name} must be a rank from 0 to {self.size - 1}, got {rank}; the group has "
                f"{self.size} ranks"
            )


class Grid(NamedTuple):
    """The two groups of a rank in a grid.

    Attributes:
        data: The ranks that hold the same part of different sequences, for data parallel training.
        ring: The ranks that share the same sequences, each with its part, for ring attention.
    """

    data: Group
    ring: Group


def grid(group: Group, data: int, ring: int) -> Grid:
    """Arrange the ranks in ``data`` rings of ``ring`` ranks each; every rank must call this function.

    Args:
        group: All ranks.
        data: Number of rings.
        ring: Number of ranks that share a sequence.

    Raises:
        ValueError: If the group does not have data x ring ranks.
    """
    if min(data, ring) < 1 or data * ring != group.size:
        raise ValueError(
            f"a grid of {data} x {ring} needs {data * ring} ranks, the group has {group.size}; choose data "
            f"and ring whose product is {group.size}, or start another number of processes"
        )
    return Grid(data=group.split(group.rank % ring), ring=group.split(group.rank // ring))
