"""The choice among the CUDA rungs, with the device that the library sees patched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from kernels import launch, make_problem
from kernels.runtime.dtypes import BFLOAT16, FLOAT16, FLOAT32
from kernels.runtime.targets import why_no_cuda


def another_device() -> launch.Target:
    """Return the rungs of a GPU, with nothing cached of their capabilities."""
    return replace(launch.CUDA)


@pytest.mark.skipif(why_no_cuda() is not None, reason="the ladder of a device")
@pytest.mark.emulated
@pytest.mark.parametrize(
    ("dtype", "dim", "options", "expected"),
    [
        (FLOAT16, 64, {}, "flash3_wgmma"),
        (BFLOAT16, 64, {"is_causal": True}, "flash3_wgmma"),
        (FLOAT16, 60, {}, "flash2_mma"),
        (FLOAT16, 64, {"scale": -1.0}, "flash2_mma"),
        (FLOAT16, 64, {"softcap": 2.0}, "flash3_wgmma"),
        (BFLOAT16, 60, {"dropout_p": 0.1, "seed": 1}, "flash2_mma"),
        (FLOAT32, 64, {}, "flash2"),  # too small to be worth splitting
        (FLOAT32, 64, {"precision": "bfloat16"}, "flash3_wgmma"),
        (FLOAT32, 64, {"precision": "tf32"}, "flash2"),
    ],
)
def test_auto_takes_the_fastest_rung_that_can(
    dtype: Any, dim: int, options: dict[str, Any], expected: str
) -> None:
    q = np.ones((1, 2, 8, dim), dtype)
    problem = make_problem(q, q, q, **options)
    with patch("kernels.cuda.device.per_device.why_no_device", lambda needed: None):
        assert another_device().pick(problem).name == expected


@pytest.mark.skipif(why_no_cuda() is not None, reason="the ladder of a device")
@pytest.mark.emulated
@pytest.mark.parametrize("precision", [None, "float32", "tf32"])
def test_auto_splits_float32_where_that_is_worth_it(precision: str | None) -> None:
    q = np.broadcast_to(np.float32(1), (8, 16, 2048, 64))
    few = q[:, :, :1]
    with patch("kernels.cuda.device.per_device.why_no_device", lambda needed: None):
        whole = make_problem(q, q, q, precision=precision)
        assert another_device().pick(whole).name == "flash2_split"
        assert another_device().pick(make_problem(few, q, q, precision=precision)).name == "flash2"
        for name in ("flash2_split", "flash2_mma"):  # the rung that once had both
            named = make_problem(few, q, q, precision=precision, rung=name)
            assert another_device().pick(named).name == "flash2_split"
        wide = q[:2].astype(np.float64)
        assert another_device().pick(make_problem(wide, wide, wide)).name == "flash2"


@pytest.mark.emulated
@pytest.mark.skipif(why_no_cuda() is not None, reason="the ladder of a device")
def test_older_devices_hand_on_and_a_named_rung_says_what_it_needs() -> None:
    q = np.ones((1, 2, 8, 64), FLOAT16)
    ampere = patch("kernels.cuda.device.per_device.compute_capability", lambda: (8, 0))
    with ampere:
        assert another_device().pick(make_problem(q, q, q)).name == "flash2_mma"
        with pytest.raises(ValueError, match=r"flash3_wgmma.*needs compute capability 9\.0.* 8\.0"):
            another_device().pick(make_problem(q, q, q, rung="flash3_wgmma"))
