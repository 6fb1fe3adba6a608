"""Attention by our kernels, to be timed and compared with the textbook."""

from __future__ import annotations

from typing import Any

import numpy as np

import kernels
from bench.measuring import out_of_memory
from bench.peer_cases import Case
from bench.record_files import Record
from kernels.cuda.runtime.arrays import is_device_array, to_device, to_host
from kernels.interop.libraries import as_array


class OurCall:
    """One case by the kernels, to be timed.

    Args:
        case: To compute.
        arrays: q, k, v and dout, NumPy's, the device's or PyTorch's: (1, heads, length, head_dim), and
            (length, heads, head_dim) for packed documents.
        dtype: Of the arrays.
        on_device: Masks belong on the device.
        options: Of the call, beside those of the case.
    """

    def __init__(
        self,
        case: Case,
        arrays: list[Any],
        dtype: np.dtype[Any],
        on_device: bool,
        options: Record | None = None,
    ):
        self.sums = case.sums
        self.arrays = arrays
        self.options = case.options_of(dtype) | (options or {})
        mask = self.options.get("attn_mask")
        if mask is not None and on_device:
            self.options["attn_mask"] = to_device(mask)
        self.results: Any = None
        self.gradients: Any = None

    def forward(self) -> None:
        """Compute out and lse."""
        *operands, _ = self.arrays
        if self.sums is None:
            self.results = kernels.flash_attention_forward(*operands, **self.options)
        else:
            self.results = kernels.flash_attention_varlen_forward(
                *operands, self.sums, self.sums, **self.options
            )

    def backward(self) -> None:
        """Compute dq, dk and dv."""
        *operands, dout = self.arrays
        call = dout, *operands, *self.results
        if self.sums is None:
            self.gradients = kernels.flash_attention_backward(*call, **self.options)
        else:
            self.gradients = kernels.flash_attention_varlen_backward(
                *call, self.sums, self.sums, **self.options
            )

    def first_heads(self, count: int = 1) -> list[Any]:
        """Return out, dq, dk and dv of so many heads in float64, (heads, length, head_dim)."""
        arrays = map(as_array, (self.results[0], *self.gradients))
        found = (to_host(x) if is_device_array(x) else x for x in arrays)
        by_head = (x[0] if self.sums is None else x.transpose(1, 0, 2) for x in found)
        return [array[:count].astype(np.float64) for array in by_head]


def reference(case: Case, first: list[Any], dtype: np.dtype[Any]) -> list[Any]:
    """Return out, dq, dk and dv of heads by the textbook in float64.

    Args:
        case: To compute.
        first: q, k, v and dout of those heads, (heads, length, head_dim), float64.
        dtype: That the contestants compute with.
    """
    q, k, v, dout = (array[None] for array in first)
    textbook = {"rung": "naive", **case.reference_options(dtype)}
    results = kernels.flash_attention_forward(q, k, v, **textbook)
    gradients = kernels.flash_attention_backward(dout, q, k, v, *results, **textbook)
    return [array[0] for array in (results[0], *gradients)]


def errors(found: list[Any], wanted: list[Any]) -> dict[str, float]:
    """Return the largest error of out, and of the gradients relative to their largest elements."""
    away = [float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True)]
    sizes = [float(np.abs(b).max()) for b in wanted]
    return {
        "error": away[0],
        "gradient_error": max(a / b for a, b in zip(away[1:], sizes[1:], strict=True)),
    }


def why_failed(error: Exception) -> str:
    """Return in one line why a contestant could not run."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return "out of memory" if out_of_memory(error) else lines[0][:160]
