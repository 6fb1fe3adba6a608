"""Block-sparse attention: FlashAttention that visits only the blocks of a fixed pattern."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kernels import BlockMask
from kernels.common.arguments import whole

from ...tensor import Tensor
from .support import Masked, check_operands, check_options, one_mask

PATTERNS = ("butterfly", "local_butterfly", "bigbird", "strided")
#: Blocks around the diagonal that local_butterfly adds: four on each side of a block.
NEAR = 9


@lru_cache(maxsize=64)
def pattern_mask(pattern: str, seq_q: int, seq_k: int, block_size: int) -> BlockMask:
    """Return the mask of a pattern; equal arguments return the same mask, whose tile lists are cached."""
    if pattern == "strided":
        return BlockMask.strided(seq_q, seq_k, block_size=block_size, is_causal=False)
    if pattern == "bigbird":
        return BlockMask.bigbird(seq_q, seq_k, block_size)
    mask = BlockMask.butterfly(seq_q, seq_k, block_size)
    if pattern == "butterfly":
        return mask
    return mask | BlockMask.bigbird(
        seq_q, seq_k, block_size, window=NEAR, global_blocks=0, random_blocks=0
    )


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
    """Attend exactly to the keys in the visible blocks of a pattern; other tiles are never read.

    o_i = Σ_j softmax_j(scale q_i·k_j) v_j over the j whose block is visible to the block of i.  With the
    butterfly pattern, blocks a and b see each other if a = b or a and b differ in one bit, so that a row of
    n blocks visits 1 + log2 n of them.  Neighbours such as 7 and 8 do not see each other then; in the
    pattern "local_butterfly", they and all up to a distance of four do.

    Args:
        q: (…, heads, seq_q, head_dim).
        k: (…, heads, seq_k, head_dim).
        v: (…, heads, seq_k, value_dim).
        attn_mask: As of ``Tensor.flash_attention``; not with ``key_mask``.
        dropout_p: Probability of dropping a probability.
        is_causal: Position i sees the positions j <= i only.
        scale: Of the scores; 1 / sqrt(head_dim) when None.
        key_mask: (…, seq_k); False or 0 hides a key.
        pattern: "butterfly", "bigbird" or "strided", as built by :class:`kernels.BlockMask`, or
            "local_butterfly".
        block_size: Rows and columns of a block, a multiple of 16.

    Returns:
        (…, heads, seq_q, value_dim); 0 for a query that sees no key.

    Raises:
        TypeError: If an operand is no tensor, or they differ in dtype or backend.
        ValueError: If a shape or block size does not fit, for an unknown pattern, or for both masks.

    Source: Dao et al., FlashAttention (2022), section 3.3, with the fixed butterfly pattern of Dao et al.,
        Pixelated Butterfly (2021).
    """
    check_options("block_sparse", Masked(attn_mask, dropout_p, is_causal, scale))
    check_operands("block_sparse", q, k, v)
    if pattern not in PATTERNS:
        raise ValueError(f"pattern must be one of {PATTERNS}, got {pattern!r}")
    attn_mask = one_mask(attn_mask, key_mask, k)
    mask = pattern_mask(pattern, q.shape[-2], k.shape[-2], whole("block_size", block_size, 1))
    return q.flash_attention(
        k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
        block_mask=mask,
    )  # fmt: skip
