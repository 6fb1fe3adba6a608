"""Wrong calls of language models and their caches, and of training."""

from __future__ import annotations

import numpy as np

import minitorch as mt
from minitorch import Parameter

from .cases import model, wrong

# Wrong types are what is tested.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportReturnType=false

MODELS = {
    "no tokens": wrong(
        lambda o: mt.DecoderLM(0, 4, 2, 3, backend=o.backend), ValueError, "n_vocab", "0"
    ),
    "no positions": wrong(
        lambda o: mt.DecoderLM(5, 4, 2, 0, backend=o.backend), ValueError, "n_positions", "0"
    ),
    "no layers": wrong(
        lambda o: mt.DecoderLM(5, 4, 2, 3, n_layer=0, backend=o.backend), ValueError, "n_layer", "0"
    ),
    "half a layer": wrong(
        lambda o: mt.DecoderLM(5, 4, 2, 3, n_layer=1.5), TypeError, "n_layer", "1.5"
    ),
    "too long a text": wrong(
        lambda o: model(o.backend)(np.zeros((1, 4), int)), ValueError, "holds 3 tokens", "got 4",
        "the last"
    ),
    "a text of one dimension": wrong(
        lambda o: model(o.backend)(np.array([1])), ValueError, "(batch, seq)", "(1,)",
        "numpy.array([ids])"
    ),
    "no text": wrong(
        lambda o: model(o.backend)(np.zeros((0, 1), int)), ValueError, "at least one token", "(0, 1)"
    ),
    "an empty text": wrong(
        lambda o: model(o.backend)(np.zeros((1, 0), int)), ValueError, "at least", "(1, 0)"
    ),
    "a text of letters": wrong(lambda o: model(o.backend)("ab"), ValueError, "(batch, seq)", "()"),
    "a token beyond": wrong(
        lambda o: model(o.backend)(np.array([[5]])), ValueError, "0 to 4", "got 5;"
    ),
    "half a token": wrong(
        lambda o: model(o.backend)(np.array([[0.5]])), TypeError, "whole numbers", "float64"
    ),
    "targets of another shape": wrong(
        lambda o: model(o.backend).loss(o.tokens, np.zeros((1, 3), int)), ValueError, "targets (n,)",
        "(2, 4)", "(3,)"
    ),
    "a target beyond": wrong(
        lambda o: model(o.backend).loss(o.tokens, np.full((1, 2), 9)), ValueError, "targets",
        "got 9;"
    ),
    "an empty prompt": wrong(
        lambda o: model(o.backend).generate([], 1), ValueError, "at least one token", "a space"
    ),
    "a prompt of letters": wrong(
        lambda o: model(o.backend).generate("ab", 1), TypeError, "the prompt", "'ab'"
    ),
    "a prompt of one number": wrong(
        lambda o: model(o.backend).generate(1, 1), ValueError, "one list", "shape ()"
    ),
    "a prompt beyond": wrong(
        lambda o: model(o.backend).generate([7], 1), ValueError, "0 to 4", "got 7;"
    ),
    "a prompt below 0": wrong(
        lambda o: model(o.backend).generate([-1], 1), ValueError, "0 to 4", "got -1;"
    ),
    "a prompt of halves": wrong(
        lambda o: model(o.backend).generate([0.5], 1), TypeError, "the prompt", "fractions"
    ),
    "fewer than no tokens": wrong(
        lambda o: model(o.backend).generate([1], -1), ValueError, "0 or more", "-1"
    ),
    "half a count": wrong(
        lambda o: model(o.backend).generate([1], 1.5), TypeError, "count must be a whole", "1.5"
    ),
    "a cold temperature": wrong(
        lambda o: model(o.backend).generate([1], 1, -1.0), ValueError, "[0, inf)", "-1.0",
        "most likely"
    ),
    "a temperature that is none": wrong(
        lambda o: model(o.backend).generate([1], 1, np.nan), ValueError, "[0, inf)", "nan"
    ),
    "a temperature of text": wrong(
        lambda o: model(o.backend).generate([1], 1, "hot"), TypeError,
        "temperature must be a number", "'hot'"
    ),
    "a seed of text": wrong(
        lambda o: model(o.backend).generate([1], 1, seed="a"), TypeError, "seed", "'a'"
    ),
    "a seed below 0": wrong(
        lambda o: model(o.backend).generate([1], 1, seed=-1), ValueError, "seed", "-1"
    ),
    "a cache of another model": wrong(
        lambda o: model(o.backend).hidden(o.tokens, mt.KVCache(2, 1, 2, 3, 2, o.backend)),
        ValueError, "2 layers", "has 1", "make_cache"
    ),
    "a cache of another batch": wrong(
        lambda o: model(o.backend).hidden(np.zeros((2, 1), int), model(o.backend).make_cache()),
        ValueError, "batch 1", "(2, 2, 1, 2)", "make one"
    ),
    "a full cache": wrong(
        lambda o: model(o.backend).hidden(o.tokens, model(o.backend).make_cache(capacity=1)),
        ValueError, "is full", "0 of 1", "larger capacity"
    ),
    "a cache of text": wrong(
        lambda o: model(o.backend).hidden(o.tokens, "a"), TypeError, "KVCache", "'a'"
    ),
    "a cache for nobody": wrong(
        lambda o: model(o.backend).make_cache(0), ValueError, "batch of a cache", "0"
    ),
    "a cache of no room": wrong(
        lambda o: model(o.backend).make_cache(1, 0), ValueError, "capacity of a cache", "0"
    ),
    "a cache of half a size": wrong(
        lambda o: mt.KVCache(1, 1, 1, 1.5, 1, o.backend), TypeError, "capacity", "1.5"
    ),
    "a cache by name": wrong(
        lambda o: mt.KVCache(1, 1, 1, 1, 1, "fast"), TypeError, "backend", "'fast'"
    ),
    "a cache of whole numbers": wrong(
        lambda o: mt.KVCache(1, 1, 1, 1, 1, o.backend, int), TypeError, "floating", "int64",
        "the model's"
    ),
    "a cache that keeps more": wrong(
        lambda o: model(o.backend).make_cache().truncate(2), ValueError, "0 positions", "2",
        "0 empties"
    ),
    "a cache that keeps half": wrong(
        lambda o: model(o.backend).make_cache().truncate(0.5), TypeError, "length", "0.5"
    ),
    "keys of an array": wrong(
        lambda o: mt.LayerCache(1, 2, 3, 4, o.backend).append(o.x, o.heads), TypeError,
        "k must be a tensor", "ndarray"
    ),
    "keys of two dimensions": wrong(
        lambda o: mt.LayerCache(1, 2, 3, 4, o.backend).append(o.matrix, o.matrix), ValueError,
        "four dimensions", "(2, 3)"
    ),
    "keys of another dtype": wrong(
        lambda o: mt.LayerCache(1, 2, 3, 4, o.backend, "float32").append(o.heads, o.heads),
        TypeError, "float32", "float64"
    ),
    "keys of another length": wrong(
        lambda o: mt.LayerCache(1, 2, 9, 4, o.backend).append(o.heads, mt.zeros((1, 2, 2, 4), o.backend)),
        ValueError, "same shape", "(1, 2, 3, 4) and (1, 2, 2, 4)"
    ),
    "more than there is room for": wrong(
        lambda o: mt.LayerCache(1, 2, 1, 4, o.backend).extended(2), ValueError, "is full", "2 more",
        "truncate"
    ),
}  # fmt: skip

