"""Layer norm on CUDA arrays, alone or of residual + dropout(x): the launches."""

from __future__ import annotations

import math
from inspect import unwrap
from typing import Any, NamedTuple

import numpy as np

from kernels.common.geometry import ceil_div
from kernels.common.philox import drop_threshold
from kernels.cuda.device.half import EIGHT, as_bits
from kernels.cuda.device.vector import ALIGNMENT
from kernels.cuda.layers.layer_norm_kernels import (
    SUM_COLS,
    SUM_LANES,
    NormForm,
    NormNumbers,
    norm_backward_kernel,
    norm_kernel,
    norm_sums_kernel,
)
from kernels.cuda.layers.row_registers import row_tile
from kernels.cuda.runtime.arrays import device_pointer, empty_device, reshaped
from kernels.cuda.runtime.repeated import repeats
from kernels.cuda.runtime.sizes import SIZES
from kernels.runtime.dtypes import acc_dtype

#: Maximum number of parts of the sums over rows, and minimum number of rows per part.  They keep a large
#: GPU busy, and do not depend on the GPU, so that the sums do not either.
PARTS, ROWS_OF_PART = SIZES.norm_parts, SIZES.norm_rows


class Noise(NamedTuple):
    """The dropout that layer norm applies to x before it adds the residual; the same in both passes."""

    #: Seed of the random words, from 0 to 2⁶³ - 1; element i depends only on the seed and i.
    seed: int = 0
    rate: float = 0.0  # Probability of 0
    scale: float = 1.0  # Factor of the other elements

    def numbers(
        self, n: int, sums: np.dtype[Any], share: float = 1.0, eps: float = 0.0
    ) -> NormNumbers:
        """Return the argument of the kernels for rows of n elements and a dtype of sums."""
        return NormNumbers(
            n, sums.type(1.0 / n), sums.type(share), sums.type(eps),
            self.seed, drop_threshold(self.rate), sums.type(self.scale),
        )  # fmt: skip


def _flat(array: Any) -> Any:
    """View a contiguous array as flat, with 16 bits as uint16."""
    return as_bits(reshaped(array, (array.size,)))


def _form(x: Any, gamma: Any, arrays: tuple[Any, ...], adds: bool, drops: bool) -> NormForm:
    """Return the parameters of the kernels for some contiguous arrays."""
    n = tuple(x.shape)[-1]
    vectors = n % EIGHT == 0 and all(device_pointer(a) % ALIGNMENT == 0 for a in arrays)
    return NormForm(row_tile(n, vectors), x.dtype, gamma.dtype, adds, drops)


def layer_norm(x: Any, gamma: Any, beta: Any, eps: float) -> tuple[Any, Any, Any]:
    """Normalise the last dimension, see ``kernels.cpu.layers.fused``; arrays are contiguous.

    Gamma and beta have x's dtype or the dtype of its sums, which is float32 for 16 bits.  Without beta it
    is an RMS norm.  The mean and the reciprocal standard deviation of each row have the dtype of sums.
    """
    _, *results = _forward(x, None, gamma, beta, eps, Noise())
    return tuple(results)  # type: ignore[return-value]


def residual_layer_norm(
    x: Any, residual: Any, gamma: Any, beta: Any, eps: float, noise: Noise
) -> tuple[Any, Any, Any, Any]:
    """Return residual + dropout(x), (…, n), and the results of :func:`layer_norm` for it."""
    return _by_noise(_forward, noise)(x, residual, gamma, beta, eps, noise)


def _by_noise(function: Any, noise: Noise) -> Any:
    """Return a function that repeats launches; with dropout, whose seeds differ, the plain function."""
    return unwrap(function) if noise.rate else function


