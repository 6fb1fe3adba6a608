"""Drawn nonsense: every call raises what is documented or returns what is right, and changes nothing.

A few seconds of it; ``make fuzz`` draws for minutes, also with numba's bounds checking
(``project/measure.py fuzz``).
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels.cpu.runtime.function_pointers import array_at
from kernels.runtime.jit import njit_cached

from ..support.attention.on_cuda import Packed, packed_cases
from ..support.attention.strategies import Case
from ..support.fuzzing import draws as fuzz_draws
from ..support.fuzzing import public_calls
from ..support.fuzzing.buffers import (
    MARGIN,
    POISON,
    Untouched,
    placed,
    whole_buffer,
)
from ..support.fuzzing.draws import DOCUMENTED, NONSENSE, SAYS, Draw, Notes, attempt, draws

#: Draws of each test; MINITORCH_EXAMPLES asks for more.
SHORT = settings(max_examples=int(os.environ.get("MINITORCH_EXAMPLES", "25")))


@pytest.mark.fuzz
@given(drawn=draws())
@SHORT
def test_nonsense_is_refused_or_right(notes: Notes, drawn: Draw) -> None:
    notes.begin(drawn)
    notes.count(attempt(drawn))


@pytest.mark.fuzz
@given(
    case=packed_cases((np.float64,), st.integers(1, 17), st.integers(1, 5)),
    option=st.sampled_from(
        ["cu_q", "cu_k", "q", "k", "v", "dout", "tile", "softcap", "window_size"]
    ),
    value=st.just("keep")
    | st.sampled_from([*NONSENSE, np.array([0, 5]), np.array([[0, 3]]), [0, 3, 2]]),
)
@SHORT
def test_packed_nonsense_is_refused_or_right(
    notes: Notes, case: Packed, option: str, value: Any
) -> None:
    drawn = f"{option}={value!r:.60} for {case}"
    notes.begin(drawn)
    arrays = {name: placed(getattr(case, name).swapaxes(0, 1)) for name in ("q", "k", "v", "dout")}
    untouched = Untouched(arrays)
    keeps = isinstance(value, str) and value == "keep"
    own = {**arrays, "cu_q": case.sums[0], "cu_k": case.sums[1]}
    options, given_ = dict(case.options), dict(own)
    if not keeps:
        (given_ if option in own else options)[option] = value
    operands, sums = [given_[name] for name in "qkv"], (given_["cu_q"], given_["cu_k"])
    try:
        out, lse = kernels.flash_attention_varlen_forward(*operands, *sums, **options)
        gradients = kernels.flash_attention_varlen_backward(
            given_["dout"], *operands, out, lse, *sums, dlse=case.dlse,
            sink_gradient=case.has_sink, **options,
        )  # fmt: skip
    except DOCUMENTED as error:
        assert not keeps, f"{error!r} for {drawn}"
        assert len(str(error)) > 20 and any(word in str(error) for word in SAYS), (
            f"{error!r} {drawn}"
        )
        notes.count("refused")
        return
    finally:
        untouched.check(drawn)
    if all(given_[name] is own[name] for name in own):
        case.options = {name: x for name, x in options.items() if name != "tile"}
        out, (dq, dk, dv, *dsink) = out.swapaxes(0, 1), gradients
        results = dict(
            zip(("dq", "dk", "dv"), (x.swapaxes(0, 1) for x in (dq, dk, dv)), strict=True)
        )
        results |= {"out": out, "lse": lse, **dict(zip(("dsink",), dsink, strict=False))}
        case.check(results, "by fuzzing")
        notes.count("right")


@pytest.mark.fuzz
@pytest.mark.filterwarnings("ignore")
@given(seed=st.integers(0, 2**32))
@SHORT
def test_only_checks_refuse_public_calls(notes: Notes, seed: int) -> None:
    given_ = public_calls.Given(random.Random(seed))
    functions = given_.functions()
    for name in given_.rng.sample(sorted(functions), 10):
        args, named = given_.arguments(functions[name])
        drawn = f"{name} of {[type(x).__name__ for x in args]} and {[*named]}, seed {seed}"
        notes.begin(drawn)
        try:
            functions[name](*args, **named)
        except Exception as error:
            wrong = public_calls.fault(error)
            assert not wrong, f"{wrong}; {drawn}"
            notes.count("refused")
        else:
            notes.count("returned")


# -- what the judge itself can see -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["out", "dk"])
def test_the_judge_sees_a_wrong_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (np.random.default_rng(i).standard_normal((2, 5, 4)) for i in range(2))
    case = Case(x, y, x, y, {"is_causal": True}, (4, 4))
    assert attempt(Draw(replace(case))) == "right"
    honest = fuzz_draws._results

    def wrong(case: Case) -> dict[str, Any]:
        results = honest(case)
        results[name][1, 2, 3] += 1e-3
        return results

    monkeypatch.setattr(fuzz_draws, "_results", wrong)
    with pytest.raises(AssertionError, match=f"{name} of Draw.*worst at \\(1, 2, 3\\)"):
        attempt(Draw(replace(case)))


def test_canaries_see_what_is_written_beside_an_array() -> None:
    array = placed(np.arange(6.0).reshape(2, 3)[:, ::2])
    untouched = Untouched({"x": array})
    untouched.check("nothing")
    whole = whole_buffer(array)
    assert (whole[:MARGIN] == POISON).all() and len(whole) > MARGIN + array.nbytes
    whole[0] = 1
    with pytest.raises(AssertionError, match="changed"):
        untouched.check("a write")


@pytest.mark.skipif(not numba.config.BOUNDSCHECK, reason="needs NUMBA_BOUNDSCHECK=1")  # type: ignore[attr-defined]
def test_bounds_are_checked_in_cached_code_and_in_arrays_made_of_an_address() -> None:
    # Not in parallel loops: there an error may stay with the thread.  Attention's only one reads no
    # array; it calls work items by address, and an error of theirs reaches sys.unraisablehook.
    x = np.arange(3.0)

    @njit_cached
    def reads(x: Any, i: int) -> Any:
        return x[i]

    @njit_cached
    def reads_at(address: int, i: int) -> Any:
        return array_at(address, (3,), (8,), np.float64)[i]

    for call in (lambda: reads(x, 5), lambda: reads_at(x.ctypes.data, 5)):
        with pytest.raises(IndexError):
            call()
