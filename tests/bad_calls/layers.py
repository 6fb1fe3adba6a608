"""Wrong calls of layers: the functions of ``nn``, and modules."""

from __future__ import annotations

from typing import Any

import numpy as np

import minitorch as mt
from minitorch import IndexingError, Parameter, from_numpy, tensor

from .cases import wrong

# Wrong types are what is tested.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportReturnType=false


class Unfinished(mt.Module):
    """A module that forgets its parent's __init__."""

    def __init__(self) -> None:
        self.weight = Parameter(1.0)


def pooled(kernel: Any) -> Any:
    return lambda o: mt.maxpool2d(o.image, kernel)


FUNCTIONS = {
    "conv channels": wrong(
        lambda o: mt.conv2d(o.image, from_numpy(np.ones((1, 3, 1, 1)), o.backend)), AssertionError,
        "2 channels", "weight 3", "(1, 2, 4, 4)"
    ),
    "conv1d dimensions": wrong(
        lambda o: mt.conv1d(o.image, o.image), ValueError, "3 dimensions", "(1, 2, 4, 4)"
    ),
    "conv2d dimensions": wrong(
        lambda o: mt.conv2d(o.signal, o.signal), ValueError, "4 dimensions", "(2, 3, 4)"
    ),
    "conv of an array": wrong(lambda o: mt.conv2d(o.x, o.image), TypeError, "ndarray"),
    "conv with an array": wrong(
        lambda o: mt.conv1d(o.signal, np.ones((1, 3, 2))), TypeError, "weight must be a tensor",
        "ndarray", "from_numpy"
    ),
    "pool that does not divide": wrong(pooled((3, 2)), AssertionError, "(3, 2)", "(4, 4)", "pad"),
    "pool larger than the image": wrong(pooled((8, 8)), AssertionError, "(8, 8)", "(4, 4)", "crop"),
    "pool of size 0": wrong(pooled((0, 2)), ValueError, "kernel must be 1 or more", "0"),
    "pool of size -1": wrong(pooled((-1, 2)), ValueError, "kernel must be 1 or more", "-1"),
    "pool of half a size": wrong(
        pooled((1.5, 2)), TypeError, "kernel must be a whole number", "1.5"
    ),
    "pool of one size": wrong(pooled(2), TypeError, "(tile height, tile width)", "got 2", "(2, 2)"),
    "pool of three sizes": wrong(
        pooled((1, 1, 1)), TypeError, "(tile height, tile width)", "(1, 1, 1)"
    ),
    "pool of nothing": wrong(pooled(None), TypeError, "(tile height, tile width)", "None"),
    "pool of no image": wrong(
        lambda o: mt.avgpool2d(o.matrix, (1, 1)), ValueError, "height", "(2, 3)", "view"
    ),
    "pool of an array": wrong(
        lambda o: mt.avgpool2d(o.x, (1, 1)), TypeError, "must be a tensor", "ndarray"
    ),
    "max beyond": wrong(
        lambda o: mt.max(o.matrix, 4), IndexingError, "dim 4", "(2, 3)", "use -2 to 1"
    ),
    "max over half": wrong(lambda o: mt.max(o.matrix, 0.5), TypeError, "one whole number", "0.5"),
    "max over text": wrong(lambda o: mt.max(o.matrix, "0"), TypeError, "one whole number", "'0'"),
    "max over nothing": wrong(
        lambda o: mt.max(o.matrix, None), TypeError, "one whole number", "None"
    ),
    "argmax over two": wrong(
        lambda o: mt.argmax(o.matrix, (0, 1)), TypeError, "one whole number", "(0, 1)"
    ),
    "softmax beyond": wrong(lambda o: mt.softmax(o.matrix, 2), IndexingError, "dim 2", "(2, 3)"),
    "softmax over a flag": wrong(
        lambda o: mt.softmax(o.matrix, True), TypeError, "one whole number", "True"
    ),
    "softmax of an array": wrong(
        lambda o: mt.softmax(o.x, 0), TypeError, "must be a tensor", "ndarray"
    ),
    "logsoftmax beyond": wrong(
        lambda o: mt.logsoftmax(o.matrix, -3), IndexingError, "dim -3", "(2, 3)"
    ),
    "logsumexp over an array": wrong(
        lambda o: mt.logsumexp(o.matrix, np.ones(2)), TypeError, "one whole number",
        "an array of shape (2,)"
    ),
    "GELU of an array": wrong(
        lambda o: mt.GELU(o.x), TypeError, "must be a tensor", "ndarray", "from_numpy"
    ),
    "dropout of 1.5": wrong(
        lambda o: mt.dropout(o.matrix, 1.5), ValueError, "from 0 to 1", "1.5", "0 turns"
    ),
    "dropout of NaN": wrong(
        lambda o: mt.dropout(o.matrix, np.nan), ValueError, "from 0 to 1", "nan"
    ),
    "dropout of text": wrong(
        lambda o: mt.dropout(o.matrix, "a"), TypeError, "rate must be a number", "'a'"
    ),
    "dropout of an array": wrong(
        lambda o: mt.dropout(o.x, 0.5), TypeError, "must be a tensor", "ndarray"
    ),
    "loss shapes": wrong(
        lambda o: mt.softmax_loss(o.matrix, np.zeros(3, int)), ValueError, "(2, 3)", "(3,)", "view"
    ),
    "loss of a vector": wrong(
        lambda o: mt.softmax_loss(o.vector, np.zeros(4, int)), ValueError, "(rows, classes)", "(4,)"
    ),
    "loss of an array": wrong(
        lambda o: mt.softmax_loss(o.x[0], np.zeros(5, int)), TypeError, "logits must be a tensor",
        "ndarray"
    ),
    "loss without targets": wrong(
        lambda o: mt.softmax_loss(o.matrix, None), ValueError, "targets (rows,)", "()"
    ),
    "a target beyond": wrong(
        lambda o: mt.softmax_loss(o.matrix, np.array([0, 3])), ValueError, "from 0 to 2", "0 to 3",
        "larger"
    ),
    "a target below 0": wrong(
        lambda o: mt.softmax_loss(o.matrix, np.array([0, -1])), ValueError, "from 0 to 2", "-1 to 0"
    ),
    "half a target": wrong(
        lambda o: mt.softmax_loss(o.matrix, np.array([0.5, 1])), TypeError, "whole numbers",
        "astype(int)"
    ),
    "a class beyond": wrong(lambda o: mt.one_hot(o.ids, 3), ValueError, "from 0 to 2", "0 to 5"),
    "no classes": wrong(
        lambda o: mt.one_hot(o.ids, 0), ValueError, "num_classes must be 1 or more", "0"
    ),
    "half a class": wrong(
        lambda o: mt.one_hot(o.ids, 2.5), TypeError, "num_classes must be a whole", "2.5"
    ),
    "classes of an array": wrong(
        lambda o: mt.one_hot(np.array([0]), 2), TypeError, "must be a tensor", "ndarray"
    ),
    "linear without weights": wrong(
        lambda o: mt.linear(o.matrix, None), TypeError, "weights must be a tensor"
    ),
    "linear with another bias": wrong(
        lambda o: mt.linear(o.matrix, o.flipped, o.vector), ValueError, "need a bias of shape (2,)", "(4,)"
    ),
    "a gradient check of numbers": wrong(
        lambda o: mt.grad_check(lambda x: x, 1.0), TypeError, "argument 0 must be a tensor", "float"
    ),
}  # fmt: skip

