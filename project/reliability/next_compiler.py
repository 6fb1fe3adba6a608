"""List the PTX tests that fail with numba-cuda-mlir, the successor of numba-cuda; this needs no GPU.

    make next-compiler                                                  all, for every night
    make next-compiler ARGS=tests/structure/compile_only/test_matmul.py

The tests run in an environment of their own, build/next_compiler, on the tree as it is: this file, as a
plug-in of pytest, only puts the package in the place of ``numba.cuda`` and of the types of kernels.  For
each module it prints the number of tests that pass, and the most frequent errors of the others.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from reliability.junit import tests_of

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build" / "next_compiler"
PACKAGES = ["--editable", ".[test]", "numba-cuda-mlir[cu13]>=0.6,<0.7"]


def pytest_load_initial_conftests() -> None:
    """Put the package in the place of numba-cuda, before the tests import a kernel."""
    cuda, types = (
        import_module(f"numba_cuda_mlir.{part}") for part in ("cuda", "numba_cuda.types")
    )
    sys.modules["numba.cuda"] = cuda
    vars(import_module("numba"))["cuda"] = cuda
    sys.modules["numba.cuda.libdevice"] = cuda.libdevice
    sys.modules["kernels.runtime.types"] = own = ModuleType("kernels.runtime.types")
    conversions: Any = import_module("numba_cuda_mlir.numba_cuda.np.numpy_support")
    vars(own).update(vars(types), types=types, from_dtype=conversions.from_dtype)
    # It asks the driver for a GPU even if a compute capability is given.
    vars(import_module("numba_cuda_mlir.tools"))["_cached_cc"] = (8, 0)


def error_of(text: str) -> str:
    """Return the line of a failure that names the error, without what differs from test to test."""
    lines = re.findall(r"^E +(\S.*)", text, re.MULTILINE) or [text.strip()]
    found = next((line for line in lines if "Failed in" not in line), lines[0])
    return re.sub(r"'\w+'|0x\w+|\d{3,}", "…", found)[:160]


def main(tests: list[str]) -> int:
    """Make the environment, run the tests, and print what came of each module."""
    python, report = PLACE / "bin" / "python", PLACE / "tests.xml"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PLACE)], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], cwd=ROOT, check=True)
    hidden = ("PIP_CONSTRAINT", "NUMBA_ENABLE_CUDASIM", "MINITORCH_EMULATE")
    known = {name: value for name, value in os.environ.items() if name not in hidden}
    known["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "project")))
    options = ["-q", "-p", "reliability.next_compiler", "--tb=short", f"--junitxml={report}"]
    chosen = tests or ["tests/structure/compile_only"]
    command = [python, "-m", "pytest", *options, *chosen]
    subprocess.run(command, cwd=ROOT, env=known, check=False, stdout=subprocess.DEVNULL)
    ended = tests_of(report)
    for module in sorted({one.test.partition("::")[0] for one in ended}):
        own = [one for one in ended if one.test.startswith(f"{module}::")]
        count = Counter(one.how for one in own)
        print(f"{module}: {count['passed']} of {len(own)} pass, {count['skipped']} are skipped")
        for error, times in Counter(error_of(x.text) for x in own if x.text).most_common(8):
            print(f"  {times:4} × {error}")
    return int(any(one.how == "failed" for one in ended))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
