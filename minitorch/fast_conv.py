"""Convolution in one and two dimensions, forward and backward, by one compiled loop each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import prange

from kernels.compiled import njit_cached

from .autodiff import Context
from .function import Function
from .tensor_ops import result_dtype

if TYPE_CHECKING:
    from .tensor import Tensor


def _tensor_conv1d(
    out, out_shape, out_strides, out_size,
    input, input_shape, input_strides,
    weight, weight_shape, weight_strides,
    reverse,
):  # fmt: skip
    """Convolve (batch, in_channels, width) with (out_channels, in_channels, kernel).

    out[b, o, w] is the sum over i and k of input[b, i, w + k] * weight[o, i, k], or w - k when
    ``reverse``; what lies outside the input counts as zero.

    Args:
        out: Storage of (batch, out_channels, width), likewise its shape, strides and size.
        out_shape: Likewise.
        out_strides: Likewise.
        out_size: Likewise.
        input: Storage of the input; likewise.
        input_shape: Likewise.
        input_strides: Likewise.
        weight: Storage of the weight; likewise.
        weight_shape: Likewise.
        weight_strides: Likewise.
        reverse: Anchor the kernel at its right end.
    """
    out_channels, out_width = out_shape[1], out_shape[2]
    in_channels, width = input_shape[1], input_shape[2]
    kernel = weight_shape[2]
    step = -1 if reverse else 1
    for item in prange(out_size):
        b, o, w = (
            item // (out_channels * out_width),
            item // out_width % out_channels,
            item % out_width,
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


tensor_conv1d = njit_cached(_tensor_conv1d, parallel=True)


def _tensor_conv2d(
    out, out_shape, out_strides, out_size,
    input, input_shape, input_strides,
    weight, weight_shape, weight_strides,
    reverse,
):  # fmt: skip
    """Convolve (batch, in_channels, height, width) with (out_channels, in_channels, kh, kw).

    As :func:`_tensor_conv1d`; the kernel is anchored top left, or bottom right when ``reverse``.

    Args:
        out: Storage of (batch, out_channels, height, width), likewise its shape, strides and size.
        out_shape: Likewise.
        out_strides: Likewise.
        out_size: Likewise.
        input: Storage of the input; likewise.
        input_shape: Likewise.
        input_strides: Likewise.
        weight: Storage of the weight; likewise.
        weight_shape: Likewise.
        weight_strides: Likewise.
        reverse: Anchor the kernel at its bottom right corner.
    """
    out_channels, out_height, out_width = out_shape[1], out_shape[2], out_shape[3]
    in_channels, height, width = input_shape[1], input_shape[2], input_shape[3]
    kernel_h, kernel_w = weight_shape[2], weight_shape[3]
    step = -1 if reverse else 1
    for item in prange(out_size):
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


tensor_conv2d = njit_cached(_tensor_conv2d, parallel=True)


class _Convolution(Function):
    """Same-size convolution; a subclass names the loop and the number of spatial dimensions."""

    loop: object
    spatial: int

    @classmethod
    def convolve(
        cls, input: Tensor, weight: Tensor, reverse: bool, size: tuple[int, ...] | None = None
    ) -> Tensor:
        """Run the loop; ``size`` is the spatial size of the output, the input's when None."""
        assert input.dims == weight.dims == cls.spatial + 2, (
            f"conv{cls.spatial}d needs {cls.spatial + 2} dimensions, (batch, channels, …) and "
            f"(out_channels, in_channels, …), got input {input.shape} and weight {weight.shape}"
        )
        assert input.shape[1] == weight.shape[1], (
            f"the input has {input.shape[1]} channels, the weight {weight.shape[1]}, in shapes "
            f"{input.shape} and {weight.shape}; they must be equal"
        )
        if input.backend.cuda:
            raise NotImplementedError(
                "convolution has no CUDA kernel yet; move the tensors with Tensor.cpu()"
            )
        shape = (input.shape[0], weight.shape[0], *(size or input.shape[2:]))
        out = input.empty(shape, result_dtype(input, weight))
        cls.loop(*out.tuple(), out.size, *input.tuple(), *weight.tuple(), reverse)  # type: ignore[operator]
        return out

    @classmethod
    def swap_channels(cls, x: Tensor) -> Tensor:
        """Exchange the first two dimensions."""
        return x._new(x._tensor.permute(1, 0, *range(2, cls.spatial + 2)))


class Conv1dFun(_Convolution):
    """Same-size convolution in one dimension, anchored left."""

    loop = staticmethod(tensor_conv1d)
    spatial = 1

    @staticmethod
    def forward(ctx: Context, input: Tensor, weight: Tensor) -> Tensor:
        """Convolve (batch, in_channels, width) with (out_channels, in_channels, kernel)."""
        ctx.save_for_backward(input, weight)
        return Conv1dFun.convolve(input, weight, False)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of input and weight."""
        return _backward(Conv1dFun, ctx, grad_output)


class Conv2dFun(_Convolution):
    """Same-size convolution in two dimensions, anchored top left."""

    loop = staticmethod(tensor_conv2d)
    spatial = 2

    @staticmethod
    def forward(ctx: Context, input: Tensor, weight: Tensor) -> Tensor:
        """Convolve (batch, in_channels, h, w) with (out_channels, in_channels, kh, kw)."""
        ctx.save_for_backward(input, weight)
        return Conv2dFun.convolve(input, weight, False)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of input and weight."""
        return _backward(Conv2dFun, ctx, grad_output)


def _backward(fun: type[_Convolution], ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor]:
    input, weight = ctx.saved_values
    swap = fun.swap_channels
    # out[b,o,w] = sum_{i,k} in[b,i,w+k] W[o,i,k]
    #   dW[o,i,k] = sum_{b,w} in[b,i,w+k] dout[b,o,w]: a convolution of in with dout, batch as channel
    dweight = swap(fun.convolve(swap(input), swap(grad), False, weight.shape[2:]))
    #   din[b,i,x] = sum_{o,k} dout[b,o,x-k] W[o,i,k]: a reversed convolution
    dinput = fun.convolve(grad, swap(weight), True)
    return dinput, dweight


conv1d = Conv1dFun.apply
conv2d = Conv2dFun.apply
