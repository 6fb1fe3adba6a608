"""Attention to be timed, forward and backward: our kernels on arrays, our tensors, and PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

import kernels
import minitorch
from bench.measuring import load_torch
from bench.peer_cases import Case
from bench.published_cuda import PublishedBackend
from kernels.cuda.runtime.arrays import is_device_array, to_device, to_host
from kernels.interop.libraries import as_array
from kernels.metering.rung_traffic import RUNGS
from minitorch import Tensor

DIRECTIONS = ("forward", "backward")


class Call:
    """One call of the kernels on arrays."""

    def __init__(self, arrays: list[Any], options: dict[str, Any], sums: Any = None):
        *self.operands, self.dout = arrays
        self.options, self.sums = options, sums
        self.results: Any = None
        self.gradients: Any = None

    def forward(self) -> None:
        """Compute out and lse."""
        packed = () if self.sums is None else (self.sums, self.sums)
        attend = (
            kernels.flash_attention_varlen_forward if packed else kernels.flash_attention_forward
        )
        self.results = attend(*self.operands, *packed, **self.options)

    def backward(self) -> None:
        """Compute dq, dk and dv, after a forward pass."""
        packed = () if self.sums is None else (self.sums, self.sums)
        attend = (
            kernels.flash_attention_varlen_backward if packed else kernels.flash_attention_backward
        )
        self.gradients = attend(self.dout, *self.operands, *self.results, *packed, **self.options)

    def first_heads(self, count: int = 1) -> list[Any]:
        """Return out, dq, dk and dv of so many heads in float64, (heads, length, head_dim)."""
        arrays = map(as_array, (self.results[0], *self.gradients))
        found = (to_host(x) if is_device_array(x) else x for x in arrays)
        by_head = (x[0] if self.sums is None else x.transpose(1, 0, 2) for x in found)
        return [array[:count].astype(np.float64) for array in by_head]


def place_on(device: str) -> Callable[[Any], Any]:
    """Return a function that places an array on a device."""
    return to_device if device == "cuda" else np.asarray


def random_call(
    device: str, heads: int, seq_q: int, seq_k: int | None = None, *, head_dim: int = 64, **options: Any
) -> Call:  # fmt: skip
    """Return a call in float32 on random operands; as many keys as queries when None."""
    rng, place = np.random.default_rng(0), place_on(device)
    lengths = (seq_q, seq_k or seq_q, seq_k or seq_q, seq_q)
    shapes = ((1, heads, length, head_dim) for length in lengths)
    arrays = [place(rng.standard_normal(shape, dtype=np.float32)) for shape in shapes]
    if "attn_mask" in options:
        options["attn_mask"] = place(options["attn_mask"])
    return Call(arrays, options)


def packed_call(device: str, heads: int, lengths: list[int], head_dim: int = 64) -> Call:
    """Return a causal call of packed sequences in float32."""
    rng, shape = np.random.default_rng(0), (sum(lengths), heads, head_dim)
    arrays = [place_on(device)(rng.standard_normal(shape, dtype=np.float32)) for _ in range(4)]
    return Call(arrays, {"is_causal": True}, np.concatenate([[0], np.cumsum(lengths)]))


def case_call(case: Case, arrays: list[Any], dtype: Any, device: str, **options: Any) -> Call:
    """Return a call of a case."""
    options = case.options_of(dtype) | options
    if options.get("attn_mask") is not None:
        options["attn_mask"] = place_on(device)(options["attn_mask"])
    return Call(arrays, options, case.sums)


def reference(case: Case, first: list[Any], dtype: Any) -> list[Any]:
    """Return out, dq, dk and dv of heads by the textbook formula in float64."""
    call = Call([x[None] for x in first], {"rung": "naive", **case.reference_options(dtype)})
    call.forward()
    call.backward()
    return call.first_heads(len(first[0]))


def errors(found: list[Any], wanted: list[Any]) -> dict[str, float]:
    """Return the largest error of out, and of the gradients relative to their largest elements."""
    away = [float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True)]
    sizes = [float(np.abs(b).max()) for b in wanted]
    relative = (a / b for a, b in zip(away[1:], sizes[1:], strict=True))
    return {"error": away[0], "gradient_error": max(relative)}


class TensorCall:
    """Attention on tensors of this library."""

    def __init__(self, attend: Any, backend: Any, arrays: list[Any], training: bool = True):
        self.attend, self.out = attend, None
        self.operands = [minitorch.from_numpy(x, backend, requires_grad=training) for x in arrays]

    def forward(self) -> None:
        """Compute the result."""
        self.out = None
        self.out = self.attend(*self.operands)

    def backward(self) -> None:
        """Compute all gradients, from the result itself as the gradient of the result."""
        for t in self.operands:
            t.zero_grad_()
        out: Any = self.out
        out.backward(out.detach())

    def release(self) -> None:
        """Free the result and all that its backward pass needs."""
        self.out = None

    def clear(self) -> None:
        """Free the gradients, too."""
        self.release()
        for t in self.operands:
            t.zero_grad_()


class TorchTensorCall(TensorCall):
    """PyTorch's scaled_dot_product_attention by the backend that it chooses; see :class:`TensorCall`."""

    def __init__(self, causal: bool, device: str, arrays: list[Any], training: bool = True):
        self.torch, self.out = load_torch(), None
        sdpa, options = self.torch.nn.functional.scaled_dot_product_attention, {"device": device}
        self.attend = partial(sdpa, is_causal=causal)
        # Four dimensions, for its fused kernels.
        self.operands = [
            self.torch.tensor(x[None], requires_grad=training, **options) for x in arrays
        ]

    def backward(self) -> None:
        """Compute all gradients, which are not kept."""
        out: Any = self.out
        self.torch.autograd.grad(out, self.operands, out.detach(), retain_graph=True)

    def clear(self) -> None:
        """Free the result."""
        self.release()


