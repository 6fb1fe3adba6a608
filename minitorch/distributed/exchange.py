"""Tensors that travel between the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..autodiff import Context
from ..functions.base import Function
from ..functions.subscripts import piece
from ..tensor import Tensor
from ..tensor_data import TensorData
from .group import Group, Transfer
from .sequence_parts import chunks


def message(tensor: Tensor, group: Group) -> Any:
    """Return a tensor as a contiguous array that a group sends; on the host it may share memory."""
    if group.on_host:
        return np.ascontiguousarray(tensor.to_numpy())
    return tensor.contiguous().array()


def space(like: Tensor, shape: Sequence[int], group: Group) -> Any:
    """Return an uninitialised array that a group fills, of the dtype of a tensor."""
    return np.empty(shape, like.dtype) if group.on_host else like.empty(tuple(shape)).array()


def received(array: Any, like: Tensor) -> Tensor:
    """Return an array that a group has filled as a tensor on the backend of ``like``."""
    if not (isinstance(array, np.ndarray) and like.backend.cuda):
        return like.wrap(array)
    data = TensorData(array.reshape(-1), array.shape)
    data.to_cuda_()
    return Tensor(data, backend=like.backend)


class Shift:
    """A transfer of tensors to the next rank of the ring, while those of the previous rank arrive.

    Args:
        group: The ring.
        tensors: Tensors of the same shapes and dtypes on all ranks.
    """

    def __init__(self, group: Group, tensors: Sequence[Tensor]):
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        self._like = tensors[0].empty((1,))  # of the backend, without their memory
        self._spaces = [space(t, t.shape, group) for t in tensors]
        self._transfers: list[Transfer] = []
        messages = [message(t, group) for t in tensors]
        with group.together():
            for array, own in zip(self._spaces, messages, strict=True):
                self._transfers += group.receive(array, before), group.send(own, after)

    def wait(self) -> list[Tensor]:
        """Return the tensors of the previous rank."""
        for transfer in self._transfers:
            transfer.wait()
        arrays, self._spaces = self._spaces, []
        return [received(array, self._like) for array in arrays]


def circulate(
    group: Group, tensors: Sequence[Tensor], visit: Callable[[int, Sequence[Tensor]], None]
) -> None:
    """Call ``visit(rank, tensors)`` with the tensors of each rank of a ring, those of this one first.

    While it computes with the tensors of one rank, those of the next arrive.  At most these two sets are in
    memory at a time.

    Args:
        group: The ring.
        tensors: Tensors of the same shapes and dtypes on all ranks.
        visit: The function; it must keep none of the tensors.
    """
    for step in range(group.size):
        shift = Shift(group, tensors) if step < group.size - 1 else None
        visit((group.rank - step) % group.size, tensors)
        tensors = ()
        if shift is not None:
            tensors = shift.wait()


def _reordered(a: Tensor, group: Group, layout: str, to_ranks: bool) -> Tensor:
    """Copy chunks of rows, (seq, …), from the order of the sequence to that of the ranks, or back."""
    out, start = a.empty(a.shape), 0
    for rank in range(group.size):
        for chunk in chunks(a.shape[0], rank, group.size, layout):
            own = range(start, start + len(chunk))
            source, target = (chunk, own) if to_ranks else (own, chunk)
            rows: Any = piece(a, 0, source)  # rows of a contiguous tensor are one piece of it
            a.f.id_map(rows, piece(out, 0, target))
            start += len(chunk)
    return out


def _collective(
    begin: Callable[[Any, Any], Transfer], a: Tensor, shape: Sequence[int], group: Group
) -> Tensor:
    """Return the result of a collective operation on a tensor."""
    out = space(a, shape, group)
    begin(message(a, group), out).wait()
    return received(out, a)


class Gathered(Function):
    """The parts of all ranks in the order of the sequence, (seq / size, …) -> (seq, …)."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, group: Group, layout: str) -> Tensor:
        """Gather and reorder."""
        ctx.save_for_backward(group, layout)
        blocks = _collective(group.all_gather, a, (group.size, *a.shape), group)
        whole = blocks.view(group.size * a.shape[0], *a.shape[1:])
        return _reordered(whole, group, layout, to_ranks=False)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Any, ...]:
        """Add up the gradients of all ranks, each for its own part."""
        group, layout = ctx.saved_values
        rows = grad_output.shape[0] // group.size
        by_rank = _reordered(grad_output.contiguous(), group, layout, to_ranks=True)
        by_rank = by_rank.view(group.size, rows, *by_rank.shape[1:])
        # Sums of 16 bits are those of float32; the gradient becomes that of its argument's dtype.
        wide = by_rank.to(np.float32) if by_rank.dtype.itemsize == 2 else by_rank
        return _collective(group.reduce_scatter, wide, wide.shape[1:], group), None, None


def _to_heads(a: Tensor, group: Group, layout: str) -> Tensor:
    """Exchange a part of the sequence for a part of the heads, for a tensor (seq / size, …, heads, dim)."""
    rows, *lead, heads, dim = a.shape
    split = a.contiguous().view(rows, *lead, group.size, heads // group.size, dim)
    order = (split.dims - 3, *(i for i in range(split.dims) if i != split.dims - 3))
    split = split.permute(*order).contiguous()  # (size, rows, …, heads / size, dim)
    blocks = _collective(group.all_to_all, split, split.shape, group)
    whole = blocks.view(group.size * rows, *blocks.shape[2:])
    return _reordered(whole, group, layout, to_ranks=False)


def _to_sequence(a: Tensor, group: Group, layout: str) -> Tensor:
    """Undo :func:`_to_heads`."""
    seq, *lead, heads, dim = a.shape
    by_rank = _reordered(a.contiguous(), group, layout, to_ranks=True)
    split = by_rank.view(group.size, seq // group.size, *lead, heads, dim)
    blocks = _collective(group.all_to_all, split, split.shape, group)
    order = (*range(1, blocks.dims - 2), 0, blocks.dims - 2, blocks.dims - 1)
    joined = blocks.permute(*order).contiguous()  # (rows, …, size, heads, dim)
    return joined.view(seq // group.size, *lead, group.size * heads, dim)


class ToHeads(Function):
    """All rows of a share of the heads: (seq / size, …, heads, dim) -> (seq, …, heads / size, dim)."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, group: Group, layout: str) -> Tensor:
        """Exchange with all ranks."""
        ctx.save_for_backward(group, layout)
        return _to_heads(a, group, layout)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Any, ...]:
        """Exchange back."""
        return _to_sequence(grad_output, *ctx.saved_values), None, None


class ToSequence(Function):
    """The inverse of :class:`ToHeads`."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, group: Group, layout: str) -> Tensor:
        """Exchange with all ranks."""
        ctx.save_for_backward(group, layout)
        return _to_sequence(a, group, layout)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Any, ...]:
        """Exchange back."""
        return _to_heads(grad_output, *ctx.saved_values), None, None
