"""Wrong calls of language models and their caches, and of training."""

from __future__ import annotations

from typing import Any

import numpy as np

import minitorch as mt
from minitorch import Parameter, Rotary
from minitorch.distributed import spread_sequence
from minitorch.models.sampling import Sampler
from minitorch.scalar_functions import Neg

from ..support.models.llama_folder import LLAMA3
from .cases import model

# Wrong types are what is tested.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportReturnType=false

ROW = np.zeros((1, 5), int)


def encoder(o: Any, attention: str = "flash") -> mt.EncoderLM:
    return mt.EncoderLM(19, 8, 2, 40, n_layer=1, attention=attention, backend=o.backend)


def classifier(o: Any, attention: str = "flash", **options: Any) -> mt.SequenceClassifier:
    return mt.SequenceClassifier(
        9, 8, 2, 40, 3, n_layer=1, attention=attention, backend=o.backend, **options
    )


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
    (lambda o: encoder(o)(ROW, None, ROW + np.arange(5) // 2), ValueError, "segments must be from 0 to 1"),
    (lambda o: encoder(o)(np.zeros((1, 41), int)), ValueError, "40 positions, got a sequence of 41"),
    (lambda o: encoder(o).loss(ROW, ROW - 100), ValueError, "no position is to be predicted"),
    (lambda o: encoder(o)(ROW + 19), ValueError, "token ids must be from 0 to 18"),
    (lambda o: encoder(o)(ROW[0], np.array([2, 4])), ValueError, "sum to at most 5"),
    (lambda o: encoder(o, "naive")(ROW[0], np.array([5])), ValueError, "need flash attention"),
    (lambda o: mt.TransformerLayer(4, 2, causal=False)(o.signal, cu_seqlens=[0, 3, 6]), ValueError,
     "total, n_embd"),
    (lambda o: classifier(o, pad_id=0)(np.ones((2, 41), int)), ValueError, "1 to 40 tokens", "(2, 41)"),
    (lambda o: classifier(o).loss(ROW, np.array([3])), ValueError, "targets must be from 0 to 2"),
    (lambda o: classifier(o, documents=2)(ROW), ValueError, "(batch, 2, seq), got (1, 5)"),
    (lambda o: classifier(o)(ROW[0], np.array([3, 3])), ValueError, "from 1 to 40 that sum", "shape (5,)"),
    (lambda o: classifier(o, pad_id=0)(ROW[0], np.array([5])), ValueError, "this model masks token 0"),
    (lambda o: classifier(o, documents=2)(ROW[0], np.array([5])), ValueError, "cannot be packed"),
    (lambda o: classifier(o, "naive")(ROW[0], np.array([5])), ValueError, "need flash attention"),
    (lambda o: mt.SequenceClassifier(8, 16, 2, 25, 2, side=4), ValueError, "16 pixels", "is 25"),
    (lambda o: mt.SequenceClassifier(8, 6, 2, 25, 2, side=5), ValueError, "multiple of 4, got 6"),
    (lambda o: model(o.backend, window=0), ValueError, "window must be"),
    (lambda o: model(o.backend, attention="local", attention_options={"window": 4}, window=4), ValueError,
     "need attention 'flash' or 'naive', got 'local'"),
    (lambda o: model(o.backend, attention="linear", sinks=True), ValueError,
     "need attention 'flash' or 'naive', got 'linear'"),
    (lambda o: mt.MultiHeadAttention(8, 2, causal=False, window=4), ValueError, "with causal=True"),
    (lambda o: spread_sequence(model(o.backend, sinks=True), None), ValueError, "has no sinks"),
    (lambda o: model(o.backend, attention="linformer", attention_options={"length": 3, "count": 2}),
     ValueError, "does not support is_causal"),
    (lambda o: model(o.backend, attention="smyrf"), ValueError, "does not support is_causal"),
    (lambda o: model(o.backend, attention="local", attention_options={"window": 4}).generate([1], 2),
     ValueError, "a cache needs flash or naive attention"),
    (lambda o: model(o.backend, precision="half"), ValueError, "'float32', 'tf32', 'bfloat16', got 'half'"),
    (lambda o: model(o.backend, precision="bfloat16", dtype=np.float32), ValueError, "leave one of them"),
    (lambda o: model(o.backend, rotary_scaling=LLAMA3), ValueError, "pass rotary_theta"),
    (lambda o: model(o.backend, norm="batch"), ValueError, "one of 'layer', 'rms', got 'batch'"),
    (lambda o: model(o.backend, n_kv_head=3), ValueError, "n_kv_head must divide n_head, got 3 and 2"),
    (lambda o: model(o.backend, n_kv_head=1, attention="local"), ValueError, "groups of heads, window"),
    (lambda o: Rotary(5, 8), ValueError, "even size, got head_dim 5"),
    (lambda o: Rotary(4, 8, theta=0.0), ValueError, "rotary_theta must be positive"),
    (lambda o: Rotary(4, 8, scaling={"rope_type": "yarn"}), ValueError, "'yarn', supported is"),
    (lambda o: Rotary(4, 8, scaling={**LLAMA3, "low_freq_factor": 9.0}), ValueError, "must be below"),
    (lambda o: Rotary(4, 8)(o.image, 7), ValueError, "8 positions, got 2 after 7"),
    (lambda o: Sampler(top_k=0), ValueError, "top_k"),
    (lambda o: Sampler(top_k=1.5), TypeError, "top_k"),
    (lambda o: Sampler(top_p=0.0), ValueError, "top_p must be above 0"),
    (lambda o: Sampler(temperature=-1.0), ValueError, "temperature"),
    (lambda o: Sampler(seed=-1), ValueError, "seed"),
]  # fmt: skip

TRAINING = [
    (lambda o: mt.SGD([], lr="a"), TypeError, "lr", "'a'"),
    (lambda o: mt.SGD([], lr=-0.1), ValueError, "lr", "-0.1"),
    (lambda o: mt.Adam([], beta1=1.5), ValueError, "beta1", "1.5", "[0, 1)"),
    (lambda o: mt.Adam([Parameter(mt.Scalar(1.0))]).step(), TypeError, "Scalar", "SGD"),
    (lambda o: mt.Optimizer([]).step(), NotImplementedError, "the subclass"),
    (lambda o: mt.Scalar(1.0) + "a", TypeError, "type str", "float()"),
    (lambda o: Neg.apply(5), AssertionError, "Neg.forward returned -5", "type int"),
    (lambda o: mt.datasets["Xor"]("a"), ValueError, "the number of points", "'a'"),
    (lambda o: mt.SGD([o.vector]), TypeError, "minitorch.Parameter"),
    (lambda o: mt.SGD([{"lr": 0.1}]), TypeError, "dictionary of params", "lr"),
    (lambda o: mt.SGD([{"params": [], "momentum": 0.1}]), TypeError, "momentum"),
    (lambda o: mt.SGD([{"params": []}, Parameter(1.0)]), TypeError, "a group of SGD"),
    (lambda o: mt.SGD([{"params": [], "lr": -1.0}]), ValueError, "lr must be"),
    (lambda o: mt.SGD([{"params": [o.vector]}]), TypeError, "minitorch.Parameter"),
    (lambda o: mt.SGD([{"params": [p := Parameter(1.0)]}, {"params": [p]}]), ValueError, "two groups"),
    (lambda o: mt.ExpressionGraph(1.0), TypeError, "starts from a Scalar or a Tensor"),
]  # fmt: skip
