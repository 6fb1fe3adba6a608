"""The recording of this thread, if its call is recorded, and what a call does differently then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager  # beyond module 5
from typing import TYPE_CHECKING, Any

import numpy as np  # beyond module 5

from kernels.runtime.cuda_errors import CaptureError  # beyond module 5

if TYPE_CHECKING:  # beyond module 5
    from kernels.cuda.runtime.recordings import Recording


class _Thread(threading.local):
    recording: Recording | None = None


thread = _Thread()


def active() -> Recording | None:
    """Return the recording of the call that this thread makes, or None."""
    return thread.recording


@contextmanager  # beyond module 5
def recorded_by(recording: Recording | None) -> Iterator[None]:  # beyond module 5
    """Record the work of this thread, or with None leave it out, as what is done once and then kept."""
    before, thread.recording = thread.recording, recording
    try:
        yield
    finally:
        thread.recording = before


def drawn(again: Callable[[], int]) -> int:
    """Return a number that differs in every call, from the function that draws each of them."""
    number = again()
    if (recording := thread.recording) is not None:  # beyond module 5
        recording.is_spoilt = True
        recording.draws.setdefault(number, again)  # recomputation draws the same number again
    return number


def between_launches(  # beyond module 5
    act: Callable[[], None], *arrays: Any
) -> None:
    """Do work now that each replay repeats at the same place among the launches.

    Args:
        act: A function that enqueues work other than our kernels, such as a message to another device.
        *arrays: Arrays on the device that it reads or writes.
    """
    act()
    if (recording := thread.recording) is not None:
        recording.is_spoilt = True
        for array in arrays:
            recording.origin(array, "a message to another device")
        recording.steps.append(act)


def computed(compute: Callable[[], Any], *sources: Any) -> Any:
    """Return an array that the host computes from ``sources``; a replay computes it again.

    The function ``compute`` returns a new array each time, always of the same shape.
    """
    result = compute()
    recording = thread.recording
    if recording is not None and any(map(recording.is_live, sources)):  # beyond module 5
        recording.live.append(result)
        recording.computations.append(lambda: np.copyto(result, compute()))
    return result


def refuse(what: str, remedy: str, on_host: bool = False) -> None:
    """Raise an error if this thread records a call for a graph.

    Args:
        what: What the function does, such as "reads numbers of the device".
        remedy: What to do instead.
        on_host: Whether this happens on the host, which is allowed in a function without launches.

    Raises:
        CaptureError: In a recorded call; for work on the host, in the last of the recorded calls.
    """
    if (recording := thread.recording) is not None:  # beyond module 5
        recording.is_spoilt = True
        if recording.is_of_graph and not (on_host and recording.before is None):
            raise CaptureError(f"the function {what}, which a CUDA graph cannot hold; {remedy}")
