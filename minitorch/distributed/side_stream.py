"""A CUDA stream for messages, concurrent with the kernels of the default stream, and its watchdog."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from kernels.runtime.targets import cuda, driver

from .waiting import LOOK, TIMEOUT_VARIABLE, announce, timeout_of_environment


class SideStream:
    """A stream that is concurrent with the default stream.

    A thread monitors the work on it.  If no work has ended for too long, the thread ends the process, and
    the launcher ends the others.  The main thread may be waiting in a call of the driver or of NCCL at that
    time.  The monitoring thread calls neither, because the calls may block each other.  Instead, the stream
    counts ended work in host memory.

    Args:
        rank: Rank of this process, for the message.
        size: Number of ranks.
    """

    def __init__(self, rank: int, size: int):
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.handle = _made(driver.cuStreamCreate(flags))
        none = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self._default, self._event = driver.CUstream(0), _made(driver.cuEventCreate(none))
        self._rank, self._size, self._timeout = rank, size, timeout_of_environment()
        self._ended = cuda.mapped_array(1, np.uint32)  # counts on the device, read on the host
        self._ended[0] = self._begun = 0
        self._counter = driver.CUdeviceptr(int(self._ended.device_ctypes_pointer.value))
        self._awaited: deque[tuple[int, float]] = deque()
        self._watch: threading.Thread | None = None

    def follow(self) -> None:
        """Make later work on this stream wait for all work on the default stream."""
        self._order(self._default, self.handle)

    def lead(self) -> None:
        """Make later work on the default stream wait for all work on this stream."""
        self._order(self.handle, self._default)

    def watched(self, run: Callable[[], Any]) -> None:
        """Put work on this stream, and monitor it until it has ended.

        Args:
            run: Puts the work on the stream; it may block.
        """
        self._begun += 1
        self._awaited.append((self._begun, time.monotonic()))
        if self._watch is None:
            self._watch = threading.Thread(target=self._look, daemon=True)
            self._watch.start()
        run()
        _made(driver.cuStreamWriteValue32(self.handle, self._counter, self._begun, 0))

    def _order(self, first: Any, then: Any) -> None:
        _made(driver.cuEventRecord(self._event, first))
        _made(driver.cuStreamWaitEvent(then, self._event, 0))

    def _look(self) -> None:
        """Check regularly whether the awaited work has ended; end the process if it takes too long."""
        last = 0.0
        while True:
            time.sleep(LOOK)
            while self._awaited and self._awaited[0][0] <= int(self._ended[0]):
                self._awaited.popleft()
                last = time.monotonic()
            waited = time.monotonic() - max(self._awaited[0][1], last) if self._awaited else 0.0
            if waited > self._timeout:
                reason = (
                    f"waited {waited:.0f} s for an operation of NCCL: another rank hangs, has ended, still "
                    "computes or has called other operations; ranks that wait say so, and it is one that "
                    f"does not; set {TIMEOUT_VARIABLE} to more seconds if a step takes so long"
                )
                announce(self._rank, self._size, reason)
                os._exit(1)


def _made(found: Any) -> Any:
    """Return the result of a call of the driver, or raise its error."""
    error, *results = found
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(
            f"the CUDA driver could not order NCCL's transfers: {error.name}; make the device of "
            "this process the current one before its NcclGroup"
        )
    return results[0] if results else None
