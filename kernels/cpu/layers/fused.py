"""Fused layers on the CPU: softmax, layer norm, cross entropy, embedding, SGD and Adam, each in one pass.

GELU and linear layers have their own files and are exported here too.  Every function takes and returns
NumPy arrays; ``minitorch.accelerated`` makes them differentiable.  Composed of tensor operations, each
would read and write its operands five to ten times.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange

from kernels.common.online_softmax import LOG2_E
from kernels.common.pointwise import adam_constants, make_adam
from kernels.cpu.layers.gelu import CHUNK, flat
from kernels.cpu.layers.gelu import gelu as gelu
from kernels.cpu.layers.gelu import gelu_backward as gelu_backward
from kernels.cpu.layers.linear import linear as linear
from kernels.cpu.layers.linear import linear_backward as linear_backward
from kernels.cpu.matmul.tile_product import exp2
from kernels.runtime.jit import FASTMATH, by_size, njit_cached

Array = np.ndarray[Any, Any]

#: Rows per work item of a kernel with a sum over rows, fixed so that the order of the sum does not depend
#: on the number of threads.
ROWS = 64

adam_element = make_adam(njit(fastmath=FASTMATH))


def _rows(x: Array) -> Array:
    """View an array as (rows, last dimension), contiguous."""
    return np.ascontiguousarray(x).reshape(-1, x.shape[-1])


def place_ids(ids: Array) -> Array:
    """Return integers as a flat int64 array for the kernels, without a copy if possible."""
    return flat(np.asarray(ids, np.int64))


# -- softmax -----------------------------------------------------------------------------------


@njit(fastmath=FASTMATH)
def softmax_row(x, out):
    """Write softmax(x) to out; return the maximum m of x and the logarithm of the sum of exp(x - m).

    A row of minus infinity becomes a row of zeros.
    """
    largest = x[0]
    for i in range(len(x)):
        largest = max(largest, x[i])
    shift = x.dtype.type(0) if largest == -np.inf else largest
    log2_e = x.dtype.type(LOG2_E)
    total = x.dtype.type(0)
    for i in range(len(x)):
        out[i] = exp2((x[i] - shift) * log2_e)
        total += out[i]
    inverse = total if total == 0 else x.dtype.type(1) / total  # NaN stays NaN
    for i in range(len(x)):
        out[i] *= inverse
    return shift, math.log(total)


@by_size(fastmath=FASTMATH)
def _softmax(x, out):
    for row in prange(len(x)):
        softmax_row(x[row], out[row])


@by_size(fastmath=FASTMATH)
def _softmax_backward(dout, out, dx):
    for row in prange(len(out)):
        g, y, d = dout[row], out[row], dx[row]
        inner = y.dtype.type(0)
        for i in range(len(y)):
            inner += g[i] * y[i]
        for i in range(len(y)):
            d[i] = y[i] * (g[i] - inner)


def softmax(x: Array) -> Array:
    """Return softmax over the last dimension of x, (…, n)."""
    out = np.empty(x.shape, x.dtype)
    _softmax(_rows(x), out.reshape(-1, x.shape[-1]))
    return out


def softmax_backward(dout: Array, out: Array) -> Array:
    """Return the gradient of softmax's input from that of its output, (…, n) like both."""
    dx = np.empty(out.shape, out.dtype)
    _softmax_backward(_rows(dout), _rows(out), dx.reshape(-1, out.shape[-1]))
    return dx


# -- layer norm --------------------------------------------------------------------------------


@njit(fastmath=FASTMATH)
def norm_row(x, gamma, beta, eps, share, out):
    """Write the layer norm of x to out; return its mean and its reciprocal standard deviation.

    ``share`` is 1, or 0 for an RMS norm, whose mean and shift are 0.
    """
    n = len(x)
    total = x.dtype.type(0)
    for i in range(n):
        total += x[i]
    center = total / x.dtype.type(n) * share
    squares = x.dtype.type(0)
    for i in range(n):
        squares += (x[i] - center) * (x[i] - center)
    inverse = x.dtype.type(1) / np.sqrt(squares / x.dtype.type(n) + x.dtype.type(eps))
    for i in range(n):
        out[i] = (x[i] - center) * inverse * gamma[i] + beta[i] * share
    return center, inverse


