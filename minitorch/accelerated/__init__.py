"""Faster functions for operations, in place of those that the modules of the course define.

``import minitorch`` installs them into the tables of the backends; ``print(minitorch.FastBackend.ops)``
shows which function serves each operation.  They compute the same results up to rounding.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from kernels.cpu.layers import fused as cpu_kernels
from kernels.cuda.layers import fused as cuda_kernels

from ..cuda_ops import CudaOps
from ..fast_ops import FastOps
from ..models.engine import continued
from ..tensor_ops import SimpleOps
from . import decoding_step, joined_layers, joined_linear, layers, linear, optimisers
from .cpu_loops import FasterOps
from .cuda_loops import FasterCudaOps
from .linear_cross_entropy import linear_cross_entropy
from .residual_layer_norm import residual_layer_norm
from .sampling import choose_tokens

#: Set to 1 before Python starts, all operations are served by the plain functions.
VARIABLE = "MINITORCH_PLAIN"

Table = dict[str, Callable[..., Any]]
#: On both backends.
SHARED: Table = {
    "softmax": layers.softmax,
    "softmax_loss": layers.softmax_loss,
    "GELU": layers.gelu,
    "layer_norm": layers.layer_norm,
    "rms_norm": layers.rms_norm,
    "lookup": layers.lookup,
    "linear_cross_entropy": linear_cross_entropy,
    "sgd_step": optimisers.sgd_step,
    "adam_step": optimisers.adam_step,
    "continued": continued,
}
CPU: Table = {
    **SHARED,
    "linear": linear.linear,
    "TransformerLayer.forward": decoding_step.layer_forward,
}
CUDA: Table = {
    **SHARED,
    "linear": linear.tensor_core_linear,
    "dropout": layers.dropout,
    "scaled_dropout": layers.scaled_dropout,
    "residual_layer_norm": residual_layer_norm,
    "MultiHeadAttention.projected": joined_linear.projected,
    "TransformerLayer.forward": joined_layers.layer_forward,
    "DecoderLM.through_layers": joined_layers.through_layers,
    "choose_tokens": choose_tokens,
    "adam_many": cuda_kernels.adam_many,
}
_TABLES = {
    SimpleOps: (SimpleOps, {"continued": continued}),
    FastOps: (FasterOps, CPU),
    CudaOps: (FasterCudaOps, CUDA),
}
# Functions of a graph that was recorded before plain() still need them.
FastOps.table.kernels, CudaOps.table.kernels = cpu_kernels, cuda_kernels

_plain = 0  # number of plain() that are active
_lock = Lock()


def _switch(change: int) -> None:
    global _plain
    with _lock:
        _plain += change
        for ops, faster in _TABLES.items():
            ops.table.serve(*(faster if _plain == 0 else (ops, {})))


@contextmanager
def plain() -> Iterator[None]:
    """Serve all operations by the functions of the course, as if there were no faster ones.

    This is the context of a block, or the decorator of a function, for all threads of the process.  For a
    whole program, set the environment variable ``MINITORCH_PLAIN=1``.
    """
    _switch(1)
    try:
        yield
    finally:
        _switch(-1)


_switch(int(os.environ.get(VARIABLE) == "1"))
