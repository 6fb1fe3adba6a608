"""Tensor methods that convert to another backend or dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import shown
from kernels.runtime.dtypes import is_floating, rounded

from ..backends.elements import dtype_of
from ..cuda_ops import CudaBackend
from ..fast_ops import FastBackend
from ..tensor_data import TensorData, is_device_storage
from ..tensor_functions import To
from ..tensor_ops import TensorBackend

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..backends.tensor_protocol import TensorLike as _Tensor
else:
    _Tensor = object


class Conversions(_Tensor):
    """Methods of :class:`minitorch.tensor.Tensor`, which inherits them."""

    def to(self, target: TensorBackend | npt.DTypeLike) -> Self:
        """Return the tensor on a given backend, or in a given dtype; differentiable.

        Args:
            target: A backend, a dtype, or the name of a dtype: float16, bfloat16, float32, float64, or an
                integer type, whose tensors are constants and end the graph.

        Raises:
            TypeError: If the target is neither a backend nor a dtype that tensors support.
        """
        if isinstance(target, TensorBackend):
            return self if target is self.backend else To.apply(self, target, self.dtype)
        dtype = dtype_of(target)
        if dtype is None or dtype.kind == "O":  # NumPy takes any class for a dtype
            raise TypeError(
                "to needs a backend, such as minitorch.FastBackend, or a dtype, such as "
                f"numpy.float32; got {shown(target)}"
            )
        if not is_floating(dtype):
            return self._converted(self.backend, dtype)
        return self if dtype == self.dtype else To.apply(self, self.backend, dtype)

    def cpu(self) -> Self:
        """Return the tensor on the host: itself if it is there, else a copy on the fast backend."""
        return self.to(FastBackend) if self.backend.cuda else self

    def cuda(self) -> Self:
        """Return the tensor on the CUDA backend."""
        return self.to(CudaBackend)

    def _converted(self, backend: TensorBackend, dtype: Any) -> Self:
        data = self._tensor
        moves = is_device_storage(data._storage) != backend.cuda
        if dtype != data.dtype and is_floating(dtype) and backend.cuda and not moves:
            data = self.backend.id_map(self, self.empty(self.shape, dtype))._tensor
        elif dtype != data.dtype or moves:
            array = data.to_array()
            converts = dtype != array.dtype and is_floating(dtype) and is_floating(array.dtype)
            array = rounded(array, dtype) if converts else array
            array = np.ascontiguousarray(array, dtype=dtype)
            data = TensorData(array.reshape(-1), self.shape)
            if backend.cuda:
                data.to_cuda_()
        new = self._new(data)
        new.backend = backend
        return new
