"""Find the operation that first makes a number that is none: NaN, or infinity out of finite numbers."""

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

from ..autodiff import Context, Switch, modes

Index = tuple[int, ...]
#: A frame within these is the library's and not the user's; ``contextlib`` stands between the two.
_LIBRARY = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    os.path.dirname(str(kernels.__file__)),
    contextlib.__file__,
)
#: Files through which every call passes: to name them says nothing.
_EVERY_CALL = {
    "anomaly.py", "autodiff.py", "base.py", "contextlib.py", "matmul_precision.py", "module.py",
    "operator_methods.py", "scalar.py", "scalar_functions.py",
}  # fmt: skip


class Site(NamedTuple):
    """Where a function was called.

    Attributes:
        file: Of the user: the innermost that is not the library's.
        line: In it.
        name: Of the function there.
        within: The library's own lines between that one and the operation, outermost first.
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
    """An operation has made NaN, or infinity out of finite numbers; see :class:`detect_anomaly`.

    Attributes:
        operation: Its name, such as "Log".
        phase: "forward", "backward" or "step", that of an optimiser.
        value: The number: nan, inf or -inf.
        index: Where it stands, the first of its kind in row order; () for a scalar.
        shape: Of the result, or of the gradient, in which it stands.
        shapes: Of all that the operation was given.
        site: Where the operation was called; None if its forward pass ran outside of the context.
    """

    operation: str = ""
    phase: str = ""
    value: float = math.nan
    index: Index = ()
    shape: Index = ()
    shapes: tuple[Index, ...] = ()
    site: Site | None = None


# -- what the functions and optimisers call ------------------------------------------------------


class _Checks:
    """The checks that functions call within :class:`detect_anomaly`; see ``autodiff.AnomalyChecks``."""

    def checked_forward(self, function: Any, ctx: Context, args: Sequence[Any]) -> Any:
        """Run the ``forward`` of a function and check what it returns.

        Args:
            function: Its class.
            ctx: Learns where the function was called.
            args: Of ``forward``.

        Raises:
            AnomalyError: If a result is at fault.
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
        """Check what the ``backward`` of a function has returned.

        Args:
            function: Its class.
            ctx: Of the call.
            gradients: With the place of the argument that each belongs to.
            given: The gradients of the results, and what else went into it.

        Raises:
            AnomalyError: If a gradient is at fault.
        """
        for place, gradient in gradients:
            if bad := _first_bad(gradient, given):
                what = f"the gradient of its argument {place}"
                raise _error(function.__name__, "backward", bad, what, given, ctx.site)


def check_step(optimizer: str, what: str, moved: Any, before: Any, gradient: Any) -> None:
    """Check a parameter that an optimiser has moved.

    Args:
        optimizer: Its class's name.
        what: Which parameter.
        moved: Its new value.
        before: The old one.
        gradient: That moved it.

    Raises:
        AnomalyError: If the new value is at fault.
    """
    given = (before, gradient)
    if bad := _first_bad(moved, given):
        raise _error(optimizer, "step", bad, what, given, _site())


# -- how they are switched on --------------------------------------------------------------------


class detect_anomaly(Switch):
    """Within the context, or the function that it decorates, look at every number that is computed.

    Every function of scalars and tensors, the fused ones too, has its results and its gradients checked,
    and every optimiser the parameters that it moves, in this thread.  The first fault raises
    :class:`AnomalyError`, which names the operation and the line that called it.  Put the forward pass
    into the context too: only then does a fault in the backward pass know that line.

    A fault is

    - NaN, always;
    - an infinity, where nothing that the operation was given is infinite: a division by zero, an overflow.
      A mask of minus infinities is no fault, nor is the lse of a row that sees no key.

    Only results are looked at: what overflows within an operation and ends as a number is not seen.
    Each result is read on the host, so that a GPU is waited for: it is made for finding a fault, not for
    every day.  The environment variable ``MINITORCH_DETECT_ANOMALY=1`` switches it on for a whole run.

    Example:
        >>> with minitorch.detect_anomaly():
        ...     model.loss(inputs, targets).backward()
    """

    mode, value = "anomaly", _Checks()


if os.environ.get("MINITORCH_DETECT_ANOMALY", "0") not in ("", "0"):
    type(modes).anomaly = detect_anomaly.value  # of the class: it holds in every thread


# -- how they check ------------------------------------------------------------------------------


class _Bad(NamedTuple):
    """A number at fault, its index, and the shape of the result that it stands in."""

    value: float
    place: Index
    shape: Index


def _error(
    operation: str, phase: str, bad: _Bad, result: str, given: Sequence[Any], site: Site | None
) -> AnomalyError:
    """Return the error that says all that is known; ``result`` names what the number stands in."""
    arrays = [array for x in given if (array := _array(x)) is not None]
    place = (
        f" at index {bad.place} of {result}, shape {bad.shape}," if bad.shape else f" as {result}"
    )
    words = [f"{operation} ({phase}) made {bad.value}{place} from {_listed(arrays)}"]
    if any(np.isnan(array).any() for array in arrays):
        words.append(
            "the NaN came in from outside: look at the data, at the parameters, and at what was computed "
            "before detect_anomaly"
        )
    if site is not None:
        words.append(f"called at {site}")
    elif phase == "backward":
        words.append("run its forward pass within detect_anomaly too, to see where it was called")
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
    """Return the first fault of a result.

    Args:
        result: A tensor or a number; anything else has no faults.
        given: What the operation was given: infinite numbers there excuse those of the result.
        answers: Infinities that are no fault.
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
    """Return what an operand is, in words: its shape, and whether its numbers are any."""
    if array.ndim == 0:
        return f"{array.item()!r}"
    words = f"{array.dtype} {array.shape}"
    for kind, found in (("NaN", np.isnan(array)), ("infinity", np.isinf(array))):
        if found.any():
            index = tuple(int(i) for i in np.unravel_index(np.argmax(found), array.shape))
            words += f" with {kind} at {index}"
    return words


def _site() -> Site:
    """Return where the user's code has called the library."""
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
