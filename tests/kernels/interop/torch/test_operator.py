"""Attention as an operator of PyTorch: the formula, its gradients, and what PyTorch does to operators."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import kernels  # noqa: E402
import minitorch  # noqa: E402
from kernels.interop.torch import (  # noqa: E402
    FlashAttention2,
    flash_attention,
    flash_attention_varlen,
)
from kernels.problem.options import DEFAULTS  # noqa: E402

from ....support.attention.on_cuda import Packed, packed_cases  # noqa: E402
from ....support.attention.strategies import FEATURES, Case, cases  # noqa: E402
from ....support.busy_threads import busy_threads  # noqa: E402
from ....support.examples import at_most  # noqa: E402
from ....support.fuzzing import extreme  # noqa: E402
from ....support.tolerances import assert_close_arrays  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])]
FLOAT64 = torch.float64


def as_tensor(array: Any) -> Any:
    """Return a tensor of at least four dimensions that lies as an array does, if PyTorch can."""
    positive = array if min(array.strides, default=0) >= 0 else array.copy()
    positive = positive if positive.flags.writeable else positive.copy()
    tensor = torch.from_numpy(positive)
    return (
        tensor.reshape((1,) * (4 - tensor.ndim) + tensor.shape) if tensor.ndim in (2, 3) else tensor
    )


#: Options of extreme calls that need no function.
OF_EXTREME = ("softcap", "dropout", "bool mask", "dlse")


def torch_cases() -> Any:
    """Draw a call of operands with four dimensions, in float64."""
    features = [name for name in FEATURES if name not in ("block mask", "dropout")]
    small, leads = st.integers(1, 9), st.just([2])
    drawn = cases((np.float64,), small, st.integers(1, 5), leads, features=features)
    return drawn.map(of_four_dimensions)


def of_four_dimensions(case: Case) -> Case:
    """Return a case whose operands have four dimensions, its arrays in their layouts."""
    shapes = case.problem().q_shape, case.problem().k_shape, case.problem().v_shape
    for name, shape in zip("qkv", shapes, strict=True):
        array = getattr(case, name)
        whole = array if array.ndim == len(shape) else np.broadcast_to(array, shape)
        setattr(case, name, whole[None] if len(shape) == 3 else whole)
    case.dout = case.dout if case.dout.ndim == 4 else case.dout[None]
    if case.dlse is not None and case.dlse.ndim == 2:
        case.dlse = case.dlse[None]
    return case


def tensors_of(case: Case) -> tuple[list[Any], dict[str, Any]]:
    """Return the tensors of a case that require grad, by their place, and all other options."""
    options = dict(case.options)
    mask, sink, slopes = (options.pop(name, None) for name in ("attn_mask", "sink", "alibi_slopes"))
    given = [None if x is None else as_tensor(x) for x in (*case.operands, mask)]
    given.append(None if sink is None else torch.from_numpy(np.array(sink)))
    for x in given:
        if x is not None and x.is_floating_point():
            x.requires_grad_()
    if slopes is not None:
        options["alibi_slopes"] = torch.from_numpy(np.array(slopes))
    return given, options


def results_of(case: Case) -> dict[str, Any]:
    """Return the results and gradients of a call as arrays."""
    (q, k, v, mask, sink), options = tensors_of(case)
    out, lse = flash_attention(q, k, v, mask, sink=sink, **options, return_lse=True)
    dlse = torch.zeros_like(lse) if case.dlse is None else torch.from_numpy(np.array(case.dlse))
    torch.autograd.backward([out, lse], [as_tensor(case.dout), dlse])
    leaves = {"dq": q, "dk": k, "dv": v, "dmask": mask, "dsink": sink}
    found = {name: x.grad for name, x in leaves.items() if x is not None and x.requires_grad}
    results = {"out": out.detach(), "lse": lse.detach(), **found}
    shapes = {"dmask": getattr(case.options.get("attn_mask"), "shape", None)}
    return {n: x.numpy().reshape(shapes.get(n) or x.shape) for n, x in results.items()}


@given(torch_cases())
def test_results_and_gradients_are_the_textbooks(case: Case) -> None:
    case.check(results_of(case), "by PyTorch")


@settings(max_examples=15)
@given(
    extreme.extreme_cases(
        (np.float32, np.float64, np.float16), st.sampled_from([2, 8, 40, 600, 1100]),
        st.sampled_from([1, 3, 8, 16, 17, 64]), st.just([2]), features=OF_EXTREME,
    ).map(of_four_dimensions)
)  # fmt: skip
def test_extreme_scores_are_right(case: Case) -> None:
    extreme.check(case, results_of(case), "by PyTorch")


@at_most(25)
@given(torch_cases(), st.booleans(), st.sampled_from([torch.no_grad, torch.inference_mode]))
def test_a_call_that_records_nothing_returns_the_same_bits(
    case: Case, return_lse: bool, context: Any
) -> None:
    (q, k, v, mask, sink), options = tensors_of(case)
    call = partial(flash_attention, q, k, v, mask, sink=sink, return_lse=return_lse, **options)
    recorded = call()
    with context():
        found = call()
    pairs = zip(found, recorded, strict=True) if return_lse else [(found, recorded)]
    for own, other in pairs:
        assert torch.equal(own, other.detach()) and not own.requires_grad


@pytest.mark.filterwarnings("ignore")
def test_a_function_that_torch_jit_traces_attends_to_its_own_arguments() -> None:
    first, other = ([torch.randn(1, 2, 5, 4) for _ in range(3)] for _ in range(2))
    traced = torch.jit.trace(lambda q, k, v: flash_attention(q, k, v), first, check_trace=False)
    assert torch.equal(traced(*other), flash_attention(*other))


@given(packed_cases((np.float64,), st.integers(1, 9), st.integers(1, 5)))
def test_packed_sequences_and_their_gradients_are_the_textbooks(case: Packed) -> None:
    q, k, v, dout = (torch.tensor(x.swapaxes(0, 1)) for x in (*case.operands, case.dout))
    options = {
        n: torch.tensor(x) if isinstance(x, np.ndarray) else x for n, x in case.options.items()
    }
    sink = options["sink"].requires_grad_() if case.has_sink else None
    leaves = {"dq": q, "dk": k, "dv": v, "dsink": sink}
    sums = [torch.tensor(x) for x in case.sums]
    out, lse = flash_attention_varlen(
        *(x.requires_grad_() for x in (q, k, v)), *sums, return_lse=True, **options
    )  # fmt: skip
    dlse = np.zeros(lse.shape) if case.dlse is None else case.dlse
    torch.autograd.backward([out, lse], [dout, torch.tensor(dlse)])
    found = {"out": out.detach(), **{n: x.grad for n, x in leaves.items() if x is not None}}
    found = {n: x if n == "dsink" else x.transpose(0, 1) for n, x in found.items()}
    case.check(
        {n: x.numpy() for n, x in found.items()} | {"lse": lse.detach().numpy()}, "by PyTorch"
    )


@given(st.lists(st.integers(1, 3), max_size=2), st.integers(1, 9), st.booleans())
def test_the_function_of_courses_saves_one_lse_and_has_right_gradients(
    lead: list[int], rows: int, causal: bool
) -> None:
    q, k, v = (torch.randn(*lead, rows, 4, dtype=FLOAT64, requires_grad=True) for _ in range(3))
    out = FlashAttention2.apply(q, k, v, causal)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(out, expected)
    shapes = [x.shape for x in out.grad_fn.saved_tensors]
    assert shapes.count((*lead, rows)) == 1 and len(shapes) == 5
    assert torch.autograd.gradcheck(lambda *a: FlashAttention2.apply(*a, causal), (q, k, v))


@settings(max_examples=12)
@given(torch_cases(), st.booleans())
def test_the_custom_operator_passes_the_checks_of_pytorch(case: Case, dropout: bool) -> None:
    (q, k, v, mask, sink), options = tensors_of(case)
    assume(not options.keys() & {"mask_mod", "score_mod"})  # which are no arguments of the operator
    seed = torch.tensor(3) if dropout else None
    forward = torch.ops.minitorch.flash_attention
    given = {
        **DEFAULTS, **options, "attn_mask": mask, "sink": sink, "seed": seed, "others": 0,
        "dropout_p": 0.5 if dropout else 0.0, "cu_seqlens_q": None, "cu_seqlens_k": None,
    }  # fmt: skip
    numbers = [given[argument.name] for argument in forward.default._schema.arguments[8:]]
    args = q, k, v, mask, options.get("alibi_slopes"), sink, None, seed, *numbers
    torch.library.opcheck(forward, args)
    results = [x.detach() for x in forward(*args)]
    inner = [None if x is None else x.detach() for x in args[:7]]
    wanted = mask is not None and mask.dtype == FLOAT64, sink is not None, False
    backward = results[0], None, *inner[:3], *results, *inner[3:], seed, *numbers, *wanted
    torch.library.opcheck(
        torch.ops.minitorch.flash_attention_backward, backward,
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def some(*shape: int, dtype: Any = torch.float32, device: str = "cpu") -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_rounds_operands_as_for_sdpa(device: str) -> None:
    tensors = some(1, 2, 16, 16, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out, lse = flash_attention(*tensors, is_causal=True, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    rounded = [x.detach().bfloat16() for x in tensors]
    assert torch.equal(out, flash_attention(*rounded, is_causal=True))
    out.sum().backward()
    assert {x.grad.dtype for x in tensors} == {torch.float32}


def test_dropout_is_drawn_from_the_generator_of_pytorch() -> None:
    tensors = some(1, 2, 9, 4)
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(flash_attention(*tensors, dropout_p=0.5))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    own = flash_attention(*tensors, dropout_p=0.5, seed=7)
    arrays = [x.detach().numpy() for x in tensors]
    same = kernels.flash_attention_forward(*arrays, dropout_p=0.5, seed=7)[0]
    np.testing.assert_array_equal(own.detach().numpy(), same)


@pytest.mark.parametrize("device", ["meta", *DEVICES[1:]])
@pytest.mark.parametrize("seed", [None, 7])
def test_the_dropout_mask_does_not_depend_on_the_default_device(
    device: str, seed: int | None
) -> None:
    q, k, v = some(1, 2, 9, 4)
    compiled = torch.compile(flash_attention, backend="aot_eager")
    results = []
    for attend in (flash_attention, compiled):
        for default in ("cpu", device):
            torch.manual_seed(0)
            with torch.device(default):
                results.append(attend(q, k, v, dropout_p=0.5, seed=seed))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="needs several threads")
@pytest.mark.parametrize("library", ["operator", "backward", "kernels", "varlen"])
def test_calls_compute_on_no_more_threads_than_pytorch(library: str) -> None:
    q, k, v = (x.detach() for x in some(1, 4, 512, 32))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    calls = {
        "operator": lambda: flash_attention(q, k, v),
        "backward": lambda: flash_attention(*leaves).sum().backward(),
        "kernels": lambda: kernels.flash_attention_forward(q, k, v),
        "varlen": lambda: kernels.flash_attention_varlen_forward(*packed, [0, 512], [0, 512]),
    }
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert busy_threads(calls[library]) == 1
    finally:
        torch.set_num_threads(before)


def test_the_first_call_leaves_pytorchs_number_of_threads_as_it_is() -> None:
    script = """
