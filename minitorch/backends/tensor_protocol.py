"""The type of a tensor for the modules that :mod:`minitorch.tensor` is built from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from ..tensor_data import TensorData, UserShape

if TYPE_CHECKING:
    from typing_extensions import Self


class TensorLike(Protocol):
    """The attributes and methods of a tensor that operations and functions use.

    :class:`minitorch.tensor.Tensor` has them all and documents them.  The modules below it cannot import
    that class, so they import this protocol under the name ``Tensor``.
    """

    _tensor: TensorData
    backend: Any  # a TensorBackend, whose own methods take tensors
    history: Any  # a History, or None

    @property
    def f(self) -> Any: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def size(self) -> int: ...  # noqa: D102
    @property
    def dims(self) -> int: ...  # noqa: D102
    @property
    def dtype(self) -> np.dtype[Any]: ...  # noqa: D102
    def to_numpy(self) -> Any: ...  # noqa: D102
    def array(self) -> Any: ...  # noqa: D102
    def wrap(self, array: Any) -> Self: ...  # noqa: D102
    def on(self, storage: Any, shape: Any, strides: Any) -> Self: ...  # noqa: D102
    def empty(self, shape: UserShape, dtype: Any = None) -> Self: ...  # noqa: D102
    def zeros(self, shape: UserShape | None = None) -> Self: ...  # noqa: D102
    def contiguous(self) -> Self: ...  # noqa: D102
    def view(self, *shape: int) -> Self: ...  # noqa: D102
    def permute(self, *order: int) -> Self: ...  # noqa: D102
    def item(self) -> float: ...  # noqa: D102
    def expand(self, other: Self) -> Self: ...  # noqa: D102
    def __mul__(self, b: Any) -> Self: ...
    def _new(self, tensor_data: TensorData) -> Self: ...
    def _converted(self, backend: Any, dtype: Any) -> Self: ...
    def _ensure_tensor(self, b: Any) -> Self: ...


AnyTensor = TypeVar("AnyTensor", bound=TensorLike)


class MapProto(Protocol):
    """The type of the functions that ``TensorOps.map`` returns."""

    def __call__(self, x: AnyTensor, out: AnyTensor | None = ..., /) -> AnyTensor:
        """Apply the function to each element of ``x``."""
        ...
