"""What stands in a starter tree before module 3 in place of compiled code: file → text."""

STAND_INS = {
    "kernels/cuda/backend.py": '''\
"""Arrays of a GPU: module 3 brings them. Before it, every array lies on the host."""

from __future__ import annotations

from typing import Any

from kernels.runtime.dtypes import BITS


def is_device_array(array: Any) -> bool:
    """Tell whether an array lies on a GPU."""
    return False


def to_host(array: Any) -> Any:
    """Return an array on the host."""
    return array


def to_device(array: Any) -> Any:
    """Refuse to move an array to a GPU.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError("there is no CUDA backend before module 3")


def as_bits(array: Any) -> Any:
    """Return 16-bit storage as integers."""
    return array.view(BITS)


def refuse(*args: Any, **more: Any) -> None:
    """Refuse what a recorded step cannot do; no step is recorded."""
''',
    "kernels/runtime/targets.py": '''\
"""Compilers and devices: module 3 brings them."""

from __future__ import annotations

from contextlib import nullcontext

IS_SIMULATOR = False


def why_no_cuda() -> str:
    """Return the reason why no GPU can be used."""
    return "module 3 brings the CUDA backend"


def explained(action: str) -> nullcontext[None]:
    """Explain errors of a GPU inside the ``with``."""
    return nullcontext()
''',
    "minitorch/cuda_ops.py": '''\
"""The CUDA backend: module 3 brings it. Before it, the simple one stands here."""

from .tensor_ops import SimpleBackend as CudaBackend
from .tensor_ops import SimpleOps as CudaOps

__all__ = ["CudaBackend", "CudaOps"]
''',
    "minitorch/fast_ops.py": '''\
"""The fast backend: module 3 brings it. Before it, the simple one stands here."""

from .tensor_ops import SimpleBackend as FastBackend
from .tensor_ops import SimpleOps as FastOps

__all__ = ["FastBackend", "FastOps"]
''',
}
