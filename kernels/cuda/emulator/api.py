"""The names of ``numba.cuda`` for the emulated GPU; ``kernels.runtime.targets`` puts them in its place."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from functools import wraps
from types import FunctionType, SimpleNamespace
from typing import Any

import numba
import numpy as np

from . import tensor_maps as tensor_maps  # beyond module 5
from .arrays import DeviceArray
from .arrays import device_array as device_array
from .arrays import device_array_like as device_array_like
from .arrays import to_device as to_device
from .device import DEVICE
from .gpu import run
from .intrinsics import LIBDEVICE, known_intrinsic


class Dispatcher:
    """A function of ``cuda.jit``: a kernel that ``[grid, block]`` launches, or a function of the device.

    Args:
        function: The function.
        options: Those of ``cuda.jit``.
        checks: Whether to look for races.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], checks: bool = True):
        self.py_func, self.targetoptions, self._checks = function, options, checks
        self.__name__, self.__qualname__ = function.__name__, function.__qualname__
        self.__doc__, self.__module__ = function.__doc__, function.__module__
        self.__wrapped__ = function

    def __call__(self, *args: Any) -> Any:
        if not self.targetoptions.get("device"):
            raise ValueError(
                f"the kernel {self.__name__} is launched on a grid of blocks: "
                f"{self.__name__}[blocks, threads](…)"
            )
        return self.py_func(*args)

    def __getitem__(self, config: Any) -> Callable[..., None]:
        grid, block, *rest = config
        shared_bytes = rest[1] if len(rest) > 1 else 0
        return lambda *args: run(self.py_func, grid, block, shared_bytes, args, self._checks)

    def get_regs_per_thread(self) -> None:
        """Return that a kernel has no registers here."""

    def forall(self, count: int, tpb: int = 0, stream: Any = 0, sharedmem: int = 0) -> Any:
        """Return the launch of one thread for each of ``count`` elements."""
        threads = tpb or 128
        return self[max(-(-count // threads), 1), threads, stream, sharedmem]


def jit(func_or_sig: Any = None, device: bool = False, checks: bool = True, **options: Any) -> Any:
    """Compile a kernel, or with ``device`` a function that kernels call."""

    def compile_(function: Any) -> Any:
        function = getattr(function, "py_func", function)
        return Dispatcher(function, {**options, "device": device}, checks)

    return compile_(func_or_sig) if isinstance(func_or_sig, FunctionType) else compile_


class Stream:
    """A stream, on which everything is done at once."""

    handle = SimpleNamespace(value=0)

    def synchronize(self) -> None:
        pass


class Event:
    """An event, which keeps the time at which it was recorded."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self, stream: Any = 0) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    wait = query = synchronize

    def elapsed_time(self, other: Event) -> float:
        """Return the milliseconds from this event to another."""
        return 1e3 * (other._at - self._at)


class Gpu:
    """The properties of the device.

    Attributes:
        compute_capability: The one that MINITORCH_EMULATE names ("9.0"); otherwise one without tensor
            cores.
    """

    id, name, MULTIPROCESSOR_COUNT = 0, "the emulated GPU", 2
    MAX_SHARED_MEMORY_PER_BLOCK, MAX_THREADS_PER_BLOCK, WARP_SIZE = 48 << 10, 1024, 32
    _named = re.fullmatch(r"(\d+)\.(\d)", os.environ.get("MINITORCH_EMULATE", ""))
    compute_capability = (int(_named[1]), int(_named[2])) if _named else (5, 0)

    @property
    def MAX_SHARED_MEMORY_PER_BLOCK_OPTIN(self) -> int:
        return {(5, 0): 96, (8, 0): 163, (9, 0): 227}.get(self.compute_capability, 99) << 10


GPU = Gpu()
gpus = [GPU]


def compile(*_: Any, **__: Any) -> Any:
    raise RuntimeError("the emulated GPU compiles nothing; start Python with MINITORCH_EMULATE=0")


def is_available() -> bool:
    return True


def cuda_error() -> None:
    return None


def get_current_device() -> Any:
    return GPU


select_device = get_current_device


def synchronize() -> None:
    pass


def stream() -> Stream:
    return Stream()


default_stream = external_stream = per_thread_default_stream = stream


def event(timing: bool = True) -> Event:
    return Event()


def current_context(device: int = 0) -> Any:
    """Return the context, whose memory is the host's."""
    return SimpleNamespace(
        device=GPU, synchronize=synchronize, get_memory_info=lambda: (1 << 34, 1 << 34),
        memory_manager=None,
    )  # fmt: skip


def is_cuda_array(obj: Any) -> bool:
    return isinstance(obj, DeviceArray)


def pinned_array(shape: Any, dtype: Any = np.float64, **_: Any) -> Any:
    return np.empty(shape, dtype)


def install() -> None:
    """Put this module in the place of ``numba.cuda``."""
    module, earlier = sys.modules[__name__], sys.modules.get("numba.cuda")
    if earlier is not None:  # someone has imported it, and named it
        own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        vars(earlier).update(own)
    sys.modules["numba.cuda"] = numba.cuda = module  # type: ignore[attr-defined]


def intrinsic(define: Callable[..., Any]) -> Callable[..., Any]:
    """Return what an intrinsic does; an instruction is found when a kernel names it."""

    @wraps(define)
    def outside(*args: Any) -> Any:
        raise RuntimeError(
            f"{define.__name__} is an instruction of the GPU, which only a kernel may use"
        )

    return known_intrinsic(define) or outside


extending = SimpleNamespace(intrinsic=intrinsic)
libdevice = SimpleNamespace(**LIBDEVICE)
cudadrv = SimpleNamespace(devicearray=SimpleNamespace(DeviceNDArray=DeviceArray))
devicearray = cudadrv.devicearray


def __getattr__(name: str) -> Any:
    """Return a name that a kernel uses, ``threadIdx`` for instance."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(DEVICE, name)
