"""Linear layers with bias and GELU in one kernel: in blocks or row by row, they are the composed form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minitorch
from kernels.cpu.layers import linear as kernel
from kernels.cpu.matmul import blas
from minitorch import FastBackend, Tensor, from_numpy, linear

from ...support.tolerances import assert_close_arrays

SIZES = st.integers(1, 9)


@given(st.data(), SIZES, SIZES, SIZES, st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_value_and_gradients_are_those_of_the_composed_form(
    dtype: type, data: st.DataObject, rows: int, in_size: int, out_size: int, bias: bool,
    has_gelu: bool, in_blocks: bool,
) -> None:  # fmt: skip
    """Of rows in two dimensions, in any layout; a few at once on one thread or all, or blocks of two."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    shapes = [(2, rows, in_size), (in_size, out_size), (out_size,)][: 2 + bias]
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    dout = from_numpy(rng.standard_normal((2, rows, out_size)).astype(dtype))

    def computed(function: object) -> list[Tensor]:
        leaves = [from_numpy(array.copy(), requires_grad=True) for array in arrays]
        x, weights, *shift = leaves
        order = (1, 0, 2)
        seen = x.permute(*order).contiguous().permute(*order)  # the same numbers in another layout
        flat = seen if function is linear else seen.contiguous().view(2 * rows, in_size)
        out = function(flat, weights, shift[0] if shift else None, has_gelu)  # type: ignore[operator]
        out = out.view(2, rows, out_size)
        out.backward(dout)
        return [out, *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]

    with pytest.MonkeyPatch.context() as patch:
        if in_blocks:
            patch.setattr(blas, "PARALLEL_FROM", 1)
            patch.setattr(blas, "BLOCK_ROWS", 2)
            patch.setattr(kernel, "FEW_ROWS", 0)
        elif data.draw(st.booleans()):
            patch.setattr(kernel, "SHARED_FROM", 0)
        found = computed(linear)
    for name, one, wanted in zip(
        ("out", "dx", "dweights", "dbias"),
        found,
        computed(minitorch.plain()(minitorch.linear)),
        strict=False,
    ):
        assert_close_arrays(one.to_numpy(), wanted.to_numpy(), dtype, name)


def test_numbers_of_two_dtypes_are_left_to_the_composed_form() -> None:
    x, weights = from_numpy(np.ones((2, 3), np.float32)), from_numpy(np.ones((3, 2)))
    assert linear(x, weights).dtype == np.float64


def test_threads_of_blas_are_as_many_as_before() -> None:
    before = [library.get_num_threads() for library in blas._libraries()]
    with pytest.raises(ZeroDivisionError), blas.one_thread_each():
        assert {library.get_num_threads() for library in blas._libraries()} == {1}
        raise ZeroDivisionError
    assert [library.get_num_threads() for library in blas._libraries()] == before


@pytest.mark.parametrize("rows", [3, 20], ids=["short queries in parts", "tiles"])
def test_attention_lies_in_memory_as_its_operands(rows: int) -> None:
    """So that heads that were split by a view and a permutation are joined by a view again."""
    rng = np.random.default_rng(0)
    q, k = (
        from_numpy(rng.standard_normal((2, n, 2, 4)), FastBackend, requires_grad=True)
        for n in (rows, 1100)
    )
    split = [t.permute(0, 2, 1, 3) for t in (q, k)]
    out = split[0].flash_attention(split[1], split[1])
    assert isinstance(out, Tensor) and out.permute(0, 2, 1, 3)._tensor.is_contiguous()
    whole = [t.contiguous() for t in split]
    wanted = whole[0].flash_attention(whole[1], whole[1])
    assert isinstance(wanted, Tensor)
    assert_close_arrays(out.to_numpy(), wanted.to_numpy(), np.float64, "out")
    found = []
    for result in (out, wanted):
        q.zero_grad_()
        k.zero_grad_()
        (result * result).sum().backward()
        assert q.grad is not None and k.grad is not None
        found.append((q.grad.to_numpy(), k.grad.to_numpy()))
    for name, one, other in zip(("dq", "dk"), *found, strict=True):
        assert_close_arrays(one, other, np.float64, name)
