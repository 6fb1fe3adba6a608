"""How often the CPU compiles a user function: once for all first derivatives, and once for second ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import event

import kernels


def test_a_score_mod_is_compiled_once_for_each_order_of_derivatives() -> None:
    def bent(score: float, batch: int, head: int, row: int, col: int) -> float:
        return score + 0.25 * score * score / (1 + row)

    q = np.random.default_rng(0).standard_normal((1, 5, 4))
    options: dict[str, Any] = {"score_mod": bent, "rung": "flash2"}

    def passes(function: Any, *operands: Any) -> tuple[int, Any]:
        with event.install_recorder("numba:compile") as recorder:
            found = function(*operands, **options)
        starts = [one.data["dispatcher"] for _, one in recorder.buffer if one.is_start]
        return sum(x.py_func.__name__ == "user_pass" for x in starts), found

    count, (out, lse) = passes(kernels.flash_attention_forward, q, q, q)
    assert count == 1
    assert passes(kernels.flash_attention_backward, out, q, q, q, out, lse)[0] == 0
    assert passes(kernels.flash_attention_jvp, q, q, q, q, q, q)[0] == 0
    second = kernels.flash_attention_double_backward
    assert [passes(second, q, q, q, out, q, q, q)[0] for _ in range(2)] == [1, 0]
