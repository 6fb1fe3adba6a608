"""The differentiable functions of tensors, each with its value and its gradient."""

from __future__ import annotations

from typing import Any

from .autodiff import Context
from .backends.tensor_protocol import TensorLike as Tensor
from .functions.base import Function, as_int
from .functions.views import Copy as Copy
from .functions.views import Permute as Permute
from .functions.views import To as To
from .functions.views import View as View
from .functions.views import swap_last


class Neg(Function):
    """-a."""

    is_multilinear = True  # beyond module 5

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        return a.f.neg_map(a)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        return grad_output.f.neg_map(grad_output)


class Inv(Function):
    """1 / a."""

    is_symmetric = True  # beyond module 5

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return a.f.inv_map(a)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        (a,) = ctx.saved_values
        return grad_output.f.inv_back_zip(a, grad_output)


class Add(Function):
    """a + b."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        return a.f.add_zip(a, b)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        return grad_output, grad_output

    @classmethod  # beyond module 5
    def jvp(cls, history: Any, tangents: tuple[Any, ...]) -> Tensor:  # beyond module 5
        """Add the tangents, zeros for an argument that does not move."""
        pairs = zip(history.inputs, tangents, strict=True)
        return cls.apply(*(x.zeros() if t is None else t for x, t in pairs))


class Mul(Function):
    """a * b."""

    is_multilinear = True  # beyond module 5

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        # TASK 2.3: Save both; a.f has the operation, mul_zip.
        ctx.save_for_backward(a, b)
        return a.f.mul_zip(a, b)
        # END TASK 2.3

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        # TASK 2.4: As for Mul of two Scalars; mul_zip multiplies tensors.
        a, b = ctx.saved_values
        return grad_output.f.mul_zip(b, grad_output), grad_output.f.mul_zip(a, grad_output)
        # END TASK 2.4


class PowerScalar(Function):  # beyond module 2
    """a ** exponent."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, exponent: Tensor) -> Tensor:
        out = a.f.pow_scalar_zip(a, exponent)
        ctx.save_for_backward(a, exponent, out)
        return out

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor | float, Tensor | float]:
        a, exponent, out = ctx.saved_values
        f, (of_base, of_exponent) = grad_output.f, ctx.needs_input_grad
        d_base = d_exponent = 0.0
        if of_base:
            is_zero = f.eq_zip(
                exponent, exponent._ensure_tensor(0.0)
            )  # then the slope is 0, of 0 too
            one_less = f.add_zip(f.add_zip(exponent, exponent._ensure_tensor(-1.0)), is_zero)
            slope = f.mul_zip(f.pow_scalar_zip(a, one_less), exponent)
            d_base = f.mul_zip(slope, grad_output)
        if of_exponent:
            d_exponent = f.mul_zip(f.mul_zip(out, f.log_map(a)), grad_output)
        return d_base, d_exponent


class Sigmoid(Function):
    """1 / (1 + e^-a)."""

    is_symmetric = True  # beyond module 5

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        # TASK 2.3: Save the result of a.f.sigmoid_map.
        out = a.f.sigmoid_map(a)
        ctx.save_for_backward(out)
        return out
        # END TASK 2.3

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        # TASK 2.4: As for Sigmoid of a Scalar; tensors have the operators too.
        (out,) = ctx.saved_values
        return grad_output * out * (-out + 1.0)
        # END TASK 2.4


class ReLU(Function):
    """a where it is positive, else 0."""

    is_symmetric = True  # beyond module 5

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        # TASK 2.3: Save a; relu_map.
        ctx.save_for_backward(a)
        return a.f.relu_map(a)
        # END TASK 2.3

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        # TASK 2.4: relu_back_zip of what was saved and of grad.
        (a,) = ctx.saved_values
        return grad_output.f.relu_back_zip(a, grad_output)
        # END TASK 2.4


