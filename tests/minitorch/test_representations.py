"""The texts of tensors, modules, backends, caches, optimisers and plans."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import kernels
import minitorch
from minitorch import (
    ExpressionGraph,
    FastBackend,
    KVCache,
    Linear,
    Scalar,
    SimpleBackend,
    from_numpy,
    tensor,
)

X = tensor([1.0, 1e-9], FastBackend, dtype="float32", requires_grad=True)
ABOUT = "shape=(2,), dtype=float32, backend=FastOps"
Q = np.zeros((1, 1, 4, 8), np.float32)


@pytest.mark.parametrize(
    ("thing", "parts"),
    [
        (X, [f"tensor([1.e+00, 1.e-09], {ABOUT}, requires_grad=True)"]),
        (X + X, [f"tensor([2.e+00, 2.e-09], {ABOUT}, grad_fn=Add)"]),
        (X.detach(), [f"tensor([1.e+00, 1.e-09], {ABOUT})"]),
        (tensor([[1.0, 20.0], [3.0, 4.0]]), ["tensor([[ 1., 20.],\n        [ 3.,  4.]],\n       shape="]),
        (minitorch.rand((100, 100)), ["...", "shape=(100, 100)"]),
        *((from_numpy(np.array([1, 0])).to(dtype), ["tensor([", f"dtype={dtype}"])
          for dtype in ("float16", "bfloat16", "int64", "bool")),
        *((minitorch.zeros(shape), [f"shape={shape}"]) for shape in [(), (0,), (2, 0, 3), (1, 1)]),
        (FastBackend, ["TensorBackend(FastOps)"]),
        (KVCache(2, 1, 4, 16, 8, FastBackend, "float32"),
         ["KVCache(layers=2, batch=1, heads=4, length=0, capacity=16, head_dim=8, dtype=float32, "
          "backend=FastOps)"]),
        (minitorch.SGD(Linear(2, 3, True, SimpleBackend).parameters(), lr=0.5),
         ["SGD(lr=0.5, parameters=2)"]),
        (minitorch.TransformerLayer(8, 2), ["in_size=8", "weights=(8, 8)", "p_dropout=0.1"]),
        (kernels.plan(Q, Q, Q), ["forward on cpu by flash2"]),
    ],
    ids=lambda x: type(x).__name__,
)  # fmt: skip
def test_a_text_shows_what_a_thing_is(thing: Any, parts: list[str]) -> None:
    text = repr(thing)
    assert all(part in text for part in parts) and len(text) < 3000, text


# -- pictures of graphs ------------------------------------------------------------------------


def texts(graph: ExpressionGraph) -> list[str]:
    nodes = ElementTree.fromstring(graph._repr_svg_()).iter()
    return [node.text or "" for node in nodes if node.tag.endswith("text")]


def test_the_picture_shows_each_variable_once_and_the_shapes_of_tensors() -> None:
    x = Scalar(2.0, name="x")
    y = x * x
    assert sorted(texts(ExpressionGraph(y + y))) == ["2", "4", "8", "Add", "Mul", "x"]
    t = tensor([[1.0, 2.0]], requires_grad=True)
    shown = texts(ExpressionGraph((t * 3.0).sum()))
    assert {"leaf", "constant", "Mul", "Sum", "(1, 2)", "(1,)"} <= {*shown}
    q = minitorch.rand((1, 1, 4, 2), requires_grad=True)
    out, lse = q.flash_attention(q, q, return_lse=True)
    assert "(1, 1, 4)" in texts(ExpressionGraph(lse.sum() + out.sum()))


def test_a_graph_may_be_deep_but_not_too_large() -> None:
    x = Scalar(1.0)
    for _ in range(5000):
        x = x * 1.0
    with pytest.raises(ValueError, match="more than 200 variables"):
        ExpressionGraph(x)
    assert len(ExpressionGraph(x, most=20_000).columns) == 10_001


@pytest.mark.parametrize("wrong", [1.0, None, "x"])
def test_what_is_no_variable_has_no_graph(wrong: Any) -> None:
    with pytest.raises(TypeError, match="starts from a Scalar or a Tensor"):
        ExpressionGraph(wrong)
