"""Read arrays of other libraries without a copy, and return results as arrays of the caller's library.

No library is imported here: an array of a library exists only where that library has been imported.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import numpy as np

from kernels.cuda.runtime.arrays import is_device_array
from kernels.cuda.runtime.repeated import VECTOR, Repeat
from kernels.interop import dlpack
from kernels.runtime.dtypes import BFLOAT16
from kernels.runtime.jit import NUM_THREADS, at_most, get_num_threads
from kernels.runtime.targets import current_device, on_device

#: What a call says to differentiation in forward mode, and to nested tensors.
NO_FORWARD_MODE = (
    "attention has no derivative in forward mode; use reverse mode, such as torch.func.vjp or jacrev, or "
    "call scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
)
NO_NESTED = (
    "kernels do not take nested tensors; pad them with torch.nested.to_padded_tensor and pass an "
    "attn_mask, or call kernels.interop.torch.flash_attention on tensors of the layout torch.jagged"
)


class Lent:
    """Lend a NumPy array, or a numba device array, to a library that reads DLPack."""

    def __init__(self, array: Any):
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's (kind of memory, number)."""
        on_host = isinstance(self._array, np.ndarray)
        return (dlpack.HOST, 0) if on_host else dlpack.dlpack_device(self._array)

    def __dlpack__(self, stream: int | None = None, **_: Any) -> Any:
        """Return a capsule; the reader's stream waits for the kernels launched so far."""
        return dlpack.to_dlpack(self._array, stream)


class Library:
    """A library whose arrays are exchanged by DLPack, such as CuPy: its module has ``from_dlpack``."""

    def __init__(self, module: Any):
        self.module = module

    def read(self, array: Any) -> Any:
        """Return an array of the library as NumPy's or numba's; see :func:`as_array`."""
        return dlpack.as_array(array)

    def result(self, array: Any) -> Any:
        """Return NumPy's or numba's array as one of the library, without a copy."""
        return self.module.from_dlpack(Lent(array))

    def context(self, array: Any) -> Any:
        """Return a context manager for a call on an array; None if it needs none."""
        return None

    def repeat(self, repeat: Repeat, starts: list[int], seed: int, like: Any) -> list[Any]:
        """Return the results of a repeated call as arrays of the library, given an operand of it."""
        return [None if x is None else self.result(x) for x in repeat.arrays(starts, seed)]


