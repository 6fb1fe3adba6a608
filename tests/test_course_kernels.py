"""Task 3.4: the course's own kernel of the matrix product, launched by itself.

The backend multiplies with a kernel of ``kernels.cuda``; this one is for learning.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.geometry import ceil_div
from minitorch import CudaBackend, cuda_ops, from_numpy

from .tolerances import assert_close_arrays

pytestmark = [pytest.mark.simulator, pytest.mark.usefixtures("quick_barriers")]


@pytest.mark.task3_4
@pytest.mark.parametrize(
    ("a", "b", "order"),
    [
        ((1, 3, 2), (1, 2, 4), (0, 1, 2)),
        ((2, 5, 33), (2, 33, 3), (2, 1, 0)),
        ((2, 3, 4), (1, 4, 2), (0, 1, 2)),
        ((1, 2, 3), (2, 3, 1), (1, 2, 0)),
    ],
    ids=str,
)
def test_the_tiled_product_of_batches_in_any_layout(
    a: tuple[int, ...], b: tuple[int, ...], order: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal(a), rng.standard_normal(b)
    back = np.argsort(order)

    def on_device(array: Any) -> Any:
        stored = np.ascontiguousarray(array.transpose(order)).transpose(back)
        return from_numpy(stored, CudaBackend)

    left, right = on_device(x), on_device(y)
    out = left.zeros((max(a[0], b[0]), a[1], b[2]))
    tile = cuda_ops.THREADS_PER_BLOCK
    grid = (ceil_div(a[1], tile), ceil_div(b[2], tile), out.shape[0])
    cuda_ops.tensor_matrix_multiply[grid, (tile, tile, 1)](
        *out.tuple(), out.size, *left.tuple(), *right.tuple()
    )
    assert_close_arrays(out.to_numpy(), x @ y, np.float64, f"{a} @ {b}")
