"""Exchange arrays with other libraries without copies: DLPack and ``__cuda_array_interface__``.

Kernels run on CUDA's legacy default stream, and so do the kernels of PyTorch and CuPy unless told
otherwise.  If another stream has written an array, or will read it, that stream and the legacy
default stream wait for each other; the host never waits.

DLPack has a code for bfloat16.  The other protocol uses NumPy's type strings, which have none: there
bfloat16 is "<V2", two bytes of any content, as in PyTorch and ``ml_dtypes``.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

import numpy as np

from kernels.cuda.runtime.arrays import array_on, device_pointer, is_device_array
from kernels.cuda.runtime.memory_pool import Block
from kernels.cuda.runtime.pooled import Foreign, MemoryPointer
from kernels.cuda.runtime.recorder import refuse
from kernels.runtime.dtypes import BFLOAT16, BITS
from kernels.runtime.memory import row_major_strides
from kernels.runtime.targets import (
    DeviceArray,
    cuda,
    current_device,
    driver,
    has_several_devices,
    why_no_cuda,
)

#: DLPack's numbers for kinds of memory; pinned memory is the host's, and a device may read it too.
HOST, DEVICE, PINNED, MANAGED = 1, 2, 3, 13
#: The number of CUDA's legacy default stream in both protocols.
LEGACY_STREAM = 1
#: Why a graph cannot contain another library's work.
_WHILE_RECORDING = (
    "shares memory of the device with another library",
    "let that work before or after it, on what it takes and returns",
)

#: DLPack's numbers for unsigned integers and for bfloat16.
_UNSIGNED, _BFLOAT = 1, 4


class _Head(ctypes.Structure):
    """The beginning of ``DLTensor``, and so of ``DLManagedTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    )


_pointer_of: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _head(capsule: Any) -> _Head:
    """Return the head of the tensor in a capsule that has not been read."""
    return _Head.from_address(_pointer_of(capsule, b"dltensor"))


class Read:
    """A capsule in the form that NumPy reads, which keeps its owner alive and gives it back.

    NumPy refuses memory of a device and bfloat16.  It does not access the memory, so the capsule,
    which has not been read, names them host memory and uint16.  ``array`` must not be accessed if the
    memory is on a device.  Other types of elements raise a TypeError, and an object without
    such a capsule a ValueError.
    """

    def __init__(self, capsule: Any):
        try:
            head, self._capsule = _head(capsule), capsule
        except ValueError:
            raise ValueError(
                f"a DLPack array must be a PyCapsule that has not been read, got {capsule!r:.60}; call "
                "__dlpack__ of its owner again"
            ) from None
        self.device_type, head.device_type = head.device_type, HOST
        kind = head.code, head.bits
        is_bfloat = kind == (_BFLOAT, 16)
        if is_bfloat:
            head.code = _UNSIGNED
        array: Any = None
        with suppress(BufferError, RuntimeError):
            array = np.from_dlpack(self)  # type: ignore[arg-type]
        if array is None or array.dtype.kind == "c":
            raise TypeError(
                f"elements of DLPack type {kind[0]} with {kind[1]} bits are not supported; convert them to "
                "float16, bfloat16, float32, float64, integers or booleans"
            )
        self.typestr = BFLOAT16.str if is_bfloat else array.dtype.str
        # NumPy writes to no memory of a capsule like this one.
        self.array = np.asarray(_Described(array, array.ctypes.data, array.dtype, array))

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return HOST, 0


class _Described:
    """Memory in the form in which NumPy reads it without accessing it, so that it may be on a device.

    It has the shape and strides of ``like``, and its owner keeps it alive; bfloat16 becomes uint16.
    """

    def __init__(self, like: Any, address: int, dtype: np.dtype[Any], owner: Any):
        self._owner = owner
        self.__array_interface__ = {
            "shape": like.shape, "strides": like.strides, "data": (address, False), "version": 3,
            "typestr": (BITS if dtype == BFLOAT16 else dtype).str,
        }  # fmt: skip


