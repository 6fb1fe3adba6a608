"""Names from the published courses, provided only so that their code runs unchanged.

The published transformer course (CMU 11-868) has a tensor method, a Function and a pair of backend
operations for each of its fused kernels.  Here a layer is one function, and the backend of its tensors
chooses the kernel.  The published names are thin wrappers around these functions.  This module attaches
them to the classes, because the layers are imported after the tensor and the backends.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from kernels.common.arguments import flag
from kernels.problem.options import Options

from .. import tensor_functions
from ..attention.score_options import bounds_penalty
from ..autodiff import Context
from ..functions.base import Function, as_int
from ..functions.views import swap_last
from ..modules_basic import LayerNorm1d, layer_norm
from ..nn import softmax
from ..scalars.modes import no_grad, recording
from ..tensor import Tensor
from ..tensor_ops import TensorBackend, TensorOps
from ..tensors import factories, gradient_check

#: The constant that the published kernel adds to the variance.
LAYER_NORM_EPS = 1e-8

LayerNorm1dFused = LayerNorm1d


# -- methods of the tensor ---------------------------------------------------------------------


def attn_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Return softmax over the last dimension of scores + mask, which broadcasts to them."""
    return softmax(scores + mask, scores.dims - 1)


def layernorm(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Normalise the last dimension, (…, n), then scale and shift it by gamma and beta, (n,)."""
    return layer_norm(x, gamma, beta, LAYER_NORM_EPS)


def flash_attn(q: Tensor, k: Tensor, v: Tensor, causal_mask: Any = False) -> Tensor:
    """Compute attention; the published courses have three names for it, one for each of their kernels."""
    return q.flash_attention(k, v, **_options(causal_mask))


def _options(causal_mask: Any) -> Options:
    """Return the options of attention; published code passes the flag as a tensor of one element."""
    found = as_int(causal_mask)
    return {"is_causal": flag("causal_mask", bool(found) if isinstance(found, int) else found)}


# -- operations of a backend: constants of constants -------------------------------------------


def _gradients(function: Callable[..., Tensor], out_grad: Tensor, *inputs: Tensor) -> list[Any]:
    """Return the gradients of the inputs of a function, given that of its result."""
    leaves = [x.detach() for x in inputs]
    for leaf in leaves:
        leaf.requires_grad_(True)
    with recording():
        out = function(*leaves)
    out.backward(out_grad.detach())
    return [leaf.grad for leaf in leaves]


@no_grad()
def attn_softmax_bw(out_grad: Tensor, soft: Tensor) -> Tensor:
    """Return the gradient of the scores, given that of ``soft``, the result of ``attn_softmax_fw``."""
    return soft * (out_grad - (soft * out_grad).sum(soft.dims - 1))


@no_grad()
def layernorm_fw(inp: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return layer norm of (rows, dim), and the variance, without LAYER_NORM_EPS, and mean of each row."""
    last, rows = inp.dims - 1, inp.shape[:-1]
    out = layernorm(inp, gamma, beta)
    return out, inp.var(last).view(*rows), inp.mean(last).view(*rows)


def layernorm_bw(
    out_grad: Tensor, inp: Tensor, gamma: Tensor, beta: Tensor, var: Tensor, mean: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of ``inp``, ``gamma`` and ``beta``; ``var`` and ``mean`` are not used."""
    return tuple(_gradients(layernorm, out_grad, inp, gamma, beta))


@no_grad()
def flash_attn2_fw(q: Tensor, k: Tensor, v: Tensor, causal_mask: Any) -> tuple[Tensor, ...]:
    """Return attention, (batch, heads, seq, dim), and the logsumexp and the maximum of each row of scores.

    The fused kernels do not return the maximum.  This function computes it separately, which allocates a
    seq × seq matrix for each head.  ``Tensor.flash_attn2`` and :class:`Flash_Attn` do not compute it.
    """
    options = _options(causal_mask)
    out, lse = q.flash_attention(k, v, **{**options, "return_lse": True})
    scores = q @ swap_last(k) * q.shape[-1] ** -0.5
    if options.get("is_causal"):
        seq_q, seq_k = scores.shape[-2:]
        scores = scores + bounds_penalty(seq_q, seq_k, -seq_q, 0, scores.backend, scores.dtype)
    return out, lse, q.f.max_reduce(scores, scores.dims - 1).view(*lse.shape)


def flash_attn_fw(q: Tensor, k: Tensor, v: Tensor, causal_mask: Any) -> tuple[Tensor, ...]:
    """Return attention, and the sum and maximum of each row, which FlashAttention-1 stores.

    The sum is that of exp(score - maximum).  Arguments and shapes are those of :func:`flash_attn2_fw`.
    """
    out, lse, m = flash_attn2_fw(q, k, v, causal_mask)
    return out, (lse - m).exp(), m


def flash_attn_bw(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, out_grad: Tensor, l_: Tensor, m: Tensor,
    causal_mask: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the gradients of q, k and v, and ``causal_mask``; ``out``, ``l_`` and ``m`` are not used."""
    options = _options(causal_mask)
    found = _gradients(lambda q, k, v: q.flash_attention(k, v, **options), out_grad, q, k, v)
    return *found, causal_mask


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
    def backward(ctx: Context, out_grad: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of ``inp``, ``gamma`` and ``beta``."""
        f: Any = out_grad.f
        return f.layernorm_bw(out_grad, *ctx.saved_values)


class Flash_Attn(Function):
    """Attention in one fused kernel, with the arguments of the published Functions."""

    apply = staticmethod(flash_attn)  # type: ignore[assignment]


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
    "attn_softmax_fw": no_grad()(attn_softmax),
    "attn_softmax_bw": attn_softmax_bw,
    "layernorm_fw": layernorm_fw,
    "layernorm_bw": layernorm_bw,
    "flash_attn_fw": flash_attn_fw,
    "flash_attn_bw": flash_attn_bw,
    "flash_attn_causal_fw": flash_attn_fw,
    "flash_attn_causal_bw": flash_attn_bw,
    "flash_attn2_fw": flash_attn2_fw,
    "flash_attn2_bw": flash_attn_bw,
}
_NAMES = (
    "zeros", "ones", "rand", "tensor", "_tensor", "tensor_from_numpy", "zeros_tensor_from_numpy",
    "ones_tensor_from_numpy", "grad_central_difference", "grad_check", "Attn_Softmax", "LayerNorm",
    "Flash_Attn", "Flash_Attn2", "Flash_Attn_Causal",
)  # fmt: skip
for _name, _method in METHODS.items():
    setattr(Tensor, _name, _method)
for _name, _operation in OPERATIONS.items():
    # A backend reads them from its operations, so that a subclass of TensorOps can override them.
    setattr(TensorOps, _name, staticmethod(_operation))
    setattr(TensorBackend, _name, property(attrgetter(f"kind.{_name}"), doc=_operation.__doc__))

# In the published course, `tensor_functions` contains all of these.  Here they need the Tensor class,
# which needs `tensor_functions`, so an import there would be circular.  They are set from outside when the
# package is imported: a module `__getattr__` would only move the circular import into a function.
_PLACES = {**vars(gradient_check), **vars(factories), **globals()}
for _name in _NAMES:
    setattr(tensor_functions, _name, _PLACES[_name])
