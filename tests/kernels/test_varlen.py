"""Packed sequences: one call is a loop over them, and nothing of one reaches another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
import minitorch
from minitorch import CudaBackend, FastBackend, SimpleBackend

from ..support.attention.strategies import SCORE_MODS, bounds, neighbours
from ..support.tolerances import assert_close_arrays

BACKENDS = {"simple": SimpleBackend, "fast": FastBackend}


@dataclass
class Packed:
    """Packed sequences, float64: (total, heads, dim), lse and its gradient (heads, total)."""

    q: Any
    k: Any
    v: Any
    dout: Any
    dlse: Any
    cu_q: Any
    cu_k: Any
    options: dict[str, Any]

    @property
    def operands(self) -> tuple[Any, Any, Any]:
        return self.q, self.k, self.v

    def one_by_one(self) -> dict[str, Any]:
        """Return the results by a call for each sequence, on arrays with the heads first."""
        sink = self.options.get("sink")
        results = {
            "out": np.zeros(self.dout.shape),
            "lse": np.full(self.dlse.shape, -np.inf),
            **{
                name: np.zeros(x.shape)
                for name, x in zip(("dq", "dk", "dv"), self.operands, strict=True)
            },
        }
        if sink is not None:
            results["dsink"] = np.zeros(sink.shape)
        for number in range(len(self.cu_q) - 1):
            rows, cols = (slice(*cu[number : number + 2]) for cu in (self.cu_q, self.cu_k))
            if rows.start == rows.stop or cols.start == cols.stop:
                if sink is not None:  # out is 0, and lse the sink alone
                    results["lse"][:, rows] = sink[:, None]
                    results["dsink"] += self.dlse[:, rows].sum(axis=1)
                continue  # out is 0 and lse minus infinity
            operands = (self.q[rows], self.k[cols], self.v[cols])
            views = [x.swapaxes(0, 1) for x in operands]
            options: dict[str, Any] = {**self.numbered(number), "rung": "naive"}
            out, lse = kernels.flash_attention_forward(*views, **options)
            dout, dlse = self.dout[rows].swapaxes(0, 1), self.dlse[:, rows]
            dq, dk, dv, *dsink = kernels.flash_attention_backward(
                dout, *views, out, lse, dlse=dlse, sink_gradient=sink is not None, **options
            )
            if dsink:
                results["dsink"] += dsink[0]
            results["out"][rows], results["lse"][:, rows] = out.swapaxes(0, 1), lse
            results["dq"][rows] = dq.swapaxes(0, 1)
            results["dk"][cols], results["dv"][cols] = dk.swapaxes(0, 1), dv.swapaxes(0, 1)
        return results

    def numbered(self, number: int) -> dict[str, Any]:
        """Return the options of one sequence: mods get its number for the batch."""
        options = dict(self.options)
        if "mask_mod" in options:
            mask_mod = options["mask_mod"]
            options["mask_mod"] = lambda batch, *place: mask_mod(number, *place)
        if "score_mod" in options:
            options["score_mod"] = tuple(
                lambda score, batch, *place, function=function: function(score, number, *place)
                for function in options["score_mod"]
            )
        return options

    def check(self, actual: dict[str, Any], what: str) -> None:
        for name, expected in self.one_by_one().items():
            finite = np.abs(expected[np.isfinite(expected)])
            size = max(1.0, float(finite.max(initial=0.0)))
            assert_close_arrays(
                actual[name], expected, np.float64, f"{name} {what} of {self}", size
            )


@st.composite
def packed(draw: Any) -> Packed:
    """Draw up to five sequences, some of them empty, and options."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = st.sampled_from([0, 1, 2, 5, 9, 17])
    pairs = draw(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=5))
    pairs.append((3, 4))  # in all at least one row and one column
    cu_q, cu_k = (np.cumsum([0, *own]).astype(np.int32) for own in zip(*pairs, strict=True))
    key_heads, groups = draw(st.sampled_from([(1, 1), (2, 1), (2, 2)]))
    head_dim, value_dim = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    heads, total_q, total_k = key_heads * groups, cu_q[-1], cu_k[-1]
    options = draw(bounds(6, 6))
    if groups > 1:
        options["enable_gqa"] = True
    for more in draw(
        st.lists(
            st.sampled_from(
                [
                    {"softcap": 1.5}, {"alibi_slopes": rng.random(heads)}, {"mask_mod": neighbours},
                    {"score_mod": SCORE_MODS[1]}, {"scale": -0.5},
                    {"sink": 2.0 * rng.standard_normal(heads)}, {"chunk_size": 3},
                ]
            ),
            max_size=2,
        )
    ):  # fmt: skip
        options |= more
    if "chunk_size" in options:
        options.pop("mask_mod", None)  # which packed sequences cannot combine
    shapes = (
        (total_q, heads, head_dim), (total_k, key_heads, head_dim), (total_k, key_heads, value_dim),
        (total_q, heads, value_dim), (heads, total_q),
    )  # fmt: skip
    q, k, v, dout, dlse = (rng.standard_normal(shape) for shape in shapes)
    return Packed(q, k, v, dout, dlse, cu_q, cu_k, options)


