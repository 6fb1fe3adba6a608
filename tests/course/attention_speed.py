"""Whether right attention is fast too; see ``speed``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels
from kernels import launch
from kernels.problem.operands import make_operands

from .speed import assert_faster


@pytest.mark.task5_3
def test_a_tile_is_a_few_products_of_matrices(record_property: Any) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 256, 32)) for _ in range(3))
    problem = kernels.make_problem(q, k, v, rung="flash2")
    operands = make_operands(launch.NUMPY.memory, problem, q, k, v)

    scores = rng.standard_normal((2, 256, 256))
    assert_faster(
        lambda: launch.forward(launch.NUMPY, problem, operands, (64, 64)),
        lambda: np.exp(scores - scores.max(-1, keepdims=True)).sum(-1), 0.05,
        record_property, "the exponentials alone, all at once",
    )  # fmt: skip
