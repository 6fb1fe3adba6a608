"""A ``score_mod`` that reads a table: the gradient of the table, against attention composed of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels
from kernels.runtime.jit import at_most as threads
from minitorch import FastBackend, SimpleBackend, from_numpy, naive_attention

from ...support.attention.on_cuda import run
from ...support.attention.strategies import Case
from ...support.examples import at_most
from ...support.tolerances import assert_close_arrays
from .test_derivatives import written

FAR = 6


def by_distance(score: Any, batch: int, head: int, row: int, col: int, bias: Any) -> Any:
    """Add T5's bias: a number for each head and distance, one for all that is far."""
    return score + bias[head, min(abs(row - col), FAR)]


def by_slope(score: Any, batch: int, head: int, row: int, col: int, slopes: Any) -> Any:
    """Subtract ALiBi's distance by a learned slope."""
    return score - slopes[head] * abs(row - col)


def by_temperature(score: Any, batch: int, head: int, row: int, col: int, heat: Any) -> Any:
    warm = score * heat[head, 0]
    return warm if row >= col else warm + heat[head, 1] * heat[head, 0]


def composed(mod: Any, q: Any, k: Any, v: Any, table: Any, dout: Any, options: Any) -> list[Any]:
    """Return out, dq and the table's gradient from a stored bias, and queries that are scaled."""
    heads, rows, cols = q.shape[-3], q.shape[-2], k.shape[-2]
    head, (row, col) = np.arange(heads)[:, None, None], np.mgrid[:rows, :cols]
    far = np.abs(row - col)
    heat = np.ones((heads, 1, 1))
    if mod is by_distance:
        bias = table[head, np.minimum(far, FAR)]
    elif mod is by_slope:
        bias = -table[head] * far
    else:
        heat = table[:, :1, None]
        bias = np.where(row >= col, 0.0, table[head, 1] * table[head, 0])
    own = [from_numpy(np.ascontiguousarray(x)) for x in (q, heat, bias)]
    for x in own:
        x.requires_grad_(True)
    out = naive_attention(own[0] * own[1], from_numpy(k), from_numpy(v), own[2], **options)
    (out * from_numpy(dout)).sum().backward()
    dq, dheat, dbias = (x.grad.to_numpy() for x in own)  # type: ignore[union-attr]
    total = np.zeros(table.shape)
    if mod is by_distance:
        np.add.at(total, (head, np.minimum(far, FAR)), dbias)
    elif mod is by_slope:
        total[:] = -(dbias * far).sum(axis=(1, 2))
    else:
        above = np.where(row >= col, 0.0, dbias).sum(axis=(1, 2))
        total[:, 0] = dheat.reshape(-1) + above * table[:, 1]
        total[:, 1] = above * table[:, 0]
    return [out.to_numpy(), dq, total]


MODS = by_distance, by_slope, by_temperature
SIZES = {by_distance: (FAR + 1,), by_slope: (), by_temperature: (2,)}


