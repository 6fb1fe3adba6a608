"""The texts of tensors, modules, backends, caches, optimisers and plans."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

import minitorch
from minitorch import (
    ExpressionGraph,
    Scalar,
    tensor,
)

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