MODULES = {
    "a linear layer of no inputs": wrong(
        lambda o: mt.Linear(0, 2, True, o.backend), ValueError, "in_size", "0"
    ),
    "a linear layer below 0": wrong(
        lambda o: mt.Linear(2, -3, True, o.backend), ValueError, "out_size", "-3"
    ),
    "a linear layer of text": wrong(
        lambda o: mt.Linear("a", 2, True, o.backend), TypeError, "in_size", "'a'"
    ),
    "a linear layer of half a size": wrong(
        lambda o: mt.Linear(1.5, 2), TypeError, "in_size must be a whole", "1.5"
    ),
    "a linear layer of integers": wrong(
        lambda o: mt.Linear(3, 2, True, o.backend, dtype="int32"), TypeError, "int32", "float32"
    ),
    "a linear layer with the backend as its bias": wrong(
        lambda o: mt.Linear(3, 2, o.backend), TypeError, "bias must be", "backend=..."
    ),
    "a linear layer with a number as its bias": wrong(
        lambda o: mt.Linear(3, 2, 0.5, o.backend), TypeError, "bias must be True or False", "0.5"
    ),
    "attention with the backend in place of causal": wrong(
        lambda o: mt.MultiHeadAttention(4, 2, o.backend), TypeError, "causal must be", "backend=..."
    ),
    "linear shapes": wrong(
        lambda o: mt.Linear(4, 2, True, o.backend)(o.matrix), AssertionError, "(2, 3)", "(4, 2)"
    ),
    "linear of an array": wrong(
        lambda o: mt.Linear(3, 2, True, o.backend)(np.ones((2, 3))), TypeError,
        "input must be a tensor", "ndarray"
    ),
    "linear of a number": wrong(
        lambda o: mt.Linear(3, 2, True, o.backend)(tensor(1.0, o.backend)), ValueError,
        "(…, in_size)", "()", "view"
    ),
    "an embedding of none": wrong(
        lambda o: mt.Embedding(0, 2, o.backend), ValueError, "num_embeddings", "0"
    ),
    "an embedding of text": wrong(
        lambda o: mt.Embedding("a", 2, o.backend), TypeError, "num_embeddings", "'a'"
    ),
    "a token beyond": wrong(
        lambda o: mt.Embedding(5, 2, o.backend)(o.ids), ValueError, "from 0 to 4", "0 to 5", "larger"
    ),
    "a token below 0": wrong(
        lambda o: mt.Embedding(5, 2, o.backend)(np.array([-1])), ValueError, "got -1;"
    ),
    "a token that wraps": wrong(
        lambda o: mt.Embedding(5, 2, o.backend)(np.array([2**64 - 1], np.uint64)), ValueError,
        "1.84467e+19"
    ),
    "half a token": wrong(
        lambda o: mt.Embedding(5, 2, o.backend)(np.array([0.5])), TypeError,
        "float64 with fractions", "astype"
    ),
    "a token that is none": wrong(
        lambda o: mt.Embedding(5, 2, o.backend)(np.array([np.nan])), TypeError, "float64"
    ),
    "an infinite token": wrong(
        lambda o: mt.Embedding(5, 2, o.backend)(np.array([np.inf])), ValueError, "inf"
    ),
    "a token of text": wrong(
        lambda o: mt.Embedding(5, 2, o.backend)(np.array(["1"])), TypeError, "<U1", "astype"
    ),
    "tokens of nothing": wrong(
        lambda o: mt.Embedding(5, 2, o.backend)(None), TypeError, "whole numbers", "None"
    ),
    "tokens ragged": wrong(
        lambda o: mt.Embedding(5, 2, o.backend)([[1], [1, 2]]), ValueError, "equal lengths"
    ),
    "layer norm of another size": wrong(
        lambda o: mt.LayerNorm1d(2, 1e-5, o.backend)(o.matrix), (ValueError, IndexingError),
        "(2, 3)", "(2,)"
    ),
    "layer norm of no size": wrong(
        lambda o: mt.LayerNorm1d(0, 1e-5, o.backend), ValueError, "dim must be 1 or more"
    ),
    "layer norm with text": wrong(
        lambda o: mt.LayerNorm1d(3, "a", o.backend), TypeError, "eps must be", "'a'"
    ),
    "layer norm below 0": wrong(
        lambda o: mt.LayerNorm1d(3, -5.0, o.backend), ValueError, "eps must be", "-5.0"
    ),
    "layer norm with NaN": wrong(
        lambda o: mt.LayerNorm1d(3, np.nan, o.backend), ValueError, "eps", "nan", "1e-5"
    ),
    "layer norm of an array": wrong(
        lambda o: mt.LayerNorm1d(3, 1e-5, o.backend)(np.ones((2, 3))), TypeError,
        "must be a tensor", "ndarray"
    ),
    "a dropout layer of 1": wrong(
        lambda o: mt.Dropout(1.0), ValueError, "[0, 1)", "1.0", "0 turns dropout off"
    ),
    "a dropout layer of NaN": wrong(lambda o: mt.Dropout(np.nan), ValueError, "[0, 1)", "nan"),
    "a dropout layer of text": wrong(
        lambda o: mt.Dropout("a"), TypeError, "p_dropout must be a number", "'a'"
    ),
    "a dropout layer of nothing": wrong(
        lambda o: mt.Dropout(None), TypeError, "p_dropout must be a number"
    ),
    "heads that do not divide": wrong(
        lambda o: mt.MultiHeadAttention(5, 2, backend=o.backend), ValueError, "5", "2",
        "equal share"
    ),
    "no heads": wrong(
        lambda o: mt.MultiHeadAttention(4, 0, backend=o.backend), ValueError, "n_head", "0"
    ),
    "heads below 0": wrong(
        lambda o: mt.MultiHeadAttention(4, -2, backend=o.backend), ValueError, "n_head", "-2"
    ),
    "half a head": wrong(
        lambda o: mt.MultiHeadAttention(4, 2.0, backend=o.backend), TypeError, "n_head", "2.0"
    ),
    "attention by name": wrong(
        lambda o: mt.MultiHeadAttention(4, 2, attention="fast"), ValueError, "'flash'", "'fast'"
    ),
    "attention dropout of 1": wrong(
        lambda o: mt.MultiHeadAttention(4, 2, attention_dropout=1.0), ValueError, "[0, 1)", "1.0"
    ),
    "attention dropout of text": wrong(
        lambda o: mt.MultiHeadAttention(4, 2, attention_dropout="a"), TypeError, "must be a number",
        "'a'"
    ),
    "an attention layer of rows": wrong(
        lambda o: mt.MultiHeadAttention(4, 2, backend=o.backend)(o.matrix), ValueError,
        "(batch, seq, 4)", "(2, 3)", "view"
    ),
    "an attention layer of an array": wrong(
        lambda o: mt.MultiHeadAttention(4, 2, backend=o.backend)(np.ones((1, 2, 4))), TypeError,
        "tensor", "ndarray"
    ),
    "a cache of text": wrong(
        lambda o: mt.MultiHeadAttention(4, 2, backend=o.backend)(o.signal, "a"), TypeError,
        "LayerCache", "'a'"
    ),
    "a cache that looks ahead": wrong(
        lambda o: mt.MultiHeadAttention(4, 2, False, backend=o.backend)(
            o.signal, mt.LayerCache(2, 2, 5, 2, o.backend)
        ),
        ValueError, "causal=True"
    ),
    "a wide layer of nothing": wrong(
        lambda o: mt.FeedForward(3, -1, backend=o.backend), ValueError, "out_size", "-1"
    ),
    "a bare module": wrong(lambda o: mt.Module()(), TypeError, "Module", "forward"),
    "a module without its parent": wrong(
        lambda o: Unfinished(), AttributeError, "'weight'", "super().__init__()"
    ),
    "a parameter of ids": wrong(
        lambda o: Parameter(o.ids), TypeError, "int64", "to(numpy.float32)"
    ),
    "a parameter named by an array": wrong(
        lambda o: Parameter(tensor([1.0]), o.ids), TypeError, "Tensor", "string"
    ),
}  # fmt: skip