class Log(Function):
    """The natural logarithm of a + 1e-6."""

    is_symmetric = True  # beyond module 5

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        # TASK 2.3: Save a; log_map.
        ctx.save_for_backward(a)
        return a.f.log_map(a)
        # END TASK 2.3

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        # TASK 2.4: log_back_zip of what was saved and of grad.
        (a,) = ctx.saved_values
        return grad_output.f.log_back_zip(a, grad_output)
        # END TASK 2.4


class Exp(Function):
    """e^a."""

    is_symmetric = True  # beyond module 5

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        # TASK 2.3: Save the result of exp_map.
        out = a.f.exp_map(a)
        ctx.save_for_backward(out)
        return out
        # END TASK 2.3

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        # TASK 2.4: As for Exp of a Scalar; make a new tensor.
        (out,) = ctx.saved_values
        return grad_output.f.mul_zip(out, grad_output)
        # END TASK 2.4


class Tanh(Function):  # beyond module 2
    """The hyperbolic tangent."""

    is_symmetric = True  # beyond module 5

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        out = a.f.tanh_map(a)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        (out,) = ctx.saved_values
        return grad_output * (-(out * out) + 1.0)


class Sum(Function):
    """The sum over one dimension, or over all elements."""

    is_multilinear = True  # beyond module 5

    @staticmethod
    def forward(ctx: Context, a: Tensor, dim: Any) -> Tensor:
        # TASK 2.3: add_reduce over as_int(dim).
        return a.f.add_reduce(a, as_int(dim))
        # END TASK 2.3

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, float]:
        # TASK 2.4: Each element has slope 1; chain_rule expands; 0.0 for dim.
        return grad_output, 0.0
        # END TASK 2.4


class Max(Function):  # beyond module 3
    """The maximum over one dimension."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, dim: Any) -> Tensor:
        # TASK 4.4: max_reduce; save where a equals the maximum.
        out = a.f.max_reduce(a, as_int(dim))
        ctx.save_for_backward(a.f.eq_zip(a, out))
        return out
        # END TASK 4.4

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, float]:
        # TASK 4.4: grad times what was saved.
        (is_max,) = ctx.saved_values
        return grad_output.f.mul_zip(is_max, grad_output), 0.0
        # END TASK 4.4


class All(Function):
    """1 if no element along a dimension is 0, else 0."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, dim: Any = None) -> Tensor:
        zero = a._ensure_tensor(0.0)
        marks = a.f.eq_zip(a.f.eq_zip(a, zero), zero)
        if dim is None:
            return a.f.mul_reduce(marks.contiguous().view(a.size), 0)
        return a.f.mul_reduce(marks, as_int(dim))


class _Comparison(Function):
    """A step function: its gradient is zero wherever it has one."""

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        # TASK 2.4: Zeros of the two saved shapes.
        a_shape, b_shape = ctx.saved_values
        return grad_output.zeros(a_shape), grad_output.zeros(b_shape)
        # END TASK 2.4


class LT(_Comparison):
    """1 where a < b, else 0."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        # TASK 2.3: Save both shapes; lt_zip.
        ctx.save_for_backward(a.shape, b.shape)
        return a.f.lt_zip(a, b)
        # END TASK 2.3


class EQ(_Comparison):
    """1 where a equals b, else 0."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        # TASK 2.3: Save both shapes; eq_zip.
        ctx.save_for_backward(a.shape, b.shape)
        return a.f.eq_zip(a, b)
        # END TASK 2.3


class IsClose(Function):
    """1 where a and b differ by less than 0.01, else 0; not differentiable."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        # TASK 2.3: is_close_zip.
        return a.f.is_close_zip(a, b)
        # END TASK 2.3


class MatMul(Function):
    """The matrix product over the last two dimensions."""

    is_multilinear = True  # beyond module 5

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a.f.matrix_multiply(a, b)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (a, b), (of_a, of_b) = ctx.saved_values, ctx.needs_input_grad
        multiply = grad_output.f.matrix_multiply
        return (
            multiply(grad_output, swap_last(b)) if of_a else None,
            multiply(swap_last(a), grad_output) if of_b else None,
        )
