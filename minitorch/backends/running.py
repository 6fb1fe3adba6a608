"""How a backend runs its loops: on data as they are, and on matrices with their batch dimensions merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import operators
from ..tensor_data import Ints, TensorData, UserShape


class Running:
    """Run loops on data of any dtype as it is; :class:`Widening` comes before it where 16 bits are used."""

    @classmethod
    def run(
        cls, loop: Callable[..., None], out: TensorData, *inputs: TensorData, options: Ints = ()
    ) -> None:
        """Fill ``out`` by a loop, which takes ``(out, *inputs, *options)``."""
        loop(out, *inputs, *options)

    run_elements = move = run

    @classmethod
    def multiply_into(cls, out: TensorData, a: TensorData, b: TensorData) -> None:
        """Fill ``out`` with the product of operands of any floating dtype."""
        cls.run(cls.matmul_into, out, a, b)

    @classmethod
    def matmul_into(cls: Any, out: TensorData, a: TensorData, b: TensorData) -> None:
        """Fill ``out`` with the product; batch dimensions are merged into one for ``matmul_loop``."""
        batch = out.shape[:-2]
        size = int(operators.prod(batch))
        flat_out = TensorData(out._storage, (size, *out.shape[-2:]))
        cls.matmul_loop(flat_out, cls._one_batch(a, batch), cls._one_batch(b, batch))

    @classmethod
    def _one_batch(cls: Any, t: TensorData, batch: UserShape) -> TensorData:
        """View ``t`` with one batch dimension; size 1 stands for any number of equal matrices."""
        lead, matrix, strides = t.shape[:-2], t.shape[-2:], t.strides[:-2]
        if all(size == 1 for size in lead):
            return TensorData(t._storage, (1, *matrix), (0, *t.strides[-2:]))
        size = int(operators.prod(batch))
        inner = zip(strides, lead[1:], strides[1:], strict=False)
        if lead == tuple(batch) and all(step == n * below for step, n, below in inner):
            return TensorData(t._storage, (size, *matrix), t.strides[-3:])  # one step for all
        storage = cls.allocate(size * matrix[0] * matrix[1], t.dtype)
        cls.map_loop(operators.id)(TensorData(storage, (*batch, *matrix)), t)
        return TensorData(storage, (size, *matrix))
