"""The watch over messages between GPUs, on a driver whose events end when a test says so."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from minitorch.distributed import side_stream

OKAY, NOT_READY = "okay", "not ready"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a driver of events that end if they are among ``ended``."""
    events = iter(range(100))
    own = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=OKAY, CUDA_ERROR_NOT_READY=NOT_READY),
        CUstream_flags=SimpleNamespace(CU_STREAM_NON_BLOCKING=1),
        CUevent_flags=SimpleNamespace(CU_EVENT_DISABLE_TIMING=1),
        CUstream=lambda number: number,
        cuStreamCreate=lambda flags: (OKAY, 7),
        cuEventCreate=lambda flags: (OKAY, next(events)),
        cuEventRecord=lambda event, stream: (OKAY,),
        cuStreamWaitEvent=lambda stream, event, flags: (OKAY,),
        cuEventQuery=lambda event: (OKAY if event in own.ended else NOT_READY,),
        cuEventDestroy=lambda event: own.destroyed.append(event),
        ended=set(), destroyed=[], exits=[],
    )  # fmt: skip
    monkeypatch.setattr(side_stream, "driver", own)
    monkeypatch.setattr(side_stream, "cuda", SimpleNamespace(select_device=lambda number: None))
    monkeypatch.setattr(side_stream, "current_device", lambda: 0)
    monkeypatch.setattr(side_stream, "LOOK", 0.01)
    monkeypatch.setenv("MINITORCH_RANK_TIMEOUT", "0.2")

    def leave(code: int) -> None:
        own.exits.append(code)
        raise SystemExit  # of the thread

    monkeypatch.setattr(side_stream.os, "_exit", leave)
    return own


def test_messages_that_end_are_forgotten(driver: Any) -> None:
    stream = side_stream.SideStream(0, 2)
    for event in range(1, 6):  # the first one orders what begins
        stream.lead()
        time.sleep(0.08)  # together longer than the limit
        driver.ended.add(event)
    time.sleep(0.1)
    assert driver.destroyed == [1, 2, 3, 4, 5] and not driver.exits


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_message_that_does_not_end_ends_the_process(driver: Any, capfd: Any) -> None:
    stream = side_stream.SideStream(0, 2)
    stream.follow()
    stream.lead()
    assert stream._watch is not None
    stream._watch.join(5.0)
    assert driver.exits == [1]
    assert "rank 0 of 2: waited 0 s for an operation of NCCL" in capfd.readouterr().err
