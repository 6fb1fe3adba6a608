"""Derivatives of attention and of its gradients: forward mode, and the gradient of the backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels.array_call import attend
from kernels.launch import Tile, Wanted
from kernels.problem.options import Options
from kernels.problem.signature import by_name, takes_attention_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes_attention_options
def flash_attention_jvp(
    q: Any,
    k: Any,
    v: Any,
    q_tangent: Any,
    k_tangent: Any,
    v_tangent: Any,
    *args: Any,
    tile: Tile | None = None,
    **options: Unpack[Options],
) -> tuple[Any, Any, Any, Any]:
    """Compute attention and its derivative along tangents of q, k and v, a Jacobian-vector product.

    Args:
        q: Queries, (…, heads, seq_q, head_dim) or (seq_q, head_dim), an array of any type that
            :func:`flash_attention_forward` accepts.
        k: Keys, (…, heads, seq_k, head_dim), of the dtype of q.
        v: Values, (…, heads, seq_k, value_dim), of the dtype of q.
        q_tangent: Tangent of q, of its shape and dtype; zeros when None.
        k_tangent: Tangent of k, of its shape and dtype; zeros when None.
        v_tangent: Tangent of v, of its shape and dtype; zeros when None.
        args: Options by position: attn_mask, dropout_p, is_causal, scale and enable_gqa.
        tile: (block_q, block_k), query rows and keys per tile; None uses the rung's default.
        options: Options by name; :func:`make_problem` describes each.  Arrays among them are constants.

    Returns:
        out (…, heads, seq_q, value_dim) and its tangent, then lse (…, heads, seq_q) and its tangent, as
        :func:`flash_attention_forward` returns out and lse.

    Raises:
        TypeError: If an operand is not a floating-point array, an option has the wrong type, or a tangent
            has another dtype than its operand.
        ValueError: If a shape or a value is invalid, or a ``score_mod`` has no derivative.

    Source: FlashAttention-2, Algorithm 1, differentiated.
    """
    own = by_name("flash_attention_jvp", args, options)
    tangents = q_tangent, k_tangent, v_tangent
    out, lse, _, out_tangent, lse_tangent = attend(
        (q, k, v), own, tile, Wanted(tangent=True), tangents
    )
    return out, out_tangent, lse, lse_tangent


@takes_attention_options
def flash_attention_double_backward(
    q_tangent: Any,
    k_tangent: Any,
    v_tangent: Any,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *args: Any,
    dlse: Any = None,
    tile: Tile | None = None,
    **options: Unpack[Options],
) -> tuple[Any, ...]:
    """Compute the gradients of the backward pass of attention, given those of dq, dk and dv.

    The results are the derivatives of the sum of the elements of dq · q_tangent, dk · k_tangent and dv ·
    v_tangent.  Since second derivatives are symmetric, those by q, k and v are also the tangents of dq, dk
    and dv: a Hessian-vector product.  The forward pass is recomputed.

    Args:
        q_tangent: Gradient of dq, of the shape and dtype of q; zeros when None.
        k_tangent: Gradient of dk, of the shape and dtype of k; zeros when None.
        v_tangent: Gradient of dv, of the shape and dtype of v; zeros when None.
        dout: Gradient of out that the backward pass received, (…, heads, seq_q, value_dim).
        q: Queries, (…, heads, seq_q, head_dim) or (seq_q, head_dim).
        k: Keys, (…, heads, seq_k, head_dim).
        v: Values, (…, heads, seq_k, value_dim).
        args: Options by position; the same values as in the forward pass.
        dlse: Gradient of lse that the backward pass received, (…, heads, seq_q); zeros when None.
        tile: (block_q, block_k), query rows and keys per tile; None uses the rung's default.
        options: Options by name; the same values as in the forward pass.

    Returns:
        The gradients of q, k and v, of their shapes, of dout, (…, heads, seq_q, value_dim), and of dlse,
        (…, heads, seq_q).

    Raises:
        TypeError: If an operand is not a floating-point array, an option has the wrong type, or an operand
            has another dtype than q, or dlse than lse.
        ValueError: If a shape or a value is invalid, or a ``score_mod`` has no second derivative.

    Source: FlashAttention-2, Algorithm 2, differentiated.
    """
    own = by_name("flash_attention_double_backward", args, options)
    further = dout, dlse, q_tangent, k_tangent, v_tangent
    return attend((q, k, v), own, tile, Wanted(True, tangent=True), further)
