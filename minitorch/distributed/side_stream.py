"""A CUDA stream on which messages travel beside the kernels of the default one, and a watch over them."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Any

from kernels.runtime.targets import cuda, current_device, driver

from .waiting import LOOK, TIMEOUT_VARIABLE, announce, timeout_of_environment


class SideStream:
    """A stream beside the default one.

    What the default stream waits for is watched by a thread: if nothing of it has ended for too long, the
    process ends, and the launcher ends the others.  The host may be waiting for the device meanwhile, so
    that it cannot look at the clock itself.

    Args:
        rank: That uses it, for the line that says so.
        size: Number of ranks.
    """

    def __init__(self, rank: int, size: int):
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.handle = self._made(driver.cuStreamCreate(flags))
        self._rank, self._size, self._timeout = rank, size, timeout_of_environment()
        self._default, self._begun = driver.CUstream(0), self._event()
        self._awaited: deque[tuple[Any, float]] = deque()
        self._watch: threading.Thread | None = None

    def follow(self) -> None:
        """Put what follows on this stream behind what has been launched on the default one."""
        self._order(self._default, self.handle, self._begun)

    def lead(self) -> None:
        """Put what follows on the default stream behind what is on this one."""
        event = self._event()
        self._order(self.handle, self._default, event)
        self._awaited.append((event, time.monotonic()))
        if self._watch is None:
            self._watch = threading.Thread(target=self._look, args=(current_device(),), daemon=True)
            self._watch.start()

    def _event(self) -> Any:
        return self._made(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def _order(self, first: Any, then: Any, event: Any) -> None:
        self._made(driver.cuEventRecord(event, first))
        self._made(driver.cuStreamWaitEvent(then, event, 0))

    def _look(self, device: int) -> None:
        """Look now and then whether what is awaited has ended; end the process if it takes too long."""
        cuda.select_device(device)  # on this thread
        last = 0.0
        while True:
            time.sleep(LOOK)
            while self._awaited and self._has_ended(self._awaited[0][0]):
                driver.cuEventDestroy(self._awaited.popleft()[0])
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

    @staticmethod
    def _has_ended(event: Any) -> bool:
        (error,) = driver.cuEventQuery(event)
        return error != driver.CUresult.CUDA_ERROR_NOT_READY  # other errors are raised elsewhere

    @staticmethod
    def _made(found: Any) -> Any:
        error, *results = found
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(
                f"the CUDA driver could not order NCCL's transfers: {error.name}; make the device of "
                "this process the current one before its NcclGroup"
            )
        return results[0] if results else None
