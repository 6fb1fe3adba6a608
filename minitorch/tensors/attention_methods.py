"""Tensor methods for attention, each in one fused kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels import takes_attention_options
from kernels.common.arguments import flag
from kernels.problem.options import WITH_GRADIENT, Options
from kernels.problem.signature import by_name

from ..functions.flash_attention import (
    FlashAttention,
    attend_packed,  # beyond module 5
)

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from ..backends.tensor_protocol import TensorLike as _Tensor
else:
    _Tensor = object


class AttentionMethods(_Tensor):
    """Methods of :class:`minitorch.tensor.Tensor`, which inherits them."""

    @takes_attention_options
    def flash_attention(self, k: Self, v: Self, *args: Any, **options: Unpack[Options]) -> Any:
        """Compute attention with this tensor as the queries, in one fused kernel.

        ``attn_mask`` may be a tensor, or a boolean array of any library; a floating mask must be a tensor
        and receives its gradient.  Without ``seed``, ``manual_seed`` determines the dropout mask.

        Args:
            k: Keys, (…, heads, seq_k, head_dim); this tensor is (…, heads, seq_q, head_dim).
            v: Values, (…, heads, seq_k, value_dim).
            args: Options by position, in PyTorch's order; ``help`` shows all of them here.
            options: Options by name.

        Returns:
            (…, heads, seq_q, value_dim); with ``return_lse`` a pair of it and lse (…, heads, seq_q), both
            differentiable.

        Raises:
            TypeError: If the dtypes or backends of the operands differ, or an option has the wrong type.
            ValueError: If a shape or a value is invalid.
        """
        options = by_name("flash_attention", args, options)
        every: Any = options
        # Options that may require gradients are arguments of their own.
        args = self, k, v, *map(every.get, WITH_GRADIENT), options
        if "return_lse" in options and flag("return_lse", options["return_lse"]):
            out, lse, _ = FlashAttention.apply_several(*args)
            return out, lse
        return FlashAttention.apply(*args)

    @takes_attention_options  # beyond module 5
    def flash_attention_varlen(  # beyond module 5
        self,
        k: Self,
        v: Self,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        *args: Any,
        **options: Unpack[Options],
    ) -> Any:
        """Compute attention within each of several packed sequences, without padding.

        Rows and columns are counted from the start of their sequence, for ``is_causal``, ``window_size``,
        ``alibi_slopes``, dropout, ``mask_mod`` and ``score_mod``.  The batch index that a mod receives is
        the index of the sequence.

        Args:
            k: Keys, (total_k, heads, head_dim); this tensor is (total_q, heads, head_dim).
            v: Values, (total_k, heads, value_dim).
            cu_seqlens_q: Cumulative lengths, (count + 1,) whole numbers that begin with 0: sequence i has
                the query rows from ``cu_seqlens_q[i]`` up to, but excluding, ``cu_seqlens_q[i + 1]``.
            cu_seqlens_k: Cumulative lengths of the keys, (count + 1,) whole numbers.
            args: Options by position; ``attn_mask`` and ``block_mask`` must be None.
            options: Options by name.

        Returns:
            (total_q, heads, value_dim); with ``return_lse`` a pair of it and lse (heads, total_q), both
            differentiable.

        Raises:
            TypeError: As in :meth:`flash_attention`, or if the cumulative lengths are not whole numbers.
            ValueError: As in :meth:`flash_attention`, if the lengths do not fit the operands, or if a mask
                is given.
        """
        sums = cu_seqlens_q, cu_seqlens_k
        options = by_name("flash_attention_varlen", args, options)
        return attend_packed(self, k, v, *sums, options)