@by_size(fastmath=FASTMATH)
def _layer_norm(x, gamma, beta, eps, share, out, mean, rstd):
    for row in prange(len(x)):
        mean[row], rstd[row] = norm_row(x[row], gamma, beta, eps, share, out[row])


@by_size(fastmath=FASTMATH)
def _layer_norm_backward(dout, x, gamma, mean, rstd, share, dx, parts):
    rows, n = x.shape
    for part in prange(len(parts)):
        dgamma, dbeta = parts[part, 0], parts[part, 1]  # (n,)
        dgamma[:] = 0
        dbeta[:] = 0
        for row in range(part * ROWS, min((part + 1) * ROWS, rows)):
            g, v, d = dout[row], x[row], dx[row]
            center, inverse = mean[row], rstd[row]
            # y = gamma * xhat + beta, xhat = (x - mean) * rstd
            sum_g = v.dtype.type(0)
            sum_gx = v.dtype.type(0)
            for i in range(n):
                xhat = (v[i] - center) * inverse
                dgamma[i] += g[i] * xhat
                dbeta[i] += g[i]
                sum_g += g[i] * gamma[i]
                sum_gx += g[i] * gamma[i] * xhat
            sum_g *= share / v.dtype.type(n)
            sum_gx /= v.dtype.type(n)
            for i in range(n):
                xhat = (v[i] - center) * inverse
                d[i] = (g[i] * gamma[i] - sum_g - xhat * sum_gx) * inverse


