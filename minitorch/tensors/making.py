"""Tensor methods that make tensors like this one, and its array for the kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends.elements import as_dtype, as_element, checked_shape
from ..tensor_data import Ints, TensorData, UserShape

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..backends.tensor_protocol import TensorLike as _Tensor
else:
    _Tensor = object


class Making(_Tensor):
    """Tensors like this one, and arrays for the kernels; :class:`minitorch.Tensor` inherits from it."""

    def empty(self, shape: UserShape, dtype: Any = None) -> Self:
        """Return an uninitialised tensor on this backend, of this dtype unless one is given."""
        return self._allocated(self.backend.loops.allocate, shape, dtype)

    def full(self, shape: UserShape, value: float, dtype: Any = None) -> Self:
        """Return a tensor of equal elements on this backend, of this dtype unless one is given."""
        ops, dtype = self.backend.loops, self.dtype if dtype is None else as_dtype(dtype)
        value = as_element(value, dtype)
        shape = checked_shape(shape)
        return self._allocated(lambda size, dtype: ops.filled(size, value, dtype), shape, dtype)

    def _allocated(self, allocate: Any, shape: UserShape, dtype: Any) -> Self:
        shape, dtype = tuple(shape), np.dtype(self.dtype if dtype is None else dtype)
        return self._new(TensorData.fresh(allocate(math.prod(shape), dtype), shape))

    def zeros(self, shape: UserShape | None = None) -> Self:
        """Return zeros on this backend, of this shape unless one is given."""
        return self.full(self.shape if shape is None else shape, 0.0)

    def array(self) -> Any:  # beyond module 4
        """Return the elements as an array for the kernels, a view on the tensor's device."""
        data = self._tensor
        return self.backend.memory.view(data._storage, data.shape, data.strides)

    def wrap(self, array: Any) -> Self:  # beyond module 4
        """Return a constant tensor on this backend around a contiguous array from a kernel."""
        storage, strides = self.backend.memory.flat(array)
        return self._new(TensorData.fresh(storage, tuple(array.shape), strides))

    def on(self, storage: Any, shape: Ints, strides: Ints | None) -> Self:  # beyond module 4
        """Return a constant tensor on this backend around a flat storage from a kernel."""
        return self._new(TensorData.fresh(storage, shape, strides))
