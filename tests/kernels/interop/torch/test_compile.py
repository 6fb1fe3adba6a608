"""Attention under torch.compile: user functions, and all that a call may change between two calls."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install torch")

import kernels  # noqa: E402
from kernels.interop.torch import flash_attention  # noqa: E402

DYNAMIC = [True, False]
WIDTHS = (1, 3, 1)


def some(*shape: int) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, requires_grad=True) for _ in range(3)]


def results(attend: Any, *args: Any) -> list[Any]:
    """Return the result of a function of q, k, v and other arguments, and its gradients."""
    operands = some(1, 1, 9, 4)
    out = attend(*operands, *args)
    return [out, *torch.autograd.grad(out.sin().sum(), operands)]


def check(attend: Any, width: float, *args: Any) -> None:
    """Compare a function with attention whose rows see the keys up to a distance."""
    place = torch.arange(9)
    mask = (place[:, None] - place).abs() <= width
    wanted = results(lambda q, k, v: flash_attention(q, k, v, mask))
    for one, other in zip(results(attend, *args), wanted, strict=True):
        torch.testing.assert_close(one, other)


def compiled(attend: Any, graphs: list[Any], **options: Any) -> Any:
    """Compile a function by a backend that collects the graphs."""

    def collect(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    return torch.compile(attend, backend=collect, **options)


class Near:
    """A mask_mod in the forms that Python has for functions with a state."""

    def __init__(self, width: float):
        self.width = width

    def __call__(self, batch: Any, head: Any, row: Any, col: Any) -> bool:
        return abs(row - col) <= self.width

    def method(self, batch: Any, head: Any, row: Any, col: Any) -> bool:
        return abs(row - col) <= self.width


def captured(width: Any) -> Any:
    return lambda batch, head, row, col: abs(row - col) <= width


def by_default(width: Any) -> Any:
    return lambda batch, head, row, col, width=width: abs(row - col) <= width


def by_keyword(width: Any) -> Any:
    return lambda batch, head, row, col, *, width=width: abs(row - col) <= width


def by_function(width: Any) -> Any:
    near = captured(width)
    return lambda batch, head, row, col: near(batch, head, row, col)


def by_tuple(width: Any) -> Any:
    widths = None, (width,)
    return lambda batch, head, row, col: abs(row - col) <= widths[1][0]


def last(width: Any, batch: Any, head: Any, row: Any, col: Any) -> bool:
    return abs(row - col) <= width


def is_near(batch: Any, head: Any, row: Any, col: Any) -> bool:
    return abs(row - col) <= current.width


def of_global(width: Any) -> Any:
    current.width = width
    return is_near


current = Near(0)
KEPT = {width: Near(width) for width in WIDTHS}
MASKS = {
    "captured int": captured,
    "captured float": lambda width: captured(width + 0.5),
    "captured function": by_function,
    "captured tuple": by_tuple,
    "default": by_default,
    "keyword default": by_keyword,
    "global": of_global,
    "callable object": KEPT.get,
    "method": lambda width: KEPT[width].method,
    "method of a changed object": lambda width: of_global(width) and current.method,
    "partial of a closure": lambda width: partial(captured(width)),
    "partial": lambda width: partial(last, width),
}


@pytest.mark.parametrize("dynamic", DYNAMIC)
@pytest.mark.parametrize("kind", MASKS)
def test_a_compiled_call_uses_the_values_of_its_own_mask_mod(kind: str, dynamic: Any) -> None:
    def attend(q: Any, k: Any, v: Any, mask_mod: Any) -> Any:
        return flash_attention(q, k, v, mask_mod=mask_mod)

    # PyTorch has no constant for a partial function of a number that it has made dynamic.
    graphs: list[Any] = []
    call = compiled(attend, graphs, dynamic=dynamic, fullgraph=kind != "partial")
    for width in WIDTHS:
        check(call, width, MASKS[kind](width))
    assert len(graphs) <= 2 or kind == "partial"  # equal values share a graph


def in_lambda(q: Any, k: Any, v: Any, width: Any) -> Any:
    return flash_attention(q, k, v, mask_mod=lambda b, h, row, col: abs(row - col) <= width)


def in_object(q: Any, k: Any, v: Any, width: Any) -> Any:
    near = KEPT[width]
    return flash_attention(q, k, v, mask_mod=lambda b, h, row, col: abs(row - col) <= near.width)


def in_scores(q: Any, k: Any, v: Any, width: Any) -> Any:
    def near(score: Any, batch: Any, head: Any, row: Any, col: Any) -> Any:
        return score if abs(row - col) <= width else -1e30

    def derivative(score: Any, batch: Any, head: Any, row: Any, col: Any) -> Any:
        return 1.0 if abs(row - col) <= width else 0.0

    return flash_attention(q, k, v, score_mod=(near, derivative))


@pytest.mark.parametrize("attend", [in_lambda, in_object, in_scores])
def test_a_function_of_compiled_code_uses_its_values(attend: Any) -> None:
    call = compiled(attend, [])  # makes a number dynamic when it changes
    for width in WIDTHS:
        check(call, width, width)


def test_a_number_made_dynamic_breaks_the_graph_in_words() -> None:
    call = compiled(in_lambda, [], dynamic=True, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="closure as Python constants"):
        call(*some(1, 1, 9, 4), 3)


@pytest.mark.parametrize("dynamic", DYNAMIC)
@pytest.mark.parametrize("kind", ["attribute", "method", "lambda"])
def test_layers_of_one_class_keep_their_own_windows(kind: str, dynamic: Any) -> None:
    class Layer(torch.nn.Module):
        def __init__(self, width: int):
            super().__init__()
            self.width, self.attribute = width, captured(width)

        def method(self, batch: Any, head: Any, row: Any, col: Any) -> bool:
            return abs(row - col) <= self.width

        def forward(self, q: Any, k: Any, v: Any) -> Any:
            width = self.width
            kinds = {"lambda": lambda b, h, row, col: abs(row - col) <= width}
            return flash_attention(q, k, v, mask_mod=kinds.get(kind) or getattr(self, kind))

    torch._dynamo.reset()
    layers = [(width, Layer(width)) for width in (1, 3)]
    calls = [
        (width, torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic))
        for width, layer in layers
    ]
    for width, call in calls * 2:
        check(call, width)


def shifted(score: Any, batch: Any, head: Any, row: Any, col: Any) -> Any:
    return score - 0.1 * (row - col)


def one(score: Any, batch: Any, head: Any, row: Any, col: Any) -> Any:
    return 1.0


def near(batch: Any, head: Any, row: Any, col: Any) -> Any:
    return abs(row - col) < 3


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"dropout_p": 0.4},
        {"dropout_p": 0.4, "seed": 2**64 - 1},
        {"score_mod": (shifted, one), "mask_mod": near},
        {"block_mask": kernels.BlockMask(np.ones((1, 1), np.uint8), 7, 7, 16)},
        {"window_size": (2, 1), "causal_offset": 1, "softcap": 2.0, "scale": 0.4, "rung": "naive"},
    ],
    ids=lambda options: ",".join(options),
)
def test_compiled_attention_is_that_of_eager_without_a_graph_break(options: dict[str, Any]) -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return 2.0 * flash_attention(q, k, v.sin(), **options)

    tensors = some(2, 3, 7, 4)
    torch.manual_seed(1)
    expected = attend(*tensors)
    wanted = torch.autograd.grad(expected.sum(), tensors)
    torch.manual_seed(1)
    actual = torch.compile(attend, fullgraph=True, backend="aot_eager")(*tensors)
    found = torch.autograd.grad(actual.sum(), tensors)
    for one, other in zip((actual, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(one, other)


def test_a_compiled_function_takes_other_lengths() -> None:
    compiled = torch.compile(flash_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (5, 9, 13):
        q, k, v = some(1, 2, length, 4)
        torch.testing.assert_close(
            compiled(q, k, v, is_causal=True), flash_attention(q, k, v, is_causal=True)
        )
