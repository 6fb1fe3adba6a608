"""Schedules of the learning rate: the rates of each step, groups of parameters, and states."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitorch import SGD, CosineAnnealingLR, LambdaLR, Parameter, StepLR, tensor

#: Makes a scheduler, and the factor of a step after the warm-up.
SCHEDULES: dict[str, tuple[Callable[..., Any], Callable[[int], float]]] = {
    "lambda": (lambda o, w: LambdaLR(o, lambda n: 1 / (1 + n), w), lambda n: 1 / (1 + n)),
    "step": (lambda o, w: StepLR(o, 3, 0.5, w), lambda n: 0.5 ** (n // 3)),
    "cosine": (
        lambda o, w: CosineAnnealingLR(o, 4, warmup_steps=w),
        lambda n: (1 + math.cos(math.pi * min(n, 4) / 4)) / 2,
    ),
}


def grouped() -> SGD:
    first, second = (Parameter(tensor([1.0])) for _ in range(2))
    return SGD([{"params": [first], "lr": 0.5}, {"params": [second]}], lr=2.0)


@pytest.mark.parametrize(("make", "factor"), SCHEDULES.values(), ids=[*SCHEDULES])
@given(st.integers(0, 4), st.integers(0, 9))
def test_rates_rise_linearly_and_follow_the_schedule(
    make: Any, factor: Any, warmup: int, steps: int
) -> None:
    optimiser = grouped()
    scheduler = make(optimiser, warmup)
    for _ in range(steps):
        optimiser.step()
        scheduler.step()
    expected = (steps + 1) / (warmup + 1) if steps < warmup else factor(steps - warmup)
    assert scheduler.get_last_lr() == pytest.approx([0.5 * expected, 2.0 * expected])
    assert optimiser.lr == scheduler.get_last_lr()[1]
    resumed = grouped()
    make(resumed, warmup).load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    assert [group["lr"] for group in resumed.param_groups] == scheduler.get_last_lr()


def test_a_cosine_ends_at_the_least_rate() -> None:
    optimiser = SGD([Parameter(tensor([1.0]))], lr=1.0)
    scheduler = CosineAnnealingLR(optimiser, 2, eta_min=0.25)
    rates = [optimiser.lr]
    for _ in range(3):
        scheduler.step()
        rates.append(optimiser.lr)
    assert rates == pytest.approx([1.0, 0.625, 0.25, 0.25])


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: StepLR(Parameter(1.0), 2), TypeError, "needs an optimiser"),  # type: ignore[arg-type]
        (lambda: StepLR(grouped(), 0), ValueError, "step_size"),
        (lambda: CosineAnnealingLR(grouped(), 2, -1.0), ValueError, "eta_min"),
        (lambda: LambdaLR(grouped(), 0.5), TypeError, "a function of a step"),  # type: ignore[arg-type]
        (
            lambda: StepLR(grouped(), 2).load_state_dict({"steps": 0, "highest": [1.0]}),
            ValueError,
            "same groups",
        ),
    ],
)
def test_an_invalid_schedule_is_refused(
    call: Callable[[], Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        call()
