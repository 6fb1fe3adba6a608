"""Exchange arrays with other libraries without copies: DLPack and ``__cuda_array_interface__``.

Kernels run on CUDA's legacy default stream, and so do the kernels of PyTorch and CuPy unless told
otherwise.  If another stream has written an array, or will read it, that stream and the legacy
default stream wait for each other; the host never waits.

DLPack has a code for bfloat16.  The other protocol uses NumPy's type strings, which have none: there
bfloat16 is "<V2", two bytes of any content, as in PyTorch and ``ml_dtypes``.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
from numba import carray, cfunc, types  # type: ignore[attr-defined]

from kernels.cuda.runtime.arrays import (
    device_pointer,
    foreign_array,
    is_device_array,
    pool_device,
)
from kernels.cuda.runtime.recorder import refuse
from kernels.runtime.dtypes import BFLOAT16
from kernels.runtime.memory import row_major_strides
from kernels.runtime.targets import (
    IS_SIMULATOR,
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

#: DLPack's numbers for kinds of elements, by NumPy's letters.
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_KINDS = {code: kind for kind, code in _CODES.items()}
_CODE_OF_BFLOAT = 4


class _Tensor(ctypes.Structure):
    """``DLTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # in elements; null: row-major
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """``DLManagedTensor``: a tensor, and the function by which its reader releases it."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# PyCapsule does not copy the name, so the pointer must stay valid.
_FRESH = ctypes.create_string_buffer(b"dltensor")
_USED = ctypes.create_string_buffer(b"used_dltensor")


def _python(name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_get_pointer = _python("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
_set_name = _python("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
_is_named = _python("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
_new_capsule = _python(
    "PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)


class Imported:
    """Memory of another library from a DLPack capsule, released when this object is freed.

    Attributes:
        device_type: ``HOST``, ``DEVICE`` or another number of DLPack.
        shape: Sizes of the dimensions.
        steps: Strides in bytes.
        dtype: Dtype of the elements.
        address: Address of the first element.

    Raises:
        TypeError: If NumPy does not support the type of the elements.
        ValueError: If it is not a capsule, or the capsule has been read.
    """

    def __init__(self, capsule: Any):
        self._managed = 0
        try:
            address = _get_pointer(capsule, ctypes.addressof(_FRESH))
        except ValueError:
            raise ValueError(
                f"a DLPack array must be a PyCapsule that has not been read, got {capsule!r:.60}; call "
                "__dlpack__ of its owner again"
            ) from None
        managed = _Managed.from_address(address)
        tensor = managed.tensor
        self.dtype = _dtype_of(tensor)
        self.device_type = int(tensor.device_type)
        self.shape = tuple(tensor.shape[: tensor.ndim])
        strides = tensor.strides[: tensor.ndim] if tensor.strides else row_major_strides(self.shape)
        self.steps = tuple(step * self.dtype.itemsize for step in strides)
        self.address = (tensor.data or 0) + tensor.byte_offset
        _set_name(capsule, ctypes.addressof(_USED))  # from here on this object must release it
        self._managed = address
        self._give_back = _Deleter(managed.deleter) if managed.deleter else None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The description that numba reads; NumPy's protocol for host memory has the same entries."""
        return {
            "shape": self.shape,
            "strides": self.steps,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "version": 3,
        }

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The description that NumPy reads, for memory of the host only."""
        if self.device_type not in (HOST, PINNED):
            raise AttributeError("NumPy reads host memory only, but this array is on a device")
        return self.__cuda_array_interface__

    def __del__(self) -> None:
        if self._managed and self._give_back is not None:
            self._give_back(self._managed)


def _dtype_of(tensor: _Tensor) -> np.dtype[Any]:
    """Return the dtype of a DLPack tensor."""
    if (tensor.lanes, tensor.code, tensor.bits) == (1, _CODE_OF_BFLOAT, 16):
        return BFLOAT16
    if tensor.lanes != 1 or tensor.code not in _KINDS or tensor.bits % 8:
        raise TypeError(
            f"NumPy does not support elements of DLPack type {tensor.code} with {tensor.bits} bits; "
            "convert them to float16, bfloat16, float32, float64, integers or booleans"
        )
    return np.dtype(f"{_KINDS[tensor.code]}{tensor.bits // 8}")


def as_array(array: Any) -> Any:
    """Convert an array of any library to a NumPy array or a numba device array, without a copy.

    Args:
        array: On the device, an object that supports ``__cuda_array_interface__`` or DLPack, such as a
            CuPy array or a PyTorch tensor.  On the host, an object that supports DLPack.

    Returns:
        A NumPy array, or a numba device array, of the same memory and strides, which keeps the memory
        alive.  Any other object is returned unchanged.

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
    imported = Imported(array.__dlpack__(stream=LEGACY_STREAM))  # its owner makes that stream wait
    return wrapped(imported.__cuda_array_interface__, imported)


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
            imported = Imported(array.__dlpack__())
        except BufferError:
            raise BufferError(
                f"{type(array).__name__} does not export its memory ({error}); pass a copy, numpy.array(x)"
            ) from None
        if imported.dtype == BFLOAT16:
            return np.asarray(imported).view(BFLOAT16)
        if imported.device_type == PINNED:
            return np.asarray(imported)
        raise


