"""Functions that move elements by index, cumulative sums, and choices between two tensors.

The gradient of a gather is a scatter-add and vice versa.  The gradient of a cumulative sum is a cumulative
sum in the other direction.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernels.common.arguments import as_host_array
from kernels.runtime.dtypes import acc_dtype, is_floating

from ..autodiff import Context
from ..backends.tensor_protocol import AnyTensor
from ..backends.tensor_protocol import TensorLike as Tensor
from ..tensor_data import Ints, TensorData
from .base import Function, is_tensor
from .kernel_arrays import rounded

INT64 = np.dtype(np.int64)


# -- checks ------------------------------------------------------------------------------------


def constant_like(like: AnyTensor, array: Any) -> AnyTensor:
    """Return an array of the host as a constant on the backend of a tensor."""
    memory = like.f.memory
    return like.wrap(memory.bring(np.ascontiguousarray(array)))


def table_like(like: AnyTensor, array: Any) -> AnyTensor:
    """Return a small array that many calls read, as :func:`constant_like`: a device gets it once."""
    memory = like.f.memory
    return like.wrap(memory.constant(np.ascontiguousarray(array)))


def as_index(like: Tensor, index: Any, dim: int, limit: int) -> Tensor:
    """Return indices as an int64 tensor on the backend of ``like``; bounds are checked on the host.

    Args:
        like: What is indexed, or what is added up.
        index: An integer tensor, array or list with as many dimensions as ``like``; beside ``dim``, each
            size is that of ``like`` or 1.
        dim: The dimension that is indexed.
        limit: One more than the largest index allowed.

    Raises:
        TypeError: If they are not integers, or are on a different backend.
        ValueError: If the shape does not fit, or an index is out of bounds.
    """
    if is_tensor(index):
        if index.backend.kind is not like.backend.kind:
            raise TypeError(
                f"index must be on the backend of the tensor, {like.backend.kind.__name__}, got "
                f"{index.backend.kind.__name__}; move it with Tensor.to(backend)"
            )
        values = index.to_numpy()
    else:
        values = as_host_array("index", index)
    if values.dtype.kind not in "iu":
        raise TypeError(
            f"index must hold integers, got {values.dtype}; pass an integer array, or convert a tensor "
            "with to(numpy.int64)"
        )
    others = zip(values.shape, like.shape, strict=False)
    fits = all(i == dim or size in (1, own) for i, (size, own) in enumerate(others))
    if values.ndim != like.dims or not fits:
        wanted = (*like.shape[:dim], "any", *like.shape[dim + 1 :])
        raise ValueError(
            f"an index along dimension {dim} of shape {like.shape} must have shape "
            f"({', '.join(map(str, wanted))}), or 1 in place of a size, got {values.shape}; "
            "add dimensions of size 1 with view"
        )
    if values.size and not (values.min() >= 0 and values.max() < limit):
        raise ValueError(
            f"indices along dimension {dim} must be from 0 to {limit - 1}, got {values.min()} to "
            f"{values.max()}"
        )
    if is_tensor(index):
        return index if index.dtype == INT64 else index._converted(index.backend, INT64)
    return constant_like(like, values.astype(INT64))


# -- layouts -----------------------------------------------------------------------------------


def _cube(t: Tensor, dim: int, dtype: Any) -> Any:
    """Return a tensor as a contiguous array (outer, size of ``dim``, inner) of a dtype."""
    if dtype != t.dtype or not t._tensor.is_contiguous():
        t = t.f.id_map(t, t.empty(t.shape, dtype))
    outer, inner = math.prod(t.shape[:dim]), math.prod(t.shape[dim + 1 :])
    return _viewed(t, (outer, t.shape[dim], inner)).array()


def _sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that elements are added up, or compared, in."""
    return acc_dtype(dtype) if is_floating(dtype) else INT64


def _viewed(t: AnyTensor, shape: Ints) -> AnyTensor:
    """View a contiguous tensor in a different shape, without history."""
    return t._new(TensorData(t._tensor._storage, shape))


def _moved(t: AnyTensor, dim: int, to: int) -> AnyTensor:
    """View a tensor with one dimension moved to a different place, without history."""
    order = [i for i in range(t.dims) if i != dim]
    order.insert(to, dim)
    return t._new(t._tensor.permute(*order))


def _expanded(t: AnyTensor, shape: Ints) -> AnyTensor:
    """Repeat a tensor to a shape, without history."""
    return t if t.shape == shape else t.f.id_map(t, t.empty(shape))


