"""Models that are called between two steps of a training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..module import Module


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """Put a model into evaluation mode within the context, and then back into training if it was there."""
    was_training = model.training
    if was_training:
        model.eval()  # this visits each module
    try:
        yield
    finally:
        if was_training:
            model.train()
