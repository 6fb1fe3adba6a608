"""An example of each option, for the tests that run every kernel with each."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels import BlockMask

from .strategies import MASK_MODS, SCORE_MODS


def option_examples(heads: int, rows: int, cols: int, dtype: Any) -> dict[str, dict[str, Any]]:
    """Return the options of a call by the name of the example.

    Args:
        heads: Query heads.
        rows: Query rows.
        cols: Key columns.
        dtype: Dtype of q, k and v.
    """
    rng = np.random.default_rng(1)

    def additive(*shape: int) -> Any:
        return np.where(rng.random(shape) < 0.1, -np.inf, rng.standard_normal(shape)).astype(dtype)

    states = rng.integers(0, 4, (heads, -(-rows // 16), -(-cols // 32)))
    blocks = BlockMask(states, rows, cols, (16, 32), rng.random((2, 16, 32)) < 0.7)
    dropout = {"dropout_p": 0.3, "seed": 9}
    alone = {
        "window": {"window_size": (20, 30)},
        "chunks": {"chunk_size": 48},
        "softcap": {"softcap": 2.0},
        "alibi": {"alibi_slopes": 0.5 / np.arange(1, heads + 1, dtype=np.float32)},
        "sink": {"sink": 3.0 - 4.0 * np.arange(heads, dtype=np.float32)},
        "dropout": dropout,
        "boolean mask": {"attn_mask": rng.random((heads, rows, cols)) < 0.7},
        "floating mask": {"attn_mask": additive(heads, rows, cols)},
        "block mask": {"block_mask": blocks},
        "mask_mod": {"mask_mod": MASK_MODS[0]},
        "score_mod": {"score_mod": SCORE_MODS[0]},
    }
    everything = {name: value for options in alone.values() for name, value in options.items()}
    return {
        **alone,
        "boolean mask that heads share": {"attn_mask": rng.random((rows, cols)) < 0.7},
        "boolean mask of keys": {"attn_mask": rng.random((1, heads, 1, cols)) < 0.7},
        "floating mask of keys": {"attn_mask": additive(1, heads, 1, cols), "softcap": 3.0},
        "floating mask of rows": {"attn_mask": rng.standard_normal((heads, rows, 1)).astype(dtype)},
        "block mask and dropout": {"block_mask": blocks, **dropout},
        "boolean mask and dropout": {"attn_mask": rng.random((rows, cols)) < 0.7, **dropout},
        "everything": everything,
    }
