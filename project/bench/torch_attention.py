"""PyTorch's ways to compute attention, each named: four backends of its fused call, and FlexAttention.

Which of the backends ``scaled_dot_product_attention`` takes by itself changes with device, dtype and
version, and so would what a figure compares with.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np

from bench.contestants import case_call, place_on
from bench.measuring import Unavailable, wait
from bench.peer_cases import Case
from kernels.cuda.runtime.arrays import is_device_array, to_host
from kernels.runtime.dtypes import BFLOAT16, FLOAT16, FLOAT32, rounded

DTYPES = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}

#: In the order of the table.
SDPA = {name: f"{name}_ATTENTION" for name in ("FLASH", "CUDNN", "EFFICIENT")} | {"MATH": "MATH"}
FLEX = "FlexAttention"
PEERS = (*SDPA, FLEX)
#: Those that compute on 16-bit tensor cores only.
HALF_ONLY = ("FLASH", "CUDNN")
#: What takes a mask of its own.
TAKES_MASK = ("CUDNN", "EFFICIENT", "MATH")


def fused(torch: Any, backend: str) -> Any:
    """Return scaled_dot_product_attention by one backend."""

    def attend(*tensors: Any, **options: Any) -> Any:
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(*tensors, **options)

    return attend


class TorchCall:
    """One case by one peer, to be timed forward and backward."""

    def __init__(self, torch: Any, peer: str, case: Case, tensors: list[Any]):
        self.torch = torch
        *leaves, self.dout = tensors
        self.leaves = [tensor.detach().clone().requires_grad_() for tensor in leaves]
        self.device = self.dout.device
        self._why_not(peer, case)
        self._attend = self._flex(case) if peer == FLEX else self._fused(peer, case)
        self.out: Any = None
        self.gradients: Any = None

    def _why_not(self, peer: str, case: Case) -> None:
        on_gpu = self.device.type == "cuda"
        if on_gpu and peer in HALF_ONLY and self.dout.dtype == self.torch.float32:
            raise Unavailable("float16/bfloat16 only")
        if not on_gpu and peer in ("CUDNN", "EFFICIENT", FLEX):
            raise Unavailable("on a GPU only")
        if peer == FLEX and case.dropout_p:
            raise Unavailable("has no dropout")
        if peer != FLEX and case.foreign:
            raise Unavailable(case.foreign)
        if on_gpu and peer not in (*TAKES_MASK, FLEX) and case.mask() is not None:
            raise Unavailable("takes no mask")

    def _fused(self, peer: str, case: Case) -> Any:
        """Return scaled_dot_product_attention by one backend."""
        torch, mask = self.torch, case.mask()
        if mask is not None:
            mask = torch.tensor(mask, device=self.device)
            mask = mask if mask.dtype == torch.bool else mask.to(self.dout.dtype)
            mask = mask[None] if mask.ndim == 3 else mask[None, None]
        options = {"attn_mask": mask, "dropout_p": case.dropout_p, "is_causal": case.is_causal}
        return partial(fused(torch, SDPA[peer]), **options)

    def _flex(self, case: Case) -> Any:
        """Return compiled FlexAttention."""
        torch = self.torch
        flex = sys.modules.get("torch.nn.attention.flex_attention")
        if flex is None:
            raise Unavailable(f"PyTorch {torch.__version__} has none")
        torch._dynamo.reset()  # every case is compiled for itself
        table = None if case.table is None else torch.as_tensor(case.table, device=self.device)
        visible, score, block_mask = case.visible, case.score, None
        if visible is not None:
            block_mask = flex.create_block_mask(
                lambda b, h, row, col: visible(row, col, table),
                None, None, case.length, case.length, device=self.device,
            )  # fmt: skip

        def score_mod(s: Any, b: Any, h: Any, row: Any, col: Any) -> Any:
            return s if score is None else score(torch, s, h, row, col, table)

        options = {"score_mod": score_mod if score else None, "block_mask": block_mask}
        compiled = torch.compile(flex.flex_attention, dynamic=False)
        return lambda q, k, v: compiled(q, k, v, **options)

    def forward(self) -> None:
        """Compute out, and what its gradient needs."""
        self.out = None
        self.out = self._attend(*self.leaves)

    def backward(self) -> None:
        """Compute dq, dk and dv."""
        self.gradients = self.torch.autograd.grad(
            self.out, self.leaves, self.dout, retain_graph=True
        )

    def first_heads(self, count: int = 1) -> list[Any]:
        """Return out, dq, dk and dv of so many heads in float64, (heads, length, head_dim)."""
        found = (self.out, *self.gradients)
        return [tensor[0, :count].detach().double().cpu().numpy() for tensor in found]


class Rivals:
    """The operands of calls of one shape and dtype for both sides, which read the same memory."""

    def __init__(self, run: Any, name: str, torch: Any):
        self.device, self.torch, self.dtype = run.device, torch, DTYPES[name]
        shape = (1, run.heads, run.length, run.head_dim)
        if torch is None:
            rng, place = np.random.default_rng(0), place_on(run.device)
            wide = [rng.standard_normal(shape, dtype=np.float32) for _ in range(4)]
            arrays = [rounded(x, self.dtype) for x in wide]
            self.arrays = [place(x) for x in arrays]
            self.packed = [place(x[0].transpose(1, 0, 2)) for x in arrays]
            return
        torch.manual_seed(0)
        wide = [torch.randn(shape, device=run.device) for _ in range(4)]
        self.arrays = [x.to(getattr(torch, name)) for x in wide]
        self.packed = [x[0].permute(1, 0, 2) for x in self.arrays]

    def first(self, count: int = 1) -> list[Any]:
        """Return q, k, v and dout of so many heads in float64."""
        if self.torch is None:
            host = (to_host(x) if is_device_array(x) else x for x in self.arrays)
            return [x[0, :count].astype(np.float64) for x in host]
        return [x[0, :count].double().cpu().numpy() for x in self.arrays]

    def call(self, peer: str | None, case: Case, **options: Any) -> Any:
        """Return a case by the kernels, for None, or by a peer; it has run once."""
        if peer is None:
            arrays = self.arrays if case.sums is None else self.packed
            call: Any = case_call(case, arrays, self.dtype, self.device, **options)
        elif self.torch is None:
            raise Unavailable("PyTorch is not installed")
        else:
            call = TorchCall(self.torch, peer, case, self.arrays)
        call.forward()
        call.backward()
        wait(self.device)
        return call
