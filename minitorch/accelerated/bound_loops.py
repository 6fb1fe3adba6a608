"""Loops with fixed layouts: the first call of a kind looks at shapes and strides, later calls only run.

A kind is the shapes, strides and dtypes of the operands.  A training step makes the same calls again and
again, and to work out how a small call runs takes longer than to run it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from kernels.runtime.known_calls import KnownCalls

from .. import operators
from ..backends.result_shapes import normalize_dim
from ..backends.tensor_protocol import AnyTensor, MapProto
from ..backends.writes import wrote
from ..tensor_data import Ints, Storage, TensorData
from ..tensor_ops import TensorOps

#: A loop with fixed layouts, which takes the storage of the output and then those of the inputs.
Run = Callable[..., None]
#: Returns an uninitialised storage of a size and a dtype.
Allocate = Callable[[int, np.dtype[Any]], Storage]


class Loop:
    """A loop over tensors, ``loop(out, *inputs, *options)``, whose layouts can be fixed beforehand.

    Args:
        bind: ``(out, *inputs, *options)``, :class:`TensorData` and then whole numbers: returns the
            function of the storages of data laid out alike.
    """

    def __init__(self, bind: Callable[..., Run]):
        self.bind = bind

    def __call__(self, out: TensorData, *rest: Any) -> None:
        """Run the loop on tensors of any layout."""
        storages = [t._storage for t in rest if isinstance(t, TensorData)]
        self.bind(out, *rest)(out._storage, *storages)


def on_storages(loop: Callable[..., None], *data: TensorData) -> Run:
    """Return a loop of ``(out, *inputs)`` with the layouts of these as a ``Run``."""
    layouts = [(t.shape, t.strides) for t in data]
    return lambda *storages: loop(
        *[TensorData(own, *layout) for own, layout in zip(storages, layouts, strict=True)]
    )


def with_layouts(
    loop: Callable[..., None], out: TensorData, *inputs: TensorData, options: Ints = ()
) -> Run:
    """Return a loop of the course, which takes storage, shape and strides of each tensor, as a ``Run``."""
    shape, strides = out._shape, out._strides
    a_shape, a_strides = inputs[0]._shape, inputs[0]._strides
    if len(inputs) == 1:
        return lambda o, a: loop(o, shape, strides, a, a_shape, a_strides, *options)
    b_shape, b_strides = inputs[1]._shape, inputs[1]._strides
    return lambda o, a, b: loop(
        o, shape, strides, a, a_shape, a_strides, b, b_shape, b_strides, *options
    )


class BoundOps(TensorOps):
    """Operations that remember how calls of their kinds run.

    ``map_loop(fn)``, ``zip_loop(fn)`` and ``fold_loop(fn, start)`` of a subclass return a :class:`Loop`.
    """

    #: Cached products by the layouts of their operands; each backend has its own.
    _products: KnownCalls
    #: Returns the options of a matrix product in addition to its operands.
    product_options: Any = tuple

    @classmethod
    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._products = KnownCalls()

    @classmethod
    def served(cls) -> dict[str, Callable[..., Any]]:
        """Return the functions that make or are the loops of this class."""
        return {
            "map": cls.map_loop, "zip": cls.zip_loop, "reduce": cls.fold_loop,
            "matrix_multiply": cls.bind_product,
        }  # fmt: skip

    @classmethod
    def allocator(cls, size: int, dtype: np.dtype[Any]) -> Allocate:
        """Return what allocates storages of a size and dtype."""
        return cls.allocate

    @classmethod
    def keep(cls, kinds: KnownCalls, kind: Any, out: TensorData, run: Run | None) -> None:
        """Keep how a call runs: a function that returns its result for storages.

        Args:
            kinds: The kinds of call that an operation has had.
            kind: The key by which later calls of this kind are looked up.
            out: A result, which is row-major.
            run: Fills the storage of such a result; None if later calls cannot be run by it.
        """
        if run is None:
            return
        about = {name: value for name, value in vars(out).items() if name != "_storage"}
        size, dtype = out.size, out.dtype
        allocate = cls.allocator(size, dtype)

        def result(*storages: Storage) -> TensorData:
            storage = allocate(size, dtype)
            run(storage, *storages)
            data = TensorData.__new__(TensorData)
            vars(data).update(about)
            data._storage = storage
            return data

        kinds.keep(kind, result)

    @classmethod
    def map(cls, fn: Callable[[float], float]) -> MapProto:
        """Lift a function of one number to tensors; see :meth:`TensorOps.map`."""
        kinds, first, loop = KnownCalls(), super().map(fn), cast(Loop, cls.map_loop(fn))

        def mapped(a: AnyTensor, out: AnyTensor | None = None, /) -> AnyTensor:
            x = a._tensor
            if out is not None:
                y = out._tensor
                kind: Any = x.shape, x.strides, x.dtype, y.shape, y.strides, y.dtype
                if (known := kinds.get(kind)) is not None:
                    known(y._storage, x._storage)
                    if out.history is not None:  # else a new result
                        wrote(y._storage)
                    return out
                first(a, out)
                if cls.runs_as_it_is(x, y) and not (
                    fn is operators.id and (x.is_half or y.is_half)
                ):
                    kinds.keep(kind, loop.bind(y, x))
                return out
            kind = x.shape, x.strides, x.dtype, x.is_number
            if (known := kinds.get(kind)) is not None:
                return a._new(known(x._storage))
            result = first(a)
            if cls.runs_as_it_is(x, result._tensor) and not (fn is operators.id and x.is_half):
                cls.keep(kinds, kind, result._tensor, loop.bind(result._tensor, x))
            return result

        return mapped

    @classmethod
    def zip(cls, fn: Callable[[float, float], float]) -> Callable[..., AnyTensor]:
        """Lift a function of two numbers to tensors that broadcast; see :meth:`TensorOps.zip`."""
        kinds, first, loop = KnownCalls(), super().zip(fn), cast(Loop, cls.zip_loop(fn))

        def zipped(a: AnyTensor, b: AnyTensor, dtype: np.dtype[Any] | None = None) -> AnyTensor:
            x, y = a._tensor, b._tensor
            kind = (x.shape, x.strides, x.dtype, x.is_number,
                    y.shape, y.strides, y.dtype, y.is_number, dtype)  # fmt: skip
            if (known := kinds.get(kind)) is not None:
                return a._new(known(x._storage, y._storage))
            result = first(a, b, dtype)
            if cls.runs_as_it_is(x, y, result._tensor):
                cls.keep(kinds, kind, result._tensor, loop.bind(result._tensor, x, y))
            return result

        return zipped

    @classmethod
    def reduce(
        cls, fn: Callable[[float, float], float], start: float = 0.0
    ) -> Callable[[AnyTensor, int], AnyTensor]:
        """Lift a function of two numbers to a fold over one dimension; see :meth:`TensorOps.reduce`."""
        kinds, first = KnownCalls(), super().reduce(fn, start)
        loop = cast(Loop, cls.fold_loop(fn, start))

        def reduced(a: AnyTensor, dim: int) -> AnyTensor:
            x = a._tensor
            if not (type(dim) is int and 0 <= dim < x.dims):
                dim = normalize_dim(dim, x.shape)
            kind = x.shape, x.strides, x.dtype, dim
            if (known := kinds.get(kind)) is not None:
                return a._new(known(x._storage))
            result = first(a, dim)
            if cls.runs_as_it_is(x, result._tensor):
                cls.keep(kinds, kind, result._tensor, loop.bind(result._tensor, x, dim))
            return result

        return reduced

    @classmethod
    def matrix_multiply(cls, a: AnyTensor, b: AnyTensor) -> AnyTensor:
        """Multiply matrices; see :meth:`TensorOps.matrix_multiply`."""
        x, y = a._tensor, b._tensor
        kind = x.shape, x.strides, x.dtype, y.shape, y.strides, y.dtype, cls.product_options()
        if (known := cls._products.get(kind)) is not None:
            return a._new(known(x._storage, y._storage))
        result = super().matrix_multiply(a, b)
        if x.dtype == y.dtype == result.dtype:
            cls.keep(cls._products, kind, result._tensor, cls.bind_product(result._tensor, x, y))
        return result

    @classmethod
    def bind_product(cls, out: TensorData, a: TensorData, b: TensorData) -> Run | None:
        """Return a function that multiplies operands of these layouts, or None if calls must check them."""
