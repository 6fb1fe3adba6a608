"""Loops with fixed layouts: the first call of a kind looks at shapes and strides, later calls only run.

A kind is the shapes, strides and dtypes of the operands.  A training step makes the same calls again and
again, and to work out how a small call runs takes longer than to run it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..tensor_data import Ints, Storage, TensorData

#: Maximum number of kinds that an operation remembers; beyond it, the operation forgets all of them.
MOST_KINDS = 1024
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


def as_loop(function: Callable[..., None]) -> Loop:
    """Return any function of ``(out, *inputs, *options)`` as a :class:`Loop`."""
    if isinstance(function, Loop):
        return function

    def bind(*args: Any) -> Run:
        layouts = [(t.shape, t.strides) for t in args if isinstance(t, TensorData)]
        options = args[len(layouts) :]

        def run(*storages: Storage) -> None:
            data = [TensorData(s, *own) for s, own in zip(storages, layouts, strict=True)]
            function(*data, *options)

        return run

    return Loop(bind)


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


class Bound(NamedTuple):
    """What a call of a known kind does: allocate a result, and run.

    Attributes:
        allocate: Returns a storage of a size and a dtype.
        size: Elements of the result.
        dtype: Of the result.
        run: Fills its storage.
        about: All other attributes of the result.
    """

    allocate: Allocate
    size: int
    dtype: np.dtype[Any]
    run: Run
    about: dict[str, Any]

    def result(self, *storages: Storage) -> TensorData:
        """Return the result for the storages of operands: one allocation, one launch."""
        allocate, size, dtype, run, about = self
        out = allocate(size, dtype)
        run(out, *storages)
        data = TensorData.__new__(TensorData)
        vars(data).update(about)
        data._storage = out
        return data


class Kinds(dict[Any, Bound]):
    """The kinds of call that one operation has had.

    Args:
        allocator: Of a size and a dtype, returns what allocates such results.
    """

    _every: ClassVar[list[Kinds]] = []

    def __init__(self, allocator: Callable[[int, np.dtype[Any]], Allocate]):
        super().__init__()
        self.allocator = allocator
        self._every.append(self)

    @classmethod
    def cache_clear(cls) -> None:
        """Forget the kinds of all operations, and with them the launches that they hold."""
        for kinds in cls._every:
            kinds.clear()

    def learn(
        self, kind: Any, loop: Loop, out: TensorData, *inputs: TensorData, options: Ints = ()
    ) -> None:
        """Remember how a call runs.

        Args:
            kind: What later calls of this kind look up.
            loop: Of the backend.
            out: What it filled, row-major.
            *inputs: As the loop took them.
            options: Likewise.
        """
        self.add(kind, out, loop.bind(out, *inputs, *options))

    def add(self, kind: Any, out: TensorData, run: Run) -> None:
        """Remember a function that fills results like ``out``, which is row-major."""
        if len(self) >= MOST_KINDS:
            self.clear()
        about = {name: value for name, value in vars(out).items() if name != "_storage"}
        allocate = self.allocator(out.size, out.dtype)
        self[kind] = Bound(allocate, out.size, out.dtype, run, about)
