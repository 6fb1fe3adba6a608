"""Attention as an implementation of SDPA's flash backend."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install torch")

from kernels.interop.torch import register_with_sdpa, sdpa  # noqa: E402

attention: Any = torch.nn.attention
needs_registry = pytest.mark.skipif(
    not hasattr(attention, "register_flash_attention_impl"), reason="PyTorch is older than 2.11"
)


@needs_registry
def test_it_can_be_activated_and_restored() -> None:
    register_with_sdpa()
    assert "minitorch" in attention.list_flash_attention_impls()
    try:
        attention.activate_flash_attention_impl("minitorch")
        assert attention.current_flash_attention_impl() == "minitorch"
    finally:
        attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None
    attention.activate_flash_attention_impl("minitorch")  # a second time
    attention.restore_flash_attention_impl()


@pytest.mark.parametrize("heads", [4, 2])
def test_its_functions_do_what_the_operators_they_replace_do(heads: int) -> None:
    q, k, v = (torch.randn(2, n, 9, 8, requires_grad=True) for n in (4, heads, heads))
    options = {"is_causal": True, "scale": 0.3}
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, **options, enable_gqa=heads != 4
    )
    dout = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    plain: Any = q, k, v  # as PyTorch passes them: they require grad
    out, lse, *lengths, seed, offset, _ = sdpa.forward(*plain, 0.0, True, scale=0.3)
    found = sdpa.backward(dout, *plain, out, lse, *lengths, 0.0, True, seed, offset, scale=0.3)
    assert lengths == [None, None, 9, 9]
    for one, other in zip((out, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(one, other)


def test_dropout_is_refused() -> None:
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(RuntimeError, match=r"dropout_p=0\.1.*restore_flash"):
        sdpa.forward(x, x, x, 0.1)


@needs_registry
@pytest.mark.cuda
def test_an_unchanged_call_of_sdpa_runs_on_it() -> None:
    register_with_sdpa()
    q, k, v = (
        torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )

    def attend() -> list[Any]:
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return [out, *torch.autograd.grad(out.float().sum(), (q, k, v))]

    expected = attend()
    calls: list[Any] = []
    forward, sdpa.forward = sdpa.forward, lambda *a, **o: calls.append(a) or forward(*a, **o)
    try:
        attention.activate_flash_attention_impl("minitorch")
        actual = attend()
    finally:
        attention.restore_flash_attention_impl()
        sdpa.forward = forward
    assert calls
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=3e-2, rtol=3e-2)
