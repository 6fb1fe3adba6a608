"""Copy and pickle a tensor, or share its elements: DLPack and the CUDA array interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels.interop.dlpack import HOST, cuda_array_interface, dlpack_device, to_dlpack
from kernels.runtime.dtypes import BFLOAT16

from ..tensor_data import TensorData

if TYPE_CHECKING:
    from ..backends.tensor_protocol import TensorLike as _Tensor
else:
    _Tensor = object


class Lending(_Tensor):
    """The methods of :class:`minitorch.tensor.Tensor` for these protocols."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Describe the tensor for ``copy`` and ``pickle``, from which a variable of its own results.

        Raises:
            RuntimeError: If a function computed it, because the graph is not copied.
        """
        own: Any = self
        history = self.history
        if history is not None and history.last_fn is not None:
            raise RuntimeError(
                f"only leaves and constants can be copied or pickled, but this tensor of shape "
                f"{self.shape} is the result of a function that is recorded for backward; copy its detach()"
            )
        data = self._tensor
        if self.backend.cuda:
            data = TensorData(self.f.memory.to_host(data._storage), data.shape, data.strides)
        return _restored, (type(self), data, self.backend, history, own.grad, own._name)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The elements on the device, for PyTorch, CuPy and numba to read in place.

        Kernels run on the legacy default stream, which the description names, so that a reader on
        another stream waits for them.  Elements of bfloat16 are described as "<V2", two untyped
        bytes, because the protocol has no name for this dtype; DLPack has one.

        Raises:
            AttributeError: If the elements are not on a device, so that ``hasattr`` is False.
        """
        if not self.backend.cuda:
            raise AttributeError(
                f"a tensor of {self.backend.kind.__name__} is not on a CUDA device; move it with cuda()"
            )
        return cuda_array_interface(self.array())

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Share the elements with another library; no gradient flows between the two.

        Args:
            stream: The stream of the reader, on a device: None or 1 for the legacy default stream,
                where kernels run; another stream waits for them.
            max_version: The newest version of DLPack that the reader supports.
            dl_device: The device that the reader requests, which must be that of the elements.
            copy: Whether to share a copy.

        Returns:
            A DLPack capsule; the elements live until the reader releases it.

        Raises:
            BufferError: If they cannot be shared in this way.
        """
        if not self.backend.cuda and self.dtype != BFLOAT16:  # NumPy does not lend that
            asked = {"max_version": max_version, "dl_device": dl_device, "copy": copy}
            given = {name: value for name, value in asked.items() if value is not None}
            return self.to_numpy().__dlpack__(stream=stream, **given)
        here = self.__dlpack_device__()
        if dl_device is not None and tuple(dl_device) != here:
            raise BufferError(
                f"the tensor is on DLPack device {here}, but {tuple(dl_device)} was requested; move it "
                "with cpu() first"
            )
        lent = self.f.id_map(self, self.empty(self.shape)) if copy else self
        return to_dlpack(lent.array(), stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the device of the elements in DLPack's numbers: (1, 0) is the host, (2, i) CUDA."""
        return dlpack_device(self._tensor._storage) if self.backend.cuda else (HOST, 0)


def _restored(
    kind: Any, data: TensorData, backend: Any, history: Any, grad: Any, name: str | None
) -> Any:
    """Return a tensor from the description that its ``__reduce__`` returned."""
    if backend.cuda:
        data.to_cuda_()
    tensor = kind(data, history, name, backend)
    tensor.grad = grad
    return tensor
