"""Find the first operation that produces NaN, or infinity from finite numbers."""

from __future__ import annotations

import contextlib
import linecache
import math
import os
import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import kernels

from ..autodiff import Context, History
from ..module import Parameter
from ..scalars.modes import Switch, modes

Index = tuple[int, ...]
#: Folders whose stack frames do not belong to the user; ``contextlib`` is between user and library.
_LIBRARY = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    os.path.dirname(str(kernels.__file__)),
    contextlib.__file__,
)
#: Files that are left out of a report, because every call passes through them.
_EVERY_CALL = {
    "anomaly.py", "attention_methods.py", "autodiff.py", "base.py", "contextlib.py", "matmul_precision.py",
    "module.py", "operator_methods.py", "scalar.py", "scalar_functions.py",
}  # fmt: skip


class Site(NamedTuple):
    """Where a function was called.

    Attributes:
        file: The user's file, which contains the innermost frame outside the library.
        line: The line in this file.
        name: The function that contains the line.
        within: The library's lines between the user's line and the operation, outermost first.
    """

    file: str
    line: int
    name: str
    within: tuple[str, ...]

    def __str__(self) -> str:
        file = self.file
        if file.startswith(os.getcwd() + os.sep):
            file = os.path.relpath(file)
        text = linecache.getline(self.file, self.line).strip()
        words = f"{file}:{self.line} in {self.name}" + f": {text}" * bool(text)
        return words + f" (through {', '.join(self.within)})" * bool(self.within)


class AnomalyError(FloatingPointError):
    """An operation produced NaN, or infinity from finite numbers; see :class:`detect_anomaly`.

    Attributes:
        operation: The name of the operation, such as "Log".
        phase: "forward", "backward", or "step" for an optimiser.
        value: The number: nan, inf or -inf.
        index: The index of its first occurrence in row-major order; () for a scalar.
        shape: The shape of the result, or of the gradient, that contains it.
        shapes: The shapes of all inputs of the operation.
        site: Where the operation was called; None if its forward pass ran outside the context.
    """

    operation: str = ""
    phase: str = ""
    value: float = math.nan
    index: Index = ()
    shape: Index = ()
    shapes: tuple[Index, ...] = ()
    site: Site | None = None


# -- the checks of functions and optimisers ------------------------------------------------------


class _Checks:
    """The checks that functions call and optimisers call within :class:`detect_anomaly`."""

    def forward(self, function: Any, ctx: Context, *args: Any) -> Any:
        """Run the ``forward`` of a function and check what it returns.

        Args:
            function: The class of the function.
            ctx: Its context, which records where the function was called.
            args: The arguments of ``forward``.

        Raises:
            AnomalyError: If a result contains an anomaly.
        """
        ctx.site = _site()
        results = function.forward(ctx, *args)
        several = isinstance(results, tuple)
        for place, result in enumerate(results if several else (results,)):
            answers = (-np.inf,) if several and place in function.minus_infinity_in else ()
            if bad := _first_bad(result, args, answers):
                what = f"its result {place}" if several else "its result"
                raise _error(function.__name__, "forward", bad, what, args, ctx.site)
        return results

    def check_gradients(
        self,
        function: Any,
        ctx: Context,
        gradients: Iterable[tuple[int, Any]],
        given: Sequence[Any],
    ) -> None:
        """Check the gradients that the ``backward`` of a function returned.

        Args:
            function: The class of the function.
            ctx: The context of the call.
            gradients: Pairs of the argument's position and its gradient.
            given: The gradients of the results, and the other inputs of ``backward``.

        Raises:
            AnomalyError: If a gradient contains an anomaly.
        """
        for place, gradient in gradients:
            if bad := _first_bad(gradient, given):
                what = f"the gradient of its argument {place}"
                raise _error(function.__name__, "backward", bad, what, given, ctx.site)

    def check_chain(
        self, history: History, d_outputs: Sequence[Any], pairs: Sequence[tuple[Any, Any]]
    ) -> None:
        """Check the gradients of the inputs of a function of tensors; see :meth:`check_gradients`.

        Args:
            history: How the function was applied.
            d_outputs: The gradients of its results.
            pairs: Each input that requires a gradient, and that gradient.
        """
        # Of a function whose gradients come from other functions, these were checked.
        if history.ctx is not None and not getattr(history.last_fn, "checks_itself", False):
            wanted = [i for i, x in enumerate(history.inputs) if any(x is y for y, _ in pairs)]
            given, gradients = (*d_outputs, *history.inputs), [gradient for _, gradient in pairs]
            found = zip(wanted, gradients, strict=True)
            self.check_gradients(history.last_fn, history.ctx, found, given)

    def check_step(self, optimizer: Any, p: Parameter, value: Any) -> None:
        """Check the new value of a parameter that an optimiser updates.

        Raises:
            AnomalyError: If it contains an anomaly.
        """
        moved, before = (getattr(x, "data", x) for x in (value, p.value))  # of a Scalar
        given = before, getattr(p.value, "derivative", getattr(p.value, "grad", None))
        if bad := _first_bad(moved, given):
            what = f"parameters[{[*optimizer.parameters].index(p)}]"
            if p.name:
                what = f"the parameter {p.name}"
            raise _error(type(optimizer).__name__, "step", bad, what, given, _site())


