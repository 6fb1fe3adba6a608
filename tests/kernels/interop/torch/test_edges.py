"""What PyTorch's own attention takes, the operator takes too, with the same results and gradients."""

from __future__ import annotations

import subprocess
import sys
from itertools import accumulate, chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install torch")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from kernels import BlockMask  # noqa: E402
from kernels.interop.torch import (  # noqa: E402
    block_mask_from_flex,
    block_mask_to_flex,
    flash_attention,
    flash_attention_varlen,
)
from kernels.runtime.dtypes import NAMES  # noqa: E402

from ....support.tolerances import assert_close_arrays, tolerance  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention
DTYPES = {name: dtype for dtype, name in NAMES.items()}
#: How an operand lies in memory: a function of its shape and of one that draws numbers.
STRIDES = {
    "row-major": lambda shape, make: make(shape),
    "sequence before heads": lambda s, make: (
        make((*s[:-3], s[-2], s[-3], s[-1])).transpose(-2, -3) if len(s) > 2 else make(s)
    ),
    "transposed": lambda s, make: make((*s[:-2], s[-1], s[-2])).mT,
    "every other element": lambda s, make: make((*s[:-1], 2 * s[-1]))[..., ::2],
    "repeated rows": lambda s, make: make((*s[:-2], 1, s[-1])).expand(s),
    "within a larger tensor": lambda s, make: make((*s[:-2], s[-2] + 3, s[-1]))[..., 2:-1, :],
}


@st.composite
def calls_of_sdpa(draw: Any) -> tuple[list[Any], dict[str, Any]]:
    """Draw the operands q, k and v, and the other arguments of a call."""
    kind, generator = getattr(torch, draw(st.sampled_from([*DTYPES]))), torch.Generator()
    generator.manual_seed(draw(st.integers(0, 99)))
    sizes = st.sampled_from([0, 1, 2, 5, 9])
    seq_q, seq_k, head_dim, value_dim = (draw(sizes) for _ in range(4))
    lead = draw(st.lists(st.sampled_from([2, 1, 3, 0]), max_size=3))
    leads = [[draw(st.sampled_from([n, n, 1])) for n in lead] for _ in range(3)]
    if 0 in (*lead, seq_q, seq_k, head_dim, value_dim):  # SDPA does not broadcast empty tensors
        leads = [lead] * 3
    options: dict[str, Any] = {}
    if lead and draw(st.booleans()):
        options["enable_gqa"], leads = True, [[*x[:-1], 6] for x in leads]
        for of_keys in leads[1:]:
            of_keys[-1] = draw(st.sampled_from([1, 2, 3, 6]))
    shapes = (seq_q, head_dim), (seq_k, head_dim), (seq_k, value_dim)

    def make(shape: Any) -> Any:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(kind)

    operands = [
        STRIDES[draw(st.sampled_from([*STRIDES]))]((*x, *shape), make)
        for x, shape in zip(leads, shapes, strict=True)
    ]
    rows = [max(x) for x in zip(*leads, strict=True)]
    mask_kind = draw(st.sampled_from(["none", "causal", torch.bool, kind, torch.float32]))
    if mask_kind == "causal":
        options["is_causal"] = True
    elif mask_kind != "none":
        shape = [draw(st.sampled_from([n, 1])) for n in (*rows, seq_q, seq_k)]
        mask = make(shape[draw(st.integers(0, len(shape))) :])
        options["attn_mask"] = mask > -0.5 if mask_kind == torch.bool else mask.to(mask_kind)
    options["scale"] = draw(st.sampled_from([None, None, 0.0, 0.3, -2]))
    options["dropout_p"] = draw(st.sampled_from([0.0, 0.0, 1.0]))
    return operands, options


def results(attend: Any, operands: Any, options: dict[str, Any]) -> list[Any]:
    """Return the result of a call by keyword, and the gradients of operands and a floating mask."""
    leaves = [x.detach().requires_grad_() for x in operands]
    own = dict(options)
    mask = own.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        own["attn_mask"] = mask = mask.detach().requires_grad_()
        leaves.append(mask)
    out = attend(query=leaves[0], key=leaves[1], value=leaves[2], **own)
    return [out, *torch.autograd.grad(out.sin().sum(), leaves, materialize_grads=True)]


def dtype_of(tensor: Any) -> Any:
    return DTYPES[str(tensor.dtype).removeprefix("torch.")]


@settings(max_examples=60)
@given(calls_of_sdpa())
def test_every_call_of_sdpa_has_its_result_and_gradients(call: Any) -> None:
    operands, options = call
    mask = options.get("attn_mask")
    wide, own = [x.double() for x in operands], dict(options)
    if mask is not None and mask.is_floating_point():
        own["attn_mask"] = mask.double()
    with sdpa_kernel(SDPBackend.MATH):
        expected = results(sdpa, wide, own)
    found = results(flash_attention, operands, options)
    names, like = ("out", "dq", "dk", "dv", "dmask"), (operands[0], *operands, mask)
    for name, one, other, x in zip(names, found, expected, like, strict=False):
        assert one.dtype == x.dtype
        # A float32 mask has a gradient that is computed from out, which has the dtype of q.
        dtype = max((dtype_of(operands[0]), dtype_of(x)), key=tolerance)
        size = max([1.0, *(x.abs().max().item() for x in (*wide, other) if x.numel())]) ** 2
        actual = one.detach().double().numpy().astype(dtype)
        assert_close_arrays(actual, other.detach().numpy(), dtype, name, size)
    metas = [x.to("meta") for x in operands]
    without = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    for one, other in zip(results(flash_attention, metas, without), found, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


def by_head(batch: Any, head: Any, row: Any, col: Any) -> Any:
    """Show the keys up to a distance, which is read from a tensor."""
    return (row >= col) & (row - col <= torch.tensor([3, 40])[head])


def some(*shape: int, count: int = 3) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]


