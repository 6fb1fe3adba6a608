"""How the CUDA backend maps, folds and multiplies: block sizes, joined dimensions, bounds and copies.

On the emulated GPU the threads of a block run one at a time, and ``SIZES`` holds small blocks. A test has a
task's mark if a kernel of the course runs in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.cuda.matmul import cuda_cores
from kernels.cuda.runtime.arrays import device_view, is_device_array, to_host
from kernels.cuda.runtime.sizes import SIZES
from kernels.runtime.memory import join_dims
from kernels.runtime.targets import cuda
from minitorch import CudaBackend
from minitorch.attention.score_options import bounds_penalty

from ...support.cuda_tensors import DTYPES, assert_equal, draw, on_cuda, permuted
from ...support.tolerances import assert_close_arrays

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("excess", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 2])
def test_vectors_of_any_length_around_a_block_are_mapped_whole(blocks: int, excess: int) -> None:
    x = draw((blocks * SIZES.flat_threads * SIZES.flat_items + excess,), np.float32)
    assert_equal(on_cuda(x) * 2.0, x * 2.0, f"{x.size} elements and one")
    assert_equal(2.0 * on_cuda(x), x * 2.0, f"one element and {x.size}")
    assert_equal(on_cuda(x) + on_cuda(x[::-1].copy()), x + x[::-1], f"{x.size} elements")


def test_operands_that_lie_alike_are_indexed_as_vectors() -> None:
    joined = join_dims
    assert joined((2, 3, 4), (12, 4, 1), (12, 4, 1)) == [(24,), (1,), (1,)]
    assert joined((3, 2), (1, 3), (1, 3)) == [(6,), (1,), (1,)]  # both permuted
    assert joined((2, 3, 4), (12, 4, 1), (0, 0, 1)) == [(6, 4), (4, 1), (0, 1)]  # a row, broadcast
    assert joined((1, 1), (1, 1), (0, 0)) == [(1,), (0,), (0,)]
    assert joined((), (), ()) == [(1,), (0,), (0,)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_sum_is_divided_among_blocks(dtype: Any) -> None:
    depth = 3 * SIZES.product_depth + 5
    x, y = draw((2, depth), dtype), draw((depth, 3), dtype, seed=1)
    for left in (x, permuted(x)):
        result = on_cuda(left) @ on_cuda(y)
        assert_equal(result, x.astype(np.float64) @ y, f"depth {depth}")
    once = (on_cuda(x) @ on_cuda(y)).to_numpy()
    assert np.array_equal(once, result.to_numpy()), "the order of a sum depends on the layout"


def test_heads_that_were_permuted_multiply_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = draw((2, 5, 3, 4)), draw((2, 5, 3, 4), seed=1)  # (batch, seq, heads, dim)
    q, k = on_cuda(x).permute(0, 2, 1, 3), on_cuda(y).permute(0, 2, 3, 1)
    monkeypatch.setattr(CudaBackend.loops, "map_loop", None)
    assert_equal(q @ k, x.transpose(0, 2, 1, 3) @ y.transpose(0, 2, 3, 1))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tile", SIZES.product_tiles[8], ids=str)
def test_a_product_reads_and_writes_nothing_beyond_the_matrices(
    tile: Any, transposed: bool
) -> None:
    """Operands and result lie in larger matrices of NaN: one row more, one column more."""
    rows, cols, depth = tile.rows + 3, tile.cols - 3, 2 * tile.depth + 1

    def framed(array: Any) -> tuple[Any, Any]:
        stored = np.full([size + 1 for size in array.shape], np.nan)
        stored[tuple(slice(size) for size in array.shape)] = array
        steps = [stored.strides[-2] // 8, stored.strides[-1] // 8]
        return cuda.to_device(stored), (0, 0, *steps)

    def flat(array: Any) -> Any:
        return device_view(array, (int(np.prod(array.shape)),), (1,))

    x, y = draw((rows, depth)), draw((depth, cols), seed=1)
    (a, a_steps), (b, b_steps) = (framed(t.T if transposed else t) for t in (x, y))
    if transposed:
        a_steps, b_steps = ((0, 0, step, row) for _, _, row, step in (a_steps, b_steps))
    out, out_steps = framed(np.full((rows, cols), np.nan))
    cuda_cores.multiply(
        flat(out),
        out_steps,
        flat(a),
        a_steps,
        flat(b),
        b_steps,
        (1, 1, rows, cols, depth),
        factor=2.0,
        tile=tile,
    )
    result = to_host(out)
    assert_close_arrays(result[:-1, :-1], 2.0 * (x @ y), np.float64)
    assert np.isnan(result[-1]).all() and np.isnan(result[:, -1]).all(), "written beyond the end"


def test_the_causal_mask_is_copied_to_the_device_once() -> None:
    mask = bounds_penalty(2, 3, -2, 1, CudaBackend, np.dtype(np.float32))
    assert bounds_penalty(2, 3, -2, 1, CudaBackend, np.dtype(np.float32)) is mask
    assert is_device_array(mask._tensor._storage)
    assert mask.to_numpy().tolist() == [[0.0, 0.0, -np.inf], [0.0, 0.0, 0.0]]
