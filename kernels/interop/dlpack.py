"""Arrays of other libraries, in and out without a copy: DLPack and ``__cuda_array_interface__``.

Kernels run on CUDA's legacy default stream, and so do the kernels of PyTorch and CuPy unless told
otherwise.  Where another stream has made an array, or will read it, that stream and the legacy
default stream wait for each other; the host never waits.

DLPack has a number for bfloat16.  The other protocol describes elements as NumPy does, which has no name of
its own for it: there "<V2", two bytes of anything, is bfloat16, as PyTorch and ``ml_dtypes`` write it.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from functools import cache
from typing import Any

import numpy as np
from numba import carray, cfunc, types  # type: ignore[attr-defined]

from kernels.cuda.runtime.arrays import (
    device_pointer,
    foreign_array,
    is_device_array,
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
#: What both protocols call CUDA's legacy default stream.
LEGACY_STREAM = 1
#: What another library launches would be no part of a graph.
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
    """``DLManagedTensor``: a tensor, and how its reader lets go of it."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# A capsule's name is a pointer that must stay good: PyCapsule copies nothing.
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
    """Memory that another library lent through a DLPack capsule, given back with this object.

    Attributes:
        device_type: ``HOST``, ``DEVICE`` or another number of DLPack.
        shape: Sizes.
        steps: Strides in bytes.
        dtype: Of the elements.
        address: Of the first element.

    Raises:
        TypeError: If the elements are none that NumPy knows.
        ValueError: If it is no capsule, or one that has been read.
    """

    def __init__(self, capsule: Any):
        self._managed = 0
        try:
            address = _get_pointer(capsule, ctypes.addressof(_FRESH))
        except ValueError:
            raise ValueError(
                f"DLPack hands over a PyCapsule that is read once, got {capsule!r:.60}; call __dlpack__ of "
                "its owner again"
            ) from None
        managed = _Managed.from_address(address)
        tensor = managed.tensor
        self.dtype = _dtype_of(tensor)
        self.device_type = int(tensor.device_type)
        self.shape = tuple(tensor.shape[: tensor.ndim])
        strides = tensor.strides[: tensor.ndim] if tensor.strides else row_major_strides(self.shape)
        self.steps = tuple(step * self.dtype.itemsize for step in strides)
        self.address = (tensor.data or 0) + tensor.byte_offset
        _set_name(capsule, ctypes.addressof(_USED))  # from here on it is ours to give back
        self._managed = address
        self._give_back = _Deleter(managed.deleter) if managed.deleter else None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What numba reads; NumPy's own protocol, for memory of the host, has the same entries."""
        return {
            "shape": self.shape,
            "strides": self.steps,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "version": 3,
        }

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """What NumPy reads of memory on the host; memory of a device is not for it."""
        if self.device_type not in (HOST, PINNED):
            raise AttributeError("NumPy reads memory of the host, this lies on a device")
        return self.__cuda_array_interface__

    def __del__(self) -> None:
        if self._managed and self._give_back is not None:
            self._give_back(self._managed)


def _dtype_of(tensor: _Tensor) -> np.dtype[Any]:
    """Return the dtype of what DLPack describes."""
    if (tensor.lanes, tensor.code, tensor.bits) == (1, _CODE_OF_BFLOAT, 16):
        return BFLOAT16
    if tensor.lanes != 1 or tensor.code not in _KINDS or tensor.bits % 8:
        raise TypeError(
            f"elements of DLPack's kind {tensor.code} with {tensor.bits} bits are none that NumPy has; "
            "convert them to float16, bfloat16, float32, float64, integers or booleans"
        )
    return np.dtype(f"{_KINDS[tensor.code]}{tensor.bits // 8}")


