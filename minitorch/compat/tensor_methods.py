"""Names from the published courses, provided only so that their code runs unchanged.

The published transformer course (CMU 11-868) has a tensor method, a Function and a pair of backend
operations for each of its fused kernels.  Here a layer is one function, and the backend of its tensors
chooses the kernel.  The published names are thin wrappers around these functions.  This module attaches
them to the classes, because the layers are imported after the tensor and the backends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any

from kernels.common.arguments import flag
from kernels.problem.operands import Operands
from kernels.problem.options import Options

from .. import operators, tensor_functions
from ..attention.score_options import masking_penalty
from ..autodiff import Context
from ..functions.base import Function, as_int, is_tensor
from ..functions.flash_attention import FlashAttention, attention_call, attention_gradients
from ..functions.views import swap_last
from ..modules_basic import LayerNorm1d, layer_norm
from ..nn import softmax
from ..tensor import Tensor
from ..tensor_ops import TensorBackend, TensorOps
from ..tensors import factories, gradient_check

#: The constant that the published kernel adds to the variance.
LAYER_NORM_EPS = 1e-8

LayerNorm1dFused = LayerNorm1d


# -- methods of the tensor ---------------------------------------------------------------------


def attn_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Return softmax over the last dimension of scores + mask.

    Args:
        scores: (batch, heads, seq_q, seq_k).
        mask: Added to the scores, -inf at masked positions; it broadcasts to their shape.

    Returns:
        (batch, heads, seq_q, seq_k).
    """
    return softmax(scores + mask, scores.dims - 1)


