"""What the convolutions of ``fast_conv`` have in common: shapes, gradients, and the call of a loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ..autodiff import Context
from ..backends.dtype_promotion import result_dtype
from ..backends.tensor_protocol import TensorLike as Tensor
from ..cuda_ops import MAP_THREADS
from .base import Function, check_tensor

if TYPE_CHECKING:
    from ..tensor_data import TensorData


class Convolution(Function):
    """Same-size convolution; a subclass names the loops and the number of spatial dimensions."""

    loop: ClassVar[Any]
    kernel: ClassVar[Any]
    spatial: ClassVar[int]
    is_multilinear = True  # beyond module 5

    @classmethod
    def forward(cls, ctx: Context, input: Tensor, weight: Tensor) -> Tensor:
        """Convolve (batch, in_channels, …) with (out_channels, in_channels, …)."""
        for name, t in (("input", input), ("weight", weight)):
            check_tensor(name, t)
        ctx.save_for_backward(input, weight)
        return cls.convolve(input, weight, False)

    @classmethod
    def backward(cls, ctx: Context, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of input and weight."""
        (input, weight), (of_input, of_weight) = ctx.saved_values, ctx.needs_input_grad
        swap = cls.swap_channels
        # out[b,o,w] = sum_{i,k} in[b,i,w+k] W[o,i,k]
        #   dW[o,i,k] = sum_{b,w} in[b,i,w+k] dout[b,o,w]: a convolution of in with dout, batch as
        #   channel
        dweight = dinput = None
        if of_weight:
            dweight = swap(cls.convolve(swap(input), swap(grad_output), False, weight.shape[2:]))
        #   din[b,i,x] = sum_{o,k} dout[b,o,x-k] W[o,i,k]: a reversed convolution
        if of_input:
            dinput = cls.convolve(grad_output, swap(weight), True)
        return dinput, dweight

    @classmethod
    def convolve(
        cls, input: Tensor, weight: Tensor, reverse: bool, size: tuple[int, ...] | None = None
    ) -> Tensor:
        """Run the loop; ``size`` is the spatial size of the output, the input's when None."""
        if not input.dims == weight.dims == cls.spatial + 2:
            raise ValueError(
                f"conv{cls.spatial}d needs {cls.spatial + 2} dimensions, (batch, channels, …) and "
                f"(out_channels, in_channels, …), got input {input.shape} and weight {weight.shape}"
            )
        if input.shape[1] != weight.shape[1]:
            raise AssertionError(
                f"the input has {input.shape[1]} channels, the weight {weight.shape[1]}, in shapes "
                f"{input.shape} and {weight.shape}; they must be equal"
            )
        shape = (input.shape[0], weight.shape[0], *(size or input.shape[2:]))
        out = input.empty(shape, result_dtype(input, weight))
        run = cls.on_device if input.backend.cuda else cls.on_host
        operands = (t._tensor for t in (out, input, weight))
        input.backend.loops.run(run, *operands, options=(reverse,))
        return out

    @classmethod
    def on_host(cls, out: TensorData, input: TensorData, weight: TensorData, reverse: bool) -> None:
        """Run the compiled loop."""
        cls.loop(*out.tuple(), out.size, *input.tuple(), *weight.tuple(), reverse)

    @classmethod
    def on_device(
        cls, out: TensorData, input: TensorData, weight: TensorData, reverse: bool
    ) -> None:
        """Launch the kernel."""
        # Tuples are passed as arguments without a copy, and indexing them needs no local memory.
        triples = [(data._storage, data.shape, data.strides) for data in (out, input, weight)]
        grid = -(-out.size // MAP_THREADS)
        if grid:  # an empty grid cannot be launched
            launch = cls.kernel[grid, MAP_THREADS]
            launch(*triples[0], out.size, *triples[1], *triples[2], reverse)

    @classmethod
    def swap_channels(cls, x: Tensor) -> Tensor:
        """Exchange the first two dimensions."""
        return x._new(x._tensor.permute(1, 0, *range(2, cls.spatial + 2)))
