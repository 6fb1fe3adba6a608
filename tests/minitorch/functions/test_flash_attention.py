"""Tensor.flash_attention against the composed baseline, and what both refuse."""

from __future__ import annotations

import inspect
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
import minitorch
from kernels.common.philox import keep_scale
from minitorch import CudaBackend, FastBackend, SimpleBackend, Tensor, naive_attention

from ...support.attention.strategies import FEATURES, SCORE_MODS, Case, cases, neighbours
from ...support.tolerances import assert_close_arrays

BACKENDS = {"simple": SimpleBackend, "fast": FastBackend}


def attend(attention: Any, case: Case, backend: Any, **more: Any) -> dict[str, Any]:
    """Run one attention on tensors, forward and backward; floating masks and sinks have gradients too."""
    tensors = [minitorch.from_numpy(x, backend, requires_grad=True) for x in case.operands]
    options = {**case.options, **more}
    names = ["dq", "dk", "dv"]
    if case.has_mask_gradient:
        options["attn_mask"] = minitorch.from_numpy(options["attn_mask"], backend, True)
        tensors.append(options["attn_mask"])
        names.append("dmask")
    if case.has_sink:
        sink = minitorch.from_numpy(options["sink"], backend, True)
        options["sink"] = sink
        tensors.append(sink)
        names.append("dsink")
    out, lse = attention(*tensors[:3], return_lse=True, **options)
    out.backward(minitorch.from_numpy(case.dout, backend))
    if case.dlse is not None:
        lse.backward(minitorch.from_numpy(case.dlse, backend))
    gradients = [t.grad.to_numpy() for t in tensors if t.grad is not None]
    results = {"out": out.to_numpy(), "lse": lse.to_numpy()}
    return {**results, **dict(zip(names, gradients, strict=True))}


ON = [
    pytest.param(attention, backend, id=f"{attention.__name__} {name}")
    for attention in (Tensor.flash_attention, naive_attention)
    for name, backend in BACKENDS.items()
]
SMALL = {"lengths": st.integers(1, 7), "dims": st.integers(1, 4)}


@pytest.mark.fuzz
@pytest.mark.parametrize(("attention", "backend"), ON)
@given(case=cases(features=FEATURES, leads=st.lists(st.integers(1, 2), max_size=2), **SMALL))
def test_every_option_is_the_textbook(attention: Any, backend: Any, case: Case) -> None:
    case.check(attend(attention, case, backend), f"by {attention.__name__}")


@given(case=cases())
@settings(max_examples=20)
def test_long_rows_are_the_textbook(case: Case) -> None:
    for attention in (Tensor.flash_attention, naive_attention):
        case.check(attend(attention, case, FastBackend), f"by {attention.__name__}")


#: Options that together touch every step of a score, and bits that drop some probabilities.
EVERYTHING: dict[str, Any] = {
    "is_causal": True, "causal_offset": 1, "window_size": (3, -1), "softcap": 2.0, "scale": 0.8,
    "alibi_slopes": [0.1, 0.3], "enable_gqa": True, "dropout_p": 0.3, "seed": 7,
    "mask_mod": neighbours, "score_mod": SCORE_MODS[0],
}  # fmt: skip


@pytest.mark.simulator
@pytest.mark.parametrize("attention", [Tensor.flash_attention, naive_attention])
@pytest.mark.parametrize("kind", [bool, np.float64])
def test_a_device_does_what_the_host_does(attention: Any, kind: Any) -> None:
    rng = np.random.default_rng(0)
    shapes = (2, 2, 5, 3), (2, 1, 4, 3), (1, 1, 4, 2), (2, 2, 5, 2)
    q, k, v, dout = (rng.standard_normal(shape) for shape in shapes)
    slopes = minitorch.tensor(EVERYTHING["alibi_slopes"], FastBackend)
    mask = rng.standard_normal((2, 1, 4))
    options = {
        **EVERYTHING,
        "alibi_slopes": slopes,
        "attn_mask": mask > -0.5 if kind is bool else mask,
    }
    case = Case(q, k, v, dout, options, (4, 4), rng.standard_normal((2, 2, 5)))
    expected = attend(naive_attention, case, FastBackend)
    for name, got in attend(attention, case, CudaBackend).items():
        assert_close_arrays(
            got, expected[name], np.float64, f"{name} by {attention.__name__}", 10.0
        )


