"""Attention by every entrance and rung, with drawn options and layouts, against one float64 oracle."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import launch
from kernels.runtime.targets import EMULATED

from ..support.attention import on_cuda
from ..support.attention.on_cuda import LATER_OPTIONS, PACKED_FEATURES, Packed, fitting, on_device
from ..support.attention.strategies import DIMS, FEATURES, LENGTHS, Case, cases, planted, wide_cases
from ..support.examples import at_most
from ..support.layouts import in_order, laid, layouts
from ..support.tolerances import assert_close_arrays

TARGETS = {"numpy": launch.NUMPY, "cpu": launch.CPU, "cuda": launch.CUDA}
HOST = [(name, rung.name) for name in ("numpy", "cpu") for rung in TARGETS[name].rungs]
ON_HOST = [pytest.param(*one, id=" ".join(one)) for one in HOST]
ON_DEVICE = [
    pytest.param("cuda", rung, marks=pytest.mark.emulated, id=f"cuda {rung}")
    for rung in on_cuda.RUNGS
]
EVERY_RUNG = pytest.mark.parametrize(("target", "rung"), [*ON_HOST, *ON_DEVICE])
#: On a GPU every set of options is a kernel to compile.
ON_DEVICE_FEATURES = FEATURES if EMULATED else ()


def host(results: dict[str, Any]) -> dict[str, Any]:
    return {
        name: x.copy_to_host() if hasattr(x, "copy_to_host") else np.asarray(x)
        for name, x in results.items()
    }


def run(case: Case, target: str, rung: str, **more: Any) -> dict[str, Any]:
    """Run a rung forward and backward with the case's tile; the results come back to the host."""
    if target == "cuda":
        case.options = on_cuda.taken_by(rung, case).options
        return on_cuda.run(case, rung, fitting(rung, case.tile), **more)
    return case.run(TARGETS[target], rung, case.tile, **more)


#: What the tests call, and how their calls are drawn: on the host, and small ones on a device.
ENTRANCES = ("arrays", "packed arrays", "few rows", "wide heads", "tensors", "packed tensors")


@st.composite
def calls(draw: Any, entrance: str, on_a_device: bool) -> Case:
    """Draw a call of an entrance, with up to three options and a layout of its own for each operand."""
    dtypes, lengths, dims, features = (np.float32, np.float64), LENGTHS, DIMS, FEATURES
    if on_a_device:
        lengths, dims, features = st.integers(1, 9), on_cuda.DIMS, ON_DEVICE_FEATURES
    if entrance.startswith("packed"):
        names, lengths = (
            PACKED_FEATURES if features else (),
            st.integers(1, 4) if on_a_device else lengths,
        )
        return draw(on_cuda.in_layouts(on_cuda.packed_cases(dtypes, lengths, dims, names)))
    if entrance == "few rows":  # whose keys may be divided among blocks or threads
        keys = st.just(40) if on_a_device else st.sampled_from([300, 700, 1100])
        leads = st.sampled_from([[], [2]])
        return draw(
            cases(dtypes, st.integers(1, 3), st.just(4), leads, features=features, keys=keys)
        )
    if entrance == "wide heads":
        lengths = st.integers(1, 5) if on_a_device else lengths
        return draw(wide_cases(dtypes, lengths, features))
    sizes = {"leads": on_cuda.LEADS, "tiles": on_cuda.TILES} if on_a_device else {}
    return draw(cases(dtypes, lengths, dims, features=features, **sizes))


def attend(entrance: str, case: Case, target: str, rung: str, data: Any) -> dict[str, Any]:
    """Make a call forward and backward; out and lse may lie differently when they come back."""
    more = {"rung": rung, "deterministic": data.draw(st.booleans(), "deterministic")}
    put = on_device if target == "cuda" else None
    if entrance.endswith("tensors"):
        return host(on_cuda.by_tensors(case, put, **more))
    if target == "numpy":  # which no public function selects
        return run(case, target, rung)

    def kept(array: Any) -> Any:
        layout = data.draw(layouts(array.ndim).filter(lambda x: not any(x.repeats)), "kept")
        moved = laid(host({"": array})[""], layout)
        return put(moved) if put else moved

    more["tile"] = fitting(rung, case.tile) if put else case.tile
    results = case.call(put, kept=kept, **more)
    operands: tuple[Any, ...] = (case.q, *case.operands, case.options.get("attn_mask"))
    for name, operand in zip(("out", "dq", "dk", "dv", "dmask"), operands, strict=True):
        if (
            name in results
            and not isinstance(case, Packed)
            and np.ndim(operand) == results[name].ndim
        ):
            strides = results[name].strides
            assert in_order(results[name], operand), f"{name} has strides {strides} in {case}"
    return host(results)


def check_entrance(entrance: str, target: str, rung: str, data: Any) -> None:
    case = data.draw(calls(entrance, target == "cuda"))
    case.options = on_cuda.taken_by(rung, case).options
    found = attend(entrance, case, target, rung, data)
    case.check(found, f"of {entrance} by {rung} on {target}")


