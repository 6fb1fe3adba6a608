"""Tensor.flash_attention against the composed baseline, and what both refuse."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import kernels
import minitorch
from minitorch import FastBackend, SimpleBackend, Tensor, naive_attention

from .attention_strategies import Case, cases
from .tolerances import assert_close_arrays

BACKENDS = {"simple": SimpleBackend, "fast": FastBackend}


def attend(attention: Any, case: Case, backend: Any) -> dict[str, Any]:
    """Run one attention on tensors, forward and backward."""
    tensors = [minitorch.from_numpy(x, backend, requires_grad=True) for x in case.operands]
    out = attention(*tensors, **case.options)
    out.backward(minitorch.from_numpy(case.dout, backend))
    gradients = [t.grad.to_numpy() for t in tensors if t.grad is not None]
    return {"out": out.to_numpy(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("attention", [Tensor.flash_attention, naive_attention])
@given(case=cases())
@settings(max_examples=20)
def test_flash_and_naive_are_the_textbook(attention: Any, backend: str, case: Case) -> None:
    if backend == "simple":  # plain Python loops: keep the products small
        case.q, case.k, case.v = case.q[..., :6, :], case.k[..., :7, :], case.v[..., :7, :]
        case.dout = case.dout[..., :6, :]
    actual, expected = attend(attention, case, BACKENDS[backend]), case.oracle()
    for name, got in actual.items():
        size = max(1.0, float(np.abs(expected[name]).max()))
        what = f"{name} of {attention.__name__}"
        assert_close_arrays(got, expected[name], case.q.dtype, what=what, size=size)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("attention", [Tensor.flash_attention, naive_attention])
def test_gradients_are_finite_differences(attention: Any, backend: str) -> None:
    q = minitorch.rand((2, 2, 5, 3), BACKENDS[backend])
    k = minitorch.rand((2, 1, 4, 3), BACKENDS[backend])
    v = minitorch.rand((2, 2, 4, 2), BACKENDS[backend])
    minitorch.grad_check(
        lambda q, k, v: attention(q, k, v, is_causal=True) * 2.0, q, k, v, tol=1e-5
    )


def test_no_history_without_a_gradient() -> None:
    q = minitorch.rand((1, 3, 2))
    assert q.flash_attention(q, q).history is None


def test_one_tensor_as_query_key_and_value_gets_the_sum_of_gradients() -> None:
    x = minitorch.rand((2, 4, 3), FastBackend)
    minitorch.grad_check(lambda x: x.flash_attention(x, x, is_causal=True), x, tol=1e-5)


def test_signatures_show_the_options_in_pytorch_order() -> None:
    names = list(inspect.signature(Tensor.flash_attention).parameters)
    assert names[:8] == [
        "self", "k", "v", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    ]  # fmt: skip
    options = names[3:]
    assert list(inspect.signature(naive_attention).parameters)[3:] == options
    assert list(inspect.signature(kernels.flash_attention_forward).parameters)[3:-1] == options
    assert list(inspect.signature(kernels.make_problem).parameters)[3:] == options


def ones(*shape: int, dtype: Any = np.float32, backend: Any = FastBackend) -> Tensor:
    return minitorch.from_numpy(np.ones(shape, dtype), backend)


WRONG = {
    "rank": (lambda a: a(ones(4), ones(4), ones(4)), ValueError, "two dimensions"),
    "head_dim": (lambda a: a(ones(2, 3), ones(2, 4), ones(2, 4)), ValueError, "3 and 4"),
    "seq_k": (lambda a: a(ones(2, 3), ones(4, 3), ones(5, 3)), ValueError, "4 and 5"),
    "batch": (
        lambda a: a(ones(2, 1, 3, 4), ones(3, 1, 3, 4), ones(3, 1, 3, 4)), ValueError, "broadcast",
    ),
    "empty": (lambda a: a(ones(2, 3), ones(0, 3), ones(0, 3)), ValueError, "at least one row"),
    "wide": (lambda a: a(ones(2, 257), ones(2, 257), ones(2, 257)), ValueError, "from 1 to 256"),
    "dtype": (
        lambda a: a(ones(2, 3), ones(2, 3, dtype=np.float64), ones(2, 3)), TypeError, "float64",
    ),
    "integer": (
        lambda a: a(*(ones(2, 3, dtype=np.int64) for _ in range(3))), TypeError, "int64",
    ),
    "backend": (
        lambda a: a(ones(2, 3), ones(2, 3, backend=SimpleBackend), ones(2, 3)), TypeError, "SimpleOps",
    ),
    "array": (lambda a: a(ones(2, 3), np.ones((2, 3), np.float32), ones(2, 3)), TypeError, "ndarray"),
    "mask shape": (
        lambda a: a(ones(2, 3), ones(4, 3), ones(4, 3), np.ones((3, 4), bool)), ValueError, "(3, 4)",
    ),
    "mask dtype": (
        lambda a: a(ones(2, 3), ones(4, 3), ones(4, 3), np.ones((2, 4), int)), TypeError, "int64",
    ),
    "mask type": (lambda a: a(ones(2, 3), ones(2, 3), ones(2, 3), "causal"), TypeError, "str"),
    "p = 1": (lambda a: a(ones(2, 3), ones(2, 3), ones(2, 3), dropout_p=1.0), ValueError, "[0, 1)"),
    "p < 0": (lambda a: a(ones(2, 3), ones(2, 3), ones(2, 3), None, -0.1), ValueError, "-0.1"),
    "scale 0": (lambda a: a(ones(2, 3), ones(2, 3), ones(2, 3), scale=0), ValueError, "not zero"),
    "scale nan": (
        lambda a: a(ones(2, 3), ones(2, 3), ones(2, 3), scale=float("nan")), ValueError, "finite",
    ),
    "scale str": (lambda a: a(ones(2, 3), ones(2, 3), ones(2, 3), scale="1"), TypeError, "str"),
    "causal": (lambda a: a(ones(2, 3), ones(2, 3), ones(2, 3), is_causal=3), TypeError, "True or"),
    "rung": (lambda a: a(ones(2, 3), ones(2, 3), ones(2, 3), rung=7), TypeError, "rung"),
    "flag": (
        lambda a: a(ones(2, 3), ones(2, 3), ones(2, 3), deterministic="no"), TypeError,
        "deterministic must be True or False, got 'no' (str)",
    ),
    "half an offset": (
        lambda a: a(ones(2, 3), ones(2, 3), ones(2, 3), causal_offset=0.5), TypeError, "0.5 (float)",
    ),
    "window": (
        lambda a: a(ones(2, 3), ones(2, 3), ones(2, 3), window_size=3), TypeError, "(left, right)",
    ),
    "cap": (lambda a: a(ones(2, 3), ones(2, 3), ones(2, 3), softcap="5"), TypeError, "'5' (str)"),
    "seed": (lambda a: a(ones(2, 3), ones(2, 3), ones(2, 3), seed="x"), TypeError, "or None"),
    "p str": (lambda a: a(ones(2, 3), ones(2, 3), ones(2, 3), dropout_p="0"), TypeError, "a number"),
    "close option": (
        lambda a: a(ones(2, 3), ones(2, 3), ones(2, 3), causal=True), TypeError,
        "attention has no option 'causal' (did you mean is_causal?); its options are attn_mask, ",
    ),
    "too many": (
        lambda a: a(*(ones(2, 3) for _ in range(3)), None, 0.0, False, None, False, 1), TypeError,
        "scale, enable_gqa), got ",
    ),
    "twice": (
        lambda a: a(ones(2, 3), ones(2, 3), ones(2, 3), None, attn_mask=None), TypeError,
        "attn_mask twice",
    ),
    "grouped heads": (
        lambda a: a(ones(1, 4, 3, 2), ones(1, 3, 3, 2), ones(1, 3, 3, 2), enable_gqa=True),
        ValueError, "q a multiple of it; got 4, 3 and 3 heads",
    ),
    "no heads": (
        lambda a: a(ones(3, 2), ones(3, 2), ones(3, 2), enable_gqa=True), ValueError, "needs heads",
    ),
    "offset": (
        lambda a: a(ones(2, 3), ones(2, 3), ones(2, 3), causal_offset=1), ValueError, "is_causal",
    ),
    "option": (lambda a: a(ones(2, 3), ones(2, 3), ones(2, 3), causal=True), TypeError, "causal"),
}  # fmt: skip


@pytest.mark.parametrize("attention", [Tensor.flash_attention, naive_attention])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_says_what_is_wrong(name: str, attention: Any) -> None:
    call, error, text = WRONG[name]
    with pytest.raises(error) as caught:
        call(attention)
    assert text in str(caught.value)


def test_an_unknown_rung_names_those_that_run() -> None:
    x = ones(2, 3)
    with pytest.raises(ValueError, match=r"'flash9'.*flash2"):
        x.flash_attention(x, x, rung="flash9")


LATER = [
    {"attn_mask": np.ones((2, 2), bool)}, {"dropout_p": 0.1}, {"window_size": (1, 1)},
    {"softcap": 5.0}, {"alibi_slopes": np.ones(1)}, {"block_mask": object()},
    {"mask_mod": lambda *_: True}, {"score_mod": lambda s, *_: s}, {"seed": 1},
    {"precision": "tf32"}, {"return_lse": True},
]  # fmt: skip


@pytest.mark.parametrize("attention", [Tensor.flash_attention, naive_attention])
@pytest.mark.parametrize("option", LATER, ids=lambda option: next(iter(option)))
def test_an_option_that_is_missing_says_so(attention: Any, option: dict[str, Any]) -> None:
    x = ones(2, 2)
    with pytest.raises(NotImplementedError, match=next(iter(option))):
        attention(x, x, x, **option)


def test_backward_checks_what_it_is_given() -> None:
    x = np.ones((2, 3), np.float32)
    out, lse = kernels.flash_attention_forward(x, x, x)
    with pytest.raises(ValueError, match="dout must have the shape"):
        kernels.flash_attention_backward(out[:1], x, x, x, out, lse)
    with pytest.raises(TypeError, match="float64"):
        kernels.flash_attention_backward(out.astype(np.float64), x, x, x, out, lse)
    for wrong in (None, [1.0]):
        with pytest.raises(TypeError, match="dout must be an array or a tensor, got"):
            kernels.flash_attention_backward(wrong, x, x, x, out, lse)
        with pytest.raises(TypeError, match="lse must be an array or a tensor, got"):
            kernels.flash_attention_backward(out, x, x, x, out, wrong)


@pytest.mark.parametrize("rung", ["flash2", "naive"])
def test_a_tile_is_two_ints_within_limits(rung: str) -> None:
    x = np.ones((2, 3), np.float32)
    for tile in ((0, 4), (10**6, 10**6), (4, -1)):
        with pytest.raises(ValueError, match=r"each from 1 to 4096, got \("):
            kernels.flash_attention_forward(x, x, x, tile=tile, rung=rung)
    for tile in (3, "ab", (4,), (4, 4, 4), (4.0, 4)):
        with pytest.raises(TypeError, match=r"\(block_q, block_k\), two whole numbers"):
            kernels.flash_attention_forward(x, x, x, tile=tile, rung=rung)
    for tile in ([4, 4], (np.int64(4), 4), (4096, 4096)):
        out, _ = kernels.flash_attention_forward(x, x, x, tile=tile, rung=rung)
        np.testing.assert_allclose(out, x, rtol=1e-6)


@pytest.mark.parametrize("rung", ["flash2", "naive"])
def test_a_matrix_is_taken_as_an_array(rung: str) -> None:
    arrays = [np.random.default_rng(i).standard_normal((4, 3)) for i in range(4)]
    matrices = [x.view(np.matrix) for x in arrays]
    results = []
    for dout, *operands in (arrays, matrices):
        forward = kernels.flash_attention_forward(*operands, rung=rung)
        results.append((*forward, *kernels.flash_attention_backward(dout, *operands, *forward)))
    for expected, got in zip(*results, strict=True):
        assert type(got) is np.ndarray
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    "function",
    [
        Tensor.flash_attention,
        naive_attention,
        kernels.flash_attention_forward,
        kernels.flash_attention_backward,
    ],
)
def test_help_describes_what_the_signature_shows(function: Any) -> None:
    described = inspect.getdoc(function) or ""
    section = described.split("Args:\n")[1].split("\n\n")[0]
    entries = [line.split(":")[0].strip() for line in section.split("\n") if line[4] != " "]
    shown = [name for name in inspect.signature(function).parameters if name != "self"]
    assert entries == shown


@given(case=cases())
@settings(max_examples=10)
def test_gradients_in_any_order_are_the_deterministic_ones_to_rounding(case: Case) -> None:
    one = attend(Tensor.flash_attention, case, FastBackend)
    case.options["deterministic"] = False
    for name, got in attend(Tensor.flash_attention, case, FastBackend).items():
        size = max(1.0, float(np.abs(one[name]).max()))
        assert_close_arrays(got, one[name], case.q.dtype, what=name, size=size)
