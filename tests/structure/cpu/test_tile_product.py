"""Products and transposes of tiles on the CPU: what the attention kernels do with registers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from kernels.cpu.matmul.tile_product import add_product, product_address, set_product
from kernels.cpu.matmul.vector_registers import LANES


@njit
def multiply(address: int, c: Any, a: Any, b: Any, add: bool) -> None:
    """Call either product as a kernel does."""
    if add:
        add_product(address, c, a, b)
    else:
        set_product(address, c, a, b)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_sum_does_not_depend_on_where_in_the_tile_it_stands(dtype: Any) -> None:
    # Blocks at the edges have other shapes, and the same order of additions.
    rng = np.random.default_rng(0)
    a = np.repeat(rng.standard_normal((1, 37)).astype(dtype), 21, axis=0)
    b = np.repeat(rng.standard_normal((37, 1)).astype(dtype), 5 * LANES, axis=1)
    c = np.empty((21, 5 * LANES), dtype)
    multiply(product_address(np.dtype(dtype)), c, a, b, False)
    assert len(np.unique(c)) == 1