import torch
from kernels.interop.torch import flash_attention
torch.set_num_threads(1)
x = torch.randn(1, 4, 512, 32)
flash_attention(x, x, x)
assert torch.get_num_threads() == 1
"""
    subprocess.run([sys.executable, "-c", script], check=True)


#: Tensors whose memory does not hold their elements.
UNREAD = {
    "a negated view": lambda x: torch._neg_view(x),
    "an imaginary part": lambda x: torch.complex(x, x).conj().imag,
    "zeros without memory": lambda x: torch._efficientzerotensor(
        *x.shape, dtype=x.dtype, device=x.device
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", UNREAD)
def test_tensors_that_pytorch_computes_when_they_are_read(
    name: str, dtype: Any, device: str
) -> None:
    q, k, v = (x.detach() for x in some(1, 2, 20, 16, dtype=dtype, device=device))
    made = UNREAD[name](q if name != "an imaginary part" else q.float()).to(dtype)
    plain = (-q if "imag" in name or "neg" in name else torch.zeros_like(q)).clone()
    with torch.no_grad():
        for _ in range(
            3
        ):  # on a GPU the later calls take the short path, which a plain call has prepared
            out, lse = flash_attention(plain, k, v, return_lse=True)
            assert torch.equal(flash_attention(made, k, v), out)
            assert torch.equal(flash_attention(q, k, made), flash_attention(q, k, plain))
            found, wanted = (
                kernels.flash_attention_backward(x, plain, k, v, out, lse) for x in (made, plain)
            )
            assert all(map(torch.equal, found, wanted))
    torch.testing.assert_close(minitorch_copy(made), plain)


def minitorch_copy(x: Any) -> Any:
    return torch.from_dlpack(minitorch.from_dlpack(x))


@pytest.mark.parametrize("fake", [False, True])
def test_tensors_without_memory_are_checked_as_others_are(fake: bool) -> None:
    def attend(*shapes: Any, dtypes: Any = (torch.float32,) * 3, **options: Any) -> Any:
        with FakeTensorMode() if fake else torch.device("meta"):
            tensors = [torch.empty(s, dtype=t) for s, t in zip(shapes, dtypes, strict=True)]
            return flash_attention(*tensors, **options)

    row, other = (1, 2, 5, 4), (1, 2, 6, 4)
    assert attend(row, other, other).shape == row
    for shapes, options, error, words in (
        ((row, (1, 2, 6, 8), other), {}, ValueError, "head_dim"),
        ((row, other, (1, 2, 7, 4)), {}, ValueError, "same length"),
        ((row, (1, 3, 6, 4), (1, 3, 6, 4)), {}, ValueError, "leading dimensions"),
        ((row, other, other), {"dropout_p": 3.0}, ValueError, "dropout_p"),
        ((row, other, other), {"dtypes": (torch.float32, FLOAT64, FLOAT64)}, TypeError, "dtype"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            attend(*shapes, **options)


def test_nested_tensors_that_are_no_packed_sequences_are_refused_in_words() -> None:
    strided = torch.nested.nested_tensor([torch.randn(2, 3, 4), torch.randn(2, 5, 4)])
    parts = [torch.randn(n, 2, 4) for n in (3, 5)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    for nested, attend in (
        (strided, flash_attention),
        (strided, kernels.flash_attention_forward),
        (jagged, kernels.flash_attention_forward),
    ):
        with pytest.raises(TypeError, match="nested tensors; pad them"):
            attend(nested, nested, nested)


def test_forward_mode_is_refused_where_it_would_give_zeros() -> None:
    q, k, v = (x.detach() for x in some(1, 2, 5, 4))

    def dual(attend: Any) -> Any:
        with torch.autograd.forward_ad.dual_level():
            return attend(q, k, torch.autograd.forward_ad.make_dual(v, v))

    refused = "no derivative in forward mode; use reverse mode"
    with pytest.raises(NotImplementedError, match=refused):
        dual(kernels.flash_attention_forward)
    # PyTorch 2.13 checks the first run of a compiled graph below autograd, and has an error of its own.
    with pytest.raises(RuntimeError, match=f"{refused}|INTERNAL ASSERT FAILED"):
        dual(torch.compile(flash_attention, backend="aot_eager"))


def test_gradients_reach_only_what_requires_them() -> None:
    q, k, v = some(1, 2, 5, 4)
    mask = torch.zeros(5, 5)
    out = flash_attention(q, k.detach(), v, mask, sink=torch.zeros(2))
    out.sum().backward()
    assert q.grad is not None and v.grad is not None and k.grad is None and mask.grad is None
    with torch.no_grad():
        assert not flash_attention(q, k, v).requires_grad


def test_what_is_refilled_before_backward_is_an_error_or_without_effect() -> None:
    q = torch.randn(1, 1, 8, 4, dtype=FLOAT64, requires_grad=True)
    mask, gradients = torch.ones(8, 8, dtype=torch.bool).tril(), []
    out = flash_attention(q, q, q, mask)
    mask.fill_(True)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()
    for refills in (False, True):
        ids = np.arange(8) // 4
        out = flash_attention(q, q, q, mask_mod=lambda b, h, i, j, ids=ids: ids[i] == ids[j])
        ids[:] *= not refills
        gradients += torch.autograd.grad(out.square().sum(), q)
    assert torch.equal(*gradients)


def test_flop_counters_of_pytorch_count_attention() -> None:
    q, k, v = some(2, 3, 5, 4)
    with FlopCounterMode(display=False) as counter:
        out = flash_attention(q, k[:, :1], v[:, :1, :, :2], enable_gqa=True)
        assert counter.get_total_flops() == 2 * (2 * 3 * 5 * 5) * (4 + 2)
        out.sum().backward()
    assert counter.get_total_flops() == 2 * (2 * 3 * 5 * 5) * (4 * 4 + 3 * 2)


def by_distance(score: Any, batch: int, head: int, row: int, col: int, bias: Any) -> Any:
    """Bend a score, and add a bias for its head and distance."""
    return 2 * math.tanh(score / 2) + bias[head, min(abs(row - col), 4)]


@pytest.mark.parametrize("call", ["eager", "compiled"])
def test_a_table_learns_as_a_bias_that_is_indexed(call: str) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (9, 11, 11)]
    leaves.append(torch.randn(2, 5, dtype=torch.float64, requires_grad=True))

    def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return flash_attention(q, k, v, score_mod=by_distance, score_table=bias, rung="naive")

    def composed(q: Any, k: Any, v: Any, bias: Any) -> Any:
        far = (torch.arange(9)[:, None] - torch.arange(11)).abs().clamp(max=4)
        return torch.softmax(2 * torch.tanh(q @ k.mT / 4) + bias[:, far], -1) @ v

    own = (
        torch.compile(attend, backend="aot_eager", fullgraph=True) if call == "compiled" else attend
    )
    found, expected = (
        torch.autograd.grad(one(*leaves).square().sum(), leaves) for one in (own, composed)
    )
    for name, x, right in zip(("dq", "dk", "dv", "dbias"), found, expected, strict=True):
        assert_close_arrays(x.numpy(), right.numpy(), np.float64, name)


def test_bad_operands_are_named() -> None:
    q, k, v = some(1, 2, 5, 4)
    mask, slopes = torch.zeros(5, 5), torch.ones(2, requires_grad=True)
    for call, error, words in (
        (lambda: flash_attention(q, k, v.detach().numpy()), TypeError, "v must be a torch.Tensor"),
        (lambda: flash_attention(q, k.to("meta"), v), ValueError, "q is on cpu and k on meta"),
        (lambda: flash_attention(q, k, v, mask.to("meta")), ValueError, "attn_mask on meta"),
        (lambda: flash_attention(q, k.double(), v), TypeError, "float64"),
        (lambda: flash_attention(q, k, v, dropout_p=1.5), ValueError, "dropout_p"),
        (lambda: flash_attention(q, k, v, alibi_slopes=slopes), ValueError, "slopes.*pass its detach"),
        (lambda: flash_attention(q, k[:, :1], v[:, :1].expand(1, 3, 5, 4)), ValueError, "heads|lead"),
        (lambda: flash_attention(*(x.to(torch.complex64) for x in (q, k, v))), TypeError, "complex64"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            call()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_gpu_computes_what_sdpa_does(dtype: str) -> None:
    kind = getattr(torch, dtype)
    tensors = some(2, 4, 130, 64, dtype=kind, device="cuda")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    expected = sdpa(*(x.double() for x in tensors), is_causal=True)
    wanted = torch.autograd.grad(expected.sum(), tensors)
    bound = 1e-5 if dtype == "float32" else 3e-2
    for _ in range(3):  # the first call runs in full, later ones repeat its launches
        out = flash_attention(*tensors, is_causal=True)
        found = torch.autograd.grad(out.sum(), tensors)
        for one, other in zip((out, *found), (expected, *wanted), strict=True):
            torch.testing.assert_close(one.double(), other.double(), atol=bound, rtol=bound)


@pytest.mark.cuda
def test_calls_take_their_place_on_the_current_stream() -> None:
    q, k, v = (x.detach() for x in some(1, 8, 4096, 64, dtype=torch.float16, device="cuda"))
    expected = [flash_attention(q, k, v), flash_attention(q + 1, k, v)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        with torch.cuda.stream(stream):
            moving = q.clone()
            torch.cuda._sleep(2_000_000)
            moving += 1
            out = flash_attention(moving, k, v)
            del moving
            other = torch.zeros_like(q)  # may have the memory of what was deleted
            total = out + other
        stream.synchronize()
        assert torch.equal(total, expected[1])
