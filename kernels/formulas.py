"""What attention costs by the book: floating-point operations and elements moved.

The benchmark, the documentation and the app count with these and with nothing else.
"""

from __future__ import annotations


def attention_flops(
    batch_heads: int, seq_q: int, seq_k: int, head_dim: int, *, causal: bool = False
) -> float:
    """Return the operations of one forward pass.

    Two products of 2·N·N·d operations each, for each head; half of it under a causal mask.  The
    exponentials are not counted.  Source: FlashAttention-2, section 4.1.
    """
    return 4.0 * batch_heads * seq_q * seq_k * head_dim * (0.5 if causal else 1.0)


def attention_backward_flops(
    batch_heads: int, seq_q: int, seq_k: int, head_dim: int, *, causal: bool = False
) -> float:
    """Return the operations of one backward pass: five products where the forward pass has two."""
    return 2.5 * attention_flops(batch_heads, seq_q, seq_k, head_dim, causal=causal)


def score_matrix_bytes(batch_heads: int, seq_q: int, seq_k: int, itemsize: int) -> int:
    """Return the size of S, which the naive baseline stores and the fused kernel does not."""
    return batch_heads * seq_q * seq_k * itemsize
