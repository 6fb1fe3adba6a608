"""Every tensor-core instruction on a GPU against its NumPy emulation, and products, one line each.

python -m tests.support.smoke.instructions [part of a name]
compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.support.smoke.instructions
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import numpy as np

from kernels.runtime.targets import cuda, why_no_cuda

from ..tensor_cores.products import CALLS as PRODUCTS
from ..tensor_cores.products import Product
from ..tensor_cores.products import run_on_gpu as run_product
from ..tensor_cores.ptx_cases import Case, run
from ..tensor_cores.ptx_kernels import CASES as OF_A_WARP
from ..tensor_cores.ptx_kernels_hopper import CASES as OF_A_BLOCK


def _instruction(case: Case) -> str:
    error = run(case, np.random.default_rng(0))
    if not error <= 1:
        raise AssertionError(f"{error:.3g} of what is allowed")
    return f"{error:.2g} of what is allowed"


def _product(call: Product) -> str:
    error = run_product(call, np.random.default_rng(0))
    if not error <= 1:
        raise AssertionError(f"{error:.3g} of what is allowed")
    return f"{error:.2g} of what is allowed"


def main() -> None:
    """Run everything that the device has; stop with the number of those that are wrong."""
    if (missing := why_no_cuda()) is not None:
        raise SystemExit(missing)
    device = tuple(cuda.get_current_device().compute_capability)
    found: dict[str, Callable[[], str]] = {
        case.name: partial(_instruction, case)
        for case in OF_A_WARP + OF_A_BLOCK
        if device >= case.cc[:2]
    }
    if device >= (8, 0):
        for name, product in PRODUCTS.items():
            if product.kind != "split" or device >= (9, 0):
                found[f"product, {name}"] = partial(_product, product)
    wrong = 0
    for name, ask in found.items():
        if sys.argv[1:] and sys.argv[1] not in name:
            continue
        try:
            verdict = f"right: {ask()}"
        except Exception as failed:
            wrong, verdict = wrong + 1, f"WRONG: {type(failed).__name__}: {failed}"
        print(f"{name:48} {verdict}", flush=True)
    if wrong:
        raise SystemExit(f"{wrong} are wrong")


if __name__ == "__main__":
    main()
