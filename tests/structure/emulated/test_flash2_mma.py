"""FlashAttention-2 on tensor cores without a GPU: its source on an emulated one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from kernels import launch
from kernels.cuda.attention.flash2_mma.tiles import MmaKeyLayout, MmaLayout, MmaRoleLayout
from kernels.cuda.emulator.schedule import WARP, held_back
from kernels.runtime.dtypes import BFLOAT16, FLOAT16, FLOAT32

from ...support.attention import option_table
from ...support.attention.large_scores import NAMES, large_case
from ...support.attention.on_cuda import packed, run
from ...support.attention.option_examples import option_examples
from ...support.attention.strategies import Case
from ...support.device.emulated_gpu import EMULATED_ONLY, emulated_gpu, longer
from ...support.fuzzing.extreme import check as check_extreme
from ...support.fuzzing.extreme import settled

pytestmark = EMULATED_ONLY


class Call(NamedTuple):
    """A call: seq_q, seq_k, head_dim, value_dim; options; layouts by rows and by keys; dtype; device."""

    sizes: tuple[int, int, int, int]
    options: dict[str, Any]
    rows: MmaLayout
    keys: MmaKeyLayout
    dtype: Any = FLOAT16
    cc: tuple[int, int] = (9, 0)


def _bounds(lower: int, upper: int, **more: Any) -> dict[str, Any]:
    """Return options that let row i see the keys from i + lower to i + upper."""
    return {"window_size": (upper - lower, 0), "causal_offset": upper, **more}


def _causal(upper: int, **more: Any) -> dict[str, Any]:
    return {"is_causal": True, "causal_offset": upper, **more}


ONE, TWO = MmaLayout(16, 16, 1), MmaLayout(32, 16, 2)
BY_ONE, BY_TWO = MmaKeyLayout(16, 16, 1, 16), MmaKeyLayout(32, 32, 2, 16)
#: As little as shows every branch of the kernels.
CALLS = {
    "whole tiles": Call((16, 32, 16, 16), {}, ONE, BY_ONE),
    "odd lengths": Call(
        (37, 43, 16, 32), _causal(6), MmaLayout(32, 16, 1), MmaKeyLayout(32, 32, 1, 16),
        BFLOAT16,
    ),
    "a window": Call(
        (50, 61, 48, 16), _bounds(-9, 4), MmaLayout(32, 32, 2), MmaKeyLayout(32, 32, 2, 32)
    ),
    "no whole pieces": Call((9, 21, 13, 7), _causal(2, scale=0.5), ONE, BY_ONE),
    "padded widths, columns in two parts": Call(
        (20, 20, 24, 8), _causal(0, scale=-0.5), ONE, MmaKeyLayout(16, 16, 1, 16, step=32, parts=2),
        BFLOAT16, (8, 0),
    ),
    "every kernel's columns in parts": Call(
        (17, 21, 40, 24), _causal(4), MmaLayout(16, 16, 1, parts=2),
        MmaKeyLayout(16, 16, 1, 16, step=64, parts=4),
    ),
    "rows that see nothing": Call((40, 16, 16, 16), _causal(-20), ONE, BY_ONE),
    "keys that no row sees": Call((16, 45, 16, 24), _causal(3), ONE, BY_ONE),
    "scores far apart": Call((37, 75, 16, 16), {"scale": 6.0}, TWO, BY_TWO),
    "maxima that may grow": Call((37, 75, 16, 16), {}, MmaLayout(32, 16, 2, patience=2), BY_TWO),
    "maxima that may grow, far apart": Call(
        (37, 75, 16, 16), _causal(30, scale=6.0), MmaLayout(32, 16, 2, patience=8), BY_TWO
    ),
    "warps that skip tiles": Call(
        (85, 90, 16, 16), _bounds(-20, 5), MmaLayout(48, 16, 3, skips=True), BY_TWO, BFLOAT16
    ),
    "warps that skip tiles, and maxima that may grow": Call(
        (70, 61, 16, 16), _bounds(-20, -9), MmaLayout(48, 16, 3, patience=2, skips=True), BY_TWO
    ),
    "a wide head": Call((17, 21, 160, 24), _causal(4, scale=0.1), ONE, BY_ONE),
    "two halves": Call((16, 32, 16, 16), {}, ONE, MmaRoleLayout(16, 16, 2, 16, step=32)),
    "two halves, a window": Call(
        (50, 61, 48, 48), _bounds(-9, 4), MmaLayout(32, 32, 2), MmaRoleLayout(32, 16, 4, 16, step=32)
    ),
    "two halves, odd lengths": Call(
        (37, 43, 16, 32), _causal(6), MmaLayout(32, 16, 1), MmaRoleLayout(16, 32, 4, 16, step=64),
        BFLOAT16,
    ),
    "two halves, no whole pieces": Call(
        (9, 21, 13, 7), _causal(2, scale=0.5), ONE, MmaRoleLayout(32, 32, 4, 16, step=32)
    ),
    "two halves, rows and keys that see nothing": Call(
        (40, 45, 16, 16), _causal(-20), ONE, MmaRoleLayout(16, 16, 2, 16, step=32)
    ),
}  # fmt: skip


def _check(call: Call, deterministic: bool) -> None:
    rng = np.random.default_rng(0)
    seq_q, seq_k, head, value = call.sizes
    shapes = (seq_q, head), (seq_k, head), (seq_k, value), (seq_q, value)
    arrays = (rng.standard_normal((1, n, 2, d)).astype(call.dtype) for n, d in shapes)
    turned = [array.transpose(0, 2, 1, 3) for array in arrays]  # heads beside dim
    case = Case(*turned, call.options, (16, 16))  # type: ignore[arg-type]
    with emulated_gpu(call.cc, call.rows, call.keys):
        found = run(case, "flash2_mma", deterministic=deterministic)
    case.check_halves(found, "on tensor cores")


@pytest.mark.parametrize("name", CALLS)
def test_the_kernels_own_source_is_the_textbook(name: str) -> None:
    _check(CALLS[name], name.startswith("two halves"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_the_kernels_own_source_is_the_textbook_in_the_other_mode(name: str) -> None:
    _check(CALLS[name], not name.startswith("two halves"))


@pytest.mark.parametrize("late", [0, 1], ids=["the first warp late", "the second warp late"])
@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "by atomics"])
def test_no_warp_is_too_late_for_the_gradients_of_a_mask(deterministic: bool, late: int) -> None:
    mask = np.random.default_rng(1).random((1, 2, 21, 35)) < 0.6
    call = Call((21, 35, 16, 16), _causal(20, attn_mask=mask, scale=0.5), TWO, BY_TWO)
    with held_back(*range(WARP * late, WARP * late + WARP)):
        _check(call, deterministic)


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "by atomics"])
def test_memory_beyond_the_sequences_is_never_read_into_a_result(deterministic: bool) -> None:
    rng = np.random.default_rng(4)
    shapes = (1, 2, 21, 16), (1, 2, 35, 16), (1, 2, 35, 24), (1, 2, 21, 24)
    arrays = (longer(rng.standard_normal(shape).astype(FLOAT16)) for shape in shapes)
    options = {"is_causal": True, "causal_offset": 20, "deterministic": deterministic}
    case = Case(*arrays, options, (4, 4))  # type: ignore[arg-type]
    with emulated_gpu():
        case.check(run(case, "flash2_mma"), "longer arrays")


@pytest.mark.parametrize("option", sorted(option_table.OPTIONS))
def test_every_option_is_the_textbooks_with_a_negative_scale(option: str) -> None:
    assert option_table.cell(option, launch.CUDA, "flash2_mma", scale=-0.3) == "yes"


def _with_table(score: Any, batch: int, head: int, row: int, col: int, table: Any) -> Any:
    return score + table[row, col] if head else score - 0.5 * table[0, col]


def _by_head(score: Any, batch: int, head: int, row: int, col: int, table: Any) -> Any:
    return score + score * table[0, head]  # all lanes of a warp add to one element


@pytest.mark.parametrize(
    ("rung", "mod"),
    [("flash2_mma", _with_table), ("flash2_split", _with_table), ("flash2_mma", _by_head)],
)
def test_kernels_whose_columns_are_in_parts_learn_a_table_once(rung: str, mod: Any) -> None:
    case, is_half = option_table.OPTIONS["`score_table`"](), rung == "flash2_mma"
    case = replace(case, options={**case.options, "score_mod": mod})
    case = replace(case, q=np.tile(case.q, 14), k=np.tile(case.k, 14))
    case = case.in_dtype(FLOAT16 if is_half else FLOAT32)
    rows, keys = MmaLayout(16, 16, 1, parts=2), MmaKeyLayout(16, 16, 1, 16, step=64, parts=4)
    with emulated_gpu(rows=rows, keys=keys):
        found = run(case, rung)
    wanted, tolerance = case.oracle()["dscore_table"], 0.02 if is_half else 1e-5
    np.testing.assert_allclose(found["dscore_table"], wanted, tolerance, tolerance)


def test_the_gradient_of_a_table_does_not_depend_on_the_order_of_warps() -> None:
    case, found = option_table.OPTIONS["`score_table`"]().in_dtype(FLOAT16), []
    for late in (0, 1):
        with emulated_gpu(), held_back(*range(WARP * late, WARP * late + WARP)):
            found.append(run(case, "flash2_mma")["dscore_table"])
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("scale", [0.45, -0.45])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=["bfloat16", "float32"])
def test_both_passes_compute_the_same_scores(dtype: Any, scale: float) -> None:
    # Scores whose roundings, if they differed, would make e^32 or e^-32 of a probability.
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, 20, 16)) for _ in range(4))
    q[:, 5] *= 2.0**20  # the other rows are small beside it
    case = settled(Case(q * 3e4, k * 3e4, v, dout, {"scale": scale}, (16, 16)).in_dtype(dtype))
    with emulated_gpu():
        check_extreme(case, run(case, "flash2_mma"), "by both passes")


@pytest.mark.parametrize("precision", ["float16", "tf32", "float32"])
@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "by atomics"])
def test_two_halves_of_a_block_are_the_textbooks_through_the_launch(
    deterministic: bool, precision: str
) -> None:
    rng = np.random.default_rng(3)
    shapes = (1, 2, 21, 24), (1, 1, 35, 24), (1, 1, 35, 27), (1, 2, 21, 27)
    options = {"is_causal": True, "causal_offset": 14, "enable_gqa": True}
    case = Case(*(rng.standard_normal(shape) for shape in shapes), options, (4, 4))  # type: ignore[arg-type]
    is_half, has_terms = precision == "float16", precision == "float32"
    case = replace(case, dlse=rng.standard_normal((1, 2, 21)))
    case = case.in_dtype(FLOAT16 if is_half else FLOAT32)
    own: dict[str, Any] = {} if is_half else {"precision": precision}
    sizes = (16, 32, 4, 16) if has_terms else (16, 16, 2, 16)
    halves = MmaRoleLayout(*sizes, step=64 if has_terms else 32)
    name = "flash2_mma" if is_half else "flash2_split"
    with emulated_gpu(keys=halves):
        found = run(case, name, deterministic=deterministic, **own)
    wanted, tolerance = case.oracle(), 1e-5 if has_terms else 0.01
    for name in ("out", "lse", "dq", "dk", "dv"):
        np.testing.assert_allclose(
            found[name], wanted[name], tolerance, 2 * tolerance, err_msg=name
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=["bfloat16", "float32"])
def test_large_scores_are_the_textbooks_through_the_launch(name: str, dtype: Any) -> None:
    case = large_case(name, dtype, 5, 35)
    with emulated_gpu():
        for deterministic in (True, False):
            found = run(case, "flash2_mma", deterministic=deterministic)
            case.check(found, name)


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "by atomics"])
def test_packed_sequences_end_where_tiles_do_not(deterministic: bool) -> None:
    # Empty ones, so that both kinds of tiles have empty ones behind them.
    lengths = (17, 0, 3, 17, 0, 0, 0), (21, 9, 1, 14, 0, 0, 0)
    case = packed(0, *lengths, (16, 24), {}).in_dtype(FLOAT16)
    case.dlse = None
    rows, cols, _ = case.alone(2)
    case.q[:, rows] = case.k[:, cols] = case.dout[:, rows] = np.nan  # of the third sequence alone
    case.v[:, cols] = np.inf
    with emulated_gpu((9, 0) if deterministic else (8, 0)):
        found = run(case, "flash2_mma", deterministic=deterministic)
    _, cols, _ = case.alone(1)  # whose keys no row reads
    assert not found["dk"][:, cols].any() and not found["dv"][:, cols].any()
    for number in (0, 3):
        rows, cols, alone = case.alone(number)
        own = {name: found[name][:, rows] for name in ("out", "lse", "dq")}
        alone.check_halves(own | {n: found[n][:, cols] for n in ("dk", "dv")}, f"of {number}")


def test_all_options_together_are_the_textbooks_through_the_launch() -> None:
    rng = np.random.default_rng(5)
    shapes = (1, 4, 37, 16), (1, 2, 45, 16), (1, 2, 45, 24), (1, 4, 37, 24)
    options = option_examples(4, 37, 45, np.float64)["everything"] | {
        "is_causal": True, "causal_offset": 5, "enable_gqa": True, "deterministic": False,
    }  # fmt: skip
    case = Case(*(rng.standard_normal(shape) for shape in shapes), options, (4, 4))  # type: ignore[arg-type]
    case = replace(case, dlse=rng.standard_normal((1, 4, 37))).in_dtype(FLOAT16)
    with emulated_gpu():
        case.check(run(case, "flash2_mma"), "all options")
