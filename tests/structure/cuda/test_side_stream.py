"""The watch over messages between GPUs, on a driver whose stream ends what a test lets it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minitorch.distributed import side_stream

OKAY = "okay"


class _Counter(np.ndarray[Any, Any]):
    """Memory of the host that a device may write to."""

    device_ctypes_pointer = SimpleNamespace(value=4096)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a driver whose streams do nothing; ``counter`` is the memory in which they count."""
    own = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=OKAY),
        CUstream_flags=SimpleNamespace(CU_STREAM_NON_BLOCKING=1),
        CUevent_flags=SimpleNamespace(CU_EVENT_DISABLE_TIMING=1),
        CUstream=lambda number: number,
        CUdeviceptr=lambda address: address,
        cuStreamCreate=lambda flags: (OKAY, 7),
        cuEventCreate=lambda flags: (OKAY, 8),
        cuEventRecord=lambda event, stream: (OKAY,),
        cuStreamWaitEvent=lambda stream, event, flags: (OKAY,),
        cuStreamWriteValue32=lambda *call: (OKAY, own.writes.append(call)),
        writes=[], exits=[], counter=np.zeros(1, np.uint32).view(_Counter),
    )  # fmt: skip
    monkeypatch.setattr(side_stream, "driver", own)
    numba = SimpleNamespace(mapped_array=lambda size, dtype: own.counter)
    monkeypatch.setattr(side_stream, "cuda", numba)
    monkeypatch.setattr(side_stream, "LOOK", 0.01)
    monkeypatch.setenv("MINITORCH_RANK_TIMEOUT", "0.2")

    def leave(code: int) -> None:
        own.exits.append(code)
        raise SystemExit  # of the thread

    monkeypatch.setattr(side_stream.os, "_exit", leave)
    return own


def test_messages_that_end_are_forgotten(driver: Any) -> None:
    stream = side_stream.SideStream(0, 2)
    for number in range(1, 6):
        stream.watched(lambda: None)
        stream.lead()
        assert driver.writes[-1] == (7, 4096, number, 0)
        time.sleep(0.08)  # together longer than the limit
        driver.counter[0] = number
    time.sleep(0.1)
    assert not stream._awaited and not driver.exits


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("blocks", [False, True])
def test_a_message_that_does_not_end_ends_the_process(
    driver: Any, capfd: Any, blocks: bool
) -> None:
    stream = side_stream.SideStream(0, 2)
    stream.follow()
    stream.watched(lambda: time.sleep(1.0 if blocks else 0.0))
    assert stream._watch is not None
    stream._watch.join(5.0)
    assert driver.exits == [1]
    assert "rank 0 of 2: waited 0 s for an operation of NCCL" in capfd.readouterr().err
