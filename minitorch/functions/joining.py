"""Join tensors along a dimension."""

from __future__ import annotations

from functools import reduce
from itertools import accumulate, pairwise
from operator import add
from typing import Any

from ..autodiff import Context
from ..backends.tensor_protocol import TensorLike as Tensor
from .base import Function
from .indexing import ScatterAdd
from .subscripts import as_table, piece, sliced


class Cat(Function):
    """Tensors one after the other along one dimension."""

    @staticmethod
    def forward(ctx: Context, dim: int, *parts: Tensor) -> Tensor:
        """Copy each tensor to its piece of a storage whose slowest dimension is ``dim``."""
        ends = [0, *accumulate(part.shape[dim] for part in parts)]
        ctx.save_for_backward(dim, ends)
        like = parts[0]
        shape = (ends[-1], *like.shape[:dim], *like.shape[dim + 1 :])
        out = like.empty(shape)
        for part, first, end in zip(parts, ends, ends[1:], strict=False):
            if part.size:
                order = (dim, *(i for i in range(part.dims) if i != dim))
                part = part._new(part._tensor.permute(*order))
                part.f.id_map(part, piece(out, 0, range(first, end)))
        back = (*range(1, dim + 1), 0, *range(dim + 1, out.dims))
        return out._new(out._tensor.permute(*back)).contiguous()

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Any, ...]:
        """Cut the gradient into the parts that belong to each tensor."""
        dim, ends = ctx.saved_values
        ranges = [range(first, end) for first, end in pairwise(ends)]
        return None, *(sliced(grad_output, dim, places) for places in ranges)

    @staticmethod
    def composed(_: Context, dim: int, *parts: Any) -> Any:
        """Add up the parts, each at its places among zeros."""
        ends = [0, *accumulate(part.shape[dim] for part in parts)]
        spread = [
            ScatterAdd.apply(part, dim, as_table(part, dim, range(first, end)), ends[-1])
            for part, (first, end) in zip(parts, pairwise(ends), strict=True)
        ]
        return reduce(add, spread)