def wrapped(described: dict[str, Any], owner: Any) -> Any:
    """Return a numba device array of another library's memory, which ``owner`` keeps alive."""
    if IS_SIMULATOR:
        raise RuntimeError(
            "kernels run in the simulator and cannot access memory of a device; unset "
            "NUMBA_ENABLE_CUDASIM, or pass a NumPy array"
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
    steps = described.get("strides")
    layout = tuple(described["shape"]), None if steps is None else tuple(steps)
    return foreign_array(address or 0, *layout, described["typestr"], owner)


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

    Args:
        stream: A CUDA stream; None, 0 and 1 are the legacy default stream itself.
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
    if IS_SIMULATOR:
        return HOST, 0
    number = pool_device(array)  # the driver says 0 of memory of every pool
    return DEVICE, device_of(device_pointer(array)) if number is None else number


def to_dlpack(array: Any, stream: int | None = None) -> Any:
    """Return a DLPack capsule of an array; its memory lives until the reader is done.

    Args:
        array: A numba device array, in the simulator one of host memory; or a NumPy array, including
            bfloat16, which NumPy itself cannot export.
        stream: The reader's stream: None or 1, the legacy default stream; 2, the per-thread default
            stream; -1, no synchronisation; otherwise a CUDA stream.

    Raises:
        BufferError: If the stream is 0, which is ambiguous between the default streams.
    """
    if IS_SIMULATOR or isinstance(array, np.ndarray):
        host = getattr(array, "_ary", array)
        return _capsule(host.ctypes.data, (HOST, 0), host.shape, host.strides, host.dtype, array)
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
    pointer, device = device_pointer(array), dlpack_device(array)
    return _capsule(pointer, device, array.shape, array.strides, array.dtype, owner)


class _OnStream:
    """An array that a reader uses on a stream of its own: its memory is free after the reader's work."""

    def __init__(self, array: Any, stream: int):
        self._array, self._stream = array, stream

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of Python the driver may be gone
            wait_for(self._stream)


def _capsule(
    address: int,
    device: tuple[int, int],
    shape: tuple[int, ...],
    steps: tuple[int, ...],
    dtype: np.dtype[Any],
    owner: Any,
) -> Any:
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    strides = (ctypes.c_int64 * len(shape))(*(step // dtype.itemsize for step in steps))
    code = _CODE_OF_BFLOAT if dtype == BFLOAT16 else _CODES[dtype.kind]
    tensor = _Tensor(address, *device, len(shape), code, dtype.itemsize * 8, 1, sizes, strides, 0)
    managed = _Managed(tensor, None, _marks_as_returned().address)
    place = ctypes.addressof(managed)
    capsule = _new_capsule(place, ctypes.addressof(_FRESH), None)
    _drop_returned()
    _EXPORTS.append(_Export(capsule, managed, (sizes, strides, owner)))
    return capsule


class _Export:
    """An exported array: its capsule, its description, and all objects that must live as long."""

    __slots__ = ("capsule", "kept", "managed")

    def __init__(self, capsule: Any, managed: _Managed, kept: Any):
        self.capsule = capsule
        self.managed = managed
        self.kept = kept

    def is_over(self) -> bool:
        """Tell whether the reader has released the array, or no reader can exist."""
        unread = _is_named(self.capsule, ctypes.addressof(_FRESH))
        return bool(self.managed.context) or (bool(unread) and self.references() == _ALONE)

    def references(self) -> int:
        """Return the number of references to the capsule."""
        return sys.getrefcount(self.capsule)


_ALONE = _Export(object(), _Managed(), None).references()
_EXPORTS: list[_Export] = []


@cache
def _marks_as_returned() -> Any:
    """Return the deleter that a reader calls when it is done; it sets the ``context``.

    Readers call it with or without the GIL, while an exception is being raised, or after Python has
    ended.  It is therefore machine code that does not use Python; marked exports are dropped later.
    """
    field = _Managed.context.offset // 8

    @cfunc(types.void(types.voidptr))
    def mark(managed):
        carray(managed, field + 1, np.int64)[field] = 1

    return mark


def _drop_returned(phase: str = "start", info: Any = None) -> None:
    """Drop the exports that their readers have released."""
    if phase == "start" and _EXPORTS:
        _EXPORTS[:] = [export for export in _EXPORTS if not export.is_over()]


gc.callbacks.append(_drop_returned)  # at every collection, and before an out-of-memory error
