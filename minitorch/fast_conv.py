"""Convolution in one and two dimensions, forward and backward, from one source for CPU and CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import njit, prange

from kernels.runtime.targets import cuda

from .backends.compiled_kernels import device_jit, kernel_of
from .backends.compiled_loops import parallel_loop
from .functions.convolution import Convolution


class Items(NamedTuple):
    """The functions that :func:`make_items` returns; each computes one element of the output."""

    conv1d: Callable[..., None]
    conv2d: Callable[..., None]


def make_items(compile_: Callable[[Any], Any]) -> Items:
    """Return the functions that compute one element of a convolution, for one compiler.

    Args:
        compile_: Turns a plain function into one that the caller's compiler can call.
    """

    @compile_
    def conv1d_item(
        item, out, out_shape, out_strides,
        input, input_shape, input_strides, weight, weight_shape, weight_strides, reverse,
    ):  # fmt: skip
        # TASK 4.1: One element of out: find b, o, w from item; sum over channels and kernel, inside only.
        # out[b, o, w] = Σ_{i, k} input[b, i, w ± k] weight[o, i, k]
        out_channels, out_width = out_shape[1], out_shape[2]
        in_channels, width = input_shape[1], input_shape[2]
        kernel = weight_shape[2]
        step = -1 if reverse else 1
        w, o, b = (
            item % out_width,
            item // out_width % out_channels,
            item // (out_width * out_channels),
        )
        total = out.dtype.type(0)
        for i in range(in_channels):
            source = b * input_strides[0] + i * input_strides[1]
            factor = o * weight_strides[0] + i * weight_strides[1]
            for k in range(kernel):
                x = w + step * k
                if 0 <= x < width:
                    total += (
                        input[source + x * input_strides[2]]
                        * weight[factor + k * weight_strides[2]]
                    )
        out[b * out_strides[0] + o * out_strides[1] + w * out_strides[2]] = total
        # END TASK 4.1

    @compile_
    def conv2d_item(
        item, out, out_shape, out_strides,
        input, input_shape, input_strides, weight, weight_shape, weight_strides, reverse,
    ):  # fmt: skip
        # TASK 4.2: As conv1d_item, with height and width; skip a row of the kernel that lies outside.
        # out[b, o, h, w] = Σ_{i, kh, kw} input[b, i, h ± kh, w ± kw] weight[o, i, kh, kw]
        out_channels, out_height, out_width = out_shape[1], out_shape[2], out_shape[3]
        in_channels, height, width = input_shape[1], input_shape[2], input_shape[3]
        kernel_h, kernel_w = weight_shape[2], weight_shape[3]
        step = -1 if reverse else 1
        w, h = item % out_width, item // out_width % out_height
        o, b = (
            item // (out_width * out_height) % out_channels,
            item // (out_width * out_height * out_channels),
        )
        total = out.dtype.type(0)
        for i in range(in_channels):
            for kh in range(kernel_h):
                y = h + step * kh
                if 0 <= y < height:
                    source = b * input_strides[0] + i * input_strides[1] + y * input_strides[2]
                    factor = o * weight_strides[0] + i * weight_strides[1] + kh * weight_strides[2]
                    for kw in range(kernel_w):
                        x = w + step * kw
                        if 0 <= x < width:
                            total += (
                                input[source + x * input_strides[3]]
                                * weight[factor + kw * weight_strides[3]]
                            )
        out[b * out_strides[0] + o * out_strides[1] + h * out_strides[2] + w * out_strides[3]] = (
            total
        )
        # END TASK 4.2

    return Items(conv1d_item, conv2d_item)


conv1d_item, conv2d_item = make_items(njit(error_model="numpy", inline="always"))


# -- on the CPU --------------------------------------------------------------------------------


def _tensor_conv1d(
    out, out_shape, out_strides, out_size,
    input, input_shape, input_strides,
    weight, weight_shape, weight_strides,
    reverse,
):  # fmt: skip
    """Convolve (batch, in_channels, width) with (out_channels, in_channels, kernel).

    out[b, o, w] is the sum over i and k of input[b, i, w + k] * weight[o, i, k], or w - k when
    ``reverse``; elements outside the input count as zero.

    Args:
        out: Storage of the output, (batch, out_channels, width).
        out_shape: Shape of out, three sizes.
        out_strides: Strides of out, in elements.
        out_size: Number of elements of out.
        input: Storage of the input, (batch, in_channels, width).
        input_shape: Shape of input, three sizes.
        input_strides: Strides of input, in elements.
        weight: Storage of the weights, (out_channels, in_channels, kernel).
        weight_shape: Shape of weight, three sizes.
        weight_strides: Strides of weight, in elements.
        reverse: Anchor the kernel at its right end.
    """
    # TASK 4.1: prange over the items; conv1d_item does one.
    for item in prange(out_size):
        conv1d_item(
            item, out, out_shape, out_strides,
            input, input_shape, input_strides, weight, weight_shape, weight_strides, reverse,
        )  # fmt: skip
    # END TASK 4.1


tensor_conv1d = parallel_loop(_tensor_conv1d)


def _tensor_conv2d(
    out, out_shape, out_strides, out_size,
    input, input_shape, input_strides,
    weight, weight_shape, weight_strides,
    reverse,
):  # fmt: skip
    """Convolve (batch, in_channels, height, width) with (out_channels, in_channels, kh, kw).

    The kernel is anchored top left, or bottom right when ``reverse``; arguments as in ``_tensor_conv1d``.
    """
    # TASK 4.2: prange over the items; conv2d_item does one.
    for item in prange(out_size):
        conv2d_item(
            item, out, out_shape, out_strides,
            input, input_shape, input_strides, weight, weight_shape, weight_strides, reverse,
        )  # fmt: skip
    # END TASK 4.2


tensor_conv2d = parallel_loop(_tensor_conv2d)


# -- on CUDA -----------------------------------------------------------------------------------


def make_kernel(convolve_item: Callable[..., None]) -> Any:
    """Return the kernel of a convolution, given the device function that computes one element."""

    def convolve(
        out, out_shape, out_strides, out_size,
        input, input_shape, input_strides, weight, weight_shape, weight_strides, reverse,
    ):  # fmt: skip
        """Convolve; arguments of :func:`_tensor_conv1d`, with shapes and strides as tuples.

        Computes: out[b, o, x] = Σ_{i, k} input[b, i, x + k] · weight[o, i, k], or x - k when reverse;
            in two dimensions, x and k are pairs
        Source: none
        Grid: ceil(out_size / threads)
        Block: any number of threads
        One thread does: one element of out
        Shared: none
        Registers: one sum
        Global traffic: for each element of out, one write and in_channels · (size of the kernel) reads of
            input and of weight each; neighbouring threads find most of these values in the cache
        Needs: nothing
        """
        item = cuda.grid(1)
        if item < out_size:
            convolve_item(
                item, out, out_shape, out_strides,
                input, input_shape, input_strides, weight, weight_shape, weight_strides, reverse,
            )  # fmt: skip

    return kernel_of(convolve, convolve_item)


cuda_conv1d, cuda_conv2d = map(make_kernel, make_items(device_jit))


# -- differentiable ----------------------------------------------------------------------------


class Conv1dFun(Convolution):
    """Same-size convolution in one dimension, anchored left."""

    loop, kernel, spatial = staticmethod(tensor_conv1d), cuda_conv1d, 1


class Conv2dFun(Convolution):
    """Same-size convolution in two dimensions, anchored top left."""

    loop, kernel, spatial = staticmethod(tensor_conv2d), cuda_conv2d, 2


conv1d = Conv1dFun.apply
conv2d = Conv2dFun.apply
