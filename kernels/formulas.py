"""What attention costs by the book: floating-point operations and elements moved.

The benchmark, the documentation and the app count with these and with nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels.geometry import PLAIN, ceil_div


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


class Traffic(NamedTuple):
    """Elements of one array that have travelled.

    Attributes:
        reads: From global memory.
        writes: To global memory.
    """

    reads: int
    writes: int

    @property
    def moved(self) -> int:
        """Both together."""
        return self.reads + self.writes


def total(counts: dict[str, Traffic]) -> Traffic:
    """Return the sum over all arrays."""
    return Traffic(sum(x.reads for x in counts.values()), sum(x.writes for x in counts.values()))


class HeadShape(NamedTuple):
    """One head of one call: its sizes, and that row ``i`` sees the columns from i + lower to i + upper.

    Attributes:
        seq_q: Query rows.
        seq_k: Key columns.
        head_dim: Of q and k.
        value_dim: Of v and out.
        lower: Of the bounds; -seq_q or less is no bound.
        upper: Likewise; seq_k or more is no bound, 0 is causal.
    """

    seq_q: int
    seq_k: int
    head_dim: int
    value_dim: int
    lower: int
    upper: int


def naive_traffic(shape: HeadShape, tile: tuple[int, int]) -> dict[str, Traffic]:
    """Return what the forward pass of Algorithm 0 moves, array by array.

    The product reads its left operand once for each column of tiles, and its right one once for each row
    of them.  The softmax reads S for its maximum, reads and writes it for P, and reads and writes that for
    the division.  A causal call that hides no key from every row moves the same.

    Args:
        shape: Of the head; the bounds change nothing.
        tile: Rows and columns of a block of the products.
    """
    rows, cols, (seq_q, seq_k, dim, value_dim, *_) = *tile, shape
    lines = ceil_div(seq_q, rows)
    scores = seq_q * seq_k
    return {
        "q": Traffic(ceil_div(seq_k, cols) * seq_q * dim, 0),
        "k": Traffic(lines * seq_k * dim, 0),
        "v": Traffic(lines * seq_k * value_dim, 0),
        "scores": Traffic((3 + ceil_div(value_dim, cols)) * scores, 3 * scores),
        "out": Traffic(0, seq_q * value_dim),
        "lse": Traffic(0, seq_q),
    }


def flash1_traffic(shape: HeadShape, tile: tuple[int, int]) -> dict[str, Traffic]:
    """Return what the forward pass of FlashAttention, Algorithm 1, moves, array by array.

    Every query row that a key tile visits is read with its output, sum and maximum, and all but the query
    are written again.

    Args:
        shape: Of the head.
        tile: (block_q, block_k).
    """
    block_q, block_k, (seq_q, seq_k, dim, value_dim, lower, upper) = *tile, shape
    visited = 0  # rows, once for each key tile
    for col in range(0, seq_k, block_k):
        first = PLAIN.first_tile(col, block_q, seq_q, -upper)
        stop = PLAIN.tiles_stop(min(col + block_k, seq_k), block_q, seq_q, -lower)
        visited += max(min(stop * block_q, seq_q) - first * block_q, 0)
    statistic = Traffic(visited + seq_q, visited + seq_q)
    return {
        "q": Traffic(visited * dim, 0),
        "k": Traffic(seq_k * dim, 0),
        "v": Traffic(seq_k * value_dim, 0),
        "out": Traffic(visited * value_dim, (visited + seq_q) * value_dim),
        "row_sum": statistic,
        "row_max": statistic,
        "lse": Traffic(0, seq_q),
    }


def flash2_traffic(shape: HeadShape, tile: tuple[int, int]) -> dict[str, Traffic]:
    """Return what the forward pass of FlashAttention-2 moves, array by array.

    A query tile reads the keys that any of its rows sees, and nothing is written before the end.

    Args:
        shape: Of the head; its keys are not divided among blocks.
        tile: (block_q, block_k); of the keys only those in reach are read, not whole tiles.
    """
    block_q, (seq_q, seq_k, dim, value_dim, lower, upper) = tile[0], shape
    visited = 0  # keys, once for each query tile
    for row in range(0, seq_q, block_q):
        row_stop = min(row + block_q, seq_q)
        visited += max(min(row_stop + upper, seq_k) - max(row + lower, 0), 0)
    return {
        "q": Traffic(seq_q * dim, 0),
        "k": Traffic(visited * dim, 0),
        "v": Traffic(visited * value_dim, 0),
        "out": Traffic(0, seq_q * value_dim),
        "lse": Traffic(0, seq_q),
    }


#: By rung.
TRAFFIC = {"naive": naive_traffic, "flash1": flash1_traffic, "flash2": flash2_traffic}
