"""Fused layers on the CPU: softmax, layer norm, GELU, cross entropy and Adam, each in one pass.

Every function takes and returns NumPy arrays; ``minitorch.fused_functions`` makes them differentiable.
Composed of tensor operations, each of these would read and write its operands five to ten times.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange

from kernels.compiled import FASTMATH, njit_cached
from kernels.cpu.products import exp2
from kernels.online_softmax import LOG2_E

Array = np.ndarray[Any, Any]

#: Elements that one work item of a pointwise kernel takes.
CHUNK = 4096
#: Rows that one work item of a kernel with a sum over rows takes: fixed, so that the order of the sum
#: does not depend on how many threads there are.
ROWS = 64

SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715


def _rows(x: Array) -> Array:
    """View an array as (rows, last dimension), contiguous."""
    return np.ascontiguousarray(x).reshape(-1, x.shape[-1])


def _flat(x: Array) -> Array:
    return np.ascontiguousarray(x).reshape(-1)


# -- softmax -----------------------------------------------------------------------------------


@njit(fastmath=FASTMATH)
def softmax_row(x, out):
    """Write softmax(x) to out; return the largest x and the logarithm of what exp(x - it) sums to.

    A row of minus infinity becomes a row of zeros.
    """
    largest = x[0]
    for i in range(len(x)):
        largest = max(largest, x[i])
    shift = largest if largest > -np.inf else x.dtype.type(0)
    log2_e = x.dtype.type(LOG2_E)
    total = x.dtype.type(0)
    for i in range(len(x)):
        out[i] = exp2((x[i] - shift) * log2_e)
        total += out[i]
    inverse = x.dtype.type(1) / total if total > 0 else total
    for i in range(len(x)):
        out[i] *= inverse
    return shift, math.log(total)


@njit_cached(parallel=True, fastmath=FASTMATH)
def _softmax(x, out):
    for row in prange(len(x)):
        softmax_row(x[row], out[row])


@njit_cached(parallel=True, fastmath=FASTMATH)
def _softmax_backward(dout, out, dx):
    for row in prange(len(out)):
        g, y, d = dout[row], out[row], dx[row]
        inner = y.dtype.type(0)
        for i in range(len(y)):
            inner += g[i] * y[i]
        for i in range(len(y)):
            d[i] = y[i] * (g[i] - inner)


def softmax(x: Array) -> Array:
    """Return softmax over the last dimension.

    Args:
        x: (…, n).

    Returns:
        (…, n).
    """
    out = np.empty(x.shape, x.dtype)
    _softmax(_rows(x), out.reshape(-1, x.shape[-1]))
    return out


def softmax_backward(dout: Array, out: Array) -> Array:
    """Return the gradient of softmax's input from its output.

    Args:
        dout: (…, n).
        out: (…, n), as :func:`softmax` returned it.

    Returns:
        (…, n).
    """
    dx = np.empty(out.shape, out.dtype)
    _softmax_backward(_rows(dout), _rows(out), dx.reshape(-1, out.shape[-1]))
    return dx


# -- layer norm --------------------------------------------------------------------------------


@njit_cached(parallel=True, fastmath=FASTMATH)
def _layer_norm(x, gamma, beta, eps, out, mean, rstd):
    n = x.shape[1]
    for row in prange(len(x)):
        v, y = x[row], out[row]
        total = v.dtype.type(0)
        for i in range(n):
            total += v[i]
        center = total / v.dtype.type(n)
        squares = v.dtype.type(0)
        for i in range(n):
            squares += (v[i] - center) * (v[i] - center)
        inverse = v.dtype.type(1) / np.sqrt(squares / v.dtype.type(n) + v.dtype.type(eps))
        for i in range(n):
            y[i] = (v[i] - center) * inverse * gamma[i] + beta[i]
        mean[row] = center
        rstd[row] = inverse


@njit_cached(parallel=True, fastmath=FASTMATH)
def _layer_norm_backward(dout, x, gamma, mean, rstd, dx, dgamma_parts, dbeta_parts):
    rows, n = x.shape
    for part in prange(len(dgamma_parts)):
        dgamma, dbeta = dgamma_parts[part], dbeta_parts[part]
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
            sum_g /= v.dtype.type(n)
            sum_gx /= v.dtype.type(n)
            for i in range(n):
                xhat = (v[i] - center) * inverse
                d[i] = (g[i] * gamma[i] - sum_g - xhat * sum_gx) * inverse


def layer_norm(x: Array, gamma: Array, beta: Array, eps: float) -> tuple[Array, Array, Array]:
    """Normalise the last dimension to mean 0 and variance 1, then scale and shift it.

    Args:
        x: (…, n).
        gamma: (n,).
        beta: (n,).
        eps: Added to the variance.

    Returns:
        out (…, n), and the mean and the reciprocal standard deviation of each row, (rows,).
    """
    out = np.empty(x.shape, x.dtype)
    rows = _rows(x)
    mean, rstd = np.empty(len(rows), x.dtype), np.empty(len(rows), x.dtype)
    _layer_norm(rows, _flat(gamma), _flat(beta), eps, out.reshape(rows.shape), mean, rstd)
    return out, mean, rstd


def layer_norm_backward(
    dout: Array, x: Array, gamma: Array, mean: Array, rstd: Array
) -> tuple[Array, Array, Array]:
    """Return the gradients of x, gamma and beta; mean and rstd as :func:`layer_norm` gave them."""
    rows = _rows(x)
    n = x.shape[-1]
    dx = np.empty(x.shape, x.dtype)
    parts = -(-len(rows) // ROWS)
    dgamma, dbeta = np.empty((parts, n), x.dtype), np.empty((parts, n), x.dtype)
    _layer_norm_backward(
        _rows(dout), rows, _flat(gamma), mean, rstd, dx.reshape(rows.shape), dgamma, dbeta
    )
    return dx, dgamma.sum(axis=0), dbeta.sum(axis=0)


# -- GELU --------------------------------------------------------------------------------------


@njit(fastmath=FASTMATH)
def gelu_gate(x, one, cubic, factor):
    """Return sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x³): GELU's tanh form is x * sigmoid(2u).

    The constants come from the caller, in the dtype of x: a Python float would promote float32.
    """
    z = factor * (x + cubic * x * x * x)
    # exp2 takes arguments that are not positive: sigmoid(z) = 1 - sigmoid(-z).
    small = exp2(-abs(z))
    gate = one / (one + small)
    return gate if z >= 0 else small * gate


@njit_cached(parallel=True, fastmath=FASTMATH)
def _gelu(x, out):
    one, cubic = x.dtype.type(1), x.dtype.type(GELU_CUBIC)
    factor = x.dtype.type(2.0 * SQRT_2_OVER_PI * LOG2_E)
    for chunk in prange((len(x) + CHUNK - 1) // CHUNK):
        start, stop = chunk * CHUNK, min((chunk + 1) * CHUNK, len(x))
        v, y = x[start:stop], out[start:stop]
        for i in range(len(v)):
            y[i] = v[i] * gelu_gate(v[i], one, cubic, factor)


@njit_cached(parallel=True, fastmath=FASTMATH)
def _gelu_backward(dout, x, dx):
    one, cubic = x.dtype.type(1), x.dtype.type(GELU_CUBIC)
    factor = x.dtype.type(2.0 * SQRT_2_OVER_PI * LOG2_E)
    inner, three = x.dtype.type(2.0 * SQRT_2_OVER_PI), x.dtype.type(3.0 * GELU_CUBIC)
    for chunk in prange((len(x) + CHUNK - 1) // CHUNK):
        start, stop = chunk * CHUNK, min((chunk + 1) * CHUNK, len(x))
        g, v, d = dout[start:stop], x[start:stop], dx[start:stop]
        for i in range(len(v)):
            gate = gelu_gate(v[i], one, cubic, factor)
            slope = inner * (one + three * v[i] * v[i])
            d[i] = g[i] * (gate + v[i] * gate * (one - gate) * slope)


def gelu(x: Array) -> Array:
    """Return GELU in its tanh form, element by element."""
    out = np.empty(x.shape, x.dtype)
    _gelu(_flat(x), out.reshape(-1))
    return out


def gelu_backward(dout: Array, x: Array) -> Array:
    """Return the gradient of GELU's input."""
    dx = np.empty(x.shape, x.dtype)
    _gelu_backward(_flat(dout), _flat(x), dx.reshape(-1))
    return dx