@settings(max_examples=10)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4), st.booleans()
)
def test_jagged_tensors_attend_as_each_of_their_sequences(lengths: Any, is_causal: bool) -> None:
    lengths = [*lengths, (3, 2)]
    parts = [
        [torch.randn(n, 4, 3, dtype=torch.float64, requires_grad=True) for n in column]
        for column in (*zip(*lengths, strict=True), [n for _, n in lengths])
    ]
    options = {"is_causal": is_causal, "return_lse": True}
    q, k, v = (torch.nested.as_nested_tensor(x, layout=torch.jagged).transpose(1, 2) for x in parts)
    jagged = [x.transpose(1, 2).unbind() for x in flash_attention(q, k, v, **options)]
    found = [[x.transpose(0, 1) for x in results] for results in zip(*jagged, strict=True)]
    wanted = [
        list(flash_attention(*(x.transpose(0, 1) for x in own), **options))
        for own in zip(*parts, strict=True)
    ]
    torch.testing.assert_close(found, wanted)
    ours, theirs = (
        torch.autograd.grad(sum(out.sin().sum() for out, _ in x), [*chain(*parts)])
        for x in (found, wanted)
    )
    torch.testing.assert_close(ours, theirs)


def test_other_nested_tensors_and_two_names_of_an_operand_are_refused_in_words() -> None:
    parts = [torch.randn(n, 2, 4) for n in (3, 5)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    (x,) = some(1, 2, 5, 4, count=1)
    for call, error, words in (
        (lambda: flash_attention(jagged, jagged, jagged), TypeError, r"x\.transpose\(1, 2\)"),
        (lambda: flash_attention(x, x, x, value=x), TypeError, "v twice, as v and as value"),
    ):
        with pytest.raises(error, match=words):
            call()


@pytest.mark.parametrize("size", [0, 3])
def test_graphs_of_pytorch_compute_what_the_operator_does(size: int) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return flash_attention(q, k, v, is_causal=True)

    tensors = some(2, size, 5, 4)
    wanted = Model()(*tensors)
    for graph in (
        torch.fx.symbolic_trace(Model()),
        torch.export.export(Model(), tuple(tensors)).module(),
    ):
        torch.testing.assert_close(graph(*tensors), wanted)
    metas = tuple(x.to("meta") for x in tensors)
    assert torch.export.export(Model(), metas).module()(*metas).shape == wanted.shape


@settings(max_examples=5)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.booleans())
def test_packed_sequences_have_meta_tensors_and_graphs(lengths: list[int], causal: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, starts: Any) -> Any:
            options = {"is_causal": causal, "return_lse": True}
            return flash_attention_varlen(q, k, v, starts, starts, **options)

    def results(model: Any, operands: Any, starts: Any) -> list[Any]:
        leaves = [x.detach().requires_grad_() for x in operands]
        out, lse = model(*leaves, starts)
        return [out, lse, *torch.autograd.grad(out.sum() + 2 * lse.sum(), leaves)]

    starts = torch.tensor([0, *accumulate([*lengths, 2])])
    operands = some(int(starts[-1]), 4, 3)
    wanted = results(Model(), operands, starts)
    graph = torch.export.export(Model(), (*operands, starts)).module()
    torch.testing.assert_close(results(graph, operands, starts), wanted)
    metas = [x.to("meta") for x in operands]
    for own in (starts, starts.to("meta"), starts.tolist()):
        found = results(Model(), metas, own)
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in wanted]


def test_a_compiled_graph_holds_packed_sequences_of_any_lengths() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(flash_attention_varlen, backend="aot_eager", fullgraph=True)
    for ends in ([0, 3, 9], [0, 9, 9], [0, 1, 9]):
        starts, operands = torch.tensor(ends), some(9, 2, 3)
        found = compiled(*operands, starts, starts, is_causal=True)
        wanted = flash_attention_varlen(*operands, starts, starts, is_causal=True)
        torch.testing.assert_close(found, wanted)


@given(
    arrays.arrays(bool, st.tuples(st.integers(1, 2), st.integers(1, 40), st.integers(1, 40))),
    st.sampled_from([16, (32, 16)]),
)
def test_block_masks_are_converted_to_flex_attention_and_back(shown: Any, size: Any) -> None:
    mask = BlockMask.from_dense(shown, size)
    assert block_mask_from_flex(block_mask_to_flex(mask)) == mask


def test_block_masks_of_flex_attention_are_those_of_its_own_function() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    mask = flex.create_block_mask(by_head, None, 2, 200, 150, device="cpu")
    q, k, v = some(1, 2, 200, 16)
    operands = q, k[:, :, :150], v[:, :, :150]
    place = torch.arange(200)[:, None], torch.arange(150)
    dense = by_head(0, torch.arange(2)[:, None, None], *place)
    wanted = flash_attention(*operands, dense)
    torch.testing.assert_close(flash_attention(*operands, block_mask=mask), wanted)
    by_batch = flex.create_block_mask(lambda b, h, i, j: i > j + b, 2, 2, 200, 150, device="cpu")
    with pytest.raises(ValueError, match=r"2 batches.*attn_mask"):
        flash_attention(*operands, block_mask=by_batch)


def test_calls_outside_of_compiled_code_do_not_load_the_compiler() -> None:
    script = """
import sys
import torch
from kernels.interop.torch import flash_attention, flash_attention_varlen
x = torch.randn(1, 1, 4, 8, requires_grad=True)
flash_attention(x, x, x).sum().backward()
flash_attention_varlen(x[0], x[0], x[0], [0, 1], [0, 1])
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
