"""Operations on 16-bit storage, which run in float32 and round once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.runtime.dtypes import FLOAT32, is_floating

from ..tensor_data import Ints, Storage, TensorData
from .memory import memories


class Widening:
    """Run operations on 16-bit storage, which most loops do not support.

    :meth:`run` passes them float32 instead, and rounds their result once.
    :class:`minitorch.tensor_ops.TensorOps` inherits from this class.
    """

    #: Whether the loops of map, zip and reduce read and write 16-bit storage directly.
    takes_half = False

    if TYPE_CHECKING:  # what the methods below need of the backend
        cuda: bool

        @staticmethod
        def allocate(size: int, dtype: np.dtype[Any]) -> Storage: ...  # noqa: D102

    @classmethod
    def _memory(cls) -> Any:
        return memories.device if cls.cuda else memories.host

    @classmethod
    def runs_as_it_is(cls, *data: TensorData) -> bool:
        """Tell whether loops support data of these dtypes without a conversion before or after."""
        return all(is_floating(t.dtype) and (cls.takes_half or not t.is_half) for t in data)

    @classmethod
    def run(
        cls, loop: Callable[..., None], out: TensorData, *inputs: TensorData, options: Ints = ()
    ) -> None:
        """Run a loop, in float32 if operands or the result have 16 bits.

        Args:
            loop: Takes ``(out, *inputs, *options)``, none of which has 16 bits.
            out: The output, which is written.
            *inputs: The operands.
            options: Passed to the loop.
        """
        is_plain = not out.is_half
        for t in inputs:  # not any(): a generator takes longer than all else here
            is_plain = is_plain and not t.is_half
        if is_plain:
            loop(out, *inputs, *options)
            return
        inputs = tuple(cls._widened(t) for t in inputs)
        if not out.is_half:
            loop(out, *inputs, *options)
            return
        # A conversion from float64, or from integers, is rounded once too.
        wide = np.result_type(FLOAT32, *(t.dtype for t in inputs))
        computed = TensorData(cls.allocate(out.size, wide), out.shape, out.strides)
        loop(computed, *inputs, *options)
        cls._memory().convert_into(computed._storage, out._storage)

    @classmethod
    def run_elements(
        cls, loop: Callable[..., None], out: TensorData, *inputs: TensorData, options: Ints = ()
    ) -> None:
        """Run a loop of map, zip or reduce like :meth:`run`, but directly if it supports 16-bit storage."""
        if cls.takes_half:
            loop(out, *inputs, *options)
        else:
            cls.run(loop, out, *inputs, options=options)

    @classmethod
    def _widened(cls, t: TensorData) -> TensorData:
        """Return 16-bit data in float32 with the same layout, and other data unchanged."""
        if not t.is_half:
            return t
        return TensorData(cls._memory().convert(t._storage, FLOAT32), t.shape, t.strides)

    @classmethod
    def move(cls, loop: Callable[..., None], out: TensorData, a: TensorData) -> None:
        """Run a loop that only copies or converts, without widening to float32."""
        memory = cls._memory()
        if out.is_half and out.dtype == a.dtype:
            bits = (TensorData(memory.bits(t._storage), t.shape, t.strides) for t in (out, a))
            loop(*bits)
        elif (
            (out.is_half or a.is_half)
            and is_floating(out.dtype)
            and is_floating(a.dtype)
            and (out.shape, out.strides) == (a.shape, a.strides)
        ):
            memory.convert_into(a._storage, out._storage)
        else:
            cls.run_elements(loop, out, a)
