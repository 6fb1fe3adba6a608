"""Tensor methods that convert to another backend or dtype, and what an operator is given to a tensor."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import shown
from kernels.runtime.dtypes import acc_dtype, is_floating, is_half, rounded

from ..backends.dtype_promotion import result_dtype
from ..backends.elements import NUMBERS, as_float, dtype_of
from ..cuda_ops import CudaBackend
from ..fast_ops import FastBackend
from ..functions.base import not_a_tensor
from ..tensor_data import TensorData, is_device_storage
from ..tensor_functions import To
from ..tensor_ops import TensorBackend, TensorOps

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..backends.tensor_protocol import TensorLike as _Tensor
else:
    _Tensor = object


@lru_cache(maxsize=256)
def constant(ops: type[TensorOps], value: str, dtype: np.dtype[Any]) -> TensorData:
    """Return a cached constant of one element; on a device each new one would cost a launch.

    Args:
        ops: The operations of the backend.
        value: The number in the form of ``float.hex``, because -0.0 and 0.0 are equal but not the same.
        dtype: Dtype of the other operand.  The constant for a 16-bit tensor is float32 and does not widen
            the result.
    """
    data = TensorData(ops.filled(1, float.fromhex(value), acc_dtype(dtype)), (1,))
    data.is_number = is_half(dtype)
    return data


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

    def cpu(self) -> Self:  # beyond module 2
        """Return the tensor on the host: itself if it is there, else a copy on the fast backend."""
        return self.to(FastBackend) if self.backend.cuda else self

    def cuda(self) -> Self:  # beyond module 2
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

    def _type_(self, backend: TensorBackend) -> None:
        """Move the tensor itself to another backend."""
        # New data where it must move: other tensors may share the old data.
        self._tensor = self._converted(backend, self.dtype)._tensor
        self.backend = backend

    def _ensure_tensor(self, b: Any) -> Any:
        """Turn a number into a tensor of one element; give a tensor this backend.

        Only single elements move between the host and a device: larger implicit copies at each operation
        would go unnoticed.  On the host, the right operand takes the backend of the left one, as in the
        published course, except that nothing moves from the fast backend to the simple one.
        """
        if isinstance(b, Conversions):
            if b.backend is not self.backend:
                if b.backend.cuda != self.backend.cuda and not (self.backend.cuda and b.size == 1):
                    places = ("the host", "the CUDA device")
                    raise TypeError(
                        f"the operands are on two devices: this one, of shape {self.shape}, is on "
                        f"{places[self.backend.cuda]}, and the other, of shape {b.shape}, is on "
                        f"{places[b.backend.cuda]}; move one of them with cuda() or cpu()"
                    )
                if b.backend.kind.is_compiled and not self.backend.kind.is_compiled:
                    raise TypeError(
                        f"the left operand is on {self.backend.kind.__name__}, plain Python loops, and "
                        f"the right one on {b.backend.kind.__name__}; create both with "
                        "backend=minitorch.FastBackend, or convert one with to(minitorch.FastBackend)"
                    )
                b._type_(self.backend)
            return b
        if isinstance(b, NUMBERS):
            return self._new(constant(self.backend.loops, as_float(b).hex(), result_dtype(self)))
        raise TypeError(f"the other operand must be a tensor or a number, got {not_a_tensor(b)}")