def on_tensors(case: Packed, backend: Any, **more: Any) -> dict[str, Any]:
    tensors = [minitorch.from_numpy(x, backend, requires_grad=True) for x in case.operands]
    q, k, v = tensors
    options = {**case.options, **more}
    if "sink" in options:
        options["sink"] = minitorch.from_numpy(options["sink"], backend, requires_grad=True)
    out, lse = q.flash_attention_varlen(k, v, case.cu_q, case.cu_k, return_lse=True, **options)
    out.backward(minitorch.from_numpy(case.dout, backend))
    lse.backward(minitorch.from_numpy(case.dlse, backend))
    gradients = {f"d{name}": np.asarray(t.grad) for name, t in zip("qkv", tensors, strict=True)}
    if "sink" in options:
        gradients["dsink"] = np.asarray(options["sink"].grad)
    return {"out": out.to_numpy(), "lse": lse.to_numpy(), **gradients}


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=packed())
@settings(max_examples=25)
def test_tensors_are_a_loop_over_the_sequences(backend: str, case: Packed) -> None:
    case.check(on_tensors(case, BACKENDS[backend]), "on tensors")


@pytest.mark.simulator
def test_a_device_is_a_loop_over_the_sequences() -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal(s) for s in ((5, 2, 3), (6, 1, 3), (6, 1, 2), (5, 2, 2)))
    lengths = np.array([0, 2, 2, 5]), np.array([0, 3, 4, 6])
    options = {
        "is_causal": True,
        "enable_gqa": True,
        "mask_mod": neighbours,
        "sink": np.array([0.5, -1.0]),
    }
    case = Packed(q, k, v, dout, rng.standard_normal((2, 5)), *lengths, options)
    case.check(on_tensors(case, CudaBackend), "on the device")


@pytest.mark.fuzz
@given(case=packed())
def test_arrays_are_a_loop_over_the_sequences(case: Packed) -> None:
    place = (case.cu_q, case.cu_k)
    out, lse = kernels.flash_attention_varlen_forward(*case.operands, *place, **case.options)
    has_sink = "sink" in case.options
    gradients = kernels.flash_attention_varlen_backward(
        case.dout, *case.operands, out, lse, *place, dlse=case.dlse, sink_gradient=has_sink,
        **case.options,
    )  # fmt: skip
    names = ("out", "lse", "dq", "dk", "dv", *["dsink"] * has_sink)
    case.check(dict(zip(names, (out, lse, *gradients), strict=True)), "")


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_counts_from_the_start_of_a_sequence(backend: str) -> None:
    # Keys of zeros and values that are unit vectors show which probabilities are kept.
    lengths, heads = (5, 3, 8), 2
    cu = np.cumsum([0, *lengths])
    total = int(cu[-1])
    values = np.concatenate([np.eye(8)[:n] for n in lengths])
    v = np.repeat(values[:, None], heads, axis=1)  # (total, heads, 8)
    q, v = (minitorch.from_numpy(x, BACKENDS[backend]) for x in (np.zeros((total, heads, 4)), v))
    out = q.flash_attention_varlen(q, v, cu, cu, dropout_p=0.5, seed=9).to_numpy()
    kept = kernels.dropout_mask((len(lengths), heads, 8, 8), 0.5, 9)
    for number, length in enumerate(lengths):
        own = out[cu[number] : cu[number + 1], :, :length].swapaxes(0, 1)
        expected = kept[number, :, :length, :length] / 0.5 / length
        assert_close_arrays(own, expected, np.float64, f"sequence {number}")