def contestants(device: str, causal: bool = False) -> dict[str, Callable[..., TensorCall]]:
    """Return what runs on a device, by name; the last one is that which all are compared with."""

    def on(backend: Any, attend: Any, **options: Any) -> Callable[..., TensorCall]:
        return partial(TensorCall, partial(attend, is_causal=causal, **options), backend)

    composed, fused = minitorch.naive_attention, Tensor.flash_attention
    if device == "cpu":
        cpu = minitorch.FastBackend
        found, ladder = {"naive": on(cpu, composed)}, {"flash": on(cpu, fused)}
    else:
        gpu = minitorch.CudaBackend
        found = {"published": on(PublishedBackend, composed), "composed": on(gpu, composed)}
        ladder = {name: on(gpu, fused, rung=name) for name in ("naive", "flash1")}
        ladder["flash2 atomic"] = on(gpu, fused, rung="flash2", deterministic=False)
        ladder["flash2"] = on(gpu, fused, rung="flash2")
    if load_torch() is not None:
        found["PyTorch"] = partial(TorchTensorCall, causal, device)
    return {**found, **ladder}


def random_arrays(*shape: int) -> list[Any]:
    """Return q, k and v in float32."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, dtype=np.float32) for _ in range(3)]


def directions(calls: Mapping[str, Any]) -> dict[tuple[str, str], Callable[[], Any]]:
    """Return the passes of calls, to be timed in turn."""
    return {(name, way): getattr(call, way) for way in DIRECTIONS for name, call in calls.items()}


def rungs_of(device: str, heads: int, length: int, head_dim: int) -> dict[str, Any]:
    """Return a dense call of every rung in float32; on the CPU of attention composed of operations, too."""
    if device == "cuda":
        return {
            n: random_call("cuda", heads, length, head_dim=head_dim, **r) for n, r in RUNGS.items()
        }
    known, arrays = contestants("cpu"), random_arrays(heads, length, head_dim)
    return {"naive": known["naive"](arrays), "flash2": known["flash"](arrays)}
