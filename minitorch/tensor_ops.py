"""The backend-independent part of tensor operations: shapes, broadcasting, allocation.

A backend is a subclass of :class:`TensorOps` that supplies the loops.  Each loop takes the output first and
then the inputs, and fills the output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernels.runtime.dtypes import is_half, lowest  # beyond module 3

from . import operators
from .backends import (  # beyond module 5
    more_operators,
    plain_indexing,
)
from .backends.dtype_promotion import floating, result_dtype
from .backends.half_precision import Widening  # beyond module 5
from .backends.memory import memories  # beyond module 2
from .backends.operations import Operations  # beyond module 5
from .backends.plain_math import unraising
from .backends.result_shapes import matmul_shape as matmul_shape
from .backends.result_shapes import normalize_dim as normalize_dim
from .backends.running import Running
from .backends.tensor_protocol import AnyTensor
from .backends.tensor_protocol import MapProto as MapProto
from .backends.unique import Unique  # beyond module 5
from .backends.writes import wrote  # beyond module 5
from .tensor_data import (
    IndexingError,
    Shape,
    Storage,
    Strides,
    TensorData,
    broadcast_index,
    index_to_position,
    shape_broadcast,
    to_index,
)


class TensorOps(
    Widening,  # beyond module 5
    Running,
):
    """Higher-order tensor operations; a backend sets its loops, or overrides the ``*_loop`` methods.

    ``map_loop(fn)``, ``zip_loop(fn)`` and ``reduce_loop(fn)`` return functions of
    :class:`TensorData`: ``(out, a)``, ``(out, a, b)`` and ``(out, a, dim)``; ``matmul_loop`` is
    ``(out, a, b)`` on three dimensions.  Reduce accumulates onto the values already in ``out``.
    """

    cuda = False
    #: Whether the loops are compiled.
    is_compiled = False
    #: Builds the loop of a function over storage, shape and strides of each tensor; see ``tensor_map``.
    make_map: Callable[..., Any]
    make_zip: Callable[..., Any]
    make_reduce: Callable[..., Any]
    target = "numpy"  # of the kernels of attention  # beyond module 4
    table: Operations  # that serve the backends of this class, by name  # beyond module 5
    indexing: Any = plain_indexing  # gather, scatter-add, sort, …  # beyond module 5

    @staticmethod
    def allocate(size: int, dtype: np.dtype[Any]) -> Storage:
        """Return an uninitialised flat storage."""
        return np.empty(size, dtype)

    @staticmethod
    def filled(size: int, value: float, dtype: np.dtype[Any]) -> Storage:
        """Return a flat storage of equal elements."""
        return np.full(size, value, dtype)

    @classmethod
    def map_loop(cls, fn: Callable[[float], float]) -> Callable[..., None]:
        """Return the loop of an element-wise function of one tensor."""
        loop = cls.make_map(fn)
        return lambda out, a: loop(*out.tuple(), *a.tuple())

    @classmethod
    def zip_loop(cls, fn: Callable[[float, float], float]) -> Callable[..., None]:
        """Return the loop of an element-wise function of two tensors."""
        loop = cls.make_zip(fn)
        return lambda out, a, b: loop(*out.tuple(), *a.tuple(), *b.tuple())

    @classmethod
    def reduce_loop(cls, fn: Callable[[float, float], float]) -> Callable[..., None]:
        """Return the loop that folds one dimension onto the values already in the output."""
        loop = cls.make_reduce(fn)
        return lambda out, a, dim: loop(*out.tuple(), *a.tuple(), dim)

    @classmethod
    def fold_loop(cls, fn: Callable[[float, float], float], start: float) -> Callable[..., None]:
        """Return the loop that writes the fold of one dimension, beginning with ``start``."""
        loop = cls.reduce_loop(fn)

        def fold(out: TensorData, a: TensorData, dim: int) -> None:
            out._storage.fill(start)
            loop(out, a, dim)

        return fold

    @staticmethod
    def matmul_loop(out: TensorData, a: TensorData, b: TensorData) -> None:
        """Multiply (batch, n, k) by (batch, k, m) into (batch, n, m)."""
        raise NotImplementedError("a backend must define matmul_loop")

    @classmethod
    def map(cls, fn: Callable[[float], float]) -> MapProto:
        """Lift a function of one number to tensors.

        Args:
            fn: One of ``operators``, or any function that the backend's compiler supports.

        Returns:
            ``mapped(a, out=None)``, which returns a new tensor of the shape of ``a``; with ``out`` it
            broadcasts ``a`` to ``out`` and fills that in place.
        """
        loop = cls.map_loop(fn)
        run = cls.move if fn is operators.id else cls.run_elements

        def mapped(a: AnyTensor, out: AnyTensor | None = None, /) -> AnyTensor:
            if out is not None:
                if a.shape != out.shape and shape_broadcast(a.shape, out.shape) != out.shape:
                    raise IndexingError(
                        f"shape {a.shape} does not broadcast to out's {out.shape}; pass an out that it fits"
                    )
                run(loop, out._tensor, a._tensor)
                if out.history is not None:  # else a new result  # beyond module 5
                    wrote(out._tensor._storage)
                return out
            out = a.empty(a.shape, result_dtype(a))
            run(loop, out._tensor, floating(a, out.dtype)._tensor)
            return out

        return mapped

    @classmethod
    def zip(cls, fn: Callable[[float, float], float]) -> Callable[..., AnyTensor]:
        """Lift a function of two numbers to tensors that broadcast.

        Returns:
            ``zipped(a, b, dtype=None)``: a new tensor of the broadcast shape; None promotes the dtypes.
        """
        loop = cls.zip_loop(fn)

        def zipped(a: AnyTensor, b: AnyTensor, dtype: np.dtype[Any] | None = None) -> AnyTensor:
            shape = a.shape if a.shape == b.shape else shape_broadcast(a.shape, b.shape)
            dtype = result_dtype(a, b) if dtype is None else dtype
            out = a.empty(shape, dtype)
            a, b = floating(a, dtype), floating(b, dtype)
            cls.run_elements(loop, out._tensor, a._tensor, b._tensor)
            return out

        return zipped

    @classmethod
    def reduce(
        cls, fn: Callable[[float, float], float], start: float = 0.0
    ) -> Callable[[AnyTensor, int], AnyTensor]:
        """Lift a function of two numbers to a fold over one dimension.

        Args:
            fn: An associative function.
            start: The initial value of the fold.

        Returns:
            ``reduced(a, dim)``: a new tensor in which ``dim`` has size 1.
        """
        loop = cls.fold_loop(fn, start)

        def reduced(a: AnyTensor, dim: int) -> AnyTensor:
            dim = normalize_dim(dim, a.shape)
            out = a.empty((*a.shape[:dim], 1, *a.shape[dim + 1 :]), result_dtype(a))
            cls.run_elements(loop, out._tensor, floating(a, out.dtype)._tensor, options=(dim,))
            return out

        return reduced

    @classmethod
    def matrix_multiply(cls, a: AnyTensor, b: AnyTensor) -> AnyTensor:
        """Multiply matrices, with any number of leading batch dimensions that broadcast.

        Args:
            a: (..., n, k).
            b: (..., k, m).

        Returns:
            (..., n, m).
        """
        out = a.empty(matmul_shape(a.shape, b.shape), result_dtype(a, b))
        a, b = floating(a, out.dtype), floating(b, out.dtype)
        cls.multiply_into(out._tensor, a._tensor, b._tensor)
        return out

    @classmethod  # beyond module 5
    def __init_subclass__(cls) -> None:  # beyond module 5
        super().__init_subclass__()
        if TensorOps in cls.__bases__:  # others share the table of the class that they change
            cls.table = Operations(cls)

    @classmethod  # beyond module 5
    def served(cls) -> dict[str, Callable[..., Any]]:  # beyond module 5
        """Return the functions that make or are the loops of this class, by the name of the operation."""
        return {
            "map": cls.make_map, "zip": cls.make_zip, "reduce": cls.make_reduce,
            "matrix_multiply": cls.matmul_loop,
        }  # fmt: skip


class TensorBackend(
    Unique,  # beyond module 5
):
    """The operations of one backend, each lifted from ``operators`` once.

    Args:
        ops: A subclass of :class:`TensorOps`.

    Attributes:
        kind: That subclass.
        loops: The class whose loops serve this backend: ``kind``, or a faster one in its place.
    """

    def __init__(self, ops: type[TensorOps]):
        self.kind = self.loops = ops
        self.cuda = ops.cuda
        #: The functions that serve operations; ``print(backend.ops)`` shows where each of them stands.
        self.ops = ops.table  # beyond module 5
        self.ops.backends.add(self)  # beyond module 5
        self.lift()

    def lift(self) -> None:
        """Lift the operators; loops compile on their first call, so that this costs nothing."""
        if self.kind is self.ops.owner:  # beyond module 5
            self.loops = self.ops.loops
        ops = self.loops
        self.target = ops.target  # beyond module 4
        self.indexing = ops.indexing  # beyond module 5
        self.memory = memories.device if self.cuda else memories.host  # beyond module 2
        map_, zip_, reduce_ = ops.map, ops.zip, ops.reduce
        self.neg_map = map_(operators.neg)
        self.sigmoid_map = map_(operators.sigmoid)
        self.relu_map = map_(operators.relu)
        self.log_map = map_(operators.log)
        self.exp_map = map_(operators.exp)
        self.tanh_map = map_(operators.tanh)  # beyond module 2
        self.id_map = self.id_cmap = map_(operators.id)
        self.inv_map = map_(operators.inv)

        self.add_zip, self.mul_zip = zip_(operators.add), zip_(operators.mul)
        self.lt_zip, self.eq_zip = zip_(operators.lt), zip_(operators.eq)
        self.is_close_zip = zip_(operators.is_close)
        self.relu_back_zip = zip_(operators.relu_back)
        self.log_back_zip, self.inv_back_zip = zip_(operators.log_back), zip_(operators.inv_back)
        self.pow_scalar_zip = zip_(operators.pow)  # beyond module 2

        self.add_reduce, self.mul_reduce = reduce_(operators.add, 0.0), reduce_(operators.mul, 1.0)
        self.max_reduce = reduce_(operators.max, -np.inf)  # beyond module 2
        self._finite_reduce = reduce_(  # beyond module 3
            operators.max, float(np.finfo(np.float32).min)
        )
        self._max_zip = zip_(operators.max)  # beyond module 3
        self.matrix_multiply = ops.matrix_multiply
        more = more_operators  # beyond module 5
        self.elu_map, self.elu_back_zip = map_(more.elu), zip_(more.elu_back)  # beyond module 5
        self.exp_difference_zip = zip_(more.exp_difference)  # beyond module 5
        self.keep_zip, self.drop_zip = zip_(more.keep), zip_(more.drop)  # beyond module 5

    def __repr__(self) -> str:
        return f"TensorBackend({self.kind.__name__})"

    def shift_reduce(self, a: AnyTensor, dim: int) -> AnyTensor:  # beyond module 3
        """Return the maximum over a dimension, finite even for a row of minus infinities; see ``nn``."""
        largest = self._finite_reduce(a, dim)
        if not is_half(largest.dtype):
            return largest
        # The least of float32 is minus infinity in 16 bits.
        return self._max_zip(largest, largest._ensure_tensor(lowest(largest.dtype)))


# -- the simple backend: plain Python loops, the form to read first ------------------------------


def tensor_map(fn: Callable[[float], float]) -> Callable[..., None]:
    """Return the loop of an element-wise function of one tensor, broadcast to the output.

    The loop takes ``(out, out_shape, out_strides, in_storage, in_shape, in_strides)``.
    """

    def _map(
        out: Storage, out_shape: Shape, out_strides: Strides,
        in_storage: Storage, in_shape: Shape, in_strides: Strides,
    ) -> None:  # fmt: skip
        # TASK 2.3: For each position of out: its index, the input's index by broadcast_index, fn.
        out_index = np.zeros(len(out_shape), np.int64)
        in_index = np.zeros(len(in_shape), np.int64)
        for ordinal in range(int(np.prod(out_shape))):
            to_index(ordinal, out_shape, out_index)
            broadcast_index(out_index, out_shape, in_shape, in_index)
            value = in_storage[index_to_position(in_index, in_strides)]
            out[index_to_position(out_index, out_strides)] = fn(value)
        # END TASK 2.3

    return _map


def tensor_zip(fn: Callable[[float, float], float]) -> Callable[..., None]:
    """Return the loop of an element-wise function of two tensors that broadcast.

    The loop takes the storage, shape and strides of out, a and b, nine arguments.
    """

    def _zip(
        out: Storage, out_shape: Shape, out_strides: Strides,
        a_storage: Storage, a_shape: Shape, a_strides: Strides,
        b_storage: Storage, b_shape: Shape, b_strides: Strides,
    ) -> None:  # fmt: skip
        # TASK 2.3: As _map, with two inputs, each broadcast.
        out_index = np.zeros(len(out_shape), np.int64)
        a_index = np.zeros(len(a_shape), np.int64)
        b_index = np.zeros(len(b_shape), np.int64)
        for ordinal in range(int(np.prod(out_shape))):
            to_index(ordinal, out_shape, out_index)
            broadcast_index(out_index, out_shape, a_shape, a_index)
            broadcast_index(out_index, out_shape, b_shape, b_index)
            a = a_storage[index_to_position(a_index, a_strides)]
            b = b_storage[index_to_position(b_index, b_strides)]
            out[index_to_position(out_index, out_strides)] = fn(a, b)
        # END TASK 2.3

    return _zip


def tensor_reduce(fn: Callable[[float, float], float]) -> Callable[..., None]:
    """Return the loop that folds one dimension onto the values already in the output.

    The loop takes the storage, shape and strides of out and a, and the dimension.
    """

    def _reduce(
        out: Storage, out_shape: Shape, out_strides: Strides,
        a_storage: Storage, a_shape: Shape, a_strides: Strides,
        reduce_dim: int,
    ) -> None:  # fmt: skip
        # TASK 2.3: For each position of out walk along reduce_dim and fold onto what out holds.
        index = np.zeros(len(out_shape), np.int64)
        for ordinal in range(int(np.prod(out_shape))):
            to_index(ordinal, out_shape, index)
            position = index_to_position(index, out_strides)
            for step in range(a_shape[reduce_dim]):
                index[reduce_dim] = step
                out[position] = fn(out[position], a_storage[index_to_position(index, a_strides)])
        # END TASK 2.3

    return _reduce


class SimpleOps(TensorOps):
    """Operations as plain Python loops: slow, and steppable in a debugger."""

    is_cuda = False
    make_map = staticmethod(unraising(tensor_map))
    make_zip = staticmethod(unraising(tensor_zip))
    make_reduce = staticmethod(tensor_reduce)

    @staticmethod
    def matmul_loop(out: TensorData, a: TensorData, b: TensorData) -> None:
        """Multiply (batch, n, k) by (batch, k, m) into (batch, n, m)."""
        x, y, result = a.to_array(), b.to_array(), out.to_array()
        batch, rows, cols = out.shape
        for n in range(batch):
            for i in range(rows):
                for j in range(cols):
                    total = 0.0
                    for k in range(a.shape[2]):
                        total += x[n % a.shape[0], i, k] * y[n % b.shape[0], k, j]
                    result[n, i, j] = total


SimpleBackend = TensorBackend(SimpleOps)
