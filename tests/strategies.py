"""The numbers that the property tests draw, and the one way in which they compare floats."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis.strategies import floats, integers

small_ints = integers(min_value=1, max_value=3)
med_ints = integers(min_value=1, max_value=20)
small_floats = floats(min_value=-100, max_value=100, allow_nan=False)


def assert_close(a: float, b: float) -> None:
    """Assert that two numbers differ by less than 0.01."""
    assert abs(a - b) < 0.01, f"{a!r} and {b!r} differ by {abs(a - b)!r}, not within 0.01"


def result_of(call: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function; if it raises, fail with a sentence that shows the call.

    Args:
        call: The call as a reader would write it.
        function: What is called.
        *args: Its arguments.
    """
    try:
        return function(*args)
    except NotImplementedError:  # a body that is not written yet
        raise
    except Exception as error:
        pytest.fail(f"{call} raises {type(error).__name__}: {error}", pytrace=False)
