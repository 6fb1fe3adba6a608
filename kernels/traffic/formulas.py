"""What attention and training cost by the book: floating-point operations and elements moved.

The benchmark, the experiments, the documentation and the app count with these and with nothing else.
``io_meter`` counts what the kernels do move; the two agree to the element.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels.common.geometry import PLAIN, ceil_div


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


def training_flops(seq: int, layers: int, width: int, middle: int, vocabulary: int) -> float:
    """Return the operations of training a causal transformer with one text, forward and backward.

    Each weight that multiplies takes two operations a token forward and four backward; to look up an
    embedding takes none.  Attention counts as many, half of its square, and nothing that is computed again.

    Args:
        seq: Tokens of the text.
        layers: Of attention, with four projections, and a feed-forward.
        width: Of the model.
        middle: Of the feed-forward.
        vocabulary: Tokens that the head scores.

    Source: Chowdhery et al. (2022), PaLM, appendix B; there without the half.
    """
    weights = layers * (4 * width * width + 2 * width * middle) + width * vocabulary
    attention = layers * attention_flops(1, seq, seq, width, causal=True)
    return 3.0 * (2.0 * seq * weights + attention)


#: Products of 2·N·N·d operations that a rung computes, forward and backward.  The naive rung keeps no P:
#: it computes S again, as the others do.  flash2 computes S and dP twice, unless it adds to dQ by atomics.
PRODUCTS = {"naive": (2, 5), "flash1": (2, 5), "flash2": (2, 7), "flash2 atomic": (2, 5)}


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

    @property
    def pairs(self) -> int:
        """Scores that no bound hides."""
        return sum(self.seen(row, row + 1) for row in range(self.seq_q))

    @property
    def transposed(self) -> HeadShape:
        """The same with keys in place of queries: key ``j`` is seen by the rows of these bounds."""
        return HeadShape(
            self.seq_k, self.seq_q, self.head_dim, self.value_dim, -self.upper, -self.lower
        )

    def seen(self, start: int, stop: int) -> int:
        """Return how many keys any of the rows from ``start`` up to ``stop`` sees."""
        return max(min(stop + self.upper, self.seq_k) - max(start + self.lower, 0), 0)

    def tile_visits(self, block: int, other: int) -> int:
        """Return the keys in tiles of ``other`` of which any is seen, summed over tiles of rows."""
        visited = 0
        for row in range(0, self.seq_q, block):
            stop_row = min(row + block, self.seq_q)
            first = PLAIN.first_tile(row, other, self.seq_k, self.lower)
            stop = PLAIN.tiles_stop(stop_row, other, self.seq_k, self.upper)
            visited += max(min(stop * other, self.seq_k) - first * other, 0)
        return visited


#: Elements of each array, by name.
Counts = dict[str, Traffic]


def summed(*parts: Counts) -> Counts:
    """Return the traffic of several steps, array by array, without arrays that do not move."""
    names = dict.fromkeys(name for part in parts for name in part)
    sums = {
        name: total({str(i): p[name] for i, p in enumerate(parts) if name in p}) for name in names
    }
    return {name: traffic for name, traffic in sums.items() if traffic.moved}


def _product(
    a: str, b: str, out: str, rows: int, cols: int, depth: int, tile: tuple[int, int]
) -> Counts:
    """Return what (rows, depth) times (depth, cols) moves.

    It reads its left operand once for each column of tiles, and its right one once for each row of them.
    """
    left = {a: Traffic(ceil_div(cols, tile[1]) * rows * depth, 0)}
    right = {b: Traffic(ceil_div(rows, tile[0]) * cols * depth, 0)}
    return summed(left, right, {out: Traffic(0, rows * cols)})


def naive_traffic(shape: HeadShape, tile: tuple[int, int]) -> Counts:
    """Return what the forward pass of Algorithm 0 moves, array by array.

    The softmax reads S for its maximum, reads and writes it for P, and reads and writes that for the
    division.  A causal call moves the same.

    Args:
        shape: Of the head.
        tile: Rows and columns of a block of the products.
    """
    seq_q, seq_k, dim, value_dim, *_ = shape
    return summed(
        _product("q", "k", "scores", seq_q, seq_k, dim, tile),
        {"scores": Traffic(3 * seq_q * seq_k, 2 * seq_q * seq_k), "lse": Traffic(0, seq_q)},
        _product("scores", "v", "out", seq_q, value_dim, seq_k, tile),
    )


def naive_backward_traffic(shape: HeadShape, tile: tuple[int, int], readers: int = 1) -> Counts:
    """Return what the backward pass of Algorithm 0 moves; S and dP lie in global memory.

    Five products, and one pass over S and dP that reads them and writes P and dS in their places.

    Args:
        shape: Of the head.
        tile: Rows and columns of a block of the products.
        readers: Threads that read L of a row, each for itself; 1 counts that as one.

    Source: FlashAttention, appendix B.2.
    """
    seq_q, seq_k, dim, value_dim, *_ = shape
    softmax = {name: Traffic(seq_q * seq_k, seq_q * seq_k) for name in ("scores", "dp")}
    rows = {name: Traffic(seq_q * value_dim, 0) for name in ("out", "dout")}
    return summed(
        _product("q", "k", "scores", seq_q, seq_k, dim, tile),
        _product("dout", "v", "dp", seq_q, seq_k, value_dim, tile),
        softmax,
        rows,
        {"lse": Traffic(readers * seq_q, 0)},
        _product("scores", "dout", "dv", seq_k, value_dim, seq_q, tile),
        _product("dp", "k", "dq", seq_q, dim, seq_k, tile),
        _product("dp", "q", "dk", seq_k, dim, seq_q, tile),
    )


def flash1_traffic(shape: HeadShape, tile: tuple[int, int]) -> Counts:
    """Return what the forward pass of FlashAttention, Algorithm 1, moves, array by array.

    Every query row that a key tile visits is read with its output, sum and maximum, and all but the query
    are written again.

    Args:
        shape: Of the head.
        tile: (block_q, block_k).
    """
    # TASK 5.8: A key tile visits rows: q, O, l, m travel for each visit; then 3: zeros, 19: L.
    (block_q, block_k), (seq_q, seq_k, dim, value_dim, *_) = tile, shape
    visited = shape.transposed.tile_visits(block_k, block_q)  # rows, once for each key tile
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
    # END TASK 5.8


def flash1_backward_traffic(shape: HeadShape, tile: tuple[int, int]) -> Counts:
    """Return what the backward pass of FlashAttention, Algorithm 4, moves, array by array.

    Every query row that a key tile visits is read with its output, dO and L, and its dQ is read and
    written.

    Args:
        shape: Of the head.
        tile: (block_q, block_k).
    """
    (block_q, block_k), (seq_q, seq_k, dim, value_dim, *_) = tile, shape
    visited = shape.transposed.tile_visits(block_k, block_q)
    return {
        "q": Traffic(visited * dim, 0),
        "k": Traffic(seq_k * dim, 0),
        "v": Traffic(seq_k * value_dim, 0),
        "out": Traffic(visited * value_dim, 0),
        "dout": Traffic(visited * value_dim, 0),
        "lse": Traffic(visited, 0),
        "dq": Traffic(visited * dim, (visited + seq_q) * dim),
        "dk": Traffic(0, seq_k * dim),
        "dv": Traffic(0, seq_k * value_dim),
    }


def flash2_traffic(shape: HeadShape, tile: tuple[int, int]) -> Counts:
    """Return what the forward pass of FlashAttention-2 moves, array by array.

    A query tile reads the key tiles of which any row sees a key, and nothing is written before the end.

    Args:
        shape: Of the head; its keys are not divided among blocks.
        tile: (block_q, block_k).
    """
    # TASK 5.8: A query tile visits keys: K and V travel for each visit, all else once.
    seq_q, _, dim, value_dim, *_ = shape
    visited = shape.tile_visits(*tile)  # keys, once for each query tile
    return {
        "q": Traffic(seq_q * dim, 0),
        "k": Traffic(visited * dim, 0),
        "v": Traffic(visited * value_dim, 0),
        "out": Traffic(0, seq_q * value_dim),
        "lse": Traffic(0, seq_q),
    }
    # END TASK 5.8


def delta_traffic(shape: HeadShape) -> Counts:
    """Return what the pass before the backward one moves: D = rowsum(dO ∘ O)."""
    rows = Traffic(shape.seq_q * shape.value_dim, 0)
    return {"dout": rows, "out": rows, "delta": Traffic(0, shape.seq_q)}


def flash2_backward_traffic(
    shape: HeadShape,
    tile: tuple[int, int],
    readers: int = 1,
    key_tile: tuple[int, int] | None = None,
) -> Counts:
    """Return what the backward pass of FlashAttention-2 moves with two kernels, bit for bit the same.

    After D, one kernel goes by query tiles and writes dQ, one by key tiles and writes dK and dV.

    Args:
        shape: Of the head.
        tile: (block_q, block_k) of the first kernel.
        readers: Threads that read L and D of a row in the first, each for itself; 1 counts that as one.
        key_tile: Of the second; the same when None.
    """
    seq_q, _, dim, value_dim, *_ = shape
    visited = shape.tile_visits(*tile)
    statistic = Traffic(readers * seq_q, 0)
    by_queries = {
        "q": Traffic(seq_q * dim, 0),
        "dout": Traffic(seq_q * value_dim, 0),
        "lse": statistic,
        "delta": statistic,
        "k": Traffic(visited * dim, 0),
        "v": Traffic(visited * value_dim, 0),
        "dq": Traffic(0, seq_q * dim),
    }
    return summed(delta_traffic(shape), by_queries, _by_keys(shape, key_tile or tile))


def flash2_atomic_traffic(shape: HeadShape, tile: tuple[int, int]) -> Counts:
    """Return what the backward pass of FlashAttention-2 moves where dQ is added up by atomics.

    An atomic addition reads an element and writes it.

    Args:
        shape: Of the head.
        tile: (block_q, block_k).
    """
    block_q, block_k = tile
    added = shape.transposed.tile_visits(block_k, block_q) * shape.head_dim
    dq = {"dq": Traffic(added, added + shape.seq_q * shape.head_dim)}  # zeros first
    return summed(delta_traffic(shape), dq, _by_keys(shape, tile))


def _by_keys(shape: HeadShape, tile: tuple[int, int]) -> Counts:
    """Return what the kernel moves that owns key tiles and writes dK and dV."""
    (block_q, block_k), (_, seq_k, dim, value_dim, *_) = tile, shape
    visited = shape.transposed.tile_visits(block_k, block_q)  # rows, once for each key tile
    return {
        "k": Traffic(seq_k * dim, 0),
        "v": Traffic(seq_k * value_dim, 0),
        "q": Traffic(visited * dim, 0),
        "dout": Traffic(visited * value_dim, 0),
        "lse": Traffic(visited, 0),
        "delta": Traffic(visited, 0),
        "dk": Traffic(0, seq_k * dim),
        "dv": Traffic(0, seq_k * value_dim),
    }


#: Forward, by rung: ``(shape, tile)``.
TRAFFIC = {
    "naive": naive_traffic,
    "flash1": flash1_traffic,
    "flash2": flash2_traffic,
}
