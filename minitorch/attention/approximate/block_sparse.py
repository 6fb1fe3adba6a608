"""Block-sparse attention: FlashAttention that visits only the blocks of a fixed pattern."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from kernels import BlockMask
from kernels.common.arguments import one_of, whole

from ...tensor import Tensor
from .support import Masked, check_operands, check_options, one_mask

#: Patterns by name, as functions that return a mask for (seq_q, seq_k, block_size, heads).
PATTERNS: dict[str, Callable[[int, int, int, int], BlockMask]] = {
    "butterfly": lambda seq_q, seq_k, size, heads: BlockMask.butterfly(seq_q, seq_k, size),
    "dilated": lambda seq_q, seq_k, size, heads: BlockMask.dilated(seq_q, seq_k, size, heads=heads),
    "bigbird": lambda seq_q, seq_k, size, heads: BlockMask.bigbird(seq_q, seq_k, size),
    "strided": lambda seq_q, seq_k, size, heads: BlockMask.strided(
        seq_q, seq_k, block_size=size, is_causal=False
    ),
}


@lru_cache(maxsize=64)
def pattern_mask(pattern: str, seq_q: int, seq_k: int, block_size: int, heads: int) -> BlockMask:
    """Return the mask of a pattern; equal arguments return the same mask, whose tile lists are cached."""
    return PATTERNS[pattern](seq_q, seq_k, block_size, heads)


def block_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    key_mask: Any = None,
    pattern: str = "butterfly",
    block_size: int = 64,
) -> Tensor:
    """Compute exact attention to the keys in the visible blocks of a pattern; other tiles are never read.

    o_i = Σ_j softmax_j(scale q_i·k_j) v_j over the j whose block is visible to the block of i. With
    the butterfly pattern, blocks a and b are visible to each other if a = b or if a and b differ in
    one bit, so that a row of n blocks visits 1 + log2 n of them. In the pattern "dilated", each
    head attends to every fourth block, with a different starting block for each head. This
    samples keys evenly, so a model trained with exact attention loses only part of its quality.

    Args:
        q: (…, heads, seq_q, head_dim).
        k: (…, heads, seq_k, head_dim).
        v: (…, heads, seq_k, value_dim).
        attn_mask: As in ``Tensor.flash_attention``; not together with ``key_mask``.
        dropout_p: Probability of dropping an attention weight.
        is_causal: Position i attends only to positions j <= i.
        scale: Factor of the scores; 1 / sqrt(head_dim) when None.
        key_mask: (…, seq_k); False or 0 masks a key.
        pattern: "butterfly", "dilated", "bigbird" or "strided", as built by :class:`kernels.BlockMask`.
        block_size: Rows and columns of a block, a multiple of 16.

    Returns:
        (…, heads, seq_q, value_dim); 0 for a query whose keys are all masked.

    Raises:
        TypeError: If an operand is not a tensor, or the operands differ in dtype or backend.
        ValueError: If a shape or block size does not fit, for an unknown pattern, or for both masks.

    Source: Dao et al., FlashAttention (2022), section 3.3, with the fixed butterfly pattern of Dao et al.,
    Pixelated Butterfly (2021).
    """
    check_options("block_sparse", Masked(attn_mask, dropout_p, is_causal, scale))
    check_operands("block_sparse", q, k, v)
    one_of("pattern", pattern, PATTERNS)
    attn_mask = one_mask(attn_mask, key_mask, k)
    size = whole("block_size", block_size, 1)
    mask = pattern_mask(pattern, q.shape[-2], k.shape[-2], size, q.shape[-3])
    return q.flash_attention(
        k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
        block_mask=mask,
    )  # fmt: skip
