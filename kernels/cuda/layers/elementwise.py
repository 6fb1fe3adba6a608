"""The element-wise fused layers on CUDA: GELU, embedding, dropout, optimisers.

All arrays are contiguous; arrays of any shape are passed as vectors.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from kernels.common.philox import WORDS
from kernels.common.pointwise import GELU_CONSTANTS, make_adam, make_gelu
from kernels.cuda.device.half import EIGHT, form, make_read_eight, make_write_eight
from kernels.cuda.device.one_source import PHILOX
from kernels.cuda.device.vector import EXP2
from kernels.cuda.layers.softmax import matrix_type, vector_type
from kernels.cuda.runtime.kernel import Kernel, device_function, scalar_type
from kernels.runtime.dtypes import acc_dtype
from kernels.runtime.targets import cuda
from kernels.runtime.types import int64, types, void

_element_words = PHILOX.element_words
_adam = make_adam(device_function)


@cache
def gelu_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the GELU kernel for one dtype, including 16-bit ones."""
    own, (stored, widen, narrow, _) = acc_dtype(dtype), form(dtype)
    constants = tuple(own.type(number) for number in GELU_CONSTANTS)
    value = make_gelu(device_function, EXP2[own]).value
    read_eight, write_eight = make_read_eight(dtype), make_write_eight(dtype, narrow)

    @device_function
    def of_four(a, b, c, d):
        return value(a, constants), value(b, constants), value(c, constants), value(d, constants)

    def gelu(x, out, in_vectors):
        """Apply GELU in its tanh form to each element.

        Computes: out = x sigmoid(2u), u = sqrt(2/π) (x + 0.044715 x³)
        Source: Hendrycks and Gimpel, Gaussian Error Linear Units (2016), section 2
        One thread does: eight neighbouring elements, by vectors of 128 bits where the arrays are aligned
        Registers: eight elements
        Global traffic: one read and one write an element
        """
        first = EIGHT * cuda.grid(1)
        if in_vectors and first + EIGHT <= x.shape[0]:
            a, b, c, d, e, f, g, h = read_eight(x, first)
            write_eight(out, first, of_four(a, b, c, d) + of_four(e, f, g, h))
        else:
            for i in range(first, min(first + EIGHT, x.shape[0])):
                out[i] = narrow(value(widen(x[i]), constants))

    vector = vector_type(stored)
    return Kernel(gelu, void(vector, vector, int64))


@cache
def gelu_backward_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel of GELU's gradient for one dtype, including 16-bit ones."""
    own, (stored, widen, narrow, _) = acc_dtype(dtype), form(dtype)
    constants = tuple(own.type(number) for number in GELU_CONSTANTS)
    gradient = make_gelu(device_function, EXP2[own]).gradient
    read_eight, write_eight = make_read_eight(dtype), make_write_eight(dtype, narrow)

    def gelu_backward(dout, x, dx, in_vectors):
        """Compute the gradient of GELU's input.

        Computes: dx = dout ∘ gelu'(x)
        Source: as gelu
        One thread does: eight neighbouring elements, by vectors of 128 bits where the arrays are aligned
        Registers: sixteen elements
        Global traffic: two reads and one write an element
        """
        first = EIGHT * cuda.grid(1)
        if in_vectors and first + EIGHT <= x.shape[0]:
            a, b, c, d, e, f, g, h = read_eight(x, first)
            p, q, r, s, t, u, v, w = read_eight(dout, first)
            write_eight(
                dx, first,
                (gradient(p, a, constants), gradient(q, b, constants),
                 gradient(r, c, constants), gradient(s, d, constants),
                 gradient(t, e, constants), gradient(u, f, constants),
                 gradient(v, g, constants), gradient(w, h, constants)),
            )  # fmt: skip
        else:
            for i in range(first, min(first + EIGHT, x.shape[0])):
                dx[i] = narrow(gradient(widen(dout[i]), widen(x[i]), constants))

    vector = vector_type(stored)
    return Kernel(gelu_backward, void(vector, vector, vector, int64))


