"""The emulated GPU takes the place of ``numba.cuda`` where a variable of the environment asks for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
from numba import cuda
early = cuda
from kernels.runtime.targets import EMULATED, device_name
from numba import cuda
for own in (early, cuda):
    @own.jit
    def count(out):
        i = own.grid(1)
        if i < out.size:
            out[i] = i
    numbers = own.device_array(5, "float32")
    count[2, 3](numbers)
    print(numbers.copy_to_host().tolist(), EMULATED, device_name())
"""


@pytest.mark.parametrize("variable", ["MINITORCH_EMULATE", "NUMBA_ENABLE_CUDASIM"])
def test_a_variable_chooses_it_for_kernels_of_numba_too(variable: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ | {variable: "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == 2 * "[0.0, 1.0, 2.0, 3.0, 4.0] True the emulated GPU\n"
