"""A CUDA device that is none: memory is numbers, launches are noted, and what a graph would do is kept.

What a training step asks of the driver can be looked at without a GPU; nothing is computed.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

import minitorch  # noqa: F401
from kernels.cuda.device import per_device
from kernels.cuda.runtime import arrays, graphs, launcher, pooled
from kernels.cuda.runtime import kernel as runtime_kernel
from kernels.runtime import targets
from kernels.runtime.known_calls import KnownCalls

graph_step_module = sys.modules["minitorch.training.captured_step"]

#: Of the device: as an H200's.
PROPERTIES = SimpleNamespace(
    MAX_SHARED_MEMORY_PER_BLOCK=48 << 10, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=227 << 10,
    MULTIPROCESSOR_COUNT=132, compute_capability=(9, 0), name="none", id=0,
)  # fmt: skip


class Result(enum.IntEnum):
    """What a driver's function returns first."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class Call(NamedTuple):
    """What the driver was asked for: its function's name, and some of the arguments."""

    name: str
    about: Any = None


class Launched(NamedTuple):
    """A launch: the kernel, grid and block, and the packed arguments."""

    kernel: str
    sizes: tuple[int, ...]
    words: tuple[int, ...]


class Address(ctypes.c_void_p):
    """An address as every owner of numba.cuda takes it."""

    def __int__(self) -> int:
        return self.value or 0


#: What the driver returns besides success, where that is all it is asked for.
ANSWERS: dict[str, tuple[int, ...]] = {
    "cuCtxGetDevice": (0,), "cuDeviceGetCount": (1,), "cuDeviceGetAttribute": (1,),
    "cuDeviceGetMemPool": (0,), "cuMemPoolGetAttribute": (1,), "cuMemPoolTrimTo": (),
    "cuCtxSynchronize": (), "cuGraphUpload": (), "cuGraphExecDestroy": (),
}  # fmt: skip