def entrances_of(target: str, rung: str) -> list[str]:
    """Return the entrances that a rung has."""
    has_parts = target != "cuda" or rung == "flash2"
    return [
        entrance for entrance in ENTRANCES
        if (has_parts or not entrance.startswith(("packed", "few")))
        and (target != "numpy" or not entrance.endswith("tensors"))
    ]  # fmt: skip


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("target", "rung", "entrance"), [(*one, entrance) for one in HOST for entrance in entrances_of(*one)]
)  # fmt: skip
@given(data=st.data())
def test_attention_is_the_textbook(target: str, rung: str, entrance: str, data: Any) -> None:
    check_entrance(entrance, target, rung, data)


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("rung", "entrance"),
    [(rung, entrance) for rung in on_cuda.RUNGS for entrance in entrances_of("cuda", rung)],
)
@at_most(8)
@given(data=st.data())
def test_attention_on_a_device_is_the_textbook(rung: str, entrance: str, data: Any) -> None:
    check_entrance(entrance, "cuda", rung, data)


@settings(max_examples=20)
@given(
    on_cuda.packed_cases(
        (np.float64,), st.integers(1, 9), st.integers(1, 5),
        [name for name in PACKED_FEATURES if name != "dropout"],
    )
)  # fmt: skip
def test_packed_sequences_are_calls_of_their_own(case: Packed) -> None:
    found = case.oracle()
    has_sink, dsink = "dsink" in found, 0.0
    for number in range(len(case.sums[0]) - 1):
        rows, cols, alone = case.alone(number)
        if rows.start == rows.stop or cols.start == cols.stop:
            assert not any(found[name][:, part].any() for name, part in
                           (("out", rows), ("dq", rows), ("dk", cols), ("dv", cols)))  # fmt: skip
            dsink = dsink + alone.dlse.sum(axis=-1)
            lse = case.options.get("sink", np.full(len(case.q), -np.inf))
            np.testing.assert_array_equal(
                found["lse"][:, rows], lse[:, None].repeat(rows.stop - rows.start, 1)
            )
            continue
        expected = alone.oracle()
        dsink = dsink + expected.get("dsink", 0.0)
        for name, part in (("out", rows), ("lse", rows), ("dq", rows), ("dk", cols), ("dv", cols)):
            np.testing.assert_allclose(
                found[name][:, part], expected[name], 1e-9, 1e-9, err_msg=name
            )
    assert not has_sink or np.allclose(found["dsink"], dsink)


def first_rows_masked(rows: int, cols: int, masked: int) -> dict[str, dict[str, Any]]:
    """Return options that mask every key from some rows, by name."""
    shown = np.arange(rows)[:, None] >= masked
    return {
        "causal": {"is_causal": True, "causal_offset": -masked},
        "window": {"window_size": (0, 0), "causal_offset": -masked},
        "boolean": {"attn_mask": shown},
        "floating": {"attn_mask": np.where(shown, 0.0, -np.inf)},
        "mask_mod": {"mask_mod": lambda batch, head, row, col: row >= masked},
        "blocks": {"block_mask": kernels.BlockMask.from_dense(np.repeat(shown, cols, 1), 16)},
    }


@EVERY_RUNG
@pytest.mark.parametrize("name", first_rows_masked(7, 6, 2))
def test_a_row_whose_keys_are_all_masked_is_zero(target: str, rung: str, name: str) -> None:
    rng = np.random.default_rng(1)
    shapes = (1, 7, 3), (1, 6, 3), (1, 6, 4), (1, 7, 4), (1, 7)
    *arrays, dlse = (rng.standard_normal(shape) for shape in shapes)
    options = first_rows_masked(7, 6, 2)[name]
    if rung == "flash1" and options.keys() & {*LATER_OPTIONS, "window_size"}:
        pytest.skip("flash1 does not have the option")
    case = Case(*arrays, options=options, tile=(3, 4), dlse=dlse)
    actual = run(case, target, rung)
    assert (actual["out"][:, :2] == 0).all() and (actual["dq"][:, :2] == 0).all()
    assert (actual["lse"][:, :2] == -np.inf).all() and np.isfinite(actual["lse"][:, 2:]).all()
    case.check(actual, f"by {rung}")


@EVERY_RUNG
@at_most(8)
@given(data=st.data())
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:divide by zero")
def test_nan_and_infinity_appear_where_the_textbook_has_them(
    target: str, rung: str, data: Any
) -> None:
    small = on_cuda.tiny() if target == "cuda" else cases(lengths=st.integers(1, 20))
    case, value = data.draw(planted(small))
    more = {"deterministic": data.draw(st.booleans())}
    case.check_what_is_not_finite(run(case, target, rung, **more), value)


@pytest.mark.parametrize(("target", "rung"), ON_HOST)
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_scores_that_overflow_are_nan_and_not_zero(target: str, rung: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 9, 4), np.float32)
    case = Case(x, x, x, x, {"scale": 1e39}, (4, 4))  # a row's product with itself is positive
    assert all(np.isnan(result).all() for result in run(case, target, rung).values())


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    rng = np.random.default_rng(1)
    q, k, v, dout = (rng.standard_normal((1, 2, 300, 24), np.float32) for _ in range(4))
    case = Case(q, k, v, dout, {"is_causal": True}, (32, 32))
    threads = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        alone = case.call()
    finally:
        numba.set_num_threads(threads)
    for _ in range(5):
        together = case.call()
        assert all(np.array_equal(alone[name], together[name]) for name in alone)


