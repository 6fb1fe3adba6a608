"""A small training whose steps can be captured, and a device without a GPU to capture them on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

import minitorch
from kernels.cuda.runtime.recorder import active
from kernels.runtime.targets import EMULATED
from minitorch.training.captured_step import RECORDED, WARM_UP

from ..device.fake_device import FakeDriver, fake_device

VOCABULARY, CONTEXT, BATCH, STEPS = 40, 16, 2, 20
#: Calls before the first replay.
FIRST = WARM_UP + RECORDED


def idle_device() -> Iterator[FakeDriver]:
    """Yield a device that computes nothing; no recording may be left when the test ends.

    The body of a fixture: ``device = pytest.fixture(idle_device)``.
    """
    if EMULATED:
        pytest.skip("the emulated GPU has no driver")
    with fake_device() as own:
        yield own
        assert active() is None, "a recording was left behind"


def made_steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list to which each step that is made by ``minitorch.graph_step`` from now on is appended."""
    made, real = list[Any](), minitorch.graph_step

    def graph_step(fn: Any, **options: Any) -> Any:
        made.append(real(fn, **options))
        return made[-1]

    monkeypatch.setattr(minitorch, "graph_step", graph_step)
    return made


def step_of(model: Any, optimizer: Any) -> Callable[..., minitorch.Tensor]:
    """Return what takes a step of training on a batch and returns the loss before it."""

    def step(*batch: Any) -> minitorch.Tensor:
        optimizer.zero_grad()
        loss = model.loss(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def assert_captured(model: Any, batches: Iterable[Iterable[Any]]) -> None:
    """Assert that steps of AdamW on ``FIRST`` or more batches of ids and targets are captured."""
    captured = minitorch.graph_step(
        step_of(model, minitorch.AdamW(model.parameters(), max_norm=1.0))
    )
    for batch in batches:
        captured(*batch)
    assert captured.is_captured and captured.why_eager is None


class Training:
    """A small model in training; equal ones take equal steps.

    Args:
        precision: Of the model.
        dropout: Everywhere, in attention too.
        clip: Norm of the gradients, or None.
        recompute: See :class:`minitorch.DecoderLM`.
        captured: Whether steps are captured.
    """

    def __init__(
        self, precision: str, dropout: float, clip: float | None, recompute: bool, captured: bool
    ):
        minitorch.manual_seed(5)
        self.model = minitorch.DecoderLM(
            VOCABULARY, 64, 2, CONTEXT, p_dropout=dropout, n_layer=1, attention_dropout=dropout,
            backend=minitorch.CudaBackend, precision=precision, recompute=recompute,
        )  # fmt: skip
        self.optimizer = minitorch.AdamW(self.model.parameters(), max_norm=clip)
        self.step = step_of(self.model, self.optimizer)
        self.captured: Any = minitorch.graph_step(self.step) if captured else None
        rng = np.random.default_rng(2)
        self.batches = rng.integers(0, VOCABULARY, (STEPS, 2, BATCH, CONTEXT))
        minitorch.manual_seed(6)

    def take(self, number: int) -> minitorch.Tensor:
        """Take the step of a number, with a learning rate of its own."""
        self.optimizer.lr = 1e-3 / (1 + number)
        return (self.captured or self.step)(*self.batches[number])


#: Precision, dropout, norm and whether activations are recomputed.
KINDS = [("bfloat16", 0.0, None, False), ("bfloat16", 0.1, 1.0, True), ("float32", 0.1, 0.5, False)]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
