"""Every public entry of attention takes operands however they lie in memory, on every target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
import minitorch
from kernels.runtime.targets import IS_SIMULATOR
from minitorch import Tensor, naive_attention

from ..support.attention.on_cuda import RUNGS, Packed, fitting, packed, taken_by, tiny
from ..support.attention.strategies import Case, cases
from ..support.layouts import Layout, in_order, laid, layouts, on_device
from ..support.tolerances import assert_close_arrays

pytestmark = pytest.mark.usefixtures("quick_barriers")

#: Where operands are: on the host for the CPU's kernels, on the device for CUDA's.
HOST = pytest.param(None, id="host")
DEVICE = pytest.param(on_device, id="device", marks=pytest.mark.simulator)
PLACES = pytest.mark.parametrize("place", [HOST, DEVICE])
#: The options that bring arrays of their own.
ARRAYS = ("bool mask", "float mask", "alibi", "sink", "dlse")
#: As ``x.view(batch, seq, heads, dim).transpose(1, 2)`` lies, the usual layout of PyTorch's models.
HEADS_BEHIND_ROWS = Layout((0, 2, 1, 3), (1,) * 4, 0, (False,) * 4, (False,) * 4)


def small(place: Any, **more: Any) -> st.SearchStrategy[Case]:
    """Draw calls that the place finishes quickly."""
    return cases(**more) if place is None else tiny(**more)


def to_host(array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else array.copy_to_host()


def check_call(case: Case, place: Any, **more: Any) -> None:
    """Check the values and the layouts of what the public functions return."""
    results = case.call(place, **more)
    case.check({name: to_host(x) for name, x in results.items()}, f"with {more}")
    mask = case.options.get("attn_mask")
    for name, operand in zip(
        ("out", "dq", "dk", "dv", "dmask"), (case.q, *case.operands, mask), strict=True
    ):
        if operand is not None and name in results and results[name].ndim == operand.ndim:
            assert in_order(results[name], operand), (
                f"{name} has strides {results[name].strides} in {case}"
            )


@pytest.mark.parametrize("rung", ["flash2", "naive"])
@given(case=cases(features=ARRAYS))
def test_arrays_on_the_host(rung: str, case: Case) -> None:
    check_call(case, None, rung=rung)


@pytest.mark.simulator
@pytest.mark.parametrize("rung", RUNGS)
@settings(max_examples=12)
@given(case=tiny(features=ARRAYS if IS_SIMULATOR else ()))
def test_arrays_on_the_device(rung: str, case: Case) -> None:
    check_call(taken_by(rung, case), on_device, rung=rung, tile=fitting(rung, case.tile))


@PLACES
@pytest.mark.parametrize("which", ["q", "k", "v", "dout", "all"])
@pytest.mark.parametrize("groups", [1, 2])
def test_heads_behind_rows(place: Any, which: str, groups: int) -> None:
    """One operand, or all, as nearly every PyTorch model has them."""
    rng = np.random.default_rng(0)
    operands = {
        name: rng.standard_normal((2, heads, rows, 4))
        for name, heads, rows in (
            ("q", 4, 5),
            ("k", 4 // groups, 7),
            ("v", 4 // groups, 7),
            ("dout", 4, 5),
        )
    }
    for name in operands if which == "all" else [which]:
        operands[name] = laid(operands[name], HEADS_BEHIND_ROWS)
    case = Case(**operands, options={"enable_gqa": groups > 1}, tile=(4, 4))
    check_call(case, place)


@PLACES
@settings(max_examples=10)
@given(data=st.data())
def test_what_the_backward_pass_is_given_may_lie_differently(place: Any, data: Any) -> None:
    """out and lse need not lie as the forward pass returned them."""
    case = data.draw(small(place))
    put = place or (lambda array: array)
    q, k, v, dout = map(put, (*case.operands, case.dout))
    stored = [to_host(x) for x in kernels.flash_attention_forward(q, k, v, **case.options)]
    out, lse = (put(laid(x, data.draw(layouts(x.ndim).filter(is_unrepeated)))) for x in stored)
    gradients = kernels.flash_attention_backward(dout, q, k, v, out, lse, **case.options)
    results = dict(zip(("dq", "dk", "dv"), map(to_host, gradients), strict=True))
    case.dlse = None
    case.check(dict(zip(("out", "lse"), stored, strict=True)) | results, "from other layouts")


def is_unrepeated(layout: Layout) -> bool:
    return not any(layout.repeats)


@PLACES
@settings(max_examples=8)
@given(data=st.data())
def test_packed_sequences(place: Any, data: Any) -> None:
    lengths = st.lists(st.integers(0, 4 if place else 20), min_size=2, max_size=3)
    lengths_q = data.draw(lengths.filter(sum))
    lengths_k = data.draw(st.permutations(lengths_q))
    options = {"is_causal": data.draw(st.booleans()), "enable_gqa": data.draw(st.booleans())}
    case = packed(data.draw(st.integers(0, 99)), lengths_q, lengths_k, (3, 4), options)
    for name in ("q", "k", "v", "dout", "dlse"):
        array = getattr(case, name)
        setattr(case, name, laid(array, data.draw(layouts(array.ndim))))
    assert isinstance(case, Packed)
    check_call(case, place)


@PLACES
@settings(max_examples=8)
@given(data=st.data())
def test_decoding(place: Any, data: Any) -> None:
    """Few query rows against many keys, whose tiles may be divided among blocks or threads."""
    shape = (1, 2, 40, 4) if place else (2, 4, 700, 16)
    rows = data.draw(st.integers(1, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    q, k, v, dout = (
        laid(rng.standard_normal((*shape[:2], n, shape[3])), data.draw(layouts(4)))
        for n in (rows, shape[2], shape[2], rows)
    )
    options = {"is_causal": True, "causal_offset": shape[2] - rows}
    check_call(Case(q, k, v, dout, options, (4, 4)), place)


@pytest.mark.parametrize("attend", [Tensor.flash_attention, naive_attention])
@PLACES
@settings(max_examples=6)
@given(data=st.data())
def test_tensors(place: Any, attend: Any, data: Any) -> None:
    case = data.draw(tiny(np.float64) if place else cases((np.float64,)))
    put = place or (lambda array: array)
    q, k, v = (minitorch.from_dlpack(put(x), requires_grad=True) for x in writable(case.operands))
    out = attend(q, k, v, **case.options)
    (dout,) = writable([case.dout])
    out.backward(minitorch.from_dlpack(put(dout)))
    expected = case.oracle()
    case.dlse = None
    for name, got in {"out": out, "dq": q.grad, "dk": k.grad, "dv": v.grad}.items():
        size = max(1.0, float(np.abs(expected[name]).max(initial=0.0)))
        assert_close_arrays(got, expected[name], np.float64, f"{name} of {case}", size)


def writable(arrays: Any) -> list[Any]:
    """Return arrays that can be lent: what cannot be written to is not."""
    for array in arrays:
        if not array.flags.writeable:
            array.flags.writeable = True
    return list(arrays)