# -- switching the checks on ---------------------------------------------------------------------


class detect_anomaly(Switch):
    """Detect NaN and infinity in every result within the context, or the function that it decorates.

    In this thread, the results and gradients of all functions of scalars and tensors are checked, including
    fused ones, and the parameters that optimisers update.  The first anomaly raises :class:`AnomalyError`,
    which names the operation and the line that called it.  Include the forward pass in the context, so that
    an error in the backward pass can name that line.

    An anomaly is

    - any NaN;
    - an infinity, if all inputs of the operation are finite: a division by zero, or an overflow.  A mask of
      minus infinities is not an anomaly, nor is the lse of a fully masked row.

    Only results are checked: an intermediate overflow that ends as a finite number is not detected.
    Each result is read on the host, which synchronises with a GPU and is slow. The environment
    variable ``MINITORCH_DETECT_ANOMALY=1`` enables the detection for a whole run.

    Example:
        >>> with minitorch.detect_anomaly():
        ...     model.loss(inputs, targets).backward()
    """

    mode, value = "observer", _Checks()


if os.environ.get("MINITORCH_DETECT_ANOMALY", "0") not in ("", "0"):
    type(modes).observer = detect_anomaly.value  # on the class, so that it applies to every thread


# -- implementation ------------------------------------------------------------------------------


class _Bad(NamedTuple):
    """An anomalous number, its index, and the shape of the result that contains it."""

    value: float
    place: Index
    shape: Index


def _error(
    operation: str, phase: str, bad: _Bad, result: str, given: Sequence[Any], site: Site | None
) -> AnomalyError:
    """Return the error with all known details; ``result`` names the tensor that contains the number."""
    arrays = [array for x in given if (array := _array(x)) is not None]
    place = (
        f" at index {bad.place} of {result}, shape {bad.shape}," if bad.shape else f" as {result}"
    )
    words = [f"{operation} ({phase}) made {bad.value}{place} from {_listed(arrays)}"]
    if any(np.isnan(array).any() for array in arrays):
        words.append(
            "the NaN came in from outside: check the data, the parameters, and the results computed before "
            "detect_anomaly"
        )
    if site is not None:
        words.append(f"called at {site}")
    elif phase == "backward":
        words.append(
            "run its forward pass within detect_anomaly too, to find the line that called it"
        )
    error = AnomalyError("; ".join(words))
    error.operation, error.phase, error.site = operation, phase, site
    error.value, error.index, error.shape = bad
    error.shapes = tuple(array.shape for array in arrays)
    return error


def _array(x: Any) -> npt.NDArray[Any] | None:
    """Return a tensor, an array or a number as an array on the host; None for anything else."""
    if hasattr(x, "to_numpy"):
        return x.to_numpy()
    return np.asarray(x) if isinstance(x, (float, np.ndarray, np.generic)) else None


def _first_bad(result: Any, given: Sequence[Any], answers: Sequence[float] = ()) -> _Bad | None:
    """Return the first anomaly of a result.

    Args:
        result: A tensor or a number; anything else is not checked.
        given: The inputs of the operation; if one is infinite, so may be the result.
        answers: Infinities that are not anomalies.
    """
    array = _array(result)
    if array is None or np.isfinite(array).all():
        return None
    bad = np.isnan(array)
    infinite = np.isinf(array) & ~np.isin(array.astype(np.float64), answers)
    if infinite.any() and not any(np.isinf(x).any() for x in map(_array, given) if x is not None):
        bad |= infinite
    if not bad.any():
        return None
    index = tuple(int(i) for i in np.unravel_index(np.argmax(bad), array.shape))
    return _Bad(float(array[index]), index, array.shape)


def _listed(arrays: Sequence[npt.NDArray[Any]]) -> str:
    return ", ".join(map(_described, arrays)) or "no numbers"


def _described(array: npt.NDArray[Any]) -> str:
    """Return a description of an operand: its shape, and whether it has NaN or infinity."""
    if array.ndim == 0:
        return f"{array.item()!r}"
    words = f"{array.dtype} {array.shape}"
    for kind, found in (("NaN", np.isnan(array)), ("infinity", np.isinf(array))):
        if found.any():
            index = tuple(int(i) for i in np.unravel_index(np.argmax(found), array.shape))
            words += f" with {kind} at {index}"
    return words


def _site() -> Site:
    """Return where the user's code called the library."""
    within: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY):
        code, name = frame.f_code, os.path.basename(frame.f_code.co_filename)
        if name not in _EVERY_CALL:
            within.append(f"{name}:{frame.f_lineno} {code.co_name}")
        if frame.f_back is None:
            break
        frame = frame.f_back
    assert frame is not None
    return Site(
        frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, tuple(reversed(within))
    )
