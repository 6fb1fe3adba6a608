"""Wrong calls of gather, sort and sums, and of approximate attention."""

from __future__ import annotations

from typing import Any

import numpy as np

import minitorch as mt
from minitorch import IndexingError, attention, from_numpy

from .cases import wrong

# Wrong types are what is tested.
# pyright: reportArgumentType=false, reportCallIssue=false


INDEXING = {
    "gather of floats": wrong(
        lambda o: o.matrix.gather(1, np.ones((2, 1))), TypeError, "integers", "float64", "to(numpy.int64)"
    ),
    "gather beyond": wrong(
        lambda o: o.matrix.gather(1, [[3], [0]]), ValueError, "from 0 to 2", "got 0 to 3"
    ),
    "gather before": wrong(lambda o: o.matrix.gather(0, [[-1]]), ValueError, "from 0 to 1", "-1"),
    "gather of another shape": wrong(
        lambda o: o.matrix.gather(1, [0, 1]), ValueError, "(2, 3)", "(2,)", "size 1", "view"
    ),
    "gather along no dimension": wrong(
        lambda o: o.matrix.gather(2, [[0]]), IndexingError, "dim 2", "(2, 3)"
    ),
    "gather of lists": wrong(
        lambda o: o.matrix.gather(1, [[0], [1, 2]]), ValueError, "index", "equal lengths"
    ),
    "scatter_add of a number": wrong(
        lambda o: o.matrix.scatter_add(1, [[0]], 1.0), TypeError, "source must be a tensor", "float"
    ),
    "scatter_add of another shape": wrong(
        lambda o: o.matrix.scatter_add(1, [[0]], o.vector), ValueError, "(2, 3)", "(4,)"
    ),
    "scatter_add of few indices": wrong(
        lambda o: o.matrix.scatter_add(1, [[0]], o.matrix), ValueError, "each of the 3", "got 1"
    ),
    "sort beyond": wrong(lambda o: o.matrix.sort(2), IndexingError, "dim 2", "(2, 3)"),
    "argsort over text": wrong(lambda o: o.matrix.argsort("0"), TypeError, "'0'"),
    "cumsum over nothing": wrong(lambda o: o.matrix.cumsum(None), TypeError, "None"),
    "where of numbers": wrong(
        lambda o: o.matrix.where([[0, 1, 0]], 0.0), TypeError, "booleans", "int64", "compare"
    ),
    "where of an array": wrong(
        lambda o: o.matrix.where(np.ones((2, 3), bool), np.ones((2, 3))), TypeError, "ndarray"
    ),
}  # fmt: skip


def attend(method: str, **options: Any) -> Any:
    def call(o: Any) -> Any:
        return getattr(attention, method)(o.heads, o.heads, o.heads, **options)

    return call


