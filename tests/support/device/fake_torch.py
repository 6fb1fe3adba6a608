"""As much of PyTorch as a call on a fake device needs: tensors that are an address and a layout."""

from __future__ import annotations

import math
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

from kernels.interop.dlpack import Read
from kernels.runtime.memory import row_major_strides

#: Bytes of an element of each dtype, by its name, which stands for the dtype itself.
SIZES = {
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1,
    "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
}  # fmt: skip


class Device(NamedTuple):
    """A device."""

    type: str = "cuda"
    number: int = 0


class Tensor:
    """A tensor on device 0."""

    layout = "strided"
    device = Device()
    owner: Any = None
    is_nested = is_cpu = False

    def __init__(
        self, start: int, shape: Any, strides: Any, dtype: str, requires_grad: bool = False
    ):
        self.shape, self.dtype, self.requires_grad = tuple(shape), dtype, requires_grad
        self._start, self._strides = start, tuple(strides)

    def data_ptr(self) -> int:
        return self._start

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def element_size(self) -> int:
        return SIZES[self.dtype]

    def get_device(self) -> int:
        return 0

    def is_neg(self) -> bool:
        return False

    def resolve_neg(self) -> Tensor:
        return self

    def _is_zerotensor(self) -> bool:
        return False


Tensor.__module__ = "torch"


class FakeTorch(SimpleNamespace):
    """The module ``torch``.

    Attributes:
        stream: The current stream.
        made: Addresses of the memory that it allocated.
        is_capturing: Whether that stream is being captured for a graph.
    """

    Tensor = Tensor
    strided = "strided"
    uint8 = "uint8"

    def __init__(self) -> None:
        super().__init__(**{name: name for name in SIZES})
        self.stream, self.made, self.is_capturing = 0, list[int](), False
        self.cuda = SimpleNamespace(is_current_stream_capturing=lambda: self.is_capturing)
        self._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda number: self.stream)
        self.is_grad_enabled, self.get_num_threads = lambda: True, lambda: 1
        self.set_num_threads = lambda count: None
        self.autograd = SimpleNamespace(forward_ad=SimpleNamespace(_current_level=-1))
        self._addresses = count(1 << 50, 1 << 30)

    def empty_strided(self, shape: Any, strides: Any, dtype: Any, device: Any) -> Tensor:
        self.made.append(next(self._addresses))
        return Tensor(self.made[-1], shape, strides, dtype)

    def empty(self, size: int, dtype: Any, device: Any) -> Tensor:
        return self.empty_strided((size,), (1,), dtype, device)

    def randn(self, *shape: int, dtype: str = "float16", requires_grad: bool = False) -> Tensor:
        start = next(self._addresses)
        return Tensor(start, shape, row_major_strides(shape), dtype, requires_grad)

    def from_dlpack(self, lent: Any) -> Tensor:
        assert lent.__dlpack_device__()[0] == 2, "memory of a device"
        found = Read(lent.__dlpack__(stream=self.stream or 1)).array
        assert math.prod(found.shape)
        strides = [step // found.itemsize for step in found.strides]
        tensor = Tensor(found.ctypes.data, found.shape, strides, found.dtype.name)
        tensor.owner = found
        return tensor
