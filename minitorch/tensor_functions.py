"""The differentiable functions of tensors: each holds its value and, beside it, its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kernels import Problem, launch, make_problem

from .autodiff import Context
from .function import Function, as_int, is_tensor
from .shape_functions import Copy as Copy
from .shape_functions import Permute as Permute
from .shape_functions import To as To
from .shape_functions import View as View
from .shape_functions import swap_last

if TYPE_CHECKING:
    from .tensor import Tensor


class Neg(Function):
    """-a."""

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        """Change the sign."""
        return a.f.neg_map(a)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        """Change the sign of the gradient."""
        return grad_output.f.neg_map(grad_output)


class Inv(Function):
    """1 / a."""

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        """Compute the reciprocal."""
        ctx.save_for_backward(a)
        return a.f.inv_map(a)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        """Multiply by -1 / a²."""
        (a,) = ctx.saved_values
        return grad_output.f.inv_back_zip(a, grad_output)


class Add(Function):
    """a + b."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        """Compute the sum."""
        return a.f.add_zip(a, b)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """Hand the gradient on to both."""
        return grad_output, grad_output


class Mul(Function):
    """a * b."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        """Compute the product."""
        ctx.save_for_backward(a, b)
        return a.f.mul_zip(a, b)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply by the other factor."""
        a, b = ctx.saved_values
        return grad_output.f.mul_zip(b, grad_output), grad_output.f.mul_zip(a, grad_output)


class PowerScalar(Function):
    """a ** exponent, where the exponent is a constant."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, exponent: Tensor) -> Tensor:
        """Raise each element to the power."""
        ctx.save_for_backward(a, exponent)
        return a.f.pow_scalar_zip(a, exponent)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, float]:
        """Multiply by exponent * a ** (exponent - 1)."""
        a, exponent = ctx.saved_values
        f = grad_output.f
        one_less = f.add_zip(exponent, exponent._ensure_tensor(-1.0))
        slope = f.mul_zip(f.pow_scalar_zip(a, one_less), exponent)
        return f.mul_zip(slope, grad_output), 0.0


class Sigmoid(Function):
    """1 / (1 + e^-a)."""

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        """Compute the sigmoid."""
        out = a.f.sigmoid_map(a)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        """Multiply by out (1 - out)."""
        (out,) = ctx.saved_values
        return grad_output * out * (-out + 1.0)


class ReLU(Function):
    """a where it is positive, else 0."""

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        """Cut off the negative part."""
        ctx.save_for_backward(a)
        return a.f.relu_map(a)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        """Hand the gradient on where a is positive."""
        (a,) = ctx.saved_values
        return grad_output.f.relu_back_zip(a, grad_output)


class Log(Function):
    """The natural logarithm of a + EPS."""

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        """Compute the logarithm."""
        ctx.save_for_backward(a)
        return a.f.log_map(a)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        """Divide by a + EPS."""
        (a,) = ctx.saved_values
        return grad_output.f.log_back_zip(a, grad_output)


class Exp(Function):
    """e^a."""

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        """Compute the exponential."""
        out = a.f.exp_map(a)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        """Multiply by e^a."""
        (out,) = ctx.saved_values
        return grad_output.f.mul_zip(out, grad_output)


class Tanh(Function):
    """The hyperbolic tangent."""

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        """Compute the hyperbolic tangent."""
        out = a.f.tanh_map(a)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        """Multiply by 1 - out²."""
        (out,) = ctx.saved_values
        return grad_output * (-(out * out) + 1.0)


class Sum(Function):
    """The sum over one dimension, or over everything."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, dim: Any) -> Tensor:
        """Add up; the dimension stays, with size 1."""
        return a.f.add_reduce(a, as_int(dim))

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, float]:
        """Hand the gradient on; the chain rule expands it."""
        return grad_output, 0.0


