"""The Tensor: strided data, the backend that computes on it, and the history of its computation."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import flag
from kernels.runtime.dtypes import is_floating

from .autodiff import History, Variable, backpropagate
from .backends.elements import checked_shape
from .functions.base import chain_rule, check_tensor, is_variable
from .functions.derivatives import chain  # beyond module 5
from .scalars.graphs import pull  # beyond module 5
from .scalars.modes import modes, recording  # beyond module 5
from .tensor_data import TensorData, UserShape, UserStrides
from .tensor_ops import TensorBackend
from .tensors.attention_methods import AttentionMethods  # beyond module 4
from .tensors.container import Container
from .tensors.conversions import Conversions
from .tensors.indexing_methods import IndexingMethods  # beyond module 5
from .tensors.interchange import Lending  # beyond module 5
from .tensors.making import Making
from .tensors.operator_methods import TensorOperators
from .tensors.shape_methods import ShapeMethods  # beyond module 5
from .tensors.torch_methods import TorchMethods  # beyond module 5

_ids = count(1)


def next_id() -> int:  # beyond module 5
    """Return a number larger than those of all existing variables."""
    return next(_ids)


class Tensor(
    AttentionMethods,  # beyond module 4
    IndexingMethods,  # beyond module 5
    Lending,  # beyond module 5
    ShapeMethods,  # beyond module 5
    TorchMethods,  # beyond module 5
    TensorOperators,
    Conversions,
    Container,
    Making,
):
    """An n-dimensional array that records how it was computed.

    Args:
        v: Storage, shape and strides.
        back: The history of the tensor; None for a constant.
        name: A name for drawings.
        backend: The backend that computes on it.

    Attributes:
        history: None for a constant, empty for a leaf.
        grad: The gradient of a leaf after ``backward``, or None.
        backend: The backend that computes on it.
        unique_id: A number that no other tensor has.
    """

    _tensor: TensorData
    backend: TensorBackend
    history: History | None
    grad: Tensor | None
    unique_id: int

    __array_ufunc__ = None  # so that numpy_number * tensor calls Tensor.__rmul__

    def __init__(
        self,
        v: TensorData,
        back: History | None = None,
        name: str | None = None,
        backend: TensorBackend | None = None,
    ):
        if not isinstance(v, TensorData):
            raise AssertionError(f"a Tensor holds TensorData, got {type(v).__name__}")
        if backend is None:
            raise AssertionError("a Tensor needs a backend, such as minitorch.SimpleBackend")
        self.unique_id = next(_ids)
        self._tensor = v
        self.history = back
        self.backend = backend
        self.grad = None
        self._name = name

    # -- properties ---------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name in drawings; the id if none was given."""
        return str(self.unique_id) if self._name is None else self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = name

    #: The backend, under its published short name.
    f: TensorBackend = property(attrgetter("backend"))  # type: ignore[assignment]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return self._tensor.shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._tensor.size

    @property
    def dims(self) -> int:
        """Number of dimensions."""
        return self._tensor.dims

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the elements."""
        return self._tensor.dtype

    @property
    def parents(self) -> Iterable[Variable]:
        """The tensors that this one was computed from."""
        if self.history is None:
            raise ValueError("a constant has no parents; requires_grad() tells whether this is one")
        return [arg for arg in self.history.inputs if is_variable(arg)]

    def requires_grad(self) -> bool:
        """Tell whether the tensor takes part in differentiation."""
        return self.history is not None

    def requires_grad_(self, x: bool) -> None:
        """Make the tensor a fresh leaf, or a constant if ``x`` is False.

        Raises:
            TypeError: If its elements are integers, or ``x`` is neither True nor False.
        """
        if flag("requires_grad", x) and not is_floating(self.dtype):
            raise TypeError(
                f"only floating tensors have gradients, but this one is {self.dtype}; convert it with "
                "to(numpy.float32)"
            )
        self.history = History() if x else None

    # -- in and out ---------------------------------------------------------------------------

    def to_numpy(self) -> npt.NDArray[Any]:
        """Return the elements as a NumPy array of the same shape and dtype.

        On the host it shares memory with the tensor where the layout allows.
        """
        return self._tensor.to_array()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.to_numpy(), dtype=dtype, copy=copy)

    def item(self) -> float:
        """Return the only element as a number."""
        if self.size != 1:
            raise AssertionError(f"item needs one element, shape {self.shape} has {self.size}")
        return float(self.to_numpy().item())

    def __hash__(self) -> int:
        return hash(self.unique_id)

    # -- making tensors like this one -----------------------------------------------------------

    @staticmethod
    def make(
        storage: Any,
        shape: UserShape,
        strides: UserStrides | None = None,
        backend: TensorBackend | None = None,
    ) -> Tensor:
        """Make a tensor from a storage, a shape and strides."""
        return Tensor(TensorData(storage, checked_shape(shape), strides), backend=backend)

    def _new(self, tensor_data: TensorData) -> Tensor:
        new = object.__new__(Tensor)  # without the checks of the constructor
        new.unique_id, new._tensor, new.backend = next(_ids), tensor_data, self.backend
        new.history = new.grad = new._name = None
        return new

    def detach(self) -> Tensor:
        """Return the same data without history."""
        return self._new(self._tensor)

    def tuple(self) -> tuple[Any, Any, Any]:
        """Return (storage, shape, strides)."""
        return self._tensor.tuple()

    # -- differentiation ------------------------------------------------------------------------

    def expand(self, other: Tensor) -> Tensor:
        """Bring a gradient to this tensor's shape: undo the broadcasting of the forward pass.

        Args:
            other: A gradient.  Either its shape or the shape of this tensor must broadcast to the other
                one.
        """
        check_tensor("a gradient", other)
        if self.shape == other.shape:
            return other
        shape = TensorData.shape_broadcast(self.shape, other.shape)
        if shape != other.shape:
            other = other.f.id_map(other, other.empty(shape))
        if self.shape == shape:
            return other
        padded = (1,) * (len(shape) - self.dims) + self.shape
        for dim, size in enumerate(padded):
            if size == 1 and shape[dim] != 1:
                other = other.f.add_reduce(other, dim)
        return other.contiguous().view(*self.shape).detach()

    def is_leaf(self) -> bool:
        """Tell whether the user made this tensor, rather than a function."""
        return self.history is not None and self.history.last_fn is None

    def is_constant(self) -> bool:
        """Tell whether the tensor takes no part in differentiation."""
        return self.history is None

    def accumulate_derivative(self, x: Any) -> None:
        """Add ``x`` to the gradient of this leaf."""
        if not self.is_leaf():
            raise AssertionError("only a leaf collects its gradient")
        check_tensor("a gradient", x)
        if x.dtype != self.dtype:
            x = x.to(self.dtype)
        # Never in place: `x` may be the gradient of another leaf too.
        self.grad = x if self.grad is None else self.grad + x
        if modes.leaf_is_done is not None:  # beyond module 5
            modes.leaf_is_done(self)

    def chain_rule(self, d_output: Any) -> Iterable[tuple[Variable, Any]]:
        """Pair each input with its gradient, given the gradient of this tensor."""
        return chain_rule(self.history or History(), d_output)

    def backward(
        self,
        grad_output: Tensor | None = None,
        create_graph: bool = False,  # beyond module 5
    ) -> None:
        """Fill the ``grad`` of every leaf that this tensor was computed from.

        Args:
            grad_output: The gradient to start from, of this shape; 1 for a tensor of one element.
            create_graph: Record how the gradients are computed, so that they can be differentiated again.

        Raises:
            RuntimeError: If no input of this tensor requires a gradient.
            TypeError: If ``grad_output`` is not a tensor.
            ValueError: If it has another shape.
            AssertionError: If it is None and this tensor does not have one element.
        """
        if self.is_constant():
            raise RuntimeError(
                f"backward needs a tensor computed from one that requires a gradient; this one, of shape "
                f"{self.shape}, is a constant. When you create the input, pass requires_grad=True, or call "
                "minitorch.compat.published() to make that the default of tensor(...) and rand(...), as in "
                "the published course; or call requires_grad_(True) on the input before the computation. "
                "Gradients are constants too, unless backward(create_graph=True) or "
                "minitorch.grad(..., create_graph=True) computed them"
            )
        if grad_output is None:
            if self.size != 1:
                raise AssertionError(
                    f"backward without a gradient needs one element, got {self.shape}; call sum() first "
                    "or pass a gradient of that shape"
                )
            grad_output = self.full(self.shape, 1.0)
        check_tensor("grad_output", grad_output)
        if grad_output.shape != self.shape:
            raise ValueError(
                f"the gradient of a tensor has its shape {self.shape}, got {grad_output.shape}; "
                "backward starts from the derivative of the result in this very tensor"
            )
        if create_graph and flag("create_graph", create_graph):  # beyond module 5
            with recording():
                pull([self], [grad_output], chain=chain)
            return
        # Without history: these gradients are not part of any graph.
        backpropagate(self, grad_output.detach())

    def zero_grad_(self) -> None:
        """Drop the gradient."""
        self.grad = None