def layer_norm(
    x: Array, gamma: Array, beta: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    """Normalise the last dimension of x, (…, n), to mean 0 and variance 1, then scale and shift it.

    Without ``beta`` it is an RMS norm, which uses a mean of 0 and has no shift; ``eps`` is added to
    the variance. Returns out (…, n), and the mean and the reciprocal standard deviation of each row,
    (rows,).
    """
    out = np.empty(x.shape, x.dtype)
    rows = _rows(x)
    mean, rstd = np.empty(len(rows), x.dtype), np.empty(len(rows), x.dtype)
    share = x.dtype.type(beta is not None)
    shift = gamma if beta is None else beta
    _layer_norm(rows, flat(gamma), flat(shift), eps, share, out.reshape(rows.shape), mean, rstd)
    return out, mean, rstd


def layer_norm_backward(
    dout: Array, x: Array, gamma: Array, mean: Array, rstd: Array, centred: bool = True
) -> tuple[Array, Array, Array]:
    """Return the gradients of x, gamma and beta from dout, x (…, n), gamma (n,) and the rows' statistics.

    ``centred`` is False for an RMS norm; the gradient of beta is then meaningless.
    """
    rows = _rows(x)
    n = x.shape[-1]
    dx = np.empty(x.shape, x.dtype)
    parts = np.empty((-(-len(rows) // ROWS), 2, n), x.dtype)  # of dgamma and dbeta
    share, shape = x.dtype.type(centred), rows.shape
    _layer_norm_backward(
        _rows(dout), rows, flat(gamma), mean, rstd, share, dx.reshape(shape), parts
    )
    dgamma, dbeta = parts.sum(axis=0)
    return dx, dgamma, dbeta


# -- cross entropy -----------------------------------------------------------------------------


@by_size()
def _cross_entropy(logits, targets, losses, probs):
    for row in prange(len(logits)):
        largest, log_total = softmax_row(logits[row], probs[row])
        # In this order, hence without fastmath: added to a large logit, log_total would be rounded away.
        losses[row] = (largest - logits[row, targets[row]]) + log_total


@by_size(fastmath=FASTMATH)
def _cross_entropy_backward(probs, targets, dlosses, dlogits):
    for row in prange(len(probs)):
        g, p, d = dlosses[row], probs[row], dlogits[row]
        for i in range(len(p)):
            d[i] = g * p[i]
        d[targets[row]] -= g


def cross_entropy(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Return the negative log-likelihood of each row's target, (rows,), and probs for the backward pass.

    Logits and probs are (rows, classes); targets are integers below classes, checked by the caller.
    """
    losses, probs = np.empty(len(logits), logits.dtype), np.empty(logits.shape, logits.dtype)
    _cross_entropy(_rows(logits), place_ids(targets), losses, probs)
    return losses, probs


def cross_entropy_backward(
    dlosses: Array, targets: Array, probs: Array, in_place: bool = False
) -> Array:
    """Return the gradient of the logits, overwriting the probabilities if they are no longer needed."""
    dlogits = probs if in_place else np.empty(probs.shape, probs.dtype)
    _cross_entropy_backward(probs, place_ids(targets), flat(dlosses), dlogits)
    return dlogits


# -- embedding ---------------------------------------------------------------------------------


def embedding(table: Array, placed: Array, shape: tuple[int, ...]) -> Array:
    """Return rows of a table (num_rows, dim) as (*shape, dim).

    The integers of :func:`place_ids` are from 0 to num_rows - 1, checked by the caller; ``shape`` is
    that of the ids.
    """
    return np.take(table, placed, axis=0).reshape(*shape, table.shape[1])


def embedding_backward(dout: Array, ids: Array, placed: Array, num_rows: int) -> Array:
    """Add up the gradients of the looked-up rows, deterministically, to (num_rows, dim).

    ``dout`` is (…, dim) and ``placed`` the ids of :func:`place_ids`; a GPU's kernel may need ``ids``
    on the host.
    """
    dtable = np.zeros((num_rows, dout.shape[-1]), dout.dtype)
    _scatter_add(_rows(dout), placed, dtable)
    return dtable


@njit_cached()
def _scatter_add(rows, ids, table):
    # Serial: two threads could update the same row, and the order of a sum must not change.
    for i in range(len(ids)):
        target, source = table[ids[i]], rows[i]
        for j in range(len(source)):
            target[j] += source[j]


# -- optimisers --------------------------------------------------------------------------------


@by_size(fastmath=FASTMATH)
def _sgd(p, g, out, lr):
    step = p.dtype.type(lr)
    for i in prange(len(p)):
        out[i] = p[i] - step * g[i]


def sgd_step(value: Array, grad: Array, lr: float) -> Array:
    """Return value - lr * grad."""
    out = np.empty(value.shape, value.dtype)
    _sgd(flat(value), flat(grad), out.reshape(-1), lr)
    return out


@by_size(fastmath=FASTMATH)
def _adam(p, g, m, v, out, constants):
    real = p.dtype.type
    one = real(1)
    size, beta1, beta2, eps, root, keep = constants
    rounded = real(size), real(beta1), real(beta2), real(eps), real(root), real(keep)
    for chunk in prange((len(p) + CHUNK - 1) // CHUNK):
        for i in range(chunk * CHUNK, min((chunk + 1) * CHUNK, len(p))):
            m[i], v[i], out[i] = adam_element(p[i], g[i], m[i], v[i], one, rounded)


def adam_step(
    value: Array,
    grad: Array,
    m: Array,
    v: Array,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    weight_decay: float = 0.0,
) -> Array:
    """Return the next value of a parameter; update its two moments in place.

    The moments m and v are contiguous, of the shape of the value; see ``pointwise.adam_constants``
    for the numbers.
    """
    out = np.empty(value.shape, value.dtype)
    constants = adam_constants(lr, beta1, beta2, eps, step, weight_decay)
    _adam(flat(value), flat(grad), m.reshape(-1), v.reshape(-1), out.reshape(-1), constants)
    return out