@cache
def embedding_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the lookup kernel for one dtype, including 16-bit ones, which it only copies."""

    def embedding(table, ids, out):
        """Look up rows of a table.

        Computes: out[i] = table[ids[i]]
        One thread does: one element
        Global traffic: one read and one write an element; an id a row
        Needs: ids inside the table
        """
        i, dim = cuda.grid(1), table.shape[1]
        if i < out.shape[0] * dim:
            out[i // dim, i % dim] = table[ids[i // dim], i % dim]

    matrix = matrix_type(form(dtype).stored)
    return Kernel(embedding, void(matrix, int64[::1], matrix))


@cache
def embedding_backward_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel of the gradient of a lookup for one dtype, including 16-bit ones."""
    zero, (stored, widen, narrow, _) = acc_dtype(dtype).type(0), form(dtype)

    def embedding_backward(dout, uses, dtable):
        """Add up, for each row of the table, the gradients of its lookups, in their order.

        No two threads add to one element: the result is equal from run to run, without atomics.

        Computes: dtable[r] = Σ dout[i] over the i with ids[i] = r
        One thread does: one element of dtable, including rows without lookups
        Registers: one sum
        Global traffic: dout read once; dtable written once; the lists of uses read once a row
        Needs: uses: where each row's list begins, rows + 1 numbers, and then the lists
        """
        i, rows, dim = cuda.grid(1), dtable.shape[0], dtable.shape[1]
        if i < rows * dim:
            row, col = i // dim, i % dim
            total = zero
            for use in range(uses[row], uses[row + 1]):
                total += widen(dout[uses[rows + 1 + use], col])
            dtable[row, col] = narrow(total)

    matrix = matrix_type(stored)
    return Kernel(embedding_backward, void(matrix, int64[::1], matrix))


@cache
def dropout_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the dropout kernel for one dtype, including 16-bit ones."""
    own, (stored, widen, narrow, _) = acc_dtype(dtype), form(dtype)
    real, zero = scalar_type(own), own.type(0)

    def dropout(x, out, seed, threshold, scale):
        """Set elements to 0 at random; with the same seed, the kernel also computes the gradient.

        Computes: out[i] = scale x[i] where random word i reaches the threshold, else 0
        Source: Srivastava et al., Dropout (2014); the words: see ``philox``
        One thread does: four neighbouring elements, for one counter gives four words
        Registers: four words
        Global traffic: one read and one write an element
        """
        block = cuda.grid(1)
        if block * WORDS < x.shape[0]:
            words = _element_words(seed, block)
            for i in range(WORDS):
                at = block * WORDS + i
                if at < x.shape[0]:
                    out[at] = narrow(scale * widen(x[at]) if words[i] >= threshold else zero)

    vector = vector_type(stored)
    return Kernel(dropout, void(vector, vector, int64, int64, real))


@cache
def adam_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel of a step of Adam for one dtype."""
    real, one = scalar_type(dtype), dtype.type(1)

    def adam(value, grad, m, v, out, constants):
        """Take a step of Adam.

        Computes: m, v in place, and the next value, as ``pointwise.make_adam``
        Source: Kingma and Ba (2015), Algorithm 1; Loshchilov and Hutter (2019), Algorithm 2
        One thread does: one element
        Global traffic: four reads and three writes an element
        """
        i = cuda.grid(1)
        if i < value.shape[0]:
            m[i], v[i], out[i] = _adam(value[i], grad[i], m[i], v[i], one, constants)

    vector = vector_type(dtype)
    signature = void(vector, vector, vector, vector, vector, types.UniTuple(real, 6))
    return Kernel(adam, signature)


@cache
def sgd_kernel(dtype: np.dtype[Any]) -> Kernel:
    """Return the kernel of a step of gradient descent for one dtype."""

    def sgd(value, grad, out, lr):
        """Take a step against the gradient.

        Computes: out = value - lr · grad
        One thread does: one element
        Global traffic: two reads and one write an element
        """
        i = cuda.grid(1)
        if i < value.shape[0]:
            out[i] = value[i] - lr * grad[i]

    vector = vector_type(dtype)
    return Kernel(sgd, void(vector, vector, vector, scalar_type(dtype)))