def test_float32_is_as_accurate_as_its_own_textbook() -> None:
    """At most twice the error (gradients three times) of the same mathematics in float32."""
    rng = np.random.default_rng(2)
    q, k, v, dout = (3 * rng.standard_normal((2, 2, 257, 64), np.float32) for _ in range(4))
    case = Case(q, k, v, dout, {"is_causal": True}, (128, 64))
    fused, plain = case.call(), case.call(rung="naive")
    for name, wanted in case.oracle().items():
        allowed = (2 if name in ("out", "lse") else 3) * np.abs(plain[name] - wanted).max()
        assert np.abs(fused[name] - wanted).max() <= allowed + 1e-6, name


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from the kernel")
def test_memory_is_linear_in_the_length() -> None:
    """One score matrix of 12,288 x 12,288 float32 is 576 MB; all passes take far less."""
    script = """
import pathlib, numpy as np, kernels
def peak():
    return int(pathlib.Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])
def go(n):
    q, k, v, dout = (np.ones((1, 1, n, 16), np.float32) for _ in range(4))
    out, lse = kernels.flash_attention_forward(q, k, v, is_causal=True)
    kernels.flash_attention_backward(dout, q, k, v, out, lse, is_causal=True)
    kernels.flash_attention_double_backward(q, k, v, dout, q, k, v, is_causal=True)
go(64)
before = peak()
go(12288)
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 60_000, "kilobytes beyond those of a tiny call"


def test_attention_of_two_keys_is_that_of_paper_and_pencil() -> None:
    q, k, v = np.array([[1.0]]), np.array([[0.0], [np.log(3.0)]]), np.array([[0.0], [4.0]])
    out, lse = kernels.flash_attention_forward(q, k, v, rung="naive")
    np.testing.assert_allclose(out, [[3.0]])
    np.testing.assert_allclose(lse, [np.log(4.0)])


@pytest.mark.parametrize("rung", ["auto", "naive"])
def test_a_sink_of_minus_infinity_is_no_sink(rung: str) -> None:
    q, k, v = (np.random.default_rng(i).standard_normal((2, 5, 4)) for i in range(3))
    plain = kernels.flash_attention_forward(q, k, v, rung=rung)
    found = kernels.flash_attention_forward(q, k, v, sink=np.full(2, -np.inf), rung=rung)
    for got, expected in zip(found, plain, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_available_rungs_says_what_a_device_is_too_old_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.available_rungs()["flash2"] is None
    monkeypatch.setattr(type(launch.CUDA.memory), "why_not", lambda self: None)
    monkeypatch.setattr("kernels.cuda.device.per_device.compute_capability", lambda: (8, 6))
    available = kernels.available_rungs()
    assert {name for name, reason in available.items() if reason} == {"flash3_wgmma"}
    assert available["flash3_wgmma"] == "it needs compute capability 9.0, this device has 8.6"


def test_waiting_threads_release_the_cores_unless_the_user_says_otherwise() -> None:
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    script = f"import os, kernels; print([os.environ.get(name) for name in {names}])"
    bare = {name: value for name, value in os.environ.items() if name not in names}
    bare["OMP_DISPLAY_ENV"] = "true"  # GCC's runtime prints how it waits
    for own, policy in (({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "active"}, "ACTIVE")):
        done = subprocess.run(
            [sys.executable, "-c", script], env={**bare, **own}, capture_output=True, check=True, text=True
        )  # fmt: skip
        # LLVM's and Intel's runtimes read their variable late; processes inherit it.
        wanted = own or {"KMP_BLOCKTIME": "0"}
        assert done.stdout.strip() == str([wanted.get(name) for name in names])
        if "OMP_WAIT_POLICY" in done.stderr:
            assert f"OMP_WAIT_POLICY = '{policy}'" in done.stderr


def test_dropout_counts_from_the_start_of_each_packed_sequence() -> None:
    """Equal scores, and values that are unit vectors: out shows which probabilities are kept."""
    lengths, heads = (5, 3, 8), 2
    sums = np.cumsum([0, *lengths])
    kept = kernels.dropout_mask((len(lengths), heads, 8, 8), 0.5, 9)
    v = np.repeat(np.concatenate([np.eye(8)[:n] for n in lengths])[:, None], heads, axis=1)
    q = np.zeros((sums[-1], heads, 4))
    out, _ = kernels.flash_attention_varlen_forward(q, q, v, sums, sums, dropout_p=0.5, seed=9)
    for number, length in enumerate(lengths):
        rows = slice(*sums[number : number + 2])
        expected = kept[number, :, :length, :length] / 0.5 / length
        assert_close_arrays(out[rows, :, :length].swapaxes(0, 1), expected, np.float64)
