"""The implementation of ``x[key]``: slices, as views where possible, and one gather for all else.

A key is processed in three steps.  First, it is expanded to one entry per dimension.  Integers and slices
then narrow one dimension after the other (:class:`Slice`).  Integer arrays and masks become positions, and
``gather`` picks the elements, so that the gradient is a ``scatter_add``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernels.common.arguments import as_host_array, shown
from kernels.runtime.memory import is_dense, strides_as

from ..autodiff import Context
from ..backends.tensor_protocol import AnyTensor
from ..backends.tensor_protocol import TensorLike as Tensor
from ..tensor_data import IndexingError, Ints, TensorData
from .base import Function, is_tensor
from .indexing import Gather, added, as_index, gathered, table_like
from .views import View

EVERYTHING = slice(None)
#: Alignment in bytes of the vector loads of kernels on a device; from other addresses they would be slow.
VECTOR = 16


# -- along one dimension -----------------------------------------------------------------------


def piece(a: AnyTensor, dim: int, places: range) -> AnyTensor | None:
    """View the elements at some places along a dimension, or return None if they have gaps."""
    data, shape = a._tensor, (*a.shape[:dim], len(places), *a.shape[dim + 1 :])
    if 0 in shape or places.step != 1 or not is_dense(shape, data.strides):
        return None
    # The storage of the view begins where its first element lies.
    first, size = places.start * data.strides[dim], math.prod(shape)
    storage = a.f.memory.part(data._storage, first, first + size)
    return a._new(TensorData.fresh(storage, shape, strides_as(data.strides, shape)))


def sliced(a: AnyTensor, dim: int, places: range) -> AnyTensor:
    """Return the elements at some places along a dimension, without history.

    They share the storage of ``a`` where they are one piece of it, and are copied otherwise.
    """
    start = places.start * a._tensor.strides[dim] * a.dtype.itemsize
    if not a.backend.cuda or start % VECTOR == 0:
        view = piece(a, dim, places)
        if view is not None:
            return view
    return gathered(a, dim, as_table(a, dim, places))


def as_table(like: AnyTensor, dim: int, places: range) -> AnyTensor:
    """Return places along a dimension as an index that all other dimensions share."""
    shape = [1] * like.dims
    shape[dim] = len(places)
    return table_like(like, np.arange(places.start, places.stop, places.step).reshape(shape))


class Slice(Function):
    """Elements at equal distances along one dimension, a view where they are one piece of the storage."""

    is_multilinear = True

    @staticmethod
    def forward(ctx: Context, a: Tensor, dim: int, places: range) -> Tensor:
        """Return out[…, j, …] = a[…, places[j], …]."""
        ctx.save_for_backward(dim, places, a.shape[dim])
        return sliced(a, dim, places)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, None, None]:
        """Put the gradients at the positions from which the elements came, and zeros elsewhere."""
        dim, places, size = ctx.saved_values
        return added(grad_output, dim, as_table(grad_output, dim, places), size), None, None


# -- the key -----------------------------------------------------------------------------------


def subscript(a: Any, key: Any) -> Any:
    """Return ``a[key]``; see ``Tensor.__getitem__``."""
    entries = _spelled_out(a.shape, key if isinstance(key, tuple) else (key,))
    arrays = [entry for entry in entries if isinstance(entry, np.ndarray)]
    if not arrays:
        return _narrowed(a, entries)
    others = [entry for entry in entries if not isinstance(entry, np.ndarray)]
    if len(arrays) == 1 and arrays[0].dtype != bool and all(type(e) is slice for e in others):
        return _rows(a, entries)
    places = _places(a.shape, entries)
    flat = View.apply(a.contiguous(), (a.size,))
    index = as_index(flat, places.reshape(-1), 0, a.size)
    return View.apply(Gather.apply(flat, 0, index), places.shape)


def _spelled_out(shape: Ints, key: tuple[Any, ...]) -> list[Any]:
    """Return a key with an entry for each dimension, and None for each new one.

    Returns:
        Integers from 0 to size - 1, slices, arrays of such integers or of booleans, and None.

    Raises:
        IndexingError: If there are too many entries, or one is out of bounds.
        TypeError: If an entry is not an index.
    """
    entries = [_entry(each) for each in key]
    taken = sum(_dims_of(each) for each in entries)
    dots = [i for i, each in enumerate(entries) if each is Ellipsis]
    if taken > len(shape) or len(dots) > 1:
        raise IndexingError(
            f"index {shown(key)} has entries for {taken} dimensions and {len(dots)} times '...', but "
            f"shape {shape} has {len(shape)} dimensions; give at most one entry for each, and one '...'"
        )
    at = dots[0] if dots else len(entries)
    entries[at : at + len(dots)] = [EVERYTHING] * (len(shape) - taken)
    dim = 0
    for i, entry in enumerate(entries):
        if isinstance(entry, np.ndarray) or type(entry) is int:
            entries[i] = _in_bounds(entry, shape, dim)
        dim += _dims_of(entry)
    return entries


def _dims_of(entry: Any) -> int:
    """Return the number of dimensions that an entry of a key is for."""
    if entry is None or entry is Ellipsis:
        return 0
    return entry.ndim if isinstance(entry, np.ndarray) and entry.dtype == bool else 1


def _entry(entry: Any) -> Any:
    """Return an entry of a key as Python's or NumPy's object; bounds are not checked yet."""
    if entry is None or entry is Ellipsis or type(entry) is slice:
        return entry
    if isinstance(entry, (int, np.integer)) and not isinstance(entry, bool):
        return int(entry)
    array = as_host_array("an index", entry)
    if is_tensor(entry) and array.dtype.kind not in "iub" and ((array == 0) | (array == 1)).all():
        array = array.astype(bool)  # what a comparison of tensors returns
    if array.size == 0 and not hasattr(entry, "dtype"):
        array = array.astype(np.int64)  # an empty list
    if array.dtype.kind not in "iub" or (array.dtype == bool and array.ndim == 0):
        raise TypeError(
            f"an index is made of integers, slices, '...', None, and arrays of integers or booleans, got "
            f"{shown(entry)}; convert whole numbers in a tensor or an array to int64"
        )
    return array if array.dtype == bool else array.astype(np.int64)


def _in_bounds(entry: Any, shape: Ints, dim: int) -> Any:
    """Return an integer, or an array of them, counted from 0, and check the shape of a mask.

    Raises:
        IndexingError: If one is out of bounds, or a mask has the wrong shape.
    """
    if isinstance(entry, np.ndarray) and entry.dtype == bool:
        wanted = shape[dim : dim + entry.ndim]
        if entry.shape != wanted:
            raise IndexingError(
                f"a mask must have the shape of the dimensions that it chooses from, {wanted} of {shape}, "
                f"got {entry.shape}"
            )
        return entry if entry.ndim > 1 else np.flatnonzero(entry)
    size = shape[dim]
    outside = np.asarray(entry)[(np.asarray(entry) < -size) | (np.asarray(entry) >= size)]
    if outside.size:
        raise IndexingError(
            f"index {outside.flat[0]} is out of range for dimension {dim} of shape {shape}; entries run "
            f"from {-size} to {size - 1}"
        )
    return entry % size if size else entry


def _narrowed(a: Any, entries: list[Any]) -> Any:
    """Apply integers and slices, then drop the dimensions of integers and add those of None."""
    shape: list[int] = []
    dim = 0
    for entry in entries:
        if entry is None:
            shape.append(1)
            continue
        size = a.shape[dim]
        places = _range(entry, size) if type(entry) is slice else range(entry, entry + 1)
        if places != range(size):
            a = Slice.apply(a, dim, places)
        if type(entry) is slice:
            shape.append(len(places))
        dim += 1
    return a if a.shape == tuple(shape) else View.apply(a.contiguous(), tuple(shape))


def _range(entry: slice, size: int) -> range:
    """Return the places of a slice.

    Raises:
        TypeError: If its bounds are not integers.
        ValueError: If its step is 0.
    """
    try:
        return range(*entry.indices(size))
    except TypeError:
        raise TypeError(
            f"a slice is made of integers or None, got {entry}; read a tensor of one element with item()"
        ) from None


def _rows(a: Any, entries: list[Any]) -> Any:
    """Apply slices and one array of integers, which picks whole rows along its dimension."""
    (dim,) = [i for i, entry in enumerate(entries) if isinstance(entry, np.ndarray)]
    picks = entries[dim]
    a = _narrowed(a, [EVERYTHING if i == dim else entry for i, entry in enumerate(entries)])
    shape = [1] * a.dims
    shape[dim] = picks.size
    index = as_index(a, picks.reshape(shape), dim, a.shape[dim])
    out = Gather.apply(a, dim, index)
    return View.apply(out.contiguous(), (*a.shape[:dim], *picks.shape, *a.shape[dim + 1 :]))


def _places(shape: Ints, entries: list[Any]) -> Any:
    """Return the place, in row-major order, of each element that a key picks, by NumPy's own rules.

    Raises:
        IndexingError: If arrays do not broadcast.
    """
    places, step = 0, 1
    for dim in reversed(range(len(shape))):
        along = np.arange(shape[dim]).reshape(-1, *[1] * (len(shape) - dim - 1))
        try:
            places = places + step * np.broadcast_to(along, shape)[tuple(entries)]
        except IndexError as error:
            raise IndexingError(f"index {shown(tuple(entries))}: {error}") from None
        step *= shape[dim]
    return np.asarray(places)