class FakeDriver:
    """``cuda.bindings.driver``, as far as the library asks it.

    Attributes:
        calls: All that it was asked for, allocations and what only asks left out.
        launches: Of kernels, those of graphs too.
        memory: Address → bytes of what is allocated.
    """

    CUresult = Result
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED=115)
    CUmemPool_attribute = SimpleNamespace(CU_MEMPOOL_ATTR_RELEASE_THRESHOLD=4)
    CUstream = CUfunction = CUkernel = cuuint64_t = staticmethod(int)
    CUdeviceptr = Address
    CUDA_KERNEL_NODE_PARAMS = SimpleNamespace

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.launches: list[Launched] = []
        self.memory: dict[int, int] = {}
        self.kernels: list[runtime_kernel.Kernel] = []  # that would have been compiled
        self.names: dict[int, tuple[str, int]] = {}  # handle of a kernel → its name, its slots
        self.nodes: dict[int, dict[int, Launched]] = {}  # graph → node → launch
        self._addresses, self._handles = count(1 << 32, 1 << 28), count(1)

    def kernel(self, name: str, slots: int) -> int:
        """Return the handle of a new kernel."""
        handle = next(self._handles)
        self.names[handle] = name, slots
        return handle

    def cuLaunchKernel(self, function: int, *args: Any) -> tuple[Any, ...]:
        *sizes, _, _, pointers, _ = args
        self.launches.append(self._launched(function, tuple(sizes), pointers))
        self.calls.append(Call("cuLaunchKernel", self.launches[-1].kernel))
        return (Result.CUDA_SUCCESS,)

    def _launched(self, function: int, sizes: tuple[int, ...], pointers: int) -> Launched:
        name, slots = self.names[function]
        places = (ctypes.c_uint64 * slots).from_address(pointers)
        words = tuple(ctypes.c_uint64.from_address(place).value for place in places)
        return Launched(name, sizes, words)

    # -- memory --------------------------------------------------------------------------------------

    def cuMemAllocAsync(self, size: int, stream: int) -> tuple[Any, ...]:
        address = next(self._addresses)
        self.memory[address] = size
        return Result.CUDA_SUCCESS, Address(address)

    def cuMemFreeAsync(self, address: int, stream: int) -> tuple[Any, ...]:
        del self.memory[int(address)]
        return (Result.CUDA_SUCCESS,)

    def cuMemcpyHtoDAsync(self, to: int, source: int, size: int, stream: int) -> tuple[Any, ...]:
        self.calls.append(Call("cuMemcpyHtoDAsync", (to, ctypes.string_at(source, size))))
        return (Result.CUDA_SUCCESS,)

    def cuMemcpyHtoD(self, to: int, source: int, size: int) -> tuple[Any, ...]:
        self.calls.append(Call("cuMemcpyHtoD", (to, ctypes.string_at(source, size))))
        return (Result.CUDA_SUCCESS,)

    # -- graphs --------------------------------------------------------------------------------------

    def cuGraphCreate(self, flags: int) -> tuple[Any, ...]:
        graph = next(self._handles)
        self.nodes[graph] = {}
        return Result.CUDA_SUCCESS, graph

    def cuGraphAddKernelNode(
        self, graph: int, after: list[int], number: int, params: Any
    ) -> tuple[Any, ...]:
        assert after == [*self.nodes[graph]][-1:] and len(after) == number, "a chain"
        node = next(self._handles)
        self.nodes[graph][node] = self._of(params)
        return Result.CUDA_SUCCESS, node

    def _of(self, params: Any) -> Launched:
        axes = [f"{kind}Dim{axis}" for kind in ("grid", "block") for axis in "XYZ"]
        sizes = tuple(getattr(params, axis) for axis in axes)
        return self._launched(params.kern, sizes, params.kernelParams)

    def cuGraphInstantiate(self, graph: int, flags: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, graph

    def cuGraphExecKernelNodeSetParams(self, graph: int, node: int, params: Any) -> tuple[Any, ...]:
        assert node in self.nodes[graph]
        self.nodes[graph][node] = self._of(params)
        self.calls.append(Call("cuGraphExecKernelNodeSetParams", self.nodes[graph][node].kernel))
        return (Result.CUDA_SUCCESS,)

    def cuGraphLaunch(self, graph: int, stream: int) -> tuple[Any, ...]:
        self.launches += self.nodes[graph].values()
        self.calls.append(Call("cuGraphLaunch"))
        return (Result.CUDA_SUCCESS,)

    def cuGraphDestroy(self, graph: int) -> tuple[Any, ...]:
        del self.nodes[graph]
        return (Result.CUDA_SUCCESS,)

    def __getattr__(self, name: str) -> Any:
        """Return what answers a question, or does nothing."""
        if name not in ANSWERS:
            raise AttributeError(name)
        return lambda *args: (Result.CUDA_SUCCESS, *ANSWERS[name])


def _compiled(own: FakeDriver) -> Any:
    """Return what stands for ``Kernel._compiled``: a handle, and no machine code."""

    def compiled(kernel: runtime_kernel.Kernel) -> Any:
        slots = sum(len(launcher._formats(kind)) for kind in kernel.signature.args)
        handle = own.kernel(kernel.name, slots)
        own.kernels.append(kernel)
        library = SimpleNamespace(get_cufunc=lambda: SimpleNamespace(handle=handle))
        return SimpleNamespace(
            overloads={0: SimpleNamespace(_codelibrary=library)}, get_regs_per_thread=lambda: 32
        )

    return compiled


def _zeros(array: Any) -> Any:
    return np.zeros(array.shape, array.dtype)


class _Numbas:
    """Numba's driver: what it is asked is noted."""

    def __init__(self, own: FakeDriver):
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._own.calls.append(Call(name))


def _caches() -> Iterator[Any]:
    """Yield what keeps kernels, or arrays on a device, from one call to the next."""
    for name, module in [*sys.modules.items()]:
        if name.startswith(("kernels.cuda", "minitorch.")):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    yield value


def _forget() -> None:
    for cache in _caches():
        cache.cache_clear()
    KnownCalls.cache_clear()


def shared_bytes(cc: tuple[int, int]) -> int:
    """Return how much shared memory a block may have; most devices have 99 KiB."""
    return {(9, 0): 227, (8, 0): 163}.get(cc, 99) << 10


@contextmanager
def fake_device(cc: tuple[int, int] = (9, 0)) -> Iterator[FakeDriver]:
    """Let the CUDA backend run on a device that notes what it is asked and computes nothing.

    Args:
        cc: Its compute capability.
    """
    own, cuda = FakeDriver(), targets.cuda
    context = SimpleNamespace(memory_manager=type("NumbaCUDAMemoryManager", (), {})())
    compiled = cached_property(_compiled(own))
    compiled.__set_name__(runtime_kernel.Kernel, "_compiled")
    _forget()
    with ExitStack() as stack:

        def put(holder: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(holder, name, value))

        asking = targets, launcher, arrays, pooled, runtime_kernel, graphs, graph_step_module
        for module in asking:
            put(module, "driver", own)
        put(targets, "_why_no_cuda", lambda: None)
        put(targets, "has_several_devices", lambda: False)
        put(targets, "_compute_capability", lambda number: cc)
        put(targets, "_dynamic_shared_memory_bytes", lambda number: shared_bytes(cc))
        put(cuda, "get_current_device", lambda: PROPERTIES)
        put(cuda, "current_context", lambda: context)
        numbas = _Numbas(own)
        put(cuda.cudadrv.driver, "driver", numbas)
        put(cuda, "synchronize", lambda: numbas.cuCtxSynchronize())
        put(cuda.cudadrv.devicearray.DeviceNDArray, "copy_to_host", _zeros)
        put(runtime_kernel.Kernel, "_compiled", compiled)
        put(runtime_kernel.Kernel, "_allow_shared_memory", lambda kernel: None)
        put(per_device, "encode_tensor_map", lambda *encoded: _encoded(encoded))
        yield own
    _forget()


def _encoded(encoded: Any) -> np.ndarray[Any, Any]:
    """Return what stands for a tensor map: 128 bytes that tell it from others."""
    return np.frombuffer(hashlib.shake_128(repr(encoded).encode()).digest(128), np.uint8)