def _index_rows(index: Tensor, lead: Ints) -> Any:
    """Return an index whose trailing sizes are 1 as an array (outer, m), or (1, m) for every row."""
    dim = len(lead)
    if math.prod(index.shape[:dim]) != 1:
        index = _expanded(index, (*lead, *index.shape[dim:]))
    index = index.contiguous()
    count = index.shape[dim]
    rows = index.size // count if count else math.prod(index.shape[:dim])
    return _viewed(index, (rows, count)).array()


def _is_across(index: Tensor, dim: int) -> bool:
    """Tell whether each index serves all elements behind its dimension."""
    return all(size == 1 for size in index.shape[dim + 1 :])


def _laid(t: AnyTensor, index: AnyTensor, dim: int) -> tuple[AnyTensor, AnyTensor]:
    """Return a tensor and its index, expanded, with the indexed dimension last."""
    full = _expanded(index, (*t.shape[:dim], index.shape[dim], *t.shape[dim + 1 :]))
    return _moved(t, dim, t.dims - 1), _moved(full, dim, t.dims - 1)


def gathered(a: AnyTensor, dim: int, index: AnyTensor, missing: int = 0) -> AnyTensor:
    """Pick elements along ``dim``, or ``missing`` where the index is -1; see :class:`Gather`."""
    if not _is_across(index, dim):
        return _moved(gathered(*_last(*_laid(a, index, dim)), missing), a.dims - 1, dim)
    rows = _index_rows(index, a.shape[:dim])
    out = a.f.indexing.gather(_cube(a, dim, a.dtype), rows, missing)
    shape = (*a.shape[:dim], index.shape[dim], *a.shape[dim + 1 :])
    return _viewed(a.wrap(out), shape)


def added(source: AnyTensor, dim: int, index: AnyTensor, size: int) -> AnyTensor:
    """Add elements up along ``dim``; see :class:`ScatterAdd`."""
    if not _is_across(index, dim):
        source_, dim_, index_ = _last(*_laid(source, index, dim))
        return _moved(added(source_, dim_, index_, size), source.dims - 1, dim)
    rows = _index_rows(index, source.shape[:dim])
    out = source.f.indexing.scatter_add(_cube(source, dim, _sum_dtype(source.dtype)), rows, size)
    return _viewed(_result(source, out), (*source.shape[:dim], size, *source.shape[dim + 1 :]))


def inverted(order: AnyTensor) -> AnyTensor:
    """Return the inverse of permutations along the last dimension, int64."""
    order = order.contiguous()
    rows = _viewed(order, (math.prod(order.shape[:-1]), order.shape[-1])).array()
    return _viewed(order.wrap(order.f.indexing.invert(rows)), order.shape)


def _last(t: AnyTensor, index: AnyTensor) -> tuple[AnyTensor, int, AnyTensor]:
    return t, t.dims - 1, index


def _result(like: AnyTensor, array: Any) -> AnyTensor:
    """Return a computed array as a tensor of the dtype of ``like``; integers need no rounding."""
    return rounded(like, array) if is_floating(like.dtype) else like.wrap(array)


def argsorted(a: AnyTensor, dim: int) -> AnyTensor:
    """Return the int64 places that sort ``a`` along ``dim``: stable, ascending, NaN last."""
    last = _moved(a, dim, a.dims - 1)
    rows = _cube(last, last.dims - 1, _sum_dtype(a.dtype))  # (rows, n, 1)
    flat = a.wrap(rows)
    matrix = _viewed(flat, (rows.shape[0], rows.shape[1])).array()
    _, order = a.f.indexing.sort(matrix)
    return _moved(_viewed(a.wrap(order), last.shape), a.dims - 1, dim)


def summed_up(a: AnyTensor, dim: int, exclusive: bool, reverse: bool) -> AnyTensor:
    """Add up along ``dim``; see :class:`CumSum`."""
    sums = a.f.indexing.cumsum(_cube(a, dim, _sum_dtype(a.dtype)), exclusive, reverse)
    return _viewed(_result(a, sums), a.shape)


# -- functions ---------------------------------------------------------------------------------


class Gather(Function):
    """Elements picked along one dimension."""

    is_multilinear = True

    @staticmethod
    def forward(ctx: Context, a: Tensor, dim: int, index: Tensor) -> Tensor:
        """Return out[…, j, …] = a[…, index[…, j, …], …]; see :func:`as_index`."""
        ctx.save_for_backward(dim, index, a.shape[dim])
        return gathered(a, dim, index)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, None, None]:
        """Add up the gradients at the positions from which the elements came."""
        dim, index, size = ctx.saved_values
        return added(grad_output, dim, index, size), None, None


