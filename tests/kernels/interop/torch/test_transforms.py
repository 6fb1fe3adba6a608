"""Attention under torch.func: a mapped call equals a loop, and what cannot be transformed says so."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from kernels.interop.torch import flash_attention  # noqa: E402

NAMES = "q", "k", "v", "attn_mask", "alibi_slopes", "sink"
SIZE = 3


def of_indices(batch: Any, head: Any, row: Any, col: Any) -> Any:
    return col <= row + 2 * batch + head


def scored(score: Any, batch: Any, head: Any, row: Any, col: Any) -> Any:
    return score + batch + head * col


def one(score: Any, batch: Any, head: Any, row: Any, col: Any) -> Any:
    return 1.0


OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True, "softcap": 2.0},
    {"mask_mod": of_indices},
    {"score_mod": (scored, one)},
    {"dropout_p": 0.5, "seed": 3},
]


@st.composite
def mapped_calls(draw: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Draw tensors by name, the dimension that each is mapped over or None, and options."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    options = dict(draw(st.sampled_from(OPTIONS)))
    grouped = draw(st.booleans())
    heads = 2
    shapes = {
        "q": (2, heads, 4, 3),
        "k": (2, 1 if grouped else heads, 5, 3),
        "v": (2, 1 if grouped else heads, 5, 2),
        "attn_mask": draw(st.sampled_from([(4, 5), (2, 1, 4, 5), (heads, 4, 5)])),
        "alibi_slopes": (heads,),
        "sink": (heads,),
    }
    if grouped:
        options["enable_gqa"] = True
    lowest = 3 if grouped else 2
    present = draw(st.sets(st.sampled_from(NAMES[3:])))
    for name in NAMES[:3]:
        rank = 4 if name == "q" and present else draw(st.integers(lowest, 4))
        shapes[name] = shapes[name][4 - rank :]
    if max(len(shapes[name]) for name in NAMES[:3]) < 3:
        present = set()
    tensors, dims = {}, {}
    for name in NAMES:
        if name in NAMES[3:] and name not in present:
            continue
        shape = list(shapes[name])
        dims[name] = draw(st.none() | st.integers(-len(shape) - 1, len(shape)))
        if dims[name] is not None:
            shape.insert(dims[name] % (len(shape) + 1), SIZE)
        tensors[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
    if all(dim is None for dim in dims.values()):
        dims["q"] = 0
        tensors["q"] = torch.stack([tensors["q"] * i for i in range(SIZE)])
    return tensors, dims, options


def in_loop(attend: Any, tensors: dict[str, Any], dims: dict[str, Any]) -> list[Any]:
    """Return the stacked results of a function for each index."""
    found = [
        attend(
            *(x if dims[name] is None else x.select(dims[name], i) for name, x in tensors.items())
        )
        for i in range(SIZE)
    ]
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


@settings(max_examples=30)
@given(mapped_calls())
def test_a_mapped_call_equals_a_loop(call: Any) -> None:
    tensors, dims, options = call

    def attend(*given: Any) -> Any:
        return flash_attention(**dict(zip(tensors, given, strict=True)), **options, return_lse=True)

    def loss(*given: Any) -> Any:
        out, lse = attend(*given)
        return out.sin().sum() + lse.sum()

    learnt = tuple(i for i, name in enumerate(tensors) if name != "alibi_slopes")
    for function in (attend, torch.func.grad(loss, learnt)):
        found = torch.func.vmap(function, tuple(dims.values()))(*tensors.values())
        for got, wanted in zip(found, in_loop(function, tensors, dims), strict=True):
            torch.testing.assert_close(got, wanted)


def some() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, 9, 4, generator=generator, dtype=torch.float64) for _ in range(3)]


def dropped(q: Any, k: Any, v: Any) -> Any:
    return flash_attention(q, k, v, dropout_p=0.5)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_randomness_is_that_of_dropout_in_pytorch(randomness: str) -> None:
    tensors = [torch.stack([x, x]) for x in some()]

    def loss(*given: Any) -> Any:
        return dropped(*given).sin().sum()

    mapped = torch.func.vmap(dropped, randomness=randomness)
    torch.manual_seed(1)
    first, second = mapped(*tensors)
    assert torch.equal(first, second) == (randomness == "same")
    torch.manual_seed(1)
    outer = torch.func.grad(lambda *given: mapped(*given).sin().sum(), (0, 1, 2))(*tensors)
    torch.manual_seed(1)
    inner = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)), randomness=randomness)(*tensors)
    torch.testing.assert_close(outer, inner)
    with pytest.raises(RuntimeError, match="random"):
        torch.func.vmap(dropped, randomness="error")(*tensors)


def test_gradients_of_a_batch_of_results_are_mapped_by_torch_func_alone() -> None:
    tensors = [x.requires_grad_() for x in some()]
    out = flash_attention(*tensors)
    douts = torch.randn(3, *out.shape, dtype=out.dtype)

    def gradients(dout: Any) -> Any:
        return torch.autograd.grad(out, tensors, dout, retain_graph=True)

    wanted = [torch.stack(parts) for parts in zip(*map(gradients, douts), strict=True)]
    torch.testing.assert_close(list(torch.func.vmap(gradients)(douts)), wanted)
    with pytest.raises(NotImplementedError, match=r"torch\.func\.vmap"):
        torch.autograd.grad(out, tensors, douts, is_grads_batched=True)


def test_gradients_of_torch_func_in_compiled_code_are_those_outside() -> None:
    def gradients(*tensors: Any) -> Any:
        return torch.func.grad(lambda *x: flash_attention(*x).sin().sum(), (0, 1, 2))(*tensors)

    torch._dynamo.reset()
    compiled = torch.compile(gradients, backend="aot_eager")
    torch.testing.assert_close(compiled(*some()), gradients(*some()))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="without_dynamo"):
        torch.compile(gradients, backend="aot_eager", fullgraph=True)(*some())
    with pytest.raises(NotImplementedError, match="make_fx"):
        make_fx(gradients)(*some())


def test_a_compiled_function_maps_attention() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return torch.func.vmap(lambda *x: flash_attention(*x, mask_mod=of_indices))(q, k, v)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*some()), attend(*some()))
