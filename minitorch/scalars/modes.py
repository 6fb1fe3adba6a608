"""Modes of automatic differentiation, each for the current thread."""

from __future__ import annotations

import threading
from collections.abc import Callable  # beyond module 5
from contextlib import ContextDecorator
from typing import Any


class _Modes(threading.local):
    """The autodiff modes of the current thread.

    Attributes:
        recording: Whether functions of tensors record their history; see :class:`no_grad`.
    """

    recording = True
    dropping = True  # in dropout layers; see without_dropout  # beyond module 5
    drawing = True  # of initial weights; see without_drawing  # beyond module 5
    #: What each function calls: checks of minitorch.detect_anomaly, a trace of its derivative, or None.
    observer: Any = None  # beyond module 5
    context: Any = None  # of attention; see minitorch.models.contexts  # beyond module 5
    # Called with each tensor whose gradient a backward pass has completed.
    leaf_is_done: Callable[[Any], None] | None = None  # beyond module 5


modes = _Modes()


class Switch(ContextDecorator):
    """Set a global mode, such as that of ``no_grad``, within a context or a decorated function.

    Attributes:
        mode: The name of the mode.
        value: Its value within the context.
    """

    mode: str
    value: Any

    def __init__(self) -> None:
        self._before: list[Any] = []  # one for each time that the context is entered

    def _recreate_cm(self) -> Switch:  # a decorated function may run in several threads
        return type(self)()

    def __enter__(self) -> None:
        self._before.append(getattr(modes, self.mode))
        setattr(modes, self.mode, self.value)

    def __exit__(self, *_: object) -> None:
        setattr(modes, self.mode, self._before.pop())


class no_grad(Switch):
    """Disable gradient recording within the context, or within the function that it decorates.

    In this thread, functions of tensors return constants and save nothing for a backward pass. Use
    it for inference, such as computing the loss on held-out text or the next token. It has no
    effect on Scalars, which always record their history.
    """

    mode, value = "recording", False


class recording(Switch):  # beyond module 5
    """Enable gradient recording within the context, even inside ``no_grad``."""

    mode, value = "recording", True


class without_dropout(Switch):  # beyond module 5
    """Disable dropout layers within the context, for callers that apply dropout themselves."""

    mode, value = "dropping", False


class without_drawing(Switch):  # beyond module 5
    """Initialise new layers with zeros within the context, for callers that then load their weights."""

    mode, value = "drawing", False


class _Writes:  # beyond module 5
    """The number of writes into tensors so far and 1; :mod:`minitorch.backends.writes` counts them."""

    count = 1


writes = _Writes()  # beyond module 5


def is_recording() -> bool:  # beyond module 5
    """Tell whether functions of tensors record how they were applied; see :class:`no_grad`."""
    return modes.recording