class Torch(Library):
    """PyTorch.  Its tensors are read by address, because DLPack takes longer than launching a kernel."""

    def __init__(self, module: Any):
        super().__init__(module)
        names = [
            "float16",
            "float32",
            "float64",
            "bool",
            "uint8",
            "int8",
            "int16",
            "int32",
            "int64",
        ]
        dtypes = {np.dtype(name): getattr(module, name) for name in names}
        dtypes[BFLOAT16] = module.bfloat16
        self._dtypes = {dtype.num: theirs for dtype, theirs in dtypes.items()}
        self._strings = {theirs: dtype.str for dtype, theirs in dtypes.items()}
        self._empty, self._empty_strided = module.empty, module.empty_strided
        self._records, self._threads = module.is_grad_enabled, module.get_num_threads
        self._levels = module.autograd.forward_ad
        # Numba sets the number of an OpenMP runtime that both may share when it starts its threads.
        count = module.get_num_threads()
        get_num_threads()
        module.set_num_threads(count)
        # What torch.compile's own code calls: a tenth of the time of torch.cuda.current_stream.
        self._stream = getattr(module._C, "_cuda_getCurrentRawStream", None) or (
            lambda number: module.cuda.current_stream(number).cuda_stream
        )

    def read(self, array: Any) -> Any:
        """Return a tensor as NumPy's or numba's array; see :func:`as_array`.

        One that requires grad where PyTorch records, or is on another device, raises a
        ValueError, and one that neither NumPy nor CUDA can read a TypeError.
        """
        if array.requires_grad or self._levels._current_level >= 0:
            self._check_grad(array)
            array = array.detach()
        typestr = self._strings.get(array.dtype)
        if typestr is None or array.layout is not self.module.strided:
            what = f"{array.dtype} ({array.layout})"
            raise TypeError(
                NO_NESTED
                if array.is_nested
                else "kernels take dense tensors of float16, bfloat16, float32 or float64, got "
                f"{what}; convert the tensor"
            )
        kind = array.device.type
        if kind == "cpu":
            try:
                return self._on_host(array)
            except RuntimeError:  # PyTorch computes some tensors only when they are read
                return self._on_host(_computed(array))
        if kind != "cuda":
            raise TypeError(
                f"the tensor is on device {array.device}, which neither NumPy nor CUDA can access; move it "
                "to the CPU or to a CUDA device"
            )
        array = _computed(array)
        size = array.element_size()
        described = {
            "shape": tuple(array.shape),
            "strides": tuple(step * size for step in array.stride()),
            "typestr": typestr,
            "data": (array.data_ptr(), False),
            "stream": self._current_stream(array),
        }
        return dlpack.wrapped(described, array)

    def result(self, array: Any) -> Any:
        """Return NumPy's or numba's array as a tensor, without a copy."""
        if not isinstance(array, np.ndarray):
            return self.module.from_dlpack(Lent(array))
        if array.dtype == BFLOAT16:
            return self.module.from_numpy(array.view(np.int16)).view(self.module.bfloat16)
        return self.module.from_numpy(array)

    def _on_host(self, array: Any) -> Any:
        if array.dtype is self.module.bfloat16:
            return array.view(self.module.int16).numpy().view(BFLOAT16)
        return array.numpy()

    def _check_grad(self, array: Any) -> None:
        if array.requires_grad and self._records():
            raise ValueError(
                "the tensor requires grad, but kernels on arrays record no gradients; call "
                "kernels.interop.torch.flash_attention, which PyTorch differentiates, or pass x.detach()"
            )
        if self._levels._current_level >= 0 and self._levels.unpack_dual(array).tangent is not None:
            raise NotImplementedError(NO_FORWARD_MODE)

    def describe(self, array: Any) -> tuple[Any, tuple[int, int, bool]]:
        """Return the layout of a tensor; its address, unit of alignment, and whether it is on the host.

        A tensor that requires grad where PyTorch records, or whose memory holds other numbers
        than its elements, raises a ValueError.
        """
        if array.requires_grad or self._levels._current_level >= 0:
            self._check_grad(array)
        start = array.data_ptr()
        if array.is_neg() or not start:  # a negated view, or zeros without memory
            raise ValueError("the tensor has to be computed before it is read")
        if array.is_cpu:  # in a sixth of the time that reading the type of a device takes
            layout = array.shape, array.stride(), array.dtype
            return layout, (start, array.element_size(), True)
        return (array.shape, array.stride(), array.dtype, array.device), (start, VECTOR, False)

    def _current_stream(self, array: Any) -> int:
        """Return PyTorch's current stream of a tensor's device; 0 is the legacy default stream."""
        stream = self._stream(array.get_device())
        if stream and self.module.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "kernels are launched on CUDA's legacy default stream, which a CUDA graph cannot capture; "
                "call attention outside torch.cuda.graph"
            )
        return stream

    def context(self, array: Any) -> Any:
        """Return a context manager for the tensor's CUDA device, or for PyTorch's number of threads."""
        number = array.get_device()
        if number >= 0:
            return None if number == current_device() else on_device(number)
        count = self._threads()
        return at_most(count) if count < NUM_THREADS and count < get_num_threads() else None

    def repeat(self, repeat: Repeat, starts: list[int], seed: int, like: Any) -> list[Any]:
        """Return the results of a repeated call, in PyTorch's memory and in the order of its stream."""
        stream = self._current_stream(like)
        dlpack.wait_for(stream)
        device, dtypes, scratch = like.device, self._dtypes, repeat.scratch
        made = [
            self._empty_strided(shape, strides, dtype=dtypes[dtype.num], device=device)
            for shape, strides, dtype in repeat.parts
        ]
        addresses = [*starts, *[x.data_ptr() for x in made]]
        memory = self._empty(scratch, dtype=self.module.uint8, device=device) if scratch else None
        repeat.into(addresses, 0 if memory is None else memory.data_ptr(), seed)
        dlpack.let_wait(stream)
        return repeat.ordered(made)


def _computed(tensor: Any) -> Any:
    """Return a tensor of PyTorch whose memory holds its elements, unlike that of a negated view."""
    if tensor.is_nested:
        raise TypeError(NO_NESTED)
    tensor = tensor.resolve_neg()
    return tensor.clone() if tensor._is_zerotensor() else tensor


#: The library of each type of array that has been seen; None for NumPy's, numba's and unknown ones.
_LIBRARIES: dict[type, Library | None] = {}


def library_of(array: Any) -> Library | None:
    """Return the library of an array; None for NumPy, numba, and libraries that do not read DLPack."""
    kind = type(array)
    try:
        return _LIBRARIES[kind]
    except KeyError:
        _LIBRARIES[kind] = found = _library_of_type(array)
        return found


def _library_of_type(array: Any) -> Library | None:
    if isinstance(array, np.ndarray) or is_device_array(array):
        return None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, getattr(torch, "Tensor", ())):
        return Torch(torch)
    module = sys.modules.get(type(array).__module__.partition(".")[0])
    return Library(module) if callable(getattr(module, "from_dlpack", None)) else None


def context_of(array: Any) -> Any:
    """Return a context manager in which a call on an array has to run; see :meth:`Library.context`."""
    library = library_of(array)
    return (library and library.context(array)) or nullcontext()


def as_array(array: Any) -> Any:
    """Convert an array of any library to a NumPy array or a numba device array, without a copy.

    See :func:`kernels.interop.dlpack.as_array`, which reads every array but PyTorch's.
    """
    library = library_of(array)
    return dlpack.as_array(array) if library is None else library.read(array)
