"""Learning rates that change with the number of steps, after a linear rise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kernels.common.arguments import not_negative, number, shown, whole

from ..optim import Optimizer


class Scheduler:
    """Set the learning rates of an optimiser: call ``step`` after each step of the optimiser.

    A subclass defines ``rate``.  The rates of the first step are set when the scheduler is made.

    Args:
        optimizer: The optimiser.  Its rates so far become the highest rates of the schedule.
        warmup_steps: Number of steps over which the rates rise linearly to the highest rates.
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int = 0):
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"a scheduler needs an optimiser, got {shown(optimizer)}")
        self.optimizer: Any = optimizer
        self.warmup_steps = whole("warmup_steps", warmup_steps, 0)
        self._own = [rates for _, rates in self.optimizer._groups if "lr" in rates]
        self._highest = [self.optimizer.lr, *(rates["lr"] for rates in self._own)]
        self.steps = 0
        self._set()

    def rate(self, highest: float, step: int) -> float:
        """Return the learning rate of a step, counted from 0 after the warm-up."""
        raise NotImplementedError("define rate in the subclass of Scheduler")

    def step(self) -> None:
        """Set the learning rates of the next step."""
        self.steps += 1
        self._set()

    def _set(self) -> None:
        after = self.steps - self.warmup_steps
        self.optimizer.lr, *others = (
            self.rate(highest, after)
            if after >= 0
            else highest * (self.steps + 1) / (self.warmup_steps + 1)
            for highest in self._highest
        )
        for rates, rate in zip(self._own, others, strict=True):
            rates["lr"] = rate

    def get_last_lr(self) -> list[float]:
        """Return the current learning rate of each group of parameters."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the highest rates, in JSON types."""
        return {"steps": self.steps, "highest": [*self._highest]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of a scheduler of the same arguments.

        Raises:
            ValueError: If the state is that of an optimiser with other groups.
        """
        steps, highest = whole("steps", state["steps"], 0), [*state["highest"]]
        if len(highest) != len(self._highest):
            raise ValueError(
                f"a state with {len(highest)} learning rates does not fit an optimiser with "
                f"{len(self._highest)}; make the optimiser with the same groups"
            )
        self.steps, self._highest = steps, [not_negative("lr", rate) for rate in highest]
        self._set()


class LambdaLR(Scheduler):
    """Multiply the learning rates by a function of the number of steps.

    Args:
        optimizer: The optimiser.  Its rates so far become the highest rates of the schedule.
        lr_lambda: Returns the factor of a step, counted from 0 after the warm-up.
        warmup_steps: Number of steps over which the rates rise linearly to the highest rates.
    """

    def __init__(
        self, optimizer: Optimizer, lr_lambda: Callable[[int], float], warmup_steps: int = 0
    ):
        if not callable(lr_lambda):
            raise TypeError(f"lr_lambda must be a function of a step, got {shown(lr_lambda)}")
        self.lr_lambda = lr_lambda
        super().__init__(optimizer, warmup_steps)

    def rate(self, highest: float, step: int) -> float:
        """Return the product of the highest rate and the factor."""
        return highest * number("the result of lr_lambda", self.lr_lambda(step))


class StepLR(Scheduler):
    """Multiply the learning rates by ``gamma`` once every ``step_size`` steps.

    Args:
        optimizer: The optimiser.  Its rates so far become the highest rates of the schedule.
        step_size: Number of steps of one rate.
        gamma: The factor.
        warmup_steps: Number of steps over which the rates rise linearly to the highest rates.
    """

    def __init__(
        self, optimizer: Optimizer, step_size: int, gamma: float = 0.1, warmup_steps: int = 0
    ):
        self.step_size = whole("step_size", step_size, 1)
        self.gamma = not_negative("gamma", gamma)
        super().__init__(optimizer, warmup_steps)

    def rate(self, highest: float, step: int) -> float:
        """Return the rate after the factors so far."""
        return highest * self.gamma ** (step // self.step_size)


class CosineAnnealingLR(Scheduler):
    """Lower the learning rates along half a cosine, and keep them at its end.

    Args:
        optimizer: The optimiser.  Its rates so far become the highest rates of the schedule.
        T_max: Number of steps after the warm-up until the end.
        eta_min: The learning rate at the end.
        warmup_steps: Number of steps over which the rates rise linearly to the highest rates.

    Source: Loshchilov and Hutter (2017), SGDR, equation 5, without restarts.
    """

    def __init__(
        self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0, warmup_steps: int = 0
    ):
        self.T_max = whole("T_max", T_max, 1)
        self.eta_min = not_negative("eta_min", eta_min)
        super().__init__(optimizer, warmup_steps)

    def rate(self, highest: float, step: int) -> float:
        """Return the rate on the cosine."""
        turn = math.cos(math.pi * min(step / self.T_max, 1.0))
        return self.eta_min + (highest - self.eta_min) * (1.0 + turn) / 2.0
