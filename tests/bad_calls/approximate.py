"""Wrong calls of gather, sort and sums, and of approximate attention."""

from __future__ import annotations

from typing import Any

import numpy as np

import minitorch as mt
from minitorch import IndexingError, attention, from_numpy

from .cases import elsewhere

# Wrong types are what is tested.
# pyright: reportArgumentType=false, reportCallIssue=false


INDEXING = [
    (lambda o: o.matrix.gather(1, np.ones((2, 1))), TypeError, "integers", "float64"),
    (lambda o: o.matrix.gather(1, [[3], [0]]), ValueError, "from 0 to 2", "got 0 to 3"),
    (lambda o: o.matrix.gather(0, [[-1]]), ValueError, "from 0 to 1", "-1"),
    (lambda o: o.matrix.gather(1, [0, 1]), ValueError, "(2, 3)", "(2,)", "size 1", "view"),
    (lambda o: o.matrix.gather(2, [[0]]), IndexingError, "dim 2", "(2, 3)"),
    (lambda o: o.matrix.scatter_add(1, [[0]], o.vector), ValueError, "(2, 3)", "(4,)"),
    (lambda o: o.matrix.scatter_add(1, [[0]], o.matrix), ValueError, "each of the 3", "got 1"),
    (lambda o: o.matrix.sort(2), IndexingError, "dim 2", "(2, 3)"),
    (lambda o: o.matrix.argsort("0"), TypeError, "'0'"),
    (lambda o: o.matrix.cumsum(None), TypeError, "None"),
    (lambda o: o.matrix.where([[0, 1, 0]], 0.0), TypeError, "booleans", "int64", "compare"),
    (lambda o: o.matrix.gather(1, mt.tensor([[0.0]], elsewhere(o))), TypeError, "move it with"),
]  # fmt: skip


def attend(method: str, **options: Any) -> Any:
    def call(o: Any) -> Any:
        return getattr(attention, method)(o.heads, o.heads, o.heads, **options)

    return call


APPROXIMATE = [
    (lambda o: attention.linformer(o.heads, o.heads, o.heads, project_k=o.matrix, is_causal=True),
     ValueError, "is_causal", "linear, performer, local, reformer, block_sparse, flash, naive"),
    (attend("smyrf", is_causal=True), ValueError, "linear, performer, local, reformer"),
    (attend("linear", dropout_p=0.5), ValueError,
     "linformer, local, reformer, smyrf, block_sparse, flash, naive"),
    (lambda o: attention.linformer(o.heads, o.heads, o.heads,
     project_k=from_numpy(np.ones((2, 2)), o.backend)), ValueError, "2 positions", "has 3"),
    (lambda o: attention.linformer(o.heads, o.heads, o.heads, project_k=o.image), ValueError,
     "(count, length)", "(1, 2, 4, 4)"),
    (lambda o: attention.reformer(o.heads, o.heads.detach(), o.heads), ValueError,
     "same tensor as q and k"),
    (attend("reformer", buckets=5), ValueError, "even number", "5"),
    (attend("local", window=-1), ValueError, "window must be 0", "-1"),
    (attend("local", attn_mask=np.ones((3, 3), bool), key_mask=np.ones((1, 3), bool)), ValueError,
     "not both"),
    (attend("linear", key_mask=np.ones((1, 4), bool)), ValueError, "(1, 3)", "(1, 4)"),
    (attend("local", key_mask=[[0.0, 0.0, -np.inf]]), ValueError, "0 for a hidden key"),
    (lambda o: attention.linformer(o.heads, o.heads, o.heads,
     project_k=from_numpy(np.ones((2, 3)), o.backend), project_v=from_numpy(np.ones((4, 3)), o.backend)),
     ValueError, "project_k and project_v", "(2, 3)", "(4, 3)"),
    (attend("performer", features=np.full((8, 4), np.nan)), ValueError, "features must be finite"),
    (lambda o: mt.MultiHeadAttention(4, 2, attention="local", attention_options=["window"]),
     TypeError, "attention_options must be a dict", "list"),
    (attend("performer", scale=np.inf), ValueError, "positive, finite scale", "inf"),
    (attend("performer", scale=-0.5), ValueError, "positive, finite scale", "-0.5", "negate q"),
    (attend("performer", features=np.ones((8, 3))), ValueError, "(count, 4)", "(8, 3)"),
    (lambda o: attention.linear(o.matrix, o.matrix, o.matrix), ValueError,
     "(…, heads, seq_q, head_dim)"),
    (lambda o: attention.linear(o.heads, o.heads, o.heads.to(np.float32)), TypeError,
     "one floating dtype"),
    (lambda o: mt.MultiHeadAttention(4, 2, attention="local", attention_options={"width": 2}),
     TypeError, "no option width", "it has window"),
    (lambda o: mt.MultiHeadAttention(4, 2, causal=False, attention="linformer"), TypeError,
     "length and count", "attention_options"),
    (lambda o: mt.ReversibleSequence([mt.Linear(2, 2)]), TypeError, "pair (f, g)", "Linear"),
    (lambda o: mt.ReversibleSequence([]), ValueError, "one block or more"),
    (attend("block_sparse", pattern="random"), ValueError, "pattern must be one of", "'random'"),
    (attend("block_sparse", block_size=20), ValueError, "multiple of 16", "20"),
    (lambda o: attention.linear(o.heads, o.heads[:, :, 1:], o.heads[:, :, 1:], is_causal=True),
     ValueError, "as many queries as keys", "3 and 2"),
    (lambda o: attention.smyrf(o.heads, o.heads[:, :1], o.heads), ValueError, "equal leading dim"),
    (lambda o: mt.MultiHeadAttention(4, 2, attention_options={"window": 3}), TypeError,
     "belong to the approximations"),
]  # fmt: skip
