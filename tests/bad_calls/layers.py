"""Wrong calls of layers: the functions of ``nn``, and modules."""

from __future__ import annotations

from typing import Any

import numpy as np

import minitorch as mt
from minitorch import IndexingError, Parameter, from_numpy, tensor

# Wrong types are what is tested.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportReturnType=false


class Unfinished(mt.Module):
    """A module that forgets its parent's __init__."""

    def __init__(self) -> None:
        self.weight = Parameter(1.0)


def pooled(kernel: Any) -> Any:
    return lambda o: mt.maxpool2d(o.image, kernel)


FUNCTIONS = [
    (lambda o: mt.conv2d(o.image, from_numpy(np.ones((1, 3, 1, 1)), o.backend)), AssertionError,
     "2 channels", "weight 3", "(1, 2, 4, 4)"),
    (lambda o: mt.conv1d(o.image, o.image), ValueError, "3 dimensions", "(1, 2, 4, 4)"),
    (pooled((3, 2)), AssertionError, "(3, 2)", "(4, 4)", "pad"),
    (pooled((0, 2)), ValueError, "kernel must be 1 or more", "0"),
    (pooled(2), TypeError, "(tile height, tile width)", "got 2", "(2, 2)"),
    (lambda o: mt.avgpool2d(o.matrix, (1, 1)), ValueError, "height", "(2, 3)", "view"),
    (lambda o: mt.avgpool2d(o.x, (1, 1)), TypeError, "must be a tensor", "ndarray"),
    (lambda o: mt.softmax(o.matrix, 2), IndexingError, "dim 2", "(2, 3)"),
    (lambda o: mt.dropout(o.matrix, 1.5), ValueError, "from 0 to 1", "1.5", "0 turns"),
    (lambda o: mt.softmax_loss(o.matrix, np.zeros(3, int)), ValueError, "(2, 3)", "(3,)", "view"),
    (lambda o: mt.softmax_loss(o.matrix, np.array([0, 3])), ValueError, "from 0 to 2", "0 to 3"),
    (lambda o: mt.softmax_loss(o.matrix, np.array([0, -1])), ValueError, "from 0 to 2", "-1 to 0"),
    (lambda o: mt.one_hot(o.ids, 2.5), TypeError, "num_classes must be a whole", "2.5"),
    (lambda o: mt.linear(o.matrix, o.flipped, o.vector), ValueError, "need a bias of shape (2,)"),
    (lambda o: mt.cross_entropy(o.matrix, [0, 1, 2]), ValueError, "(2, 3) and (3,)"),
    (lambda o: mt.cross_entropy(o.matrix, [0, 3]), ValueError, "from 0 to 2"),
    (lambda o: mt.cross_entropy(o.matrix, [0.5, 1]), TypeError, "whole numbers"),
    (lambda o: mt.cross_entropy(o.matrix, [0, 1], reduction="all"), ValueError, "'mean', 'sum', 'none'"),
    (lambda o: mt.cross_entropy(o.matrix, [0, 1], label_smoothing=1.5), ValueError, "from 0 to 1"),
    (lambda o: mt.cross_entropy(o.matrix, [0, 1], ignore_index=0.5), TypeError, "whole number"),
    (lambda o: mt.cross_entropy(o.x, [0, 1]), TypeError, "must be a tensor"),
]  # fmt: skip

MODULES = [
    (lambda o: mt.Linear(0, 2, True, o.backend), ValueError, "in_size", "0"),
    (lambda o: mt.Linear("a", 2, True, o.backend), TypeError, "in_size", "'a'"),
    (lambda o: mt.Linear(3, 2, True, o.backend, dtype="int32"), TypeError, "int32", "float32"),
    (lambda o: mt.Linear(3, 2, o.backend), TypeError, "bias must be", "backend=..."),
    (lambda o: mt.MultiHeadAttention(4, 2, o.backend), TypeError, "causal must be", "backend=..."),
    (lambda o: mt.Linear(4, 2, True, o.backend)(o.matrix), AssertionError, "(2, 3)", "(4, 2)"),
    (lambda o: mt.Linear(3, 2, True, o.backend)(tensor(1.0, o.backend)), ValueError, "(…, in_size)"),
    (lambda o: mt.Embedding(0, 2, o.backend), ValueError, "num_embeddings", "0"),
    (lambda o: mt.Embedding("a", 2, o.backend), TypeError, "num_embeddings", "'a'"),
    (lambda o: mt.Embedding(5, 2, o.backend)(o.ids), ValueError, "from 0 to 4", "0 to 5", "larger"),
    (lambda o: mt.Embedding(5, 2, o.backend)(np.array([-1])), ValueError, "got -1;"),
    (lambda o: mt.Embedding(5, 2, o.backend)(np.array([2**64 - 1], np.uint64)), ValueError,
     "1.84467e+19"),
    (lambda o: mt.Embedding(5, 2, o.backend)(np.array([0.5])), TypeError, "float64 with fractions"),
    (lambda o: mt.LayerNorm1d(2, 1e-5, o.backend)(o.matrix), (ValueError, IndexingError), "(2, 3)"),
    (lambda o: mt.LayerNorm1d(3, "a", o.backend), TypeError, "eps must be", "'a'"),
    (lambda o: mt.LayerNorm1d(3, -5.0, o.backend), ValueError, "eps must be", "-5.0"),
    (lambda o: mt.Dropout(1.0), ValueError, "[0, 1)", "1.0", "0 turns dropout off"),
    (lambda o: mt.MultiHeadAttention(5, 2, backend=o.backend), ValueError, "5", "2", "equal share"),
    (lambda o: mt.MultiHeadAttention(4, 2, attention="fast"), ValueError, "'flash'", "'fast'"),
    (lambda o: mt.MultiHeadAttention(4, 2).forward(from_numpy(np.ones((2, 4)))), ValueError, "(2, 4)"),
    (lambda o: mt.MultiHeadAttention(4, 2, backend=o.backend)(o.matrix), ValueError, "(batch, seq, 4)"),
    (lambda o: mt.MultiHeadAttention(4, 2, backend=o.backend)(np.ones((1, 2, 4))), TypeError, "tensor"),
    (lambda o: mt.MultiHeadAttention(4, 2, backend=o.backend)(o.signal, "a"), TypeError, "LayerCache"),
    (lambda o: mt.MultiHeadAttention(4, 2, False, backend=o.backend)(o.signal,
     mt.LayerCache(2, 2, 5, 2, o.backend)), ValueError, "causal=True"),
    (lambda o: mt.Module()(), TypeError, "Module", "forward"),
    (lambda o: Unfinished(), AttributeError, "'weight'", "super().__init__()"),
    (lambda o: Parameter(o.ids), TypeError, "int64", "to(numpy.float32)"),
    (lambda o: Parameter(tensor([1.0]), o.ids), TypeError, "Tensor", "string"),
    (lambda o: mt.Sequential([mt.Linear(2, 2)]), TypeError, "a module or a function"),
    (lambda o: mt.Sequential(mt.ReLU), TypeError, "a module or a function"),
    (lambda o: mt.ModuleList([1.0]), TypeError, "holds modules"),
    (lambda o: mt.ModuleDict({"train": mt.Linear(2, 2)}), ValueError, "another name"),
    (lambda o: mt.ModuleDict({"a.b": mt.Linear(2, 2)}), ValueError, "dot"),
    (lambda o: mt.ModuleDict({"a": None}), TypeError, "holds modules"),
    (lambda o: mt.ModuleDict()["a"], KeyError, "a"),
    (lambda o: mt.ModuleList()[0], IndexError, "range"),
]  # fmt: skip