class Max(Function):
    """The maximum over one dimension."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, dim: Any) -> Tensor:
        """Find the maximum; the dimension stays, with size 1."""
        out = a.f.max_reduce(a, as_int(dim))
        ctx.save_for_backward(a.f.eq_zip(a, out))
        return out

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, float]:
        """Hand the gradient on to every element that is the maximum."""
        (is_max,) = ctx.saved_values
        return grad_output.f.mul_zip(is_max, grad_output), 0.0


class All(Function):
    """1 if every element along a dimension is 1."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, dim: Any = None) -> Tensor:
        """Multiply up one dimension, or everything."""
        if dim is None:
            return a.f.mul_reduce(a.contiguous().view(a.size), 0)
        return a.f.mul_reduce(a, as_int(dim))


class _Comparison(Function):
    """A step function: its gradient is zero wherever it has one."""

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """Return zeros for both."""
        a_shape, b_shape = ctx.saved_values
        return grad_output.zeros(a_shape), grad_output.zeros(b_shape)


class LT(_Comparison):
    """1 where a < b, else 0."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        """Compare."""
        ctx.save_for_backward(a.shape, b.shape)
        return a.f.lt_zip(a, b)


class EQ(_Comparison):
    """1 where a equals b, else 0."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        """Compare."""
        ctx.save_for_backward(a.shape, b.shape)
        return a.f.eq_zip(a, b)


class IsClose(Function):
    """1 where a and b differ by less than 0.01, else 0; not differentiable."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        """Compare."""
        return a.f.is_close_zip(a, b)


class MatMul(Function):
    """The matrix product over the last two dimensions."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        """Multiply (..., n, k) by (..., k, m)."""
        ctx.save_for_backward(a, b)
        return a.f.matrix_multiply(a, b)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """Return grad @ bᵀ and aᵀ @ grad."""
        a, b = ctx.saved_values
        multiply = grad_output.f.matrix_multiply
        return multiply(grad_output, swap_last(b)), multiply(swap_last(a), grad_output)


def attention_problem(q: Any, k: Any, v: Any, *args: Any, **options: Any) -> Problem:
    """Check the operands and options of attention on tensors; see ``kernels.make_problem``.

    Raises:
        TypeError: Also if an operand is no tensor, or on another backend than q.
    """
    for name, operand in (("q", q), ("k", k), ("v", v)):
        if not is_tensor(operand):
            raise TypeError(
                f"{name} must be a tensor, got {type(operand).__name__}; make one with "
                "minitorch.from_numpy or minitorch.tensor"
            )
    if not q.backend.ops is k.backend.ops is v.backend.ops:
        raise TypeError(
            "q, k and v must be on one backend, got "
            f"{', '.join(t.backend.ops.__name__ for t in (q, k, v))}; move them with "
            "Tensor.to(backend)"
        )
    return make_problem(q, k, v, *args, **options)


class FlashAttention(Function):
    """Attention in one kernel: nothing of size seq_q x seq_k is ever stored."""

    @staticmethod
    def forward(
        ctx: Context, q: Tensor, k: Tensor, v: Tensor, args: Sequence[Any], options: dict[str, Any]
    ) -> Tensor:
        """Check the call, compute out and lse, and keep them for the backward pass.

        Args:
            ctx: Keeps the problem, q, k, v, out and lse.
            q: (…, heads, seq_q, head_dim).
            k: (…, heads, seq_k, head_dim).
            v: (…, heads, seq_k, value_dim).
            args: Options by position, in the order of ``make_problem``.
            options: Options by name.

        Returns:
            (…, heads, seq_q, value_dim).
        """
        problem = attention_problem(q, k, v, *args, **options)
        target = q.f.attention
        out, lse = launch.forward(target, problem, *(t.array() for t in (q, k, v)))
        result = q.wrap(out)
        ctx.save_for_backward(target, problem, q, k, v, result, lse)
        return result

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Recompute the probabilities tile by tile and return dq, dk and dv."""
        target, problem, q, k, v, out, lse = ctx.saved_values
        gradients = launch.backward(
            target, problem, grad_output.array(), q.array(), k.array(), v.array(), out.array(), lse
        )
        dq, dk, dv = (q.wrap(gradient) for gradient in gradients)
        return dq, dk, dv, None, None
