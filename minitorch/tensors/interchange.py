"""How a tensor lends its elements to another library: DLPack and the CUDA array interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels.interop.dlpack import HOST, cuda_array_interface, dlpack_device, to_dlpack
from kernels.runtime.dtypes import BFLOAT16
from kernels.runtime.targets import IS_SIMULATOR

if TYPE_CHECKING:
    from ..backends.tensor_protocol import TensorLike as _Tensor
else:
    _Tensor = object


class Lending(_Tensor):
    """What :class:`minitorch.tensor.Tensor` has of the protocols; nothing is copied."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The elements on the device, for PyTorch, CuPy and numba to read in place.

        Kernels run on the legacy default stream, which the description names, so that a reader on
        another stream waits for them.  Elements of bfloat16 are described as "<V2", two bytes of
        anything, for the protocol has no name for them; DLPack has one.

        Raises:
            AttributeError: If they are not on a device, so that ``hasattr`` is False.
        """
        if IS_SIMULATOR or not self.backend.cuda:
            raise AttributeError(
                f"a tensor of {self.backend.ops.__name__} lies on no CUDA device; move it with cuda()"
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
        """Lend the elements to another library; no gradient flows between the two.

        Args:
            stream: Where the reader will read, on a device: None or 1 for the legacy default stream,
                where kernels run; another one waits for them.
            max_version: The newest DLPack that the reader knows.
            dl_device: Where the reader wants them: where they are.
            copy: True lends a copy.

        Returns:
            A DLPack capsule; the elements live until its reader is done with it.

        Raises:
            BufferError: If they cannot be lent so.
        """
        if not self.backend.cuda and self.dtype != BFLOAT16:  # NumPy does not lend that
            asked = {"max_version": max_version, "dl_device": dl_device, "copy": copy}
            given = {name: value for name, value in asked.items() if value is not None}
            return self.to_numpy().__dlpack__(stream=stream, **given)
        here = self.__dlpack_device__()
        if dl_device is not None and tuple(dl_device) != here:
            raise BufferError(
                f"the tensor lies on DLPack's device {here} and is wanted on {tuple(dl_device)}; move "
                "it with cpu() first"
            )
        lent = self.f.id_map(self, self.empty(self.shape)) if copy else self
        return to_dlpack(lent.array(), stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's numbers for where the elements lie: (1, 0) is the host, (2, i) CUDA."""
        return dlpack_device(self._tensor._storage) if self.backend.cuda else (HOST, 0)
