"""The tests of the course name a student's mistake, and pass right solutions however they round."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.runtime.targets import EMULATED, why_no_cuda
from minitorch import cuda_ops

from ...course.test_course_kernels import test_a_block_folds_a_dimension_of_any_length as checked

ROOT = Path(__file__).parents[3]


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


@pytest.mark.slow
@pytest.mark.skipif(why_no_cuda() is None and not EMULATED, reason="there is a GPU")
def test_tests_that_need_the_emulated_gpu_say_how_to_run_them() -> None:
    run = [sys.executable, "-m", "pytest", "tests/course/test_course_kernels.py", "-m", "task3_4"]
    skipped = subprocess.run(
        run, cwd=ROOT, env={**os.environ, "MINITORCH_EMULATE": "0"}, capture_output=True, text=True
    )
    line = re.search(
        r"NO CUDA KERNEL .* 4 skipped, .* (\w+)=(\w+) python -m pytest (.*)", skipped.stdout
    )
    assert line, skipped.stdout
    again = [*run[:4], *shlex.split(line[3])]
    found = subprocess.run(
        again, cwd=ROOT, env={**os.environ, line[1]: line[2]}, capture_output=True, text=True
    )
    assert found.returncode == 0 and "skipped" not in found.stdout, found.stdout
