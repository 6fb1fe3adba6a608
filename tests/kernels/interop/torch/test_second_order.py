"""Second derivatives and forward mode of attention in PyTorch, beside those of composed operations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install torch")

from kernels.interop.torch import flash_attention, flash_attention_varlen  # noqa: E402

from ....support.attention.strategies import bowl, slope_of_bowl  # noqa: E402
from ....support.examples import at_most  # noqa: E402

FLOAT64 = torch.float64
ALL = 0, 1, 2
OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True, "softcap": 2.0},
    {"window_size": (2, 0), "scale": 0.7},
    {"score_mod": (bowl, slope_of_bowl)},
    {"dropout_p": 0.5, "seed": 3},
]


def composed(q: Any, k: Any, v: Any, softcap: float = 0.0) -> Any:
    """Return causal attention of PyTorch's own operations."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~seen, -float("inf")).softmax(-1) @ v


def some(seed: int, rows: int, cols: int) -> list[Any]:
    rng = torch.Generator().manual_seed(seed)
    sizes = (2, rows, 3), (2, cols, 3), (2, cols, 2)
    return [torch.randn(1, *size, generator=rng, dtype=FLOAT64) for size in sizes]


@at_most(12)
@given(st.integers(0, 99), st.integers(1, 6), st.integers(1, 6), st.sampled_from(OPTIONS))
def test_pytorch_finds_both_orders_right(seed: int, rows: int, cols: int, options: Any) -> None:
    tensors = [x.requires_grad_() for x in some(seed, rows, cols)]

    def attend(*given: Any) -> Any:
        return flash_attention(*given, return_lse=True, **options)

    empty = not torch.isfinite(attend(*tensors)[1]).all()  # lse of a row that sees no key
    shown = (lambda *given: attend(*given)[0]) if empty else attend
    assert torch.autograd.gradcheck(shown, tensors, check_forward_ad=True, check_backward_ad=False)
    assert torch.autograd.gradgradcheck(shown, tensors)


def test_packed_sequences_have_second_derivatives() -> None:
    tensors = [x[0].transpose(0, 1).clone().requires_grad_() for x in some(0, 7, 7)]
    starts = torch.tensor([0, 3, 3, 7])

    def attend(*given: Any) -> Any:
        return flash_attention_varlen(*given, starts, starts, is_causal=True, return_lse=True)

    assert torch.autograd.gradgradcheck(attend, tensors)


def products(loss: Any, given: tuple[Any, ...], along: tuple[Any, ...]) -> dict[str, Any]:
    """Return the Hessian-vector product by each pair of modes, a Hessian, and a mapped product."""
    grad, jvp, vmap = torch.func.grad, torch.func.jvp, torch.func.vmap

    def slope(*x: Any) -> Any:
        return sum((g * t).sum() for g, t in zip(grad(loss, ALL)(*x), along, strict=True))

    q, *others = given
    return {
        "forward over reverse": jvp(grad(loss, ALL), given, along)[1],
        "reverse over forward": grad(lambda *x: jvp(loss, x, along)[1], ALL)(*given),
        "reverse over reverse": grad(slope, ALL)(*given),
        "Hessian": torch.func.hessian(lambda q: loss(q, *others))(q),
        "mapped": vmap(lambda t: jvp(lambda q: loss(q, *others), (q,), (t,))[1])(
            torch.stack([q, -q])
        ),
    }


@at_most(6)
@given(st.integers(0, 99), st.integers(1, 6), st.sampled_from([0.0, 2.0]))
def test_torch_func_composes_both_modes(seed: int, rows: int, softcap: float) -> None:
    given, along = tuple(some(seed, rows, rows)), tuple(some(seed + 100, rows, rows))

    def ours(*x: Any) -> Any:
        return flash_attention(*x, is_causal=True, softcap=softcap).sin().sum()

    def theirs(*x: Any) -> Any:
        return composed(*x, softcap=softcap).sin().sum()

    expected = products(theirs, given, along)
    for name, found in products(ours, given, along).items():
        torch.testing.assert_close(
            found, expected[name], msg=lambda text, name=name: f"{name}: {text}"
        )


def test_derivatives_that_do_not_exist_are_refused_in_words() -> None:
    q, k, v = (x.requires_grad_() for x in some(0, 4, 4))
    mask = torch.zeros(4, 4, dtype=FLOAT64, requires_grad=True)

    def slope(learnt: Any, **options: Any) -> Any:
        loss = flash_attention(q, k, v, **options).sin().sum()
        return torch.autograd.grad(loss, learnt, create_graph=True)[0].sum()

    with pytest.raises(NotImplementedError, match="not of attn_mask; pass its detach"):
        slope(mask, attn_mask=mask).backward()
    with pytest.raises(NotImplementedError, match="not of attn_mask; pass its detach"):
        slope(q, attn_mask=mask).backward()
    (second,) = torch.autograd.grad(slope(q), k, create_graph=True)
    with pytest.raises(NotImplementedError, match="first and second derivatives"):
        second.sum().backward()
