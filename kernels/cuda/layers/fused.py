"""Fused layers on CUDA: softmax, layer norm, GELU, cross entropy, embedding, dropout, SGD and Adam.

The functions have the names and arguments of those in ``kernels.cpu.layers.fused``, and take contiguous
device arrays of one dtype, float32 or float64; those in ``TAKES_HALF`` also take 16-bit arrays.  Nothing is
copied to the host, nothing waits for the device, and results are bitwise equal on every run, because no
kernel uses atomics.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernels.common.geometry import ceil_div
from kernels.common.philox import WORDS, drop_threshold
from kernels.common.pointwise import adam_constants
from kernels.cuda.device.half import EIGHT, as_bits
from kernels.cuda.device.memory import device_constant
from kernels.cuda.device.row_folds import RowBlock, row_block
from kernels.cuda.device.vector import ALIGNMENT
from kernels.cuda.layers import elementwise, embedding_sums
from kernels.cuda.layers import softmax as softmax_kernels
from kernels.cuda.layers.adamw import Moved as Moved
from kernels.cuda.layers.adamw import adam_many as adam_many
from kernels.cuda.layers.adamw import clip_of as clip_of
from kernels.cuda.layers.cross_entropy import logit_gradient, losses_of
from kernels.cuda.layers.layer_norm import Noise as Noise
from kernels.cuda.layers.layer_norm import layer_norm as layer_norm
from kernels.cuda.layers.layer_norm import layer_norm_backward as layer_norm_backward
from kernels.cuda.layers.layer_norm import residual_layer_norm as residual_layer_norm
from kernels.cuda.layers.layer_norm import (
    residual_layer_norm_backward as residual_layer_norm_backward,
)
from kernels.cuda.runtime.arrays import (
    device_pointer,
    empty_device,
    is_device_array,
    reshaped,
    to_device,
)
from kernels.cuda.runtime.recorder import computed
from kernels.cuda.runtime.repeated import repeats
from kernels.cuda.runtime.sizes import launch_each
from kernels.runtime.dtypes import acc_dtype
from kernels.runtime.targets import current_device

#: Functions that read and write 16-bit arrays directly, and compute in float32.
TAKES_HALF = frozenset({"layer_norm", "gelu", "cross_entropy", "embedding", "dropout"})


def _empty_like(x: Any) -> Any:
    return empty_device(tuple(x.shape), x.dtype)


def _rows(x: Any) -> Any:
    """View an array as (rows, last dimension)."""
    *lead, n = x.shape
    return reshaped(x, (math.prod(lead), n))


def _flat(x: Any) -> Any:
    return reshaped(x, (x.size,))


def _launch_eights(kernel: Any, *arrays: Any) -> None:
    """Launch one thread for every eight elements of arrays of one shape."""
    in_vectors = all(device_pointer(array) % ALIGNMENT == 0 for array in arrays)
    flat = [as_bits(_flat(array)) for array in arrays]
    launch_each(kernel, ceil_div(arrays[0].size, EIGHT), *flat, int(in_vectors))


def _launch_rows(kernel: Any, block: RowBlock, rows: Any, *args: Any) -> None:
    """Launch on the rows of ``rows``, which is also the first argument."""
    if math.prod(rows.shape):
        kernel[ceil_div(rows.shape[0], block.rows), (block.threads, block.rows)](rows, *args)


def place_ids(ids: Any) -> Any:
    """Return integers as a flat int64 array on the device; read-only ones on the host are copied once."""
    if is_device_array(ids):
        return ids
    ids = np.ascontiguousarray(ids, np.int64).reshape(-1)
    if ids.flags.writeable:
        return to_device(ids)
    return device_constant(ids.tobytes(), ids.shape, ids.dtype, current_device())


def softmax(x: Any) -> Any:
    """Return softmax over the last dimension."""
    out, rows = _empty_like(x), _rows(x)
    block = row_block(rows.shape[1])
    _launch_rows(softmax_kernels.softmax_kernel(block, x.dtype), block, rows, _rows(out))
    return out


def softmax_backward(dout: Any, out: Any) -> Any:
    """Return the gradient of softmax's input from its output."""
    dx, rows = _empty_like(out), _rows(dout)
    block = row_block(rows.shape[1])
    kernel = softmax_kernels.softmax_backward_kernel(block, out.dtype)
    _launch_rows(kernel, block, rows, _rows(out), _rows(dx))
    return dx


