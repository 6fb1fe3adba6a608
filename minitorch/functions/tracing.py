"""Record what the forward and the backward of a function compute, so that it can be differentiated.

Both call the raw operations of a backend, such as ``a.f.mul_zip(a, b)``, which record nothing.  Here, they
run on traced tensors, whose ``f`` serves each raw operation by a differentiable function of its meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from operator import attrgetter
from typing import Any

from ..autodiff import Context
from ..scalars.derivatives import RECORDED
from ..scalars.modes import modes
from ..tensor_functions import Max
from .indexing import Where
from .views import To

#: The differentiable function of each raw operation; those of one operator end in _map or _zip.
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{f"{name}_map": rule for name, rule in RECORDED.items()},
    **{f"{name}_zip": rule for name, rule in RECORDED.items()},
    "tanh_map": lambda x: x.tanh(),
    "pow_scalar_zip": lambda x, y: x**y,
    "add_reduce": lambda x, dim: x.sum(dim),
    "max_reduce": lambda x, dim: Max.apply(x, dim),
    "matrix_multiply": lambda x, y: x @ y,
    "keep_zip": lambda condition, x: Where.apply(condition, x, x._ensure_tensor(0.0)),
    "drop_zip": lambda condition, x: Where.apply(condition, x._ensure_tensor(0.0), x),
    # Steps and shifts have no derivative.
    "lt_zip": lambda x, y: x.detach() < y.detach(),
    "eq_zip": lambda x, y: x.detach() == y.detach(),
    "is_close_zip": lambda x, y: x.detach().is_close(y.detach()),
    "shift_reduce": lambda x, dim: x.f.shift_reduce(x.detach(), dim),
}


class _Operations:
    """Stands for a backend, with differentiable functions in the place of its raw operations.

    Args:
        backend: The backend.
    """

    def __init__(self, backend: Any):
        self.backend = backend

    def __getattr__(self, name: str) -> Any:
        raw = getattr(self.backend, name)
        if name not in OPERATIONS:
            return raw

        def operation(*args: Any) -> Any:
            is_variable = any(getattr(plain(x), "history", None) is not None for x in args)
            return modes.observer.call(OPERATIONS[name] if is_variable else raw, args)

        return operation


class _Traced:
    """A tensor inside a traced function; this class stands before that of the tensor itself.

    Args:
        variable: The tensor that it stands for, with its history.
    """

    history = grad = _name = None  # functions take it for a constant, and the trace knows better

    def __init__(self, variable: Any):
        self._variable, self.backend, self.unique_id = (
            variable,
            variable.backend,
            variable.unique_id,
        )

    shape = property(attrgetter("_variable.shape"))
    size = property(attrgetter("_variable.size"))
    dims = property(attrgetter("_variable.dims"))
    dtype = property(attrgetter("_variable.dtype"))
    f = property(lambda self: _Operations(self.backend))

    @property
    def _tensor(self) -> Any:
        """The data of a constant.

        Raises:
            _ReadsMemory: If the tensor is a variable, whose derivative would be lost.
        """
        if self._variable.history is not None:
            raise _ReadsMemory
        return self._variable._tensor

    def detach(self) -> Any:
        """Return the same data as a constant."""
        return traced(self._variable.detach())

    def _new(self, data: Any) -> Any:
        return traced(self._variable._new(data))

    def _converted(self, backend: Any, dtype: Any) -> Any:
        return To.apply(self, backend, dtype)


class _ReadsMemory(Exception):
    """A traced function reads the elements of a variable."""


@lru_cache(maxsize=8)
def _traced_type(kind: type) -> type:
    return type("Traced", (_Traced, kind), {})


def traced(x: Any) -> Any:
    """Return what a traced function takes for ``x``: a traced tensor for a tensor."""
    if not hasattr(type(x), "_converted") or isinstance(x, _Traced):
        return x
    return _traced_type(type(x))(x)


def plain(x: Any) -> Any:
    """Return the tensor that a traced one stands for; anything else as it is."""
    return x._variable if isinstance(x, _Traced) else x


class Trace:
    """One run of a function on variables.

    Args:
        function: The function.
        needs_grad: Which arguments require a gradient.

    Attributes:
        ctx: Its context, which the forward pass fills with traced tensors.
    """

    def __init__(self, function: Any, needs_grad: tuple[bool, ...]):
        self.function, self.outer = function, modes.observer
        self.ctx = Context(False, (), needs_grad)

    def run(self, method: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
        """Return what ``forward`` or ``backward`` of the function returns, as a tuple of tensors.

        Raises:
            RuntimeError: If it reads the elements of a variable.
        """
        try:
            with self._observing(self):
                results = method(self.ctx, *map(traced, args))
        except _ReadsMemory:
            raise RuntimeError(
                f"{self.function.__name__} has first derivatives only: it reads the elements of its "
                "tensors, which records nothing; compute the value by tensor operations, or give the "
                "function `composed`, which does"
            ) from None
        return tuple(map(plain, results if isinstance(results, tuple) else (results,)))

    def forward(self, function: Any, _: Context, *args: Any) -> Any:
        """Apply another function, which the traced one calls; see ``modes.observer``."""
        return self.call(function.apply, args)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a function of tensors and trace its result."""
        with self._observing(self.outer):
            return traced(function(*map(plain, args)))

    @contextmanager
    def _observing(self, observer: Any) -> Iterator[None]:
        before, modes.observer = modes.observer, observer
        try:
            yield
        finally:
            modes.observer = before
