"""The dtypes of the operands that a rung of attention receives for fp16 and bf16 problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kernels
from kernels import launch
from kernels.runtime.dtypes import FLOAT16, FLOAT32, FLOAT_DTYPES, acc_dtype, is_half
from kernels.runtime.memory import Memory

from ...support.attention.strategies import Case
from ...support.tolerances import assert_close_arrays

pytestmark = pytest.mark.usefixtures("quick_barriers")


def _recording(seen: list[Any], *dtypes: Any) -> launch.Target:
    """Return a target with one rung, the textbook on what it is given, that takes some dtypes."""
    naive = launch.NUMPY.rungs[-1]

    def through(run: Callable[..., None]) -> Callable[..., None]:
        def recorded(problem: Any, tile: Any, operands: Any) -> None:
            mask = None if operands.mask is None else operands.mask.dtype
            seen.append((problem.dtype, operands.q.dtype, operands.lse.dtype, mask))
            wide = {
                name: x.astype(np.float64)
                if isinstance(x, np.ndarray) and name != "mask_batch"
                else x
                for name, x in operands._asdict().items()
            }
            own = operands.having(**wide)
            run(problem, tile, own)
            for name in ("out", "lse", "lse_rest", "dq", "dk", "dv"):
                if wide[name] is not None:
                    getattr(operands, name)[...] = wide[name]

        return recorded

    rung = launch.Rung(
        "naive", through(naive.forward), through(naive.backward), naive.tile, naive.backward_tile,
        dtypes=dtypes,
    )  # fmt: skip
    return launch.Target("numpy", Memory(), (rung,), launch.NUMPY.mask_gradient)


@pytest.mark.parametrize(
    ("own", "precision", "taken"),
    [
        pytest.param(FLOAT16, None, FLOAT16, id="16 bits as they are"),
        pytest.param(FLOAT32, "float16", FLOAT16, id="float32 narrowed by permission"),
    ],
)
def test_a_rung_that_knows_16_bits_gets_them(own: Any, precision: Any, taken: Any) -> None:
    rng = np.random.default_rng(9)
    q, k, v, dout = (rng.standard_normal((2, 5, 4)).astype(own) for _ in range(4))
    mask = rng.standard_normal((5, 5)).astype(own)
    case = Case(q, k, v, dout, {"attn_mask": mask}, (1, 1))
    seen: list[Any] = []
    results = case.run(_recording(seen, FLOAT16), precision=precision)
    assert seen == [(taken, taken, FLOAT32, FLOAT32)] * 2
    assert {name: x.dtype for name, x in results.items()} == {
        name: acc_dtype(own) if name == "lse" else own for name in results
    }
    for name, expected in case.oracle().items():
        got = results[name].astype(np.float16) if name != "lse" else results[name]
        if name == "lse":
            np.testing.assert_allclose(got, expected, atol=4e-3)
        else:
            assert_close_arrays(got, expected, FLOAT16, what=name, size=3.0)


def test_a_rung_that_does_not_know_a_dtype_says_which_it_knows() -> None:
    q = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match="takes operands of float16, or a precision that allows"):
        _recording([], FLOAT16).pick(kernels.make_problem(q, q, q))
    for dtype in FLOAT_DTYPES:  # a target of float32 and float64 takes 16 bits as float32
        other = q.astype(dtype)
        taken = launch.CPU.rungs[0].taken(kernels.make_problem(other, other, other))
        assert taken is not None and taken.dtype == (FLOAT32 if is_half(dtype) else dtype)
