"""The tests of the course name a student's mistake, and pass right solutions however they round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitorch import cuda_ops

from ...course.test_course_kernels import test_a_block_folds_a_dimension_of_any_length as checked


class Folding:
    """A solution of task 3.3 that folds in ``start`` some times, and rounds otherwise.

    Args:
        kernel: The course's.
        start: Returns what is folded in.
    """

    def __init__(self, kernel: Any, start: Callable[[float], float]):
        self._kernel, self._start = kernel, start

    def __getitem__(self, config: Any) -> Callable[..., None]:
        return lambda *args: self._kernel[config](*args[:-1], self._start(args[-1]))


@pytest.mark.emulated
@given(times=st.integers(1, 257), rounding=st.floats(-1e-11, 1e-11), length=st.integers(1, 20))
def test_a_start_that_is_folded_in_too_often_is_named(
    times: int, rounding: float, length: int
) -> None:
    right = cuda_ops.tensor_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            cuda_ops, "tensor_reduce", lambda fn: Folding(right(fn), lambda x: times * x + rounding)
        )
        if times == 1:
            checked(length)
            return
        with pytest.raises(AssertionError, match=f"start is folded in {times} times"):
            checked(length)
