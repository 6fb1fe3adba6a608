"""The ladder of softmax on long rows compiles for every generation, and reads whole vectors."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.cuda.layers import softmax_ladder as cuda_ladder
from kernels.reference.softmax_ladder import READS

from ...support.device.compiling import (
    FLOAT32,
    assert_fits,
    assert_is_kernel,
    assert_no_float64,
    needs_nvvm,
    needs_ptxas,
    on_every_generation,
    ptx_of,
)

# The widest block, of long rows.
LONG = 2**18


def ladder_kernel(step: str, dtype: Any, whole: bool = True) -> Any:
    block = cuda_ladder.ladder_block(LONG, dtype.itemsize)
    return cuda_ladder.ladder_kernel(step, block, whole, dtype), block


@needs_nvvm
@on_every_generation
@pytest.mark.parametrize("step", READS)
def test_a_thread_asks_for_several_vectors_at_a_time(
    step: str, dtype: Any, cc: tuple[int, int]
) -> None:
    kernel, block = ladder_kernel(step, dtype)
    ptx = ptx_of(kernel, cc)
    assert_is_kernel(ptx, cc)
    assert ".local" not in ptx
    if dtype == FLOAT32:
        assert_no_float64(ptx)
        loads, stores = ptx.count("ld.v4.f32"), ptx.count("st.v4.f32")
        loads, stores = (
            loads + ptx.count("ld.global.v4.f32"), stores + ptx.count("st.global.v4.f32")
        )  # fmt: skip
        assert loads >= READS[step] * block.ahead and stores >= block.ahead


@needs_ptxas
@pytest.mark.parametrize("whole", [True, False], ids=["vectors", "elements"])
@pytest.mark.parametrize("step", READS)
def test_a_multiprocessor_holds_the_blocks_that_it_shall(step: str, whole: bool) -> None:
    kernel, block = ladder_kernel(step, FLOAT32, whole)
    assert_fits(kernel, block.threads, (9, 0))