@repeats
def _forward(
    x: Any, residual: Any, gamma: Any, beta: Any, eps: float, noise: Noise
) -> tuple[Any, Any, Any, Any]:
    """Return the sum (None without a residual), and the results of :func:`layer_norm`."""
    adds, shape, sums = residual is not None, tuple(x.shape), acc_dtype(x.dtype)
    n, height = shape[-1], math.prod(shape[:-1])
    out, hidden = empty_device(shape, x.dtype), empty_device(shape, x.dtype) if adds else None
    mean, rstd = (empty_device((height,), sums) for _ in range(2))
    if height * n:
        share, beta = (0.0, gamma) if beta is None else (1.0, beta)
        arrays = (x, gamma, beta, *((residual,) if adds else ()))
        own = _form(x, gamma, arrays, adds, noise.rate > 0.0)
        block = own.tile.block
        norm_kernel(own)[ceil_div(height, block.rows), (block.threads, block.rows)](
            _flat(x), _flat(residual) if adds else 0, (_flat(gamma), _flat(beta)),
            _flat(hidden) if adds else 0, _flat(out), (mean, rstd),
            noise.numbers(n, sums, share, eps),
        )  # fmt: skip
    return hidden, out, mean, rstd


class NormGradients(NamedTuple):
    """The gradients that the backward pass of layer norm returns."""

    dx: Any  # Gradient of x
    dresidual: Any  # Gradient of the residual; None without one
    dgamma: Any  # (n,), of gamma's dtype
    dbeta: Any  # (n,), of beta's dtype


def layer_norm_backward(
    dout: Any, x: Any, gamma: Any, mean: Any, rstd: Any, centred: bool = True
) -> tuple[Any, Any, Any]:
    """Return the gradients of x, gamma and beta; see ``kernels.cpu.layers.fused``."""
    found = _backward(dout, None, x, gamma, mean, rstd, Noise(), centred)
    return found.dx, found.dgamma, found.dbeta


def residual_layer_norm_backward(
    dout: Any, dhidden: Any, hidden: Any, gamma: Any, mean: Any, rstd: Any, noise: Noise,
    centred: bool = True,
) -> NormGradients:  # fmt: skip
    """Return the gradients of the inputs of :func:`residual_layer_norm`.

    ``dout`` is the gradient of the normalised sum, and ``dhidden`` that of the sum itself, ``hidden``.  For
    an RMS norm, which is not ``centred``, ``dbeta`` is meaningless.
    """
    return _by_noise(_backward, noise)(dout, dhidden, hidden, gamma, mean, rstd, noise, centred)


@repeats
def _backward(
    dout: Any, dhidden: Any, hidden: Any, gamma: Any, mean: Any, rstd: Any, noise: Noise,
    centred: bool,
) -> NormGradients:  # fmt: skip
    adds, drops = dhidden is not None, noise.rate > 0.0
    shape, height = tuple(hidden.shape), mean.shape[0]
    n, sums = shape[-1], acc_dtype(hidden.dtype)
    dx = empty_device(shape, hidden.dtype)
    # Without dropout both have one gradient.
    dresidual = (empty_device(shape, hidden.dtype) if drops else dx) if adds else None
    dgamma, dbeta = (empty_device((n,), gamma.dtype) for _ in range(2))
    if n == 0:
        return NormGradients(dx, dresidual, dgamma, dbeta)
    arrays = (dout, hidden, gamma, *((dhidden,) if adds else ()))
    own = _form(hidden, gamma, arrays, adds, drops)
    block = own.tile.block
    lines = min(PARTS, ceil_div(height, ROWS_OF_PART))
    blocks = ceil_div(lines, block.rows)
    parts = empty_device((max(blocks * block.rows, 1) * 2 * n,), sums)
    if blocks:
        norm_backward_kernel(own)[blocks, (block.threads, block.rows)](
            _flat(dout), _flat(dhidden) if adds else 0, _flat(hidden), _flat(gamma), (mean, rstd),
            (_flat(dx), _flat(dresidual) if adds else 0), parts, noise.numbers(n, sums, centred),
        )  # fmt: skip
    grid = ceil_div(2 * n, SUM_COLS)
    norm_sums_kernel(gamma.dtype)[grid, (SUM_COLS, SUM_LANES)](
        parts, _flat(dgamma), _flat(dbeta), blocks * block.rows
    )
    return NormGradients(dx, dresidual, dgamma, dbeta)
