"""Cached properties and data of each device: its size, counters and tensor maps."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

from kernels.cuda.ptx.tensor_map import encode_tensor_map
from kernels.cuda.runtime.arrays import (
    device_pointer,
    device_view,
    element_strides,
    to_device,
)
from kernels.cuda.runtime.recorder import active, recorded_by
from kernels.runtime.targets import compute_capability, cuda, current_device

#: The compute capability of Hopper.
HOPPER = (9, 0)


def multiprocessors() -> int:
    """Return the number of multiprocessors of the current device."""
    return _multiprocessors(current_device())


@cache
def _multiprocessors(device: int) -> int:
    return int(cuda.get_current_device().MULTIPROCESSOR_COUNT)


def counters() -> Any:
    """Return the counters of taken items and of finished blocks, which are 0 between two launches.

    All launches on a device share them, from all threads, because all are in the legacy default stream and
    run one after the other.  The last block of each launch resets them.
    """
    return _counters(current_device())


@cache
def _counters(device: int) -> Any:
    return to_device(np.zeros(2, np.int32))


def no_clip() -> Any:
    """Return (2,) float64 ones on the current device: a norm and a scale with which nothing is clipped."""
    return _no_clip(current_device())


@cache
def _no_clip(device: int) -> Any:
    return to_device(np.ones(2))


def map_of(
    array: Any, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], dtype: str
) -> Any:
    """Return the tensor map of an array under a shape and strides; see :func:`device_map`.

    For a tuple of arrays, the maps of each are one after the other.
    """
    rest, arrays = (shape, strides, box, dtype), array if isinstance(array, tuple) else (array,)
    recording = active()
    with recorded_by(None):  # the map is made once for an address, and kept
        made = device_map(tuple(map(device_pointer, arrays)), *rest)
    if recording is not None:
        # An object for this map alone, for several operands may begin at one address.
        made = device_view(made, made.shape, element_strides(made))

        @lru_cache(maxsize=256)
        def remake(*addresses: int) -> tuple[Any, int]:
            found = device_map(addresses, *rest)
            return found, int(found.device_ctypes_pointer.value)

        recording.mapped(made, arrays, remake)
    return made


def device_map(
    addresses: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...],
    box: tuple[int, ...], dtype: str,
) -> Any:  # fmt: skip
    """Return the tensor maps of equal arrays on the current device; see ``encode_tensor_map``."""
    return _device_map(current_device(), addresses, shape, strides, box, dtype)


@lru_cache(maxsize=4096)
def _device_map(device: int, addresses: tuple[int, ...], *rest: Any) -> Any:
    # Arrays come and go at the same addresses: a training step finds all its maps here.
    return to_device(np.concatenate([encode_tensor_map(one, *rest) for one in addresses]))


def why_no_device(needed: tuple[int, int]) -> str | None:
    """Return why the device lacks the tensor cores that a kernel needs, or None.

    ``needed`` is the least compute capability; only :data:`HOPPER` itself suffices for it.
    """
    found = compute_capability()
    # The instructions of 9.0a, wgmma among them, exist on no later generation.
    if found < needed or (needed == HOPPER and found[0] > HOPPER[0]):
        least, have = (".".join(map(str, version)) for version in (needed, found))
        return f"it needs compute capability {least}, this device has {have}"
    return None
