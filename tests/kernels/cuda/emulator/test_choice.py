"""The emulated GPU takes the place of a GPU where a variable asks for it, or where there is none."""

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
#: What hides a driver of this machine.
NO_DRIVER = """
import ctypes
class Missing(ctypes.CDLL):
    def __init__(self, name, *more, **options):
        if "cuda" in str(name):
            raise OSError(name)
        super().__init__(name, *more, **options)
ctypes.CDLL = Missing
"""
BY_ITSELF = """
import sys
import numpy
from minitorch import CudaBackend, from_numpy
x = from_numpy(numpy.ones((2, 2)), CudaBackend)
print((x @ x + x).to_numpy().tolist(), "numba.cuda" in sys.modules)
try:
    from_numpy(numpy.ones((400, 400)), CudaBackend)
except RuntimeError as error:
    print(error)
"""
CAPABLE = """
import kernels
print([name for name, reason in kernels.available_rungs().items() if reason is None])
"""


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that only these variables tell what to choose."""
    own = {name: x for name, x in os.environ.items() if name != "MINITORCH_EMULATE"} | variables
    return subprocess.run(
        [sys.executable, "-c", code], env=own, capture_output=True, text=True, check=True
    )


@pytest.mark.parametrize("variable", ["MINITORCH_EMULATE", "NUMBA_ENABLE_CUDASIM"])
def test_a_variable_chooses_it_for_kernels_of_numba_too(variable: str) -> None:
    done = run(CODE, **{variable: "1"})
    assert done.stdout == 2 * "[0.0, 1.0, 2.0, 3.0, 4.0] True the emulated GPU\n"


def test_without_a_driver_it_is_chosen_for_small_arrays_and_says_so_once() -> None:
    done = run(NO_DRIVER + BY_ITSELF)
    assert done.stderr.count("no CUDA driver found; kernels run on an emulated GPU") == 1
    result, error = done.stdout.splitlines()
    assert result == "[[3.0, 3.0], [3.0, 3.0]] False", "numba.cuda remains what it is for others"
    assert "has 160,000 elements" in error and "takes up to 65,536 by itself" in error


def test_a_capability_that_is_asked_for_gives_it_tensor_cores() -> None:
    assert "flash3_wgmma" in run(CAPABLE, MINITORCH_EMULATE="9.0").stdout