class Regroup(Function):
    """Elements picked along one dimension, where the uses of each element are known."""

    is_multilinear = True

    @staticmethod
    def forward(
        ctx: Context, a: Tensor, dim: int, index: Tensor, uses: tuple[Tensor, ...]
    ) -> Tensor:
        """Return what :class:`Gather` does.

        Args:
            ctx: Keeps ``uses``.
            a: Any shape.
            dim: Of which elements are picked.
            index: As for :func:`gathered`.
            uses: Indices into the result, one for each element of ``a`` along ``dim``; -1 for none.  The
                gradient of a pick that they leave out is lost.
        """
        ctx.save_for_backward(dim, uses)
        return gathered(a, dim, index)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        """Pick the gradients of each element's uses, which takes no sorting, and add them up."""
        dim, (first, *others) = ctx.saved_values
        total = gathered(grad_output, dim, first)
        for index in others:
            total = total.f.add_zip(total, gathered(grad_output, dim, index))
        return total, None, None, None


class ScatterAdd(Function):
    """Elements added up at places along one dimension."""

    is_multilinear = True

    @staticmethod
    def forward(ctx: Context, source: Tensor, dim: int, index: Tensor, size: int) -> Tensor:
        """Return out[…, t, …] = Σ source[…, j, …] over the j with index[…, j, …] = t, for t < size."""
        ctx.save_for_backward(dim, index)
        return added(source, dim, index, size)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        """Pick each element's gradient at the position to which it was added."""
        dim, index = ctx.saved_values
        return gathered(grad_output, dim, index), None, None, None


class CumSum(Function):
    """The sum of an element and all before it along one dimension."""

    is_multilinear = True

    @staticmethod
    def forward(ctx: Context, a: Tensor, dim: int, exclusive: bool, reverse: bool) -> Tensor:
        """Compute the cumulative sum, without the element itself if exclusive, from the end if reverse."""
        ctx.save_for_backward(dim, exclusive, reverse)
        return summed_up(a, dim, exclusive, reverse)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        """Add up the gradients from the other end, because an element is in every sum that follows."""
        dim, exclusive, reverse = ctx.saved_values
        return summed_up(grad_output, dim, exclusive, not reverse), None, None, None


class Elu(Function):
    """a where it is positive, else e^a - 1."""

    is_symmetric = True

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        """Apply to each element."""
        ctx.save_for_backward(a)
        return a.f.elu_map(a)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        """Multiply by 1 where a is positive, else by e^a."""
        (a,) = ctx.saved_values
        return grad_output.f.elu_back_zip(a, grad_output)

    @staticmethod
    def composed(_: Context, a: Any) -> Any:
        """Choose, with an exponent that cannot overflow."""
        return a.where(a > 0.0, (-(-a).relu()).exp() - 1.0)


class ExpDifference(Function):
    """e^(a - b) in a dtype; b, a shift that cancels later such as a maximum, has no gradient."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor, dtype: Any) -> Tensor:
        """Apply to each element, in one pass."""
        out = a.f.exp_difference_zip(a, b, dtype)
        ctx.save_for_backward(out, a.dtype)
        return out

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, None, None]:
        """Multiply by e^(a - b)."""
        out, dtype = ctx.saved_values
        return grad_output.f.mul_zip(out, grad_output, dtype), None, None

    @staticmethod
    def composed(_: Context, a: Any, b: Any, dtype: Any) -> Any:
        """Subtract, then apply e^x."""
        return (a - b.detach()).exp().to(dtype)


class Where(Function):
    """a where a condition is not 0, else b."""

    @staticmethod
    def forward(ctx: Context, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Choose elements; infinity and NaN in an element that is not chosen have no effect."""
        ctx.save_for_backward(condition)
        f = a.f
        return f.add_zip(f.keep_zip(condition, a), f.drop_zip(condition, b))

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[None, Tensor, Tensor]:
        """Pass the gradient on to the tensor that was chosen."""
        (condition,) = ctx.saved_values
        f = grad_output.f
        return None, f.keep_zip(condition, grad_output), f.drop_zip(condition, grad_output)


def as_condition(like: AnyTensor, condition: Any) -> AnyTensor:
    """Return a condition as a tensor of the backend and dtype of ``like``.

    Raises:
        TypeError: If it is neither a tensor nor an array of booleans.
    """
    if not is_tensor(condition):
        array = as_host_array("condition", condition)
        if array.dtype != np.bool_:
            raise TypeError(
                f"condition must be a tensor or an array of booleans, got {array.dtype}; compare it first"
            )
        condition = constant_like(like, array)
    condition = like._ensure_tensor(condition)
    # In another dtype, it would decide on the dtype of the result.
    same = condition.dtype == like.dtype
    return condition if same else condition._converted(like.backend, like.dtype)


def where(condition: Any, a: Tensor, b: Tensor) -> Any:
    """Choose between two tensors; see ``Tensor.where``."""
    return Where.apply(as_condition(a, condition), a, b)