def as_array(array: Any) -> Any:
    """Return an array of any library as NumPy's or numba's, without a copy.

    Args:
        array: On the device: anything with ``__cuda_array_interface__`` or DLPack, as CuPy and
            PyTorch have.  On the host: anything with DLPack.

    Returns:
        A NumPy array, or numba's device array, of the same memory and strides; it keeps the memory
        alive.  Anything else is returned as it is.

    Raises:
        ValueError: If the array lies on another device than the current one.
        BufferError: If its owner does not lend it: NumPy no memory that is read-only.
        TypeError: If its elements are none that NumPy knows, or NumPy and CUDA cannot reach it.
        RuntimeError: If it lies on a device and kernels cannot run there; it says what to do.
    """
    if isinstance(array, np.ndarray) or is_device_array(array):
        return array
    described = getattr(array, "__cuda_array_interface__", None)
    if described is not None:
        return _wrapped(described, array)
    if not (hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")):
        return array
    kind, _ = array.__dlpack_device__()
    if int(kind) in (HOST, PINNED):
        return _from_host(array)
    if int(kind) not in (DEVICE, MANAGED):
        raise TypeError(
            f"{type(array).__name__} lies in memory of DLPack's kind {int(kind)}, which neither NumPy "
            "nor CUDA reaches; move it to the host or to a CUDA device"
        )
    imported = Imported(array.__dlpack__(stream=LEGACY_STREAM))  # its owner makes that stream wait
    return _wrapped(imported.__cuda_array_interface__, imported)


def _from_host(array: Any) -> Any:
    """Return NumPy's array of what another library has on the host."""
    try:
        return np.from_dlpack(array)
    except ValueError as error:
        raise ValueError(
            f"{type(array).__name__}.__dlpack__ returned nothing that NumPy reads ({error}); pass "
            "numpy.array(x)"
        ) from None
    except (BufferError, RuntimeError) as error:  # of what NumPy does not know bfloat16 is ours
        try:
            imported = Imported(array.__dlpack__())
        except BufferError:
            raise BufferError(
                f"{type(array).__name__} does not lend its memory ({error}); pass a copy, numpy.array(x)"
            ) from None
        if imported.dtype == BFLOAT16:
            return np.asarray(imported).view(BFLOAT16)
        if imported.device_type == PINNED:
            return np.asarray(imported)
        raise


def _wrapped(described: dict[str, Any], owner: Any) -> Any:
    """Return numba's array around memory of another library, which ``owner`` keeps alive."""
    if IS_SIMULATOR:
        raise RuntimeError(
            "kernels run in the simulator and cannot reach memory of a device; unset "
            "NUMBA_ENABLE_CUDASIM, or pass a NumPy array"
        )
    if (reason := why_no_cuda()) is not None:
        raise RuntimeError(reason)
    refuse(*_WHILE_RECORDING)
    address = described["data"][0]
    current, device = current_device(), device_of(address)
    if device != current:
        raise ValueError(
            f"the array lies on CUDA device {device} and kernels run on device {current}; copy it "
            f"there, or call numba.cuda.select_device({device}) first"
        )
    stream = described.get("stream")
    if stream not in (None, LEGACY_STREAM):
        _make_wait(cuda.default_stream(), cuda.external_stream(stream))
    if described.get("mask") is not None:
        raise TypeError("the array has a mask, which kernels do not read; pass it filled")
    steps = described.get("strides")
    layout = tuple(described["shape"]), None if steps is None else tuple(steps)
    return foreign_array(address or 0, *layout, described["typestr"], owner)


def device_of(address: int) -> int:
    """Return the number of the device that an address lies on; the current one if none says."""
    if driver is not None and address and has_several_devices():
        attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        error, device = driver.cuPointerGetAttribute(attribute, address)
        if not int(error):
            return int(device)
    return current_device()


def _make_wait(waiting: Any, working: Any) -> None:
    """Make one stream wait for the work that another has so far; the host does not wait."""
    event = cuda.event(timing=False)
    event.record(working)
    event.wait(waiting)


def cuda_array_interface(array: Any) -> dict[str, Any]:
    """Describe a device array for a reader that may run on any stream."""
    refuse(*_WHILE_RECORDING)
    # Numba names no stream for its arrays, so a reader on another one would not wait for kernels.
    return {**array.__cuda_array_interface__, "stream": LEGACY_STREAM}


def dlpack_device(array: Any) -> tuple[int, int]:
    """Return DLPack's (kind of memory, number) for a device array."""
    return (HOST, 0) if IS_SIMULATOR else (DEVICE, device_of(device_pointer(array)))


def to_dlpack(array: Any, stream: int | None = None) -> Any:
    """Return a DLPack capsule of an array; its memory lives until the reader is done.

    Args:
        array: Numba's array; the simulator's lends its memory on the host.  Or NumPy's, of bfloat16 too,
            which NumPy itself does not lend.
        stream: Where the reader will read: None or 1, the legacy default stream; 2, the per-thread
            one; -1, the reader sees to it that kernels are done; otherwise a CUDA stream.

    Raises:
        BufferError: If the stream is 0, which could be either default stream.
    """
    if IS_SIMULATOR or isinstance(array, np.ndarray):
        host = getattr(array, "_ary", array)
        return _capsule(host.ctypes.data, (HOST, 0), host.shape, host.strides, host.dtype, array)
    refuse(*_WHILE_RECORDING)
    if stream == 0:
        raise BufferError(
            "stream 0 may be either default stream of CUDA; pass 1 for the legacy one or 2 for that "
            "of the thread"
        )
    if stream not in (None, -1, LEGACY_STREAM):
        _make_wait(cuda.external_stream(stream), cuda.default_stream())
    pointer, device = device_pointer(array), dlpack_device(array)
    return _capsule(pointer, device, array.shape, array.strides, array.dtype, array)


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
    """An exported array: its capsule, its description, and all else that must live as long."""

    __slots__ = ("capsule", "kept", "managed")

    def __init__(self, capsule: Any, managed: _Managed, kept: Any):
        self.capsule = capsule
        self.managed = managed
        self.kept = kept

    def is_over(self) -> bool:
        """Tell whether the reader has returned it, or no reader can be left."""
        unread = _is_named(self.capsule, ctypes.addressof(_FRESH))
        return bool(self.managed.context) or (bool(unread) and self.references() == _ALONE)

    def references(self) -> int:
        """Return how many references to the capsule there are."""
        return sys.getrefcount(self.capsule)


_ALONE = _Export(object(), _Managed(), None).references()
_EXPORTS: list[_Export] = []


@cache
def _marks_as_returned() -> Any:
    """Return the function by which a reader says that it is done; it sets the ``context``.

    Readers call it with or without the interpreter's lock, while an exception is being raised, or
    after Python has ended.  So it is machine code and does nothing of Python's; what is marked is
    dropped later.
    """
    field = _Managed.context.offset // 8

    @cfunc(types.void(types.voidptr))
    def mark(managed):
        carray(managed, field + 1, np.int64)[field] = 1

    return mark


def _drop_returned(phase: str = "start", info: Any = None) -> None:
    """Drop the exports that are over."""
    if phase == "start" and _EXPORTS:
        _EXPORTS[:] = [export for export in _EXPORTS if not export.is_over()]


gc.callbacks.append(_drop_returned)  # often, and before device memory is said to be used up