TRAINING = {
    "SGD at a word": wrong(lambda o: mt.SGD([], lr="a"), TypeError, "lr", "'a'"),
    "SGD uphill": wrong(lambda o: mt.SGD([], lr=-0.1), ValueError, "lr", "-0.1"),
    "Adam at no rate": wrong(lambda o: mt.Adam([], lr=float("nan")), ValueError, "lr", "nan"),
    "Adam that remembers more than all": wrong(
        lambda o: mt.Adam([], beta1=1.5), ValueError, "beta1", "1.5", "[0, 1)"
    ),
    "Adam with a negative eps": wrong(lambda o: mt.Adam([], eps=-1e-8), ValueError, "eps"),
    "Adam of scalars": wrong(
        lambda o: mt.Adam([Parameter(mt.Scalar(1.0))]).step(), TypeError, "Scalar", "SGD"
    ),
    "a step of no optimiser": wrong(
        lambda o: mt.Optimizer([]).step(), NotImplementedError, "the subclass"
    ),
    "a Scalar and text": wrong(lambda o: mt.Scalar(1.0) + "a", TypeError, "type str", "float()"),
    "points of text": wrong(
        lambda o: mt.datasets["Xor"]("a"), ValueError, "the number of points", "'a'"
    ),
    "points below 0": wrong(lambda o: mt.datasets["Simple"](-1), ValueError, "0 or more", "-1"),
    "half a point": wrong(
        lambda o: mt.datasets["Spiral"](2.5), ValueError, "a whole number", "2.5"
    ),
}  # fmt: skip
