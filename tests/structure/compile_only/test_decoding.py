"""The kernels of calls on a cache in pages, compiled without a GPU: registers, spills, copies of pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels
from kernels.cuda.runtime.arrays import to_device
from kernels.runtime.dtypes import BFLOAT16, FLOAT16

from ...support.device.compiling import FLOAT32, FLOAT64, assert_in_registers, needs_ptxas
from ...support.device.fake_device import fake_device

BATCH, HEADS, KEY_HEADS, DIM, PAGES, PAGE = 2, 16, 2, 128, 64, 16


@needs_ptxas
@pytest.mark.parametrize(
    ("dtype", "cc", "name", "text"),
    [
        (FLOAT32, (8, 0), "flash2_forward", "ld.v4.f32"),
        (FLOAT64, (8, 0), "flash2_forward", "ld.v2.f64"),
        (FLOAT16, (7, 5), "flash2_forward", "cvt.f32.f16"),
        (BFLOAT16, (8, 0), "flash2_mma_forward", "cp.async.cg.shared.global"),
        (BFLOAT16, (9, 0), "flash_decoding", "bulk.tensor.4d.shared"),
    ],
    ids=str,
)
def test_every_generation_keeps_tiles_of_pages_in_registers(
    dtype: Any, cc: tuple[int, int], name: str, text: str
) -> None:
    def zeros(*shape: int) -> Any:
        return to_device(np.zeros(shape, dtype))

    with fake_device(cc) as device:
        cache = [zeros(BATCH * PAGES, KEY_HEADS, PAGE, DIM) for _ in range(2)]
        kernels.flash_attention_with_cache(
            zeros(BATCH, HEADS, 1, DIM), *cache,
            cache_seqlens=to_device(np.full(BATCH, 1000, np.int32)),
            block_table=to_device(np.zeros((BATCH, PAGES), np.int32)),
        )  # fmt: skip
    (kernel,) = (one for one in device.kernels if one.name == name)
    # A few numbers of addresses may be spilled; the smallest tile would take 128 bytes.
    ptx = assert_in_registers(kernel, (*cc, "a") if cc == (9, 0) else cc, 16)
    assert text in ptx
    (launched,) = (one for one in device.launches if one.kernel == name)
    if name != "flash_decoding":  # the heads that share a key head are rows of one tile
        assert launched.sizes[1] == BATCH * KEY_HEADS