def layernorm(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Normalise the last dimension, then scale and shift it.

    Args:
        x: (…, n), floating.
        gamma: (n,), the weights.
        beta: (n,), the bias.

    Returns:
        (…, n).
    """
    return layer_norm(x, gamma, beta, LAYER_NORM_EPS)


def flash_attn(q: Tensor, k: Tensor, v: Tensor, causal_mask: Any = False) -> Tensor:
    """Compute attention; the published courses have three names for it, one for each of their kernels."""
    return q.flash_attention(k, v, **_options(causal_mask))


def _options(causal_mask: Any) -> Options:
    """Return the options of attention; published code passes the flag as a tensor of one element."""
    found = as_int(causal_mask)
    return {"is_causal": flag("causal_mask", bool(found) if isinstance(found, int) else found)}


# -- operations of a backend -------------------------------------------------------------------


def constants(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operation so that it runs on detached tensors and returns constants."""

    @wraps(operation)
    def run(*args: Any) -> Any:
        return operation(*(arg.detach() if is_tensor(arg) else arg for arg in args))

    return run


@constants
def attn_softmax_bw(out_grad: Tensor, soft: Tensor) -> Tensor:
    """Return the gradient of the scores.

    Args:
        out_grad: Gradient of the result.
        soft: The result of ``attn_softmax_fw``, (…, seq_q, seq_k).
    """
    return soft * (out_grad - (soft * out_grad).sum(soft.dims - 1))


@constants
def layernorm_fw(inp: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return layer norm over the last dimension, and the variance and mean of each row.

    Args:
        inp: (rows, dim).
        gamma: (dim,).
        beta: (dim,).

    Returns:
        (rows, dim), (rows,) and (rows,).  The variance does not include the constant LAYER_NORM_EPS.
    """
    last, rows = inp.dims - 1, inp.shape[:-1]
    out = layernorm(inp, gamma, beta)
    return out, inp.var(last).view(*rows), inp.mean(last).view(*rows)


@constants
def layernorm_bw(
    out_grad: Tensor, inp: Tensor, gamma: Tensor, beta: Tensor, var: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``inp``, ``gamma`` and ``beta``.

    Args:
        out_grad: Gradient of the result.
        inp: The input of ``layernorm_fw``, (rows, dim).
        gamma: The weights, (dim,).
        beta: The bias, (dim,).
        var: The variance of each row that ``layernorm_fw`` returned, (rows,).
        mean: The mean of each row that ``layernorm_fw`` returned, (rows,).
    """
    last, column = inp.dims - 1, (*inp.shape[:-1], 1)
    rstd = (var.view(*column) + LAYER_NORM_EPS) ** -0.5
    normal, grad = (inp - mean.view(*column)) * rstd, out_grad * gamma
    dinp = (grad - grad.mean(last) - normal * (grad * normal).mean(last)) * rstd
    return dinp, gamma.expand(out_grad * normal), beta.expand(out_grad)


@constants
def flash_attn2_fw(
    q: Tensor, k: Tensor, v: Tensor, causal_mask: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention, and the logsumexp and the maximum of each row of scores.

    The fused kernels do not return the maximum.  This function computes it separately, which allocates a
    seq × seq matrix for each head.  ``Tensor.flash_attn2`` and :class:`Flash_Attn` do not compute it.

    Args:
        q: Queries, (batch, heads, seq, dim).
        k: Keys, (batch, heads, seq, dim).
        v: Values, (batch, heads, seq, dim).
        causal_mask: Whether later columns are masked, a bool or a tensor of one element.

    Returns:
        (batch, heads, seq, dim), (batch, heads, seq) and (batch, heads, seq).
    """
    options = _options(causal_mask)
    out, lse = q.flash_attention(k, v, **{**options, "return_lse": True})
    call = attention_call(q, k, v, options)
    scores = q @ swap_last(k) * call.problem.scale
    penalty = masking_penalty(call, scores)
    scores = scores if penalty is None else scores + penalty
    return out, lse, q.f.max_reduce(scores, scores.dims - 1).view(*lse.shape)


def flash_attn_fw(
    q: Tensor, k: Tensor, v: Tensor, causal_mask: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention, and the sum and maximum of each row, which FlashAttention-1 stores.

    The sum is that of exp(score - maximum).  Arguments and shapes are those of :func:`flash_attn2_fw`.
    """
    out, lse, m = flash_attn2_fw(q, k, v, causal_mask)
    return out, (lse - m).exp(), m


@constants
def flash_attn2_bw(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, out_grad: Tensor, lse: Tensor, m: Tensor,
    causal_mask: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Return the gradients of q, k and v, and ``causal_mask`` unchanged.

    Args:
        q: Queries, (batch, heads, seq, dim).
        k: Keys, (batch, heads, seq, dim).
        v: Values, (batch, heads, seq, dim).
        out: Result of the forward pass.
        out_grad: Gradient of ``out``.
        lse: The logsumexp of each row, the second result of :func:`flash_attn2_fw`.
        m: The maximum of each row; not used.
        causal_mask: Whether later columns are masked; the same value as in the forward pass.
    """
    problem = attention_call(q, k, v, _options(causal_mask)).problem
    gradients = attention_gradients(problem, out_grad, Operands(q, k, v, out=out, lse=lse))
    return *gradients, causal_mask


def flash_attn_bw(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, out_grad: Tensor, row_sum: Tensor, m: Tensor,
    causal_mask: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Return the result of :func:`flash_attn2_bw`, given the sum and maximum of each row.

    ``row_sum`` and ``m`` are the l and m of :func:`flash_attn_fw`; other arguments are the same.
    """
    lse = m + (row_sum - operators.EPS).log()  # `log` adds EPS; a row sum is at least 1
    return flash_attn2_bw(q, k, v, out, out_grad, lse, m, causal_mask)


# -- Functions ---------------------------------------------------------------------------------


class Attn_Softmax(Function):
    """Softmax over the last dimension of scores + mask."""

    @staticmethod
    def forward(ctx: Context, inp: Tensor, mask: Tensor) -> Tensor:
        """Return the probabilities, of the shape of ``inp``."""
        f: Any = inp.f
        soft = f.attn_softmax_fw(inp, mask)
        ctx.save_for_backward(soft, mask)
        return soft

    @staticmethod
    def backward(ctx: Context, out_grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of the scores, and zeros for the mask, as published."""
        soft, mask = ctx.saved_values
        f: Any = out_grad.f
        return f.attn_softmax_bw(out_grad, soft), mask.zeros()


class LayerNorm(Function):
    """Normalise the last dimension, then scale and shift it."""

    @staticmethod
    def forward(ctx: Context, inp: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        """Return (rows, dim) for (rows, dim), (dim,) and (dim,)."""
        f: Any = inp.f
        out, var, mean = f.layernorm_fw(inp, gamma, beta)
        ctx.save_for_backward(inp, gamma, beta, var, mean)
        return out

    @staticmethod
    def backward(ctx: Context, out_grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of ``inp``, ``gamma`` and ``beta``."""
        f: Any = out_grad.f
        return f.layernorm_bw(out_grad, *ctx.saved_values)


class Flash_Attn(Function):
    """Attention in one fused kernel, with the arguments of the published Functions."""

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, causal_mask: Any) -> Tensor:
        """Return (batch, heads, seq, dim); ``causal_mask`` is a bool, or a tensor of one element."""
        return FlashAttention.forward(ctx, q, k, v, None, None, _options(causal_mask))

    @staticmethod
    def backward(ctx: Context, out_grad: Tensor) -> tuple[Any, ...]:
        """Return the gradients of q, k and v, and None for ``causal_mask``."""
        return *FlashAttention.backward(ctx, out_grad)[:3], None


Flash_Attn2 = Flash_Attn_Causal = Flash_Attn

# -- published import paths -------------------------------------------------------------------

METHODS = {
    "attn_softmax": attn_softmax,
    "layernorm": layernorm,
    "flash_attn": flash_attn,
    "flash_attn2": flash_attn,
    "flash_attn_causal": flash_attn,
}
OPERATIONS = {
    "attn_softmax_fw": constants(attn_softmax),
    "attn_softmax_bw": attn_softmax_bw,
    "layernorm_fw": layernorm_fw,
    "layernorm_bw": layernorm_bw,
    "flash_attn_fw": flash_attn_fw,
    "flash_attn_bw": flash_attn_bw,
    "flash_attn_causal_fw": flash_attn_fw,
    "flash_attn_causal_bw": flash_attn_bw,
    "flash_attn2_fw": flash_attn2_fw,
    "flash_attn2_bw": flash_attn2_bw,
}
FUNCTIONS = {
    "Attn_Softmax": Attn_Softmax,
    "LayerNorm": LayerNorm,
    "Flash_Attn": Flash_Attn,
    "Flash_Attn2": Flash_Attn2,
    "Flash_Attn_Causal": Flash_Attn_Causal,
    "zeros": factories.zeros,
    "ones": factories.ones,
    "rand": factories.rand,
    "tensor": factories.tensor,
    "_tensor": factories._tensor,
    "tensor_from_numpy": factories.tensor_from_numpy,
    "zeros_tensor_from_numpy": factories.zeros_tensor_from_numpy,
    "ones_tensor_from_numpy": factories.ones_tensor_from_numpy,
    "grad_central_difference": gradient_check.grad_central_difference,
    "grad_check": gradient_check.grad_check,
}
for _name, _method in METHODS.items():
    setattr(Tensor, _name, _method)
for _name, _operation in OPERATIONS.items():
    # A backend reads them from its operations, so that a subclass of TensorOps can override them.
    setattr(TensorOps, _name, staticmethod(_operation))
    setattr(TensorBackend, _name, property(attrgetter(f"kind.{_name}"), doc=_operation.__doc__))

# In the published course, `tensor_functions` contains all of these.  Here they need the Tensor class,
# which needs `tensor_functions`, so an import there would be circular.  They are set from outside when the
# package is imported: a module `__getattr__` would only move the circular import into a function.
for _name, _function in FUNCTIONS.items():
    setattr(tensor_functions, _name, _function)