def as_array(array: Any) -> Any:
    """Convert an array of any library to a NumPy array or a numba device array, without a copy.

    On the device it supports ``__cuda_array_interface__`` or DLPack, on the host DLPack.  The result
    has the same memory, which it keeps alive, and strides.  Any other object is returned unchanged.

    Raises:
        ValueError: If the array is on another device than the current one.
        BufferError: If its owner refuses to export it, as NumPy does for read-only memory.
        TypeError: If NumPy does not support its type, or neither NumPy nor CUDA can access its memory.
        RuntimeError: If it is on a device and kernels cannot run there.
    """
    if isinstance(array, np.ndarray) or is_device_array(array):
        return array
    described = getattr(array, "__cuda_array_interface__", None)
    if described is not None:
        return wrapped(described, array)
    if not (hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")):
        return array
    kind, _ = array.__dlpack_device__()
    if int(kind) in (HOST, PINNED):
        return _from_host(array)
    if int(kind) not in (DEVICE, MANAGED):
        raise TypeError(
            f"{type(array).__name__} is in memory of DLPack device type {int(kind)}, which neither NumPy "
            "nor CUDA can access; move it to the host or to a CUDA device"
        )
    read = Read(array.__dlpack__(stream=LEGACY_STREAM))  # its owner makes that stream wait
    return wrapped({**read.array.__array_interface__, "typestr": read.typestr}, read.array)


def _from_host(array: Any) -> Any:
    """Return a NumPy array of host memory of another library."""
    try:
        return np.from_dlpack(array)
    except ValueError as error:
        raise ValueError(
            f"NumPy cannot read the result of {type(array).__name__}.__dlpack__ ({error}); pass "
            "numpy.array(x)"
        ) from None
    except (BufferError, RuntimeError) as error:  # NumPy's from_dlpack does not support bfloat16
        try:
            read = Read(array.__dlpack__())
        except BufferError:
            raise BufferError(
                f"{type(array).__name__} does not export its memory ({error}); pass a copy, numpy.array(x)"
            ) from None
        return read.array.view(BFLOAT16) if read.typestr == BFLOAT16.str else read.array


#: Device memory is the host's: the emulated GPU's.
_ON_HOST = not hasattr(DeviceArray, "__cuda_array_interface__")


def wrapped(described: dict[str, Any], owner: Any) -> Any:
    """Return a numba device array of another library's memory, which ``owner`` keeps alive."""
    if _ON_HOST:
        raise RuntimeError(
            "kernels run on the emulated GPU and cannot access memory of a device; unset "
            "MINITORCH_EMULATE, or pass a NumPy array"
        )
    if (reason := why_no_cuda()) is not None:
        raise RuntimeError(reason)
    refuse(*_WHILE_RECORDING)
    address = described["data"][0]
    current, device = current_device(), device_of(address)
    if device != current:
        raise ValueError(
            f"the array is on CUDA device {device}, but kernels run on device {current}; copy it "
            f"there, or call numba.cuda.select_device({device}) first"
        )
    wait_for(described.get("stream"))
    if described.get("mask") is not None:
        raise TypeError("masked arrays are not supported; fill the array first")
    return _foreign_array(described, address or 0, owner)


def _foreign_array(described: dict[str, Any], address: int, owner: Any) -> Any:
    """Return numba's array on memory of another library, which ``owner`` keeps alive."""
    dtype = BFLOAT16 if described["typestr"] == BFLOAT16.str else np.dtype(described["typestr"])
    shape, steps = tuple(described["shape"]), described.get("strides")
    if steps is None:
        steps = [step * dtype.itemsize for step in row_major_strides(shape)]
    last = sum((size - 1) * step for size, step in zip(shape, steps, strict=True) if step > 0)
    size = 0 if 0 in shape else last + dtype.itemsize
    if driver is None:
        memory = MemoryPointer(cuda.current_context(), ctypes.c_void_p(address), size, owner)
    else:
        memory = Foreign(address, size, owner)
    return array_on(memory, (shape, tuple(steps), dtype))


def device_of(address: int) -> int:
    """Return the number of the device that owns an address; the current one if unknown."""
    if driver is not None and address and has_several_devices():
        attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        error, device = driver.cuPointerGetAttribute(attribute, address)
        if not int(error):
            return int(device)
    return current_device()


def wait_for(stream: int | None) -> None:
    """Make the legacy default stream wait for the current work of another; the host does not wait.

    None, 0 and 1 are the legacy default stream itself.
    """
    if stream not in (None, 0, LEGACY_STREAM):
        _make_wait(cuda.default_stream(), cuda.external_stream(stream))


def let_wait(stream: int | None) -> None:
    """Make another stream wait for the current work of the legacy default stream; see :func:`wait_for`."""
    if stream not in (None, 0, LEGACY_STREAM):
        _make_wait(cuda.external_stream(stream), cuda.default_stream())


def _make_wait(waiting: Any, working: Any) -> None:
    """Make one stream wait for the current work of another; the host does not wait."""
    event = cuda.event(timing=False)
    event.record(working)
    event.wait(waiting)


def cuda_array_interface(array: Any) -> dict[str, Any]:
    """Describe a device array for a reader that may run on any stream."""
    refuse(*_WHILE_RECORDING)
    # Numba does not name a stream for its arrays, so a reader on another stream would not wait.
    return {**array.__cuda_array_interface__, "stream": LEGACY_STREAM}


def dlpack_device(array: Any) -> tuple[int, int]:
    """Return DLPack's (kind of memory, number) for a device array."""
    if _ON_HOST:
        return HOST, 0
    memory = getattr(array, "gpu_data", None)
    block = getattr(getattr(memory, "whole", memory), "block", None)
    if isinstance(block, Block):
        return DEVICE, block.device  # the driver says 0 of memory of every pool
    return DEVICE, device_of(device_pointer(array))


def to_dlpack(array: Any, stream: int | None = None) -> Any:
    """Return a DLPack capsule of an array; its memory lives until the reader is done.

    It is a numba device array, on the emulated GPU one of host memory, or a NumPy array, including
    bfloat16, which NumPy itself cannot export.  The reader's stream is None or 1 for the legacy
    default stream, 2 for that of the thread, -1 for no synchronisation, or a CUDA stream.

    Raises:
        BufferError: If the stream is 0, which is ambiguous between the default streams.
    """
    if _ON_HOST or isinstance(array, np.ndarray):
        host = getattr(array, "_ary", array)
        return _capsule(host, host.ctypes.data, (HOST, 0), array)
    refuse(*_WHILE_RECORDING)
    if stream == 0:
        raise BufferError(
            "stream 0 is ambiguous between CUDA's default streams; pass 1 for the legacy one or 2 for "
            "that of the thread"
        )
    owner = array
    if stream not in (None, -1, LEGACY_STREAM):
        let_wait(stream)
        owner = _OnStream(array, stream)
    return _capsule(array, device_pointer(array), dlpack_device(array), owner)


class _OnStream:
    """An array that a reader uses on a stream of its own: its memory is free after the reader's work."""

    def __init__(self, array: Any, stream: int):
        self._array, self._stream = array, stream

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of Python the driver may be gone
            wait_for(self._stream)


def _capsule(array: Any, address: int, place: tuple[int, int], owner: Any) -> Any:
    """Return a capsule of an array at an address and a place, which keeps its owner alive."""
    capsule: Any = np.asarray(_Described(array, address, array.dtype, owner)).__dlpack__()
    head = _head(capsule)
    head.device_type, head.device_id = place
    if array.dtype == BFLOAT16:
        head.code = _BFLOAT
    return capsule