APPROXIMATE = {
    "causal linformer": wrong(
        lambda o: attention.linformer(o.heads, o.heads, o.heads, project_k=o.matrix, is_causal=True),
        ValueError, "is_causal", "linear, performer, local, reformer, block_sparse, flash, naive"
    ),
    "causal smyrf": wrong(
        attend("smyrf", is_causal=True), ValueError, "linear, performer, local, reformer"
    ),
    "masked performer": wrong(
        attend("performer", attn_mask=np.ones((3, 3), bool)),
        ValueError,
        "local, block_sparse, flash, naive",
        "key_mask",
    ),
    "dropout in linear attention": wrong(
        attend("linear", dropout_p=0.5),
        ValueError,
        "linformer, local, reformer, smyrf, block_sparse, flash, naive",
    ),
    "projection shorter than the sequence": wrong(
        lambda o: attention.linformer(
            o.heads, o.heads, o.heads, project_k=from_numpy(np.ones((2, 2)), o.backend)
        ),
        ValueError, "2 positions", "has 3", "the other methods take any length"
    ),
    "projection of four dimensions": wrong(
        lambda o: attention.linformer(o.heads, o.heads, o.heads, project_k=o.image), ValueError,
        "(count, length)", "(1, 2, 4, 4)"
    ),
    "projection of an array": wrong(
        lambda o: attention.linformer(o.heads, o.heads, o.heads, project_k=np.ones((2, 3))), TypeError,
        "project_k must be a tensor", "ndarray"
    ),
    "reformer with keys": wrong(
        lambda o: attention.reformer(o.heads, o.heads.detach(), o.heads), ValueError,
        "same tensor as q and k"
    ),
    "odd buckets": wrong(attend("reformer", buckets=5), ValueError, "even number", "5"),
    "chunk of half a position": wrong(
        attend("reformer", chunk=1.5), TypeError, "chunk must be a whole number", "1.5"
    ),
    "no rounds": wrong(attend("smyrf", rounds=0), ValueError, "rounds must be 1 or more", "0"),
    "negative window": wrong(attend("local", window=-1), ValueError, "window must be 0", "-1"),
    "both masks": wrong(
        attend("local", attn_mask=np.ones((3, 3), bool), key_mask=np.ones((1, 3), bool)), ValueError,
        "not both"
    ),
    "key mask of another length": wrong(
        attend("linear", key_mask=np.ones((1, 4), bool)), ValueError, "(1, 3)", "(1, 4)"
    ),
    "key mask to be added": wrong(
        attend("local", key_mask=[[0.0, 0.0, -np.inf]]), ValueError, "0 for a hidden key", "mask == 0"
    ),
    "causal text": wrong(attend("linear", is_causal="no"), TypeError, "is_causal", "True or False"),
    "exclusive text": wrong(
        lambda o: o.matrix.cumsum(1, exclusive="no"), TypeError, "exclusive", "True or False", "'no'"
    ),
    "projections to other counts": wrong(
        lambda o: attention.linformer(
            o.heads, o.heads, o.heads, project_k=from_numpy(np.ones((2, 3)), o.backend),
            project_v=from_numpy(np.ones((4, 3)), o.backend),
        ),
        ValueError, "project_k and project_v", "(2, 3)", "(4, 3)"
    ),
    "features that are no numbers": wrong(
        attend("performer", features=np.full((8, 4), np.nan)), ValueError, "features must be finite"
    ),
    "options of a layer in a list": wrong(
        lambda o: mt.MultiHeadAttention(4, 2, attention="local", attention_options=["window"]),
        TypeError, "attention_options must be a dict", "list"
    ),
    "infinite scale of performer": wrong(
        attend("performer", scale=np.inf), ValueError, "positive, finite scale", "inf"
    ),
    "negative scale of performer": wrong(
        attend("performer", scale=-0.5), ValueError, "positive, finite scale", "-0.5", "negate q"
    ),
    "features of another width": wrong(
        attend("performer", features=np.ones((8, 3))), ValueError, "(count, 4)", "(8, 3)"
    ),
    "attention of arrays": wrong(
        lambda o: attention.linear(o.x, o.x, o.x), TypeError, "q must be a tensor", "ndarray"
    ),
    "attention of matrices": wrong(
        lambda o: attention.linear(o.matrix, o.matrix, o.matrix), ValueError, "(…, heads, seq_q, head_dim)"
    ),
    "attention of several dtypes": wrong(
        lambda o: attention.linear(o.heads, o.heads, o.heads.to(np.float32)), TypeError,
        "one floating dtype"
    ),
    "option of a layer that there is not": wrong(
        lambda o: mt.MultiHeadAttention(4, 2, attention="local", attention_options={"width": 2}),
        TypeError, "no option width", "it has window"
    ),
    "layer without its length": wrong(
        lambda o: mt.MultiHeadAttention(4, 2, causal=False, attention="linformer"), TypeError,
        "length and count", "attention_options"
    ),
    "reversible block of one": wrong(
        lambda o: mt.ReversibleSequence([mt.Linear(2, 2)]), TypeError, "pair (f, g)", "Linear"
    ),
    "no reversible block": wrong(lambda o: mt.ReversibleSequence([]), ValueError, "one block or more"),
}  # fmt: skip
