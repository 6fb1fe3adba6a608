"""Wrong calls of language models and their caches, and of training."""

from __future__ import annotations

import numpy as np

import minitorch as mt
from minitorch import Parameter

from .cases import model

# Wrong types are what is tested.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportReturnType=false

MODELS = [
    (lambda o: mt.DecoderLM(0, 4, 2, 3, backend=o.backend), ValueError, "n_vocab", "0"),
    (lambda o: mt.DecoderLM(5, 4, 2, 3, n_layer=0, backend=o.backend), ValueError, "n_layer", "0"),
    (lambda o: model(o.backend)(np.zeros((1, 4), int)), ValueError, "holds 3 tokens", "got 4"),
    (lambda o: model(o.backend)(np.array([1])), ValueError, "(batch, seq)", "(1,)"),
    (lambda o: model(o.backend)(np.array([[5]])), ValueError, "0 to 4", "got 5;"),
    (lambda o: model(o.backend).loss(o.tokens, np.zeros((1, 3), int)), ValueError, "targets (n,)"),
    (lambda o: model(o.backend).loss(o.tokens, np.full((1, 2), 9)), ValueError, "targets"),
    (lambda o: model(o.backend).generate("ab", 1), TypeError, "the prompt", "'ab'"),
    (lambda o: model(o.backend).generate(1, 1), ValueError, "one list", "shape ()"),
    (lambda o: model(o.backend).generate([1], -1), ValueError, "0 or more", "-1"),
    (lambda o: model(o.backend).generate([1], 1, -1.0), ValueError, "[0, inf)", "-1.0"),
    (lambda o: model(o.backend).generate([1], 1, seed="a"), TypeError, "seed", "'a'"),
    (lambda o: model(o.backend).hidden(o.tokens, mt.KVCache(2, 1, 2, 3, 2, o.backend)), ValueError,
     "2 layers", "has 1", "make_cache"),
    (lambda o: model(o.backend).hidden(np.zeros((2, 1), int), model(o.backend).make_cache()),
     ValueError, "batch 1", "(2, 2, 1, 2)", "make one"),
    (lambda o: model(o.backend).hidden(o.tokens, model(o.backend).make_cache(capacity=1)),
     ValueError, "is full", "0 of 1", "larger capacity"),
    (lambda o: model(o.backend).hidden(o.tokens, "a"), TypeError, "KVCache", "'a'"),
    (lambda o: mt.KVCache(1, 1, 1, 1.5, 1, o.backend), TypeError, "capacity", "1.5"),
    (lambda o: mt.KVCache(1, 1, 1, 1, 1, "fast"), TypeError, "backend", "'fast'"),
    (lambda o: mt.KVCache(1, 1, 1, 1, 1, o.backend, int), TypeError, "floating", "int64"),
    (lambda o: model(o.backend).make_cache().truncate(2), ValueError, "0 positions", "2"),
    (lambda o: mt.LayerCache(1, 2, 3, 4, o.backend).append(o.matrix, o.matrix), ValueError, "(2, 3)"),
    (lambda o: mt.LayerCache(1, 2, 3, 4, o.backend, "float32").append(o.heads, o.heads), TypeError,
     "float32", "float64"),
    (lambda o: mt.LayerCache(1, 2, 9, 4, o.backend).append(o.heads, mt.zeros((1, 2, 2, 4),
     o.backend)), ValueError, "same shape", "(1, 2, 3, 4) and (1, 2, 2, 4)"),
    (lambda o: mt.Engine(model(o.backend), page_size=24), ValueError, "multiple of 16", "24"),
    (lambda o: mt.Engine(model(o.backend), pages=0), ValueError, "pages", "0"),
    (lambda o: mt.Engine(model(o.backend)).submit([1], 0), ValueError, "count", "0"),
]  # fmt: skip

TRAINING = [
    (lambda o: mt.SGD([], lr="a"), TypeError, "lr", "'a'"),
    (lambda o: mt.SGD([], lr=-0.1), ValueError, "lr", "-0.1"),
    (lambda o: mt.Adam([], beta1=1.5), ValueError, "beta1", "1.5", "[0, 1)"),
    (lambda o: mt.Adam([Parameter(mt.Scalar(1.0))]).step(), TypeError, "Scalar", "SGD"),
    (lambda o: mt.Optimizer([]).step(), NotImplementedError, "the subclass"),
    (lambda o: mt.Scalar(1.0) + "a", TypeError, "type str", "float()"),
    (lambda o: mt.datasets["Xor"]("a"), ValueError, "the number of points", "'a'"),
]  # fmt: skip