def test_no_history_without_a_gradient() -> None:
    q = minitorch.rand((1, 3, 2))
    assert q.flash_attention(q, q).history is None
    assert [t.history for t in q.flash_attention(q, q, return_lse=True)] == [None, None]


@pytest.mark.parametrize(("attention", "backend"), ON)
def test_each_of_two_results_may_be_used_alone(attention: Any, backend: Any) -> None:
    q, k = (minitorch.rand(shape, backend) for shape in ((2, 3, 2), (2, 4, 2)))
    minitorch.grad_check(lambda q, k: attention(q, k, k, return_lse=True)[0], q, k, tol=1e-5)
    minitorch.grad_check(lambda q, k: attention(q, k, k, return_lse=True)[1], q, k, tol=1e-5)


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


def boolean(shape: tuple[int, ...], backend: Any = None) -> Any:
    array = np.random.default_rng(3).random(shape) > 0.3
    return array if backend is None else minitorch.from_numpy(array, backend)


@pytest.mark.parametrize(("attention", "backend"), ON)
def test_a_boolean_mask_may_be_an_array_or_a_tensor_of_any_host_backend(
    attention: Any, backend: Any
) -> None:
    q = minitorch.rand((2, 3, 4, 2), backend)
    expected = attention(q, q, q, boolean((3, 4, 4))).to_numpy()
    for kind in BACKENDS.values():
        given = attention(q, q, q, boolean((3, 4, 4), kind)).to_numpy()
        np.testing.assert_array_equal(given, expected)


@pytest.mark.parametrize("layout", ["plain", "broadcast"])
@pytest.mark.parametrize(("attention", "backend"), ON)
def test_arrays_refilled_before_backward_do_not_change_the_gradient(
    attention: Any, backend: Any, layout: str
) -> None:
    gradients = []
    for refills in (False, True):
        rng = np.random.default_rng(0)
        x = minitorch.from_numpy(rng.standard_normal((2, 2, 7, 4)), backend, requires_grad=True)
        mask = rng.random((2, 1, 7, 7)) < 0.6
        slopes, sink, ids = np.array([0.1, 0.3]), np.array([0.5, -0.5]), np.arange(7) // 4
        seen = mask if layout == "plain" else np.broadcast_to(mask, (2, 2, 7, 7))
        options = {"attn_mask": seen, "alibi_slopes": slopes, "sink": sink}
        out = attention(x, x, x, mask_mod=lambda b, h, i, j, ids=ids: ids[j] <= ids[i], **options)
        if refills:
            mask[...], slopes[:], sink[:], ids[:] = ~mask, 0.0, 3.0, 0
        out.sum().backward()
        gradients.append(x.grad.to_numpy())  # type: ignore[union-attr]
    np.testing.assert_array_equal(*gradients)


@pytest.mark.parametrize(("attention", "backend"), ON)
def test_slopes_may_be_a_list_an_array_or_a_tensor(attention: Any, backend: Any) -> None:
    q = minitorch.rand((2, 3, 4, 2), backend)
    slopes = [0.5, 0.25, 0.125]
    kinds = [slopes, np.array(slopes), *(minitorch.tensor(slopes, b) for b in BACKENDS.values())]
    first, *others = [attention(q, q, q, alibi_slopes=kind).to_numpy() for kind in kinds]
    for other in others:
        np.testing.assert_array_equal(other, first)


