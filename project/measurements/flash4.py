"""Attention on a Hopper GPU beside FlashAttention-4 and cuDNN, forward and backward, in bfloat16.

The package ``flash-attn-4`` is no requirement of this project; install it, or put it on PYTHONPATH.  Calls
have 16,384 tokens and 2,048 columns over all heads; kernels are timed while the device is busy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from statistics import geometric_mean, median
from typing import Any

from bench.kit import Case, Figure, Measurement, Record, Run, markdown
from bench.torch_attention import fused

import kernels
from measurements.decoding import timed

TOKENS, COLUMNS = 16384, 2048
OURS, CUDNN, FLASH4 = "ours", "cuDNN", "FlashAttention-4"
DETERMINISTIC = {name: f"{name}, deterministic" for name in (OURS, FLASH4)}
#: Pass, ours, theirs, and the least geometric mean of the ratios of speed by head_dim.
BOUNDS = (
    ("forward", OURS, FLASH4, {64: 1.05, 128: 1.03, 256: 0.98}),
    ("backward", OURS, FLASH4, {64: 0.95, 128: 0.95, 256: 1.05}),
    ("backward", DETERMINISTIC[OURS], DETERMINISTIC[FLASH4], {64: 1.0, 128: 1.0, 256: 1.3}),
)


def cases(run: Run) -> Iterator[Case]:
    run.note(tokens=TOKENS, hidden=COLUMNS)
    for head_dim, mask, length in itertools.product(run.dims, ("full", "causal"), run.lengths):
        key = {"head_dim": head_dim, "mask": mask, "length": length}
        yield key, partial(compare, run, head_dim, mask == "causal", length)


def compare(run: Run, head_dim: int, causal: bool, length: int) -> Record:
    """Return the TFLOP/s of each contestant, forward and backward."""
    torch = run.torch
    shape = (TOKENS // length, COLUMNS // head_dim, length, head_dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    out, lse = kernels.flash_attention_forward(q, k, v, is_causal=causal)
    back = partial(kernels.flash_attention_backward, dout, q, k, v, out, lse, is_causal=causal)
    cudnn = partial(fused(torch, "CUDNN_ATTENTION"), is_causal=causal)
    flash4 = partial(import_module("flash_attn.cute.interface").flash_attn_func, causal=causal)
    by_row = [x.transpose(1, 2).contiguous() for x in (q, k, v)]  # (batch, seq, heads, dim)
    forward = {
        OURS: partial(kernels.flash_attention_forward, q, k, v, is_causal=causal),
        CUDNN: partial(cudnn, q, k, v), FLASH4: partial(flash4, *by_row),
    }  # fmt: skip
    backward = {
        OURS: partial(back, deterministic=False),
        DETERMINISTIC[OURS]: partial(back, deterministic=True),
        CUDNN: gradients(torch, cudnn, [q, k, v], dout),
        FLASH4: gradients(torch, flash4, by_row, dout.transpose(1, 2)),
        DETERMINISTIC[FLASH4]: gradients(
            torch, partial(flash4, deterministic=True), by_row, dout.transpose(1, 2)
        ),
    }
    operations = 4 * q.numel() * length * (0.5 if causal else 1)
    return {
        direction: {
            name: times * operations / median(found) / 1e12
            for name, found in timed(run, steps).items()
        }
        for direction, times, steps in (("forward", 1, forward), ("backward", 2.5, backward))
    }


def gradients(torch: Any, attend: Any, operands: list[Any], dout: Any) -> Any:
    """Return the backward pass of a call as a function."""
    leaves = [x.detach().requires_grad_() for x in operands]
    out = attend(*leaves)
    out = out[0] if isinstance(out, tuple) else out
    return partial(torch.autograd.grad, out, leaves, dout.contiguous(), retain_graph=True)


def ratios(record: Record, direction: str, ours: str, theirs: str, head_dim: int) -> list[float]:
    """Return the speed of ours over theirs in every call with a head_dim."""
    return [
        row[direction][ours] / row[direction][theirs]
        for row in record["rows"]
        if row["head_dim"] == head_dim and direction in row
    ]


def table(record: Record) -> str:
    rows = [row for row in record["rows"] if "forward" in row]
    names = [(way, name) for way in ("forward", "backward") for name in rows[0][way]]
    head = ["TFLOP/s: head_dim, mask, length", *(f"{way}: {name}" for way, name in names)]
    lines = [
        [f"{row['head_dim']}, {row['mask']}, {row['length']:,}",
         *(f"{row[way][name]:.0f}" for way, name in names)]
        for row in rows
    ]  # fmt: skip
    return markdown(head, lines)


def figures(record: Record) -> list[Figure]:
    return [
        Figure(f"{way}, d {head_dim}: {ours} / {theirs}", geometric_mean(found), least)
        for way, ours, theirs, bounds in BOUNDS
        for head_dim, least in bounds.items()
        if (found := ratios(record, way, ours, theirs, head_dim))
    ]


MEASUREMENT = Measurement(
    "flash4", "How fast is attention on Hopper beside FlashAttention-4 and cuDNN?", cases,
    {"cuda": {"normal": {"dims": (64, 128, 256), "lengths": (1024, 2048, 8192)},
              "quick": {"dims": (128,), "lengths": (1024,)}}},
    table=table, figures=figures, minutes={"cuda": 3}, paths=("kernels/cuda/attention",),
)  # fmt: skip
