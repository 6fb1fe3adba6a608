"""Hopper's decoding kernel on the emulated GPU, by calls on a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels
from kernels.cuda.attention.flash_decoding import launch as decoding_launch
from kernels.cuda.attention.flash_decoding.layout import DecodingLayout
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


@emulated_only
@pytest.mark.parametrize(("consumers", "block_k"), [(1, 16), (2, 16), (1, 32)])
def test_tiles_of_several_sequences_follow_one_another_through_two_stages(
    consumers: int, block_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A barrier that is missing lets a copy overwrite what is read, or a product read what is not there."""
    layout = DecodingLayout(consumers, block_k, 2, 1)
    monkeypatch.setattr(decoding_launch, "layout_of", lambda widths, rows: layout)
    monkeypatch.setattr(decoding_launch, "BLOCKS", 1)  # no parts of the keys
    decoding_launch._plan.cache_clear()
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 4 * consumers, 30, 64)).astype(BFLOAT16)
    caches = [rng.standard_normal((14, 2, 16, 64)).astype(BFLOAT16) for _ in range(2)]
    lengths = np.array([100, 57], np.int32)
    for cache in caches:  # and nothing beyond the lengths may count
        cache[6, :, 4:] = cache[10, :, 9:] = np.nan
    table = np.arange(14, dtype=np.int32).reshape(2, 7)
    rows = {"cache_seqlens": lengths, "block_table": table}
    wanted = kernels.flash_attention_with_cache(q, *caches, **rows, is_causal=True)
    with emulated_gpu(blocks=1):
        own = [to_device(x) for x in (q, *caches)]
        rows = {name: to_device(x) for name, x in rows.items()}
        found = kernels.flash_attention_with_cache(*own, **rows, is_causal=True)
    decoding_launch._plan.cache_clear()
    assert_close_arrays(found.copy_to_host(), wanted, BFLOAT16, size=4.0)


@emulated_only
def test_few_rows_of_16_bits_take_a_mask_of_16_bits() -> None:
    rng = np.random.default_rng(2)
    q, k, v, mask = (
        rng.standard_normal(shape).astype(BFLOAT16)
        for shape in ((1, 2, 3, 64), (1, 2, 300, 64), (1, 2, 300, 64), (3, 300))
    )
    wide = (x.astype(np.float64) for x in (q, k, v))
    wanted, _ = kernels.flash_attention_forward(*wide, attn_mask=mask.astype(np.float64))
    with emulated_gpu(), launches_noted() as launches:
        own = map(to_device, (q, k, v))
        found, _ = kernels.flash_attention_forward(*own, attn_mask=to_device(mask))
    assert "flash_decoding" in [one.kernel for one in launches if isinstance(one, Launched)]
    assert_close_arrays(found.copy_to_host(), wanted, BFLOAT16)
