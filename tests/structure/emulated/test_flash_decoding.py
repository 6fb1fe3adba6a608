"""Hopper's decoding kernel on the emulated GPU, by calls on a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels
from kernels.cuda.runtime.arrays import to_device
from kernels.runtime.dtypes import BFLOAT16, FLOAT32
from kernels.runtime.launch_notes import Launched, launches_noted

from ...support.device.emulated_gpu import emulated_gpu, emulated_only
from ...support.tolerances import assert_close_arrays


@emulated_only
@pytest.mark.parametrize("pages", [3, 40], ids=["whole", "in parts"])
def test_rotated_rows_are_appended_to_pages_and_a_tree_of_drafts_attends_to_them(
    pages: int,
) -> None:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(BFLOAT16)

    q, k, v = normal(2, 4, 3, 64), normal(2, 2, 3, 64), normal(2, 2, 3, 64)
    caches = normal(9, 2, 16, 64), normal(9, 2, 16, 64)
    angles = np.arange(48)[:, None] / np.array([1.0, 7.0])
    call = {
        "cache_seqlens": np.array([20, 41], np.int32),
        "block_table": np.pad(
            np.array([[5, 2, -1], [8, 0, 3]], np.int32), ((0, 0), (0, pages - 3))
        ),
        "rotary_cos": np.cos(angles).astype(np.float32),
        "rotary_sin": np.sin(angles).astype(np.float32),
        "attn_mask": np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool),
    }

    def attend(place: Any) -> list[Any]:
        own = [place(x.copy()) for x in (q, *caches, k, v)]
        options: Any = {name: place(x) for name, x in call.items()}
        results = kernels.flash_attention_with_cache(*own, return_lse=True, **options)
        return [*results, *own[1:3]]

    wanted = attend(np.asarray)
    with emulated_gpu(), launches_noted() as launches:
        found = [x.copy_to_host() for x in attend(to_device)]
    names = ["place_rows"] * 3 + ["flash_decoding"] + ["flash2_merge"] * (pages > 3)
    assert [launch.kernel for launch in launches if isinstance(launch, Launched)] == names
    for x, y, dtype in zip(found, wanted, (BFLOAT16, FLOAT32, BFLOAT16, BFLOAT16), strict=True):
        assert_close_arrays(x, y, dtype, size=4.0)
