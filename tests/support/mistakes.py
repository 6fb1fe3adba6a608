"""A wrong result that equals what a common mistake computes is explained by the name of that mistake."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..strategies import result_of
from .tolerances import assert_close_arrays


def assert_close_or_explain(
    got: Any, expected: Any, what: str, mistakes: Mapping[str, Any], size: float = 10.0
) -> None:
    """Compare float64 arrays; name the mistake that gives what is wrong.

    Args:
        got: What was computed.
        expected: What is right.
        what: Names the result in the error text.
        mistakes: Sentence → what the mistake computes; NaN where that is not known.
        size: The size of the numbers that were added up to make the result.
    """
    __tracebackhide__ = True
    got, why = np.asarray(got), ""
    for sentence, wrong in (*mistakes.items(), ("the sign is wrong", -np.asarray(expected))):
        wrong = np.asarray(wrong)
        known = ~np.isnan(wrong)
        if got.shape == wrong.shape and known.any() and np.allclose(got[known], wrong[known]):
            why = f"{sentence}\n"
            break
    try:
        assert_close_arrays(got, expected, np.float64, what, size)
    except AssertionError as error:
        raise AssertionError(f"{why}{error}") from None


def filled(what: str, run: Callable[..., Any], out: Any, *operands: Any) -> Any:
    """Run a loop that fills ``out`` and return the array it then holds; an error shows the call."""
    result_of(what, run, out, *operands)
    return out.to_array() if hasattr(out, "to_array") else out.to_numpy()