#: A score_mod without its derivative.
HALF: Any = {"score_mod": lambda s, b, h, r, c: s / 2}


def test_a_score_mod_alone_is_enough_without_a_gradient() -> None:
    x = minitorch.rand((2, 2), FastBackend)
    np.testing.assert_allclose(
        x.flash_attention(x, x, **HALF).to_numpy(), naive_attention(x, x, x, **HALF).to_numpy()
    )


@pytest.mark.parametrize(("attention", "backend"), ON)
def test_dropout_is_decided_by_the_seed(attention: Any, backend: Any) -> None:
    x = minitorch.rand((2, 4, 4), backend)

    def out(**options: Any) -> Any:
        return attention(x, x, x, dropout_p=0.5, **options).to_numpy()

    np.testing.assert_array_equal(out(seed=3), out(seed=3))
    assert (out(seed=3) != out(seed=4)).any()
    minitorch.manual_seed(1)
    first, second = out(), out()
    minitorch.manual_seed(1)
    np.testing.assert_array_equal(out(), first)
    np.testing.assert_array_equal(out(), second)
    assert (first != second).any()
    before = random.getstate()
    out(seed=3)
    attention(x, x, x, dropout_p=0.0)
    assert random.getstate() == before


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_shows_its_mask(p: float) -> None:
    # With keys of zeros every probability is 1 / seq_k, and values that are unit vectors show each.
    q, v = np.zeros((2, 3, 5, 4)), np.broadcast_to(np.eye(8), (2, 3, 8, 8))
    tensors = [minitorch.from_numpy(x) for x in (q, np.zeros((2, 3, 8, 4)), v)]
    out = tensors[0].flash_attention(*tensors[1:], dropout_p=p, seed=11).to_numpy()
    expected = kernels.dropout_mask((2, 3, 5, 8), p, 11) * keep_scale(p) / 8
    assert_close_arrays(out, expected, np.float64)


@pytest.mark.parametrize("options", [{}, {"softcap": 0.5}, {"dropout_p": 0.3, "seed": 2}], ids=str)
@pytest.mark.parametrize("backend", [minitorch.SimpleBackend, minitorch.FastBackend])
def test_a_diagonal_may_lie_as_far_off_as_a_number_says(backend: Any, options: Any) -> None:
    q = minitorch.rand((1, 2, 3, 4), backend)
    found = q.flash_attention(q, q, is_causal=True, causal_offset=10**400, **options)
    assert (found.to_numpy() == q.flash_attention(q, q, **options).to_numpy()).all()
    nothing = q.flash_attention(q, q, is_causal=True, causal_offset=-(10**400), **options)
    assert not nothing.to_numpy().any()


def test_a_second_derivative_is_refused() -> None:
    x = minitorch.rand((2, 3), FastBackend, requires_grad=True)
    x.flash_attention(x, x).sum().backward()
    assert x.grad is not None
    for gradient in (x.grad, (x.grad * x.grad).sum()):
        with pytest.raises(RuntimeError, match="first order"):
            gradient.backward()
    # Nor does one come about by the way: a gradient to start from that has a history loses it.
    y = minitorch.rand((2, 3), FastBackend, requires_grad=True)
    x.tanh().backward(y * 2.0)
    assert x.grad.history is None and y.grad is None


def test_a_gradient_of_another_dtype_is_converted() -> None:
    x = minitorch.rand((2, 3), FastBackend, requires_grad=True, dtype=np.float32)
    weights = minitorch.rand((2, 3), FastBackend, dtype=np.float64)
    (x.flash_attention(x, x) * weights).sum().backward()
    assert x.grad is not None and x.grad.dtype == np.float32


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
        Tensor.flash_attention_varlen,
        naive_attention,
        kernels.flash_attention_forward,
        kernels.flash_attention_backward,
        kernels.flash_attention_varlen_forward,
        kernels.flash_attention_varlen_backward,
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