# -- cross entropy -----------------------------------------------------------------------------


@njit_cached(parallel=True)
def _cross_entropy(logits, targets, losses, probs):
    for row in prange(len(logits)):
        largest, log_total = softmax_row(logits[row], probs[row])
        # In this order, hence no fastmath here: beside a large logit log_total would round away.
        losses[row] = (largest - logits[row, targets[row]]) + log_total


@njit_cached(parallel=True, fastmath=FASTMATH)
def _cross_entropy_backward(dlosses, targets, probs, dlogits):
    for row in prange(len(probs)):
        g, p, d = dlosses[row], probs[row], dlogits[row]
        for i in range(len(p)):
            d[i] = g * p[i]
        d[targets[row]] -= g


def cross_entropy(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Return the negative log-likelihood of each row's target.

    Args:
        logits: (rows, classes).
        targets: (rows,) integers from 0 to classes - 1, checked by the caller.

    Returns:
        losses (rows,), and probs (rows, classes) for the backward pass.
    """
    losses, probs = np.empty(len(logits), logits.dtype), np.empty(logits.shape, logits.dtype)
    _cross_entropy(_rows(logits), targets.astype(np.int64), losses, probs)
    return losses, probs


def cross_entropy_backward(dlosses: Array, targets: Array, probs: Array) -> Array:
    """Return the gradient of the logits."""
    dlogits = np.empty(probs.shape, probs.dtype)
    _cross_entropy_backward(_flat(dlosses), targets.astype(np.int64), probs, dlogits)
    return dlogits


# -- embedding ---------------------------------------------------------------------------------


def embedding_backward(dout: Array, ids: Array, num_rows: int) -> Array:
    """Add up the gradients of the rows that were looked up; equal from run to run.

    Args:
        dout: (count, dim).
        ids: (count,) integers.
        num_rows: Rows of the table.

    Returns:
        (num_rows, dim).
    """
    dtable = np.zeros((num_rows, dout.shape[-1]), dout.dtype)
    _scatter_add(_rows(dout), ids.astype(np.int64), dtable)
    return dtable


@njit_cached()
def _scatter_add(rows, ids, table):
    # Serial: two threads could meet in one row, and the order of a sum must not change.
    for i in range(len(ids)):
        target, source = table[ids[i]], rows[i]
        for j in range(len(source)):
            target[j] += source[j]


# -- Adam --------------------------------------------------------------------------------------


@njit_cached(parallel=True, fastmath=FASTMATH)
def _adam(p, g, m, v, out, step_size, beta1, beta2, eps, correction, decay):
    one = p.dtype.type(1)
    b1, b2 = p.dtype.type(beta1), p.dtype.type(beta2)
    size, tiny, root = p.dtype.type(step_size), p.dtype.type(eps), p.dtype.type(correction)
    keep = p.dtype.type(decay)
    for chunk in prange((len(p) + CHUNK - 1) // CHUNK):
        for i in range(chunk * CHUNK, min((chunk + 1) * CHUNK, len(p))):
            m[i] = b1 * m[i] + (one - b1) * g[i]
            v[i] = b2 * v[i] + (one - b2) * g[i] * g[i]
            out[i] = keep * p[i] - size * m[i] / (np.sqrt(v[i]) * root + tiny)


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

    Args:
        value: Any shape; grad, m and v have the same, m and v contiguous.
        grad: Likewise.
        m: Running mean of the gradient.
        v: Running mean of its square.
        lr: Learning rate.
        beta1: Decay of m.
        beta2: Decay of v.
        eps: Added to the root of v.
        step: Counts from 1; corrects the bias of the zero start.
        weight_decay: Decoupled, as in AdamW.

    Source: Kingma and Ba (2015), Algorithm 1; Loshchilov and Hutter (2019), Algorithm 2.
    """
    out = np.empty(value.shape, value.dtype)
    _adam(
        _flat(value), _flat(grad), m.reshape(-1), v.reshape(-1), out.reshape(-1),
        lr / (1.0 - beta1**step), beta1, beta2, eps, 1.0 / math.sqrt(1.0 - beta2**step),
        1.0 - lr * weight_decay,
    )  # fmt: skip
    return out
