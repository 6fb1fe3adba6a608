"""Strided storage: one flat array, a shape, and the strides that map an index to a position."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import shown

from .backends.elements import DTYPES as DTYPES
from .backends.elements import HELD, as_element, as_storage, checked_shape
from .backends.elements import get_default_dtype as get_default_dtype
from .backends.elements import set_default_dtype as set_default_dtype  # beyond module 5
from .backends.memory import is_device_storage as is_device_storage
from .backends.memory import memories  # beyond module 2
from .backends.writes import wrote  # beyond module 5

#: Length of the scratch index buffers inside kernels; no tensor has more dimensions.
MAX_DIMS = 32


class IndexingError(RuntimeError, IndexError):
    """Raised if an index is invalid or two shapes do not match."""


Storage: TypeAlias = npt.NDArray[Any]
OutIndex: TypeAlias = npt.NDArray[np.int64]
Index: TypeAlias = npt.NDArray[np.int64]
Shape: TypeAlias = npt.NDArray[np.int64]
Strides: TypeAlias = npt.NDArray[np.int64]

UserIndex: TypeAlias = Sequence[int]
UserShape: TypeAlias = Sequence[int]
UserStrides: TypeAlias = Sequence[int]
Ints: TypeAlias = tuple[int, ...]  # inside TensorData the word `tuple` names a published method
Triple: TypeAlias = tuple[Storage, Shape, Strides]

# The three helpers below are compiled into every kernel, for the CPU and for CUDA.  They loop over
# len(shape) and never over len(index): kernels hand them scratch buffers of MAX_DIMS entries.


def index_to_position(index: Index, strides: Strides) -> int:
    """Map an index to its position in storage: the dot product of index and strides.

    Args:
        index: (dims,) or a longer scratch buffer.
        strides: (dims,) in elements.

    Returns:
        The position, in elements.
    """
    # TASK 2.1: Add up index times stride over the dimensions.
    position = 0
    for dim in range(len(strides)):
        position += index[dim] * strides[dim]
    return position
    # END TASK 2.1


def to_index(ordinal: int, shape: Shape, out_index: OutIndex) -> None:
    """Write the index of the ``ordinal``-th element, last dimension fastest, to ``out_index``.

    Args:
        ordinal: 0 to size - 1; each ordinal gives a different index.
        shape: (dims,).
        out_index: (dims,) or longer; its first ``dims`` entries are written.
    """
    # TASK 2.1: From the last dimension: remainder and quotient by its size.
    rest = ordinal + 0  # inside a prange loop the loop variable itself must not be changed
    for step in range(len(shape)):
        dim = len(shape) - 1 - step
        extent = shape[dim]
        out_index[dim] = rest % extent
        rest = rest // extent
    # END TASK 2.1


def broadcast_index(big_index: Index, big_shape: Shape, shape: Shape, out_index: OutIndex) -> None:
    """Map an index of a broadcast result to an index of an operand.

    The shapes are aligned on the right, and dimensions of the operand with size 1 get the index 0.

    Args:
        big_index: (big_dims,) index into ``big_shape``.
        big_shape: (big_dims,).
        shape: (dims,), dims <= big_dims, broadcastable to ``big_shape``.
        out_index: (dims,) or longer; its first ``dims`` entries are written.
    """
    # TASK 2.2: Align at the right; a dimension of size 1 has index 0 only.
    offset = len(big_shape) - len(shape)
    for dim in range(len(shape)):
        out_index[dim] = big_index[dim + offset] if shape[dim] > 1 else 0
    # END TASK 2.2


def shape_broadcast(shape1: UserShape, shape2: UserShape) -> tuple[int, ...]:
    """Return the shape that two shapes broadcast to, by NumPy's rules.

    Raises:
        IndexingError: If a pair of sizes differs and neither is 1; the message names both shapes.
    """
    # TASK 2.2: Pad the shorter shape with 1s on the left; then compare pair by pair.
    dims = max(len(shape1), len(shape2))
    padded1 = (1,) * (dims - len(shape1)) + tuple(shape1)
    padded2 = (1,) * (dims - len(shape2)) + tuple(shape2)
    result = []
    for size1, size2 in zip(padded1, padded2, strict=True):
        if size1 != size2 and 1 not in (size1, size2):
            raise IndexingError(
                f"shapes {tuple(shape1)} and {tuple(shape2)} do not broadcast: sizes {size1} and "
                f"{size2} differ and neither is 1; align them from the right with view or permute"
            )
        result.append(int(size2 if size1 == 1 else size1))
    return tuple(result)
    # END TASK 2.2


def strides_from_shape(shape: UserShape) -> tuple[int, ...]:
    """Return row-major strides, in elements."""
    strides = []
    step = 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= int(size)
    return tuple(reversed(strides))


@lru_cache(maxsize=4096)
def _row_major_strides(shape: Ints) -> Ints:
    """Return the strides of the shape of a result, which most results have had before; it is checked."""
    return strides_from_shape(checked_shape(shape))


@lru_cache(maxsize=4096)
def _as_arrays(shape: Ints, strides: Ints) -> tuple[Shape, Strides]:
    """Return shape and strides as compiled loops take them, which only read them."""
    return np.array(shape, np.int64), np.array(strides, np.int64)


def _check_dims(dims: int) -> None:
    if dims > MAX_DIMS:
        raise ValueError(
            f"a tensor has at most {MAX_DIMS} dimensions, got {dims}; join some with view"
        )


class TensorData:
    """A flat storage seen through a shape and strides.

    Args:
        storage: A list (converted to the default dtype), or a 1-D array, shared and not copied.
        shape: Sizes, a tuple.
        strides: Elements to step for each dimension, a tuple; row-major when None.

    Raises:
        IndexingError: If strides and shape have different lengths, or an index would leave the
            storage.
        TypeError: If the storage holds anything but float16, bfloat16, float32, float64, integers or
            booleans.
        ValueError: If a size is negative or not a whole number, the storage is not flat or not of numbers,
            or there are more than MAX_DIMS dimensions.
        AssertionError: If shape or strides is not a tuple, or the storage has the wrong size.
    """

    _storage: Storage
    strides: Ints
    shape: Ints
    dims: int
    #: The dtype of the storage.
    dtype: np.dtype[Any]
    #: Whether the elements have 16 bits (float16 or bfloat16).
    is_half: bool
    #: Whether this is a Python number, which is not rounded to 16 bits and does not widen a result.
    is_number = False

    def __init__(
        self,
        storage: Sequence[float] | Storage,
        shape: UserShape,
        strides: UserStrides | None = None,
    ):
        if isinstance(storage, np.ndarray) or is_device_storage(storage):
            self._storage = storage  # type: ignore[assignment]
        else:
            self._storage = as_storage(storage)
        self.dtype = self._storage.dtype
        is_half = DTYPES.get(self.dtype)
        if is_half is None:
            raise TypeError(
                f"a tensor holds {HELD}, got {self.dtype}; convert with astype(numpy.float32)"
            )
        for name, sizes in (("shape", shape), ("strides", () if strides is None else strides)):
            if not isinstance(sizes, tuple):
                raise AssertionError(f"{name} must be a tuple, got {shown(sizes)}")
        row_major = strides is None
        strides = _row_major_strides(shape) if strides is None else strides
        if len(strides) != len(shape):
            raise IndexingError(
                f"strides {shown(strides)} and shape {shape} have different lengths; use one stride a size"
            )
        self.is_half = is_half
        self.shape: tuple[int, ...] = shape  # type: ignore[assignment]
        self.strides: tuple[int, ...] = strides  # type: ignore[assignment]
        self.dims = len(shape)
        self.size = math.prod(shape)
        if type(self.size) is not int:  # to the cache above, 2.0 is 2
            self.shape = shape = checked_shape(shape)
            self.size = math.prod(shape)
        if self._storage.ndim != 1:
            raise ValueError(
                f"the storage must be flat, got an array of shape {self._storage.shape}; pass it as "
                "array.reshape(-1), or use minitorch.from_numpy"
            )
        if len(self._storage) != self.size:
            raise AssertionError(
                f"shape {shape} holds {self.size} elements, the storage has {len(self._storage)}"
            )
        # Compiled loops trust what follows: they check no index and have buffers of MAX_DIMS.
        _check_dims(self.dims)
        if self.size and not row_major:
            last = sum([(size - 1) * stride for size, stride in zip(shape, strides, strict=True)])
            if min(shape, default=0) < 0:
                checked_shape(shape)
            whole = all(isinstance(step, (int, np.integer)) for step in strides)
            if last >= self.size or min(strides, default=0) < 0 or not whole:
                raise IndexingError(
                    f"strides {shown(strides)} lead outside the {self.size} elements of shape {shape}; "
                    "they must be whole numbers, none negative, and the last index must lie in the storage"
                )

    @classmethod
    def fresh(cls, storage: Storage, shape: Ints, strides: Ints | None = None) -> TensorData:
        """Return data on a storage that was just allocated for it, row-major when strides are None.

        The arguments are not checked.
        """
        data = cls.__new__(cls)
        data._storage, data.shape = storage, shape
        data.strides = _row_major_strides(shape) if strides is None else strides
        data.dtype = dtype = storage.dtype
        data.dims, data.size, data.is_half = len(shape), len(storage), DTYPES[dtype]
        _check_dims(data.dims)
        return data

    # Arrays for the compiled loops, made when a loop asks for them: kernels on a device do not.
    @property
    def _shape(self) -> Shape:
        return _as_arrays(self.shape, self.strides)[0]

    @property
    def _strides(self) -> Strides:
        return _as_arrays(self.shape, self.strides)[1]

    def to_cuda_(self) -> None:  # beyond module 2
        """Move the storage to the CUDA device, in place.

        Raises:
            RuntimeError: If there is no device; the message says what to do.
            MemoryError: If the device has too little memory left.
        """
        if not is_device_storage(self._storage):
            self._storage = memories.device.bring(self._storage)

    def is_contiguous(self) -> bool:
        """Tell whether the elements lie in row-major order."""
        if self.strides == _row_major_strides(self.shape):
            return True
        expected = 1  # of a dimension of size 1 the stride does not matter
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True

    def to_array(self) -> Storage:
        """Return the elements as an array of ``shape``: a view of a host storage, else a copy."""
        storage: Any = self._storage
        if is_device_storage(storage):  # beyond module 2
            storage = memories.device.to_host(storage)
        steps = tuple(stride * storage.itemsize for stride in self.strides)
        return np.ndarray(self.shape, storage.dtype, storage, 0, steps)

    @staticmethod
    def shape_broadcast(shape_a: UserShape, shape_b: UserShape) -> Ints:
        """Return the broadcast of two shapes; see :func:`shape_broadcast`."""
        return shape_broadcast(shape_a, shape_b)

    def index(self, index: int | UserIndex) -> int:
        """Return the position of an index in the storage.

        Raises:
            IndexingError: If the index and the shape have different lengths, or the index is out of range.
        """
        key: Any = tuple(index) if isinstance(index, (tuple, list, np.ndarray)) else (index,)
        # A 0-dimensional tensor is read as if it had one dimension of size 1.
        shape, strides = (self.shape, self.strides) if self.shape else ((1,), (1,))
        if len(key) != len(shape):
            raise IndexingError(
                f"index {key} has {len(key)} entries, but shape {self.shape} has {self.dims} "
                "dimensions; give one entry for each"
            )
        for entry, size in zip(key, shape, strict=True):
            if not isinstance(entry, (int, np.integer)):
                raise TypeError(
                    f"index {key} must be whole numbers, one for each dimension of shape {self.shape}"
                )
            if not 0 <= entry < size:
                raise IndexingError(
                    f"index {key} is out of range for shape {self.shape}; entries run from 0 to "
                    "size - 1 and negative ones are not supported"
                )
        return int(sum(entry * stride for entry, stride in zip(key, strides, strict=True)))

    def indices(self) -> Iterable[UserIndex]:
        """Yield each index as a tuple of NumPy integers, in row-major order."""
        out_index = np.zeros(self.dims, dtype=np.int64)
        for ordinal in range(self.size):
            to_index(ordinal, self._shape, out_index)
            yield tuple(out_index)  # type: ignore[misc]

    def sample(self) -> UserIndex:
        """Return a random valid index, drawn with Python's ``random``."""
        return tuple(random.randint(0, size - 1) for size in self.shape)

    def get(self, key: int | UserIndex) -> float:
        """Return the element at an index."""
        storage, position = self._storage, self.index(key)
        if is_device_storage(storage):  # beyond module 2
            return memories.device.read(storage, position)
        return storage[position]

    def set(self, key: int | UserIndex, val: float) -> None:
        """Write the element at an index.

        Raises:
            IndexingError: As in :meth:`index`.
            TypeError: If the value is not a number.
            ValueError: If the dtype cannot hold the value, such as a fraction in an integer dtype.
        """
        storage, position = self._storage, self.index(key)
        val = as_element(val, self.dtype)
        wrote(storage)  # beyond module 5
        if is_device_storage(storage):  # beyond module 2
            return memories.device.write(storage, position, val)
        storage[position] = val

    def tuple(self) -> Triple:
        """Return (storage, shape, strides), the three arguments that a kernel takes per tensor."""
        return (self._storage, *_as_arrays(self.shape, self.strides))

    def permute(self, *order: int) -> TensorData:
        """Return a view with the dimensions in a different order; nothing is copied.

        Args:
            order: A permutation of 0 to dims - 1.
        """
        if sorted(order) != list(range(self.dims)):
            raise AssertionError(
                f"permute needs each of the dimensions 0 to {self.dims - 1} once, got {order} for shape "
                f"{self.shape}"
            )
        # TASK 2.1: The same storage, with shape and strides in the new order.
        return TensorData(
            self._storage,
            tuple([self.shape[dim] for dim in order]),
            tuple([self.strides[dim] for dim in order]),
        )
        # END TASK 2.1

    def to_string(self) -> str:
        """Return the elements as nested brackets with two decimals."""
        return "".join(self._pieces(self.to_array(), 0))

    def _pieces(self, array: Storage, depth: int) -> Iterator[str]:
        if array.ndim == 0:
            yield f"{float(array):3.2f}"
            return
        yield ("\n" + "\t" * depth if depth else "") + "["
        for position, row in enumerate(array):
            if position and array.ndim == 1:
                yield " "
            yield from self._pieces(row, depth + 1)
        yield "]"
