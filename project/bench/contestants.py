"""What benchmarks and experiments compare: our rungs, composed baselines, and PyTorch if it is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import kernels
import minitorch
from bench.published_cuda import PublishedBackend
from kernels.cuda.runtime.arrays import pool, to_device
from kernels.runtime.targets import cuda
from minitorch import Tensor, TensorBackend


class ArrayCall:
    """One call of attention on arrays, to be timed: the kernels and nothing else.

    Args:
        device: "cpu" or "cuda".
        heads: Of q, k and v.
        seq_q: Query rows.
        seq_k: Key columns; as many when None.
        head_dim: Of q, k and v.
        tile: (block_q, block_k) of both passes; the rung's own when None.
        options: Of the call.
    """

    def __init__(
        self, device: str, heads: int, seq_q: int, seq_k: int | None = None, *,
        head_dim: int = 64, tile: tuple[int, int] | None = None, **options: Any,
    ):  # fmt: skip
        rng = np.random.default_rng(0)
        place = to_device if device == "cuda" else lambda array: array
        lengths = (seq_q, seq_k or seq_q, seq_k or seq_q, seq_q)
        self.q, self.k, self.v, self.dout = (
            place(rng.standard_normal((1, heads, length, head_dim), dtype=np.float32))
            for length in lengths
        )
        if "attn_mask" in options:
            options["attn_mask"] = place(options["attn_mask"])
        self.options = {"tile": tile, **options}
        self.results: Any = None

    def forward(self) -> None:
        """Compute out and lse."""
        self.results = kernels.flash_attention_forward(self.q, self.k, self.v, **self.options)

    def backward(self) -> None:
        """Compute dq, dk and dv, after a forward pass."""
        kernels.flash_attention_backward(
            self.dout, self.q, self.k, self.v, *self.results, **self.options
        )


class Contestant:
    """One way to compute attention, forward and backward.

    Args:
        attend: ``(q, k, v)`` of tensors to a tensor.
        backend: Of the tensors.
    """

    def __init__(self, attend: Callable[..., Any], backend: TensorBackend):
        self.attend = attend
        self.backend = backend

    def operands(self, arrays: list[Any]) -> list[Any]:
        """Return NumPy arrays as what ``attend`` takes."""
        return [minitorch.from_numpy(x, self.backend, requires_grad=True) for x in arrays]

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        """Return the result, and what its backward pass needs with it."""
        return self.attend(q, k, v)

    def backward(self, out: Any, operands: list[Any]) -> None:
        """Compute all three gradients, from the result itself as the gradient of the result."""
        self.forget_gradients(operands)
        out.backward(out.detach())

    def forget_gradients(self, operands: list[Any]) -> None:
        """Free the memory of the gradients."""
        for t in operands:
            t.zero_grad_()

    def wait(self) -> None:
        """Wait until everything that was asked for has been done."""
        if self.backend.cuda:
            cuda.synchronize()

    def start_peak(self) -> int:
        """Begin to watch the device's memory; return what is in use."""
        memory = pool()
        return 0 if memory is None else memory.reset_peak()

    def peak(self) -> int:
        """Return the most bytes of the device's memory in use since then."""
        memory = pool()
        return 0 if memory is None else memory.peak()


class Bound:
    """A contestant with its operands, to be timed as an :class:`ArrayCall` is.

    Args:
        contestant: That computes.
        arrays: q, k and v, NumPy arrays.
    """

    def __init__(self, contestant: Contestant, arrays: list[Any]):
        self.contestant = contestant
        self.operands = contestant.operands(arrays)
        self.out: Any = None

    def forward(self) -> None:
        """Compute the result."""
        self.release()
        self.out = self.contestant.forward(*self.operands)

    def backward(self) -> None:
        """Compute all three gradients, after a forward pass."""
        self.contestant.backward(self.out, self.operands)

    def release(self) -> None:
        """Forget the result, and what its backward pass needs: the memory is free for others."""
        self.out = None

    def clear(self) -> None:
        """Forget the gradients, too."""
        self.release()
        self.contestant.forget_gradients(self.operands)


class TorchContestant(Contestant):
    """PyTorch's own scaled_dot_product_attention, by the fastest of its kernels.

    Args:
        torch: The module.
        causal: Mask what comes later.
        device: "cpu" or "cuda".
    """

    def __init__(self, torch: Any, causal: bool, device: str):
        sdpa = torch.nn.functional.scaled_dot_product_attention
        super().__init__(lambda q, k, v: sdpa(q, k, v, is_causal=causal), minitorch.FastBackend)
        self.torch = torch
        self.device = device

    def operands(self, arrays: list[Any]) -> list[Any]:
        """Return NumPy arrays as what ``attend`` takes: four dimensions, for its fused kernels."""
        return [self.torch.tensor(x[None], device=self.device, requires_grad=True) for x in arrays]

    def backward(self, out: Any, operands: list[Any]) -> None:
        """Compute all three gradients, from the result itself as the gradient of the result."""
        self.torch.autograd.grad(out, operands, out.detach(), retain_graph=True)

    def forget_gradients(self, operands: list[Any]) -> None:
        """Do nothing: nobody keeps the gradients."""

    def wait(self) -> None:
        """Wait until everything that was asked for has been done."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def start_peak(self) -> int:
        """Begin to watch the device's memory; return what is in use."""
        self.torch.cuda.reset_peak_memory_stats()
        return self.torch.cuda.memory_allocated()

    def peak(self) -> int:
        """Return the most bytes of the device's memory in use since then."""
        return self.torch.cuda.max_memory_allocated()


def contestants(device: str, causal: bool) -> dict[str, Contestant]:
    """Return what runs on a device, by name; the one that all are compared with comes last.

    Args:
        device: "cpu" or "cuda".
        causal: Mask what comes later.
    """

    def fused(**options: Any) -> Callable[..., Any]:
        return lambda q, k, v: Tensor.flash_attention(q, k, v, is_causal=causal, **options)

    def composed(q: Any, k: Any, v: Any) -> Any:
        return minitorch.naive_attention(q, k, v, is_causal=causal)

    if device == "cpu":
        found = {"naive": Contestant(composed, minitorch.FastBackend)}
        ladder = {"flash": Contestant(fused(), minitorch.FastBackend)}
    else:
        gpu = minitorch.CudaBackend
        found = {
            "published": Contestant(composed, PublishedBackend),
            "composed": Contestant(composed, gpu),
        }
        ladder = {name: Contestant(fused(rung=name), gpu) for name in ("naive", "flash1")}
        ladder["flash2 atomic"] = Contestant(fused(rung="flash2", deterministic=False), gpu)
        ladder["flash2"] = Contestant(fused(rung="flash2"), gpu)
    try:
        import torch  # type: ignore[import-not-found]
    except ImportError:
        return {**found, **ladder}
    return {**found, "PyTorch": TorchContestant(torch, causal, device), **ladder}


def random_arrays(shape: tuple[int, ...]) -> list[Any]:
    """Return q, k and v in float32."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, dtype=np.float32) for _ in range(3)]
