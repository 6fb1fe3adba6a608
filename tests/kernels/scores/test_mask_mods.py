"""A bare ``mask_mod`` on calls of several tiles: the same attention as under its elements as an array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels

from ...support.attention.mask_mods import elements, mask_mods
from ...support.attention.strategies import Case
from ...support.examples import at_most
from ...support.tolerances import assert_close_arrays


@at_most(12)
@given(
    mask_mods(),
    st.integers(1, 2),
    st.integers(120, 300),
    st.integers(1, 300),
    st.sampled_from(
        [
            {},
            {"is_causal": True},
            {"is_causal": True, "causal_offset": 40, "window_size": (90, 0)},
            {"window_size": (30, 100)},
            {"dropout_p": 0.3, "seed": 5},
            {"softcap": 2.0, "sink": np.ones(2)},
            {"alibi_slopes": np.array([0.1, 0.2])},
            {"score_mod": (lambda s, b, h, r, c: s * 2 - h, lambda s, b, h, r, c: 2.0)},
            {"enable_gqa": True},
        ]
    ),
)
def test_a_mask_mod_hides_what_its_elements_hide(
    mod: Any, batch: int, seq_q: int, seq_k: int, options: dict[str, Any]
) -> None:
    rng = np.random.default_rng(1)
    key_heads = 1 if "enable_gqa" in options else 2
    shapes = (2, seq_q), (key_heads, seq_k), (key_heads, seq_k), (2, seq_q)
    operands = [rng.standard_normal((batch, *shape, 5)) for shape in shapes]
    mask = elements(mod, batch, 2, seq_q, seq_k)
    results = Case(*operands, options={"mask_mod": mod, **options}).call()
    for name, right in Case(*operands, options={"attn_mask": mask, **options}).call().items():
        assert_close_arrays(results[name], right, np.float64, name)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_tiles_that_a_mask_mod_masks_are_not_read(dtype: Any) -> None:
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, 400, 8)).astype(dtype) for _ in range(3))
    k[:, 192:], v[:, 192:] = np.nan, np.nan
    mod = lambda b, h, r, c: c < 130  # noqa: E731
    out, lse = kernels.flash_attention_forward(q, k, v, mask_mod=mod)
    assert np.isfinite(out.astype(np.float32)).all() and np.isfinite(lse).all()


def test_a_mask_without_repetition_hides_the_same() -> None:
    rng = np.random.default_rng(4)
    shown = rng.random((1100, 2200)) < 0.5
    q, k, v = (rng.standard_normal((4, length, 3)) for length in (1100, 2200, 2200))

    def random_by_head(batch: Any, head: Any, row: Any, col: Any) -> Any:
        return shown[row, (col + head) % 2200] & (col > 300)

    mask = elements(random_by_head, 1, 4, 1100, 2200)[0]
    out, lse = kernels.flash_attention_forward(q, k, v, mask_mod=random_by_head)
    expected = kernels.flash_attention_forward(q, k, v, attn_mask=mask)
    assert_close_arrays(out, expected[0], np.float64, "out")
    assert_close_arrays(lse, expected[1], np.float64, "lse")


def test_a_mask_mod_is_not_called_out_of_bounds() -> None:
    q = np.random.default_rng(7).standard_normal((1, 300, 4))
    near = np.ones(180, bool)
    out, _ = kernels.flash_attention_forward(
        q, q, q, mask_mod=lambda b, h, r, c: near[r - c], window_size=(50, 0)
    )
    expected, _ = kernels.flash_attention_forward(q, q, q, window_size=(50, 0))
    assert_close_arrays(out, expected, np.float64, "out")