@pytest.mark.parametrize("mod", MODS)
@pytest.mark.parametrize("backend", [SimpleBackend, FastBackend, None])
@at_most(6)
@given(data=st.data())
def test_the_gradient_of_a_table_is_that_of_what_it_composes(
    mod: Any, backend: Any, data: st.DataObject
) -> None:
    """The backend of None composes attention of tensors."""
    options = data.draw(
        st.sampled_from(
            [{}, {"is_causal": True}, {"dropout_p": 0.25, "seed": 4}, {"window_size": (3, 4)}]
        )
    )
    heads, rows, cols = data.draw(
        st.tuples(st.integers(1, 3), st.integers(1, 80), st.integers(1, 70))
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    q, k, v, dout = (rng.standard_normal((2, heads, n, 4)) for n in (rows, cols, cols, rows))
    table = rng.standard_normal((heads, *SIZES[mod]))
    kind = backend or SimpleBackend
    own = [from_numpy(x, kind) for x in (q, k, v, table)]
    own[0].requires_grad_(True)
    own[3].requires_grad_(True)
    every: Any = {"score_mod": mod, "score_table": own[3], **options}
    attend = naive_attention if backend is None else type(own[0]).flash_attention
    out = attend(*own[:3], **every)
    (out * from_numpy(dout, kind)).sum().backward()
    expected = composed(mod, q, k, v, table, dout, options)
    found = out.to_numpy(), own[0].grad.to_numpy(), own[3].grad.to_numpy()  # type: ignore[union-attr]
    for name, x, right in zip(("out", "dq", "dtable"), found, expected, strict=True):
        size = max(1.0, float(np.abs(right).max(initial=0.0)))
        assert_close_arrays(x, right, np.float64, name, size=size)


@pytest.mark.emulated
@pytest.mark.parametrize("mod", MODS)
@at_most(5)
@given(data=st.data())
def test_the_gradient_of_a_table_on_a_device_is_the_textbooks(
    mod: Any, data: st.DataObject
) -> None:
    heads, rows, cols = data.draw(
        st.tuples(st.integers(1, 3), st.integers(1, 11), st.integers(1, 9))
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    q, k, v, dout = (rng.standard_normal((2, heads, n, 3)) for n in (rows, cols, cols, rows))
    mask = rng.random((rows, cols)) < 0.7
    options: dict[str, Any] = data.draw(
        st.sampled_from(
            [{}, {"is_causal": True}, {"dropout_p": 0.25, "seed": 4}, {"softcap": 1.5},
             {"attn_mask": mask}, {"deterministic": False}, {"sink": np.ones(heads)}]
        )
    )  # fmt: skip
    table = rng.standard_normal((heads, *SIZES[mod]))
    options |= {"score_mod": mod, "score_table": table}
    case = Case(q, k, v, dout, options, (4, 4))
    if data.draw(st.booleans()):
        case = case.in_dtype(np.dtype(np.float32))
    found = run(case, "flash2", (4, 4))
    for name, right in case.oracle().items():
        size = max(1.0, float(np.abs(right[np.isfinite(right)]).max(initial=0.0)))
        assert_close_arrays(found[name], right, case.q.dtype, name, size=size)


def test_the_gradient_of_a_table_is_the_same_with_any_number_of_threads() -> None:
    rng = np.random.default_rng(5)
    q, k, v, dout = (rng.standard_normal((2, 3, 200, 8)).astype(np.float32) for _ in range(4))
    table = rng.standard_normal((3, FAR + 1)).astype(np.float32)
    options: dict[str, Any] = {"score_mod": by_distance, "score_table": table}
    out, lse = kernels.flash_attention_forward(q, k, v, **options)
    found = []
    for count in (1, 2):
        with threads(count):
            found.append(
                kernels.flash_attention_backward(
                    dout, q, k, v, out, lse, score_table_gradient=True, **options
                )[3]
            )
    assert np.array_equal(*found)


def test_a_table_that_changes_is_read_anew_without_compiling_again() -> None:
    q = np.random.default_rng(6).standard_normal((2, 9, 4))
    results = []
    for scale in (1.0, 2.0):
        table = scale * np.ones(2)
        out, _ = kernels.flash_attention_forward(q, q, q, score_mod=by_slope, score_table=table)
        far = np.abs(np.subtract.outer(np.arange(9), np.arange(9)))
        right, _ = kernels.flash_attention_forward(q, q, q, -scale * far[None].repeat(2, 0))
        assert_close_arrays(out, right, np.float64, "out")
        results.append(out)
    assert not np.allclose(*results)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("    row = table", "otherwise than by its elements"),
        ("    for i in range(2):\n        score += table[i]", "in a loop"),
        ("    score += table[0:2].sum()", "1 indices"),
    ],
)
def test_other_uses_of_a_table_have_no_gradient(lines: str, why: str) -> None:
    mod = written(lines, "    return score", arguments="score, batch, head, row, col, table")
    q = np.random.default_rng(7).standard_normal((2, 9, 4))
    options: dict[str, Any] = {"score_mod": mod, "score_table": np.ones(3), "rung": "naive"}
    out, lse = np.ones_like(q), np.ones((2, 9))
    with pytest.raises(ValueError, match=why):
        kernels.flash_attention_backward(q, q, q, q, out, lse, score_table_gradient=True, **options)
