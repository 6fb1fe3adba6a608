"""The numbers that the property tests draw, and the one way in which they compare floats."""

from hypothesis.strategies import floats, integers

from minitorch import operators

small_ints = integers(min_value=1, max_value=3)
med_ints = integers(min_value=1, max_value=20)
small_floats = floats(min_value=-100, max_value=100, allow_nan=False)


def assert_close(a: float, b: float) -> None:
    """Assert that two numbers differ by less than 0.01."""
    assert operators.is_close(a, b), f"{a!r} and {b!r} differ by {abs(a - b)!r}, not within 0.01"