def gelu(x: Any) -> Any:
    """Return GELU in its tanh form, element by element."""
    out = _empty_like(x)
    _launch_eights(elementwise.gelu_kernel(x.dtype), x, out)
    return out


@repeats
def gelu_backward(dout: Any, x: Any) -> Any:
    """Return the gradient of GELU's input; all arrays have one dtype, including 16-bit ones."""
    dx = _empty_like(x)
    _launch_eights(elementwise.gelu_backward_kernel(x.dtype), dout, x, dx)
    return dx


def cross_entropy(logits: Any, targets: Any) -> tuple[Any, ...]:
    """Return the negative log-likelihood of each row's target.

    The inputs of the backward pass are the logits and two numbers per row instead of the probabilities.
    Losses of 16-bit logits are float32.
    """
    return losses_of(logits, place_ids(targets))


def cross_entropy_backward(dlosses: Any, targets: Any, *kept: Any, in_place: bool = False) -> Any:
    """Return the gradient of the logits, overwriting them if they are no longer needed."""
    return logit_gradient(dlosses, place_ids(targets), *kept, in_place=in_place)


def embedding(table: Any, placed: Any, shape: tuple[int, ...]) -> Any:
    """Return rows of a table."""
    out = empty_device((*shape, table.shape[1]), table.dtype)
    kernel = elementwise.embedding_kernel(table.dtype)
    launch_each(kernel, math.prod(out.shape), as_bits(table), placed, as_bits(_rows(out)))
    return out


def embedding_backward(dout: Any, ids: Any, placed: Any, num_rows: int) -> Any:
    """Add up the gradients of the looked-up rows, deterministically."""
    rows = _rows(dout)
    dtable = empty_device((num_rows, rows.shape[1]), dout.dtype)
    if embedding_sums.fits(num_rows, rows.shape[0], dout.dtype):
        embedding_sums.add_up(rows, placed, dtable)
        return dtable
    ids = np.asarray(ids).reshape(-1)
    uses = computed(lambda: _uses(ids, num_rows), ids)
    kernel = elementwise.embedding_backward_kernel(dout.dtype)
    launch_each(kernel, math.prod(dtable.shape), as_bits(rows), place_ids(uses), as_bits(dtable))
    return dtable


def _uses(ids: np.ndarray[Any, Any], num_rows: int) -> np.ndarray[Any, Any]:
    """Return the start of the list of uses for each row of a table, followed by the lists."""
    uses = np.zeros(num_rows + 1 + ids.size, np.int64)
    np.cumsum(np.bincount(ids, minlength=num_rows), out=uses[1 : num_rows + 1])
    uses[num_rows + 1 :] = np.argsort(ids, kind="stable")
    uses.setflags(write=ids.flags.writeable)
    return uses


def dropout(x: Any, seed: int, rate: float, scale: float) -> Any:
    """Apply dropout with a seed, see ``layer_norm.Noise``; the same seed applies it to the gradient."""
    out = _empty_like(x)
    flat = [as_bits(_flat(array)) for array in (x, out)]
    launch_each(
        elementwise.dropout_kernel(x.dtype), ceil_div(flat[0].shape[0], WORDS),
        *flat, seed, drop_threshold(rate), acc_dtype(x.dtype).type(scale),
    )  # fmt: skip
    return out


def sgd_step(value: Any, grad: Any, lr: float) -> Any:
    """Return value - lr * grad."""
    out, flat = _empty_like(value), _flat(value)
    kernel = elementwise.sgd_kernel(value.dtype)
    launch_each(kernel, flat.shape[0], flat, _flat(grad), _flat(out), value.dtype.type(lr))
    return out


def adam_step(
    value: Any,
    grad: Any,
    m: Any,
    v: Any,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    weight_decay: float = 0.0,
) -> Any:
    """Return the next value of a parameter; update its two moments in place."""
    out, flat = _empty_like(value), _flat(value)
    constants = adam_constants(lr, beta1, beta2, eps, step, weight_decay)
    launch_each(
        elementwise.adam_kernel(value.dtype), flat.shape[0],
        flat, _flat(grad), _flat(m), _flat(v), _flat(out),
        tuple(value.dtype.type(number) for number in constants),
    )  # fmt: skip
    return out
