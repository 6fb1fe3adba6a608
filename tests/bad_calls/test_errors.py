"""Wrong calls that take more than a line to make; ``test_bad_calls.py`` has the table of all others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels
import minitorch as mt
from kernels.runtime.targets import why_no_cuda
from minitorch import FastBackend, Parameter, from_numpy, tensor

from ..tensor_strategies import on_backends


def test_adam_writes_nothing_beyond_its_moments() -> None:
    parameter = Parameter(from_numpy(np.zeros(3)))
    optimiser = mt.Adam([parameter])
    parameter.value.grad = from_numpy(np.ones(2))
    with pytest.raises(ValueError, match=r"\(3,\) has a gradient of shape \(2,\)"):
        optimiser.step()
    parameter.value.grad = from_numpy(np.ones(3))
    optimiser.step()
    parameter.update(from_numpy(np.zeros(5000)))
    parameter.value.grad = from_numpy(np.ones(5000))
    with pytest.raises(ValueError, match=r"\(5000,\).* moments of shape \(3,\)"):
        optimiser.step()


@pytest.mark.emulated
def test_nothing_moves_between_host_and_device_unseen() -> None:
    host = from_numpy(np.arange(6.0).reshape(2, 3))
    there = from_numpy(np.ones((3, 2)), mt.CudaBackend)
    for call in (
        lambda: host + there.permute(1, 0),
        lambda: there.permute(1, 0) + host,
        lambda: host @ there,
        lambda: there @ host,
        lambda: there.permute(1, 0) < host,
        lambda: host * from_numpy(np.ones(1), mt.CudaBackend),
    ):
        with pytest.raises(TypeError, match=r"two devices.*the host.*with cuda\(\) or cpu\(\)"):
            call()
    with pytest.raises(TypeError, match=r"one backend, got FastOps, CudaOps, CudaOps"):
        host.flash_attention(there, there)
    assert host.backend is FastBackend and there.backend is mt.CudaBackend
    # A number may be written as a tensor, as published code does.
    assert (there * tensor([2.0])).to_numpy().tolist() == [[2.0, 2.0]] * 3


@on_backends()
def test_the_rung_of_a_whole_run(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (from_numpy(np.ones((1, 2, 3)), backend) for _ in range(3))
    expected = q.flash_attention(k, v, rung="naive").to_numpy()
    arrays = [t.array() for t in (q, k, v)]
    for name, rung in (("naive", "naive"), ("auto", "flash2"), ("", "flash2")):
        monkeypatch.setenv("MINITORCH_RUNG", name)
        for _ in range(2):  # the second call finds the plan of the first
            np.testing.assert_allclose(q.flash_attention(k, v).to_numpy(), expected)
        assert kernels.plan(*arrays).rung == rung
        assert kernels.plan(*arrays, rung="flash2").rung == "flash2"  # a call that names one has it


@pytest.mark.parametrize(
    ("asked", "words"), [("flash1", "the cpu target has no such rung"), ("warp9", "the rungs are")]
)
def test_a_rung_that_is_not_to_be_had(
    asked: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = from_numpy(np.ones((2, 3)))
    with pytest.raises(ValueError, match=words) as by_call:
        q.flash_attention(q, q, rung=asked)
    if asked == "warp9":  # the composed baseline takes any name that there is
        with pytest.raises(ValueError, match=words):
            mt.naive_attention(q, q, q, rung=asked)
    monkeypatch.setenv("MINITORCH_RUNG", asked)
    with pytest.raises(ValueError, match=words) as by_run:
        q.flash_attention(q, q)
    assert f"{asked!r} (from MINITORCH_RUNG)" in str(by_run.value)
    assert f"{asked!r}" in str(by_call.value) and "MINITORCH_RUNG" not in str(by_call.value)
    assert asked == "warp9" or asked in kernels.available_rungs()


@pytest.mark.skipif(why_no_cuda() is None, reason="there is a GPU, or the emulated one")
def test_without_a_gpu_the_way_out_is_named() -> None:
    a = tensor([1.0])
    for call in (a.cuda, lambda: mt.zeros((2,), mt.CudaBackend), lambda: a.to(mt.CudaBackend)):
        with pytest.raises(RuntimeError, match=r"fast backend, or set MINITORCH_EMULATE=1"):
            call()
    assert a.to_numpy().tolist() == [1.0]


def test_a_mod_that_raises_on_any_thread_spoils_its_call_and_no_other() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 300, 8)).astype(np.float32)
    table = np.ones(250)

    def short(score: float, batch: int, head: int, row: int, col: int) -> float:
        return score * table[col]

    out, lse = kernels.flash_attention_forward(x, x, x, score_mod=lambda s, b, h, r, c: s * 0.5)
    every: Any = {"score_mod": (short, short)}, {"mask_mod": lambda b, h, r, c: table[r] > 0}
    for options in every:
        for call in (
            lambda: kernels.flash_attention_forward(x, x, x, **options),  # noqa: B023
            lambda: kernels.flash_attention_backward(out, x, x, x, out, lse, **options),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=r"never raise.*naive"):
                call()
    again, _ = kernels.flash_attention_forward(x, x, x, score_mod=lambda s, b, h, r, c: s * 0.5)
    np.testing.assert_array_equal(again, out)
    with pytest.raises(ValueError, match=r"never raise, got IndexError.*at \("):
        kernels.flash_attention_forward(x, x, x, score_mod=short, rung="naive")


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, mt.bfloat16])
def test_a_number_of_a_narrow_dtype_is_checked_as_a_float(kind: Any) -> None:
    x, infinite, nothing = np.ones((2, 5, 4)), kind("inf"), kind(0.0)
    q, model = from_numpy(x), mt.DecoderLM(5, 4, 2, 3, n_layer=1, middle_dim=4)
    for call in (
        lambda: kernels.flash_attention_forward(x, x, x, scale=infinite),
        lambda: kernels.flash_attention_forward(x, x, x, scale=-infinite),
        lambda: kernels.flash_attention_forward(x, x, x, softcap=infinite),
        lambda: q.flash_attention(q, q, scale=nothing),
        lambda: kernels.flash_attention_forward(x, x, x, dropout_p=kind(1.0), seed=0),
        lambda: mt.clip_grad_norm_([], nothing),
        lambda: mt.AdamW([], max_norm=nothing),
        lambda: mt.Adam([], lr=infinite),
        lambda: mt.LayerNorm1d(3, infinite),
        lambda: mt.Dropout(kind(1.0)),
        lambda: mt.Rotary(4, 8, infinite),
        lambda: model.generate([1], 1, infinite),
    ):
        with pytest.raises(ValueError, match=r"must be"):
            call()
    assert type(mt.Adam([], lr=kind(0.5)).lr) is type(mt.Dropout(kind(0.5)).p_dropout) is float
    kept = kernels.dropout_mask((64, 64), kind(0.5), 0)
    np.testing.assert_array_equal(kept, kernels.dropout_mask((64, 64), 0.5, 0))


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.uint64, np.int64])
def test_an_offset_of_a_narrow_dtype_does_not_wrap(kind: Any) -> None:
    x = np.random.default_rng(0).standard_normal((2, 5, 4))
    every: Any = {"window_size": (3, 0)}, {"window_size": (200, -1), "is_causal": True}
    for options in every:
        out, expected = (
            kernels.flash_attention_forward(x, x, x, causal_offset=offset, **options)[0]
            for offset in (kind(2), 2)
        )
        np.testing.assert_array_equal(out, expected)
