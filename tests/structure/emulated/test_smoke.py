"""The program for compute-sanitizer, without a GPU: on the CPU's rung and on the emulated GPU."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import launch

from ...support.emulated.hopper import emulated_hopper_backward
from ...support.emulated.target import EMULATED
from ...support.smoke.attention import cases, check, in_float8, in_half


@pytest.mark.parametrize("option", ["sink", "floating mask", "packed"])
def test_options_are_compared_with_all_their_gradients(option: str) -> None:
    rng = np.random.default_rng(0)
    case = next(case for case in cases(rng) if case.name == f"flash2, {option}")
    check(case, rng, launch.CPU)


def test_hoppers_rung_is_compared_in_16_bits_and_in_float8() -> None:
    rng = np.random.default_rng(0)
    _, smallest, *_ = in_half(rng, "flash3_wgmma")
    *_, float8 = in_float8("flash3_wgmma")
    float8.asked["heads"] = 2
    with emulated_hopper_backward():
        for case in (smallest, float8):
            check(case, rng, EMULATED)
