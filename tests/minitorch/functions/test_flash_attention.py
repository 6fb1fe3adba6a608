"""Tensor.flash_attention against the composed baseline, and what both refuse."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minitorch
from minitorch import CudaBackend, FastBackend, SimpleBackend, Tensor, naive_attention
from minitorch.attention.naive import taped_derivative

from ...support.attention.on_cuda import by_tensors
from ...support.attention.strategies import FEATURES, SCORE_MODS, Case, cases, neighbours
from ...support.tolerances import assert_close_arrays

BACKENDS = {"simple": SimpleBackend, "fast": FastBackend}


def attend(attention: Any, case: Case, backend: Any) -> dict[str, Any]:
    """Run one attention on tensors, forward and backward; floating masks and sinks have gradients too."""
    results = by_tensors(case, None, attention, partial(minitorch.from_numpy, backend=backend))
    return {name: x.to_numpy() for name, x in results.items()}


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


def curved(score: Any, batch: int, head: int, row: int, col: int) -> Any:
    return score * score * (head + 1.0) + 0.1 * (row - col)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_a_score_mod_has_the_same_gradient_by_the_tape_as_by_its_source(backend: Any) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 5, 3)) for _ in range(3)]

    def gradients(score_mod: Any) -> list[Any]:
        tensors: list[Any] = [minitorch.from_numpy(x, backend, True) for x in arrays]
        naive_attention(*tensors, score_mod=score_mod).sum().backward()
        return [t.grad.to_numpy() for t in tensors]

    own = gradients((curved, taped_derivative(curved)))
    for name, got, expected in zip("qkv", own, gradients(curved), strict=True):
        assert_close_arrays(got, expected, np.float64, f"d{name}")


#: Options that together touch every step of a score, and bits that drop some probabilities.
EVERYTHING: dict[str, Any] = {
    "is_causal": True, "causal_offset": 1, "window_size": (3, -1), "softcap": 2.0, "scale": 0.8,
    "alibi_slopes": [0.1, 0.3], "enable_gqa": True, "dropout_p": 0.3, "seed": 7,
    "mask_mod": neighbours, "score_mod": SCORE_MODS[0],
}  # fmt: skip


@pytest.mark.emulated
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


@pytest.mark.parametrize(("attention", "backend"), ON)
def test_arrays_of_options_may_be_tensors_of_any_host_backend(attention: Any, backend: Any) -> None:
    q, mask = (
        minitorch.rand((2, 3, 4, 2), backend),
        np.random.default_rng(3).random((3, 4, 4)) > 0.3,
    )
    slopes = [0.5, 0.25, 0.125]
    wanted = attention(q, q, q, mask, alibi_slopes=slopes).to_numpy()
    for kind in BACKENDS.values():
        given = minitorch.from_numpy(mask, kind), minitorch.tensor(slopes, kind)
        found = attention(q, q, q, given[0], alibi_slopes=given[1]).to_numpy()
        np.testing.assert_array_equal(found, wanted)


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


@pytest.mark.parametrize("options", [{}, {"softcap": 0.5}, {"dropout_p": 0.3, "seed": 2}], ids=str)
@pytest.mark.parametrize("backend", [minitorch.SimpleBackend, minitorch.FastBackend])
def test_a_diagonal_may_lie_as_far_off_as_a_number_says(backend: Any, options: Any) -> None:
    q = minitorch.rand((1, 2, 3, 4), backend)
    found = q.flash_attention(q, q, is_causal=True, causal_offset=10**400, **options)
    assert (found.to_numpy() == q.flash_attention(q, q, **options).to_numpy()).all()
    nothing = q.flash_attention(q, q, is_causal=True, causal_offset=-(10**400), **options)
    assert not nothing.to_numpy().any()


def test_a_gradient_is_a_constant_unless_it_is_recorded() -> None:
    x = minitorch.rand((2, 3), FastBackend, requires_grad=True)
    x.flash_attention(x, x).sum().backward()
    assert x.grad is not None
    for gradient in (x.grad, (x.grad * x.grad).sum()):
        with pytest.raises(RuntimeError, match="create_graph=True"):
            gradient.backward()
    # Nor does one come about by the way: a gradient to start from that has a history loses it.
    y = minitorch.rand((2, 3), FastBackend, requires_grad=True)
    x.tanh().backward(y * 2.0)
    assert x.grad.history is None and y.grad is None
