"""Formulas for the floating-point operations and the memory traffic of attention and training.

The benchmarks, the experiments, the documentation and the app all use these formulas.  ``io_meter`` counts
the traffic of the kernels on the emulated GPU, and the two agree exactly.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels.common.geometry import PLAIN, ceil_div


def attention_flops(
    batch_heads: int, seq_q: int, seq_k: int, head_dim: int, *, causal: bool = False
) -> float:
    """Return the operations of one forward pass.

    Each head takes two matrix products of 2·N·N·d operations, or half of that under a causal mask.
    Exponentials are not counted.  Source: FlashAttention-2, section 4.1.
    """
    return 4.0 * batch_heads * seq_q * seq_k * head_dim * (0.5 if causal else 1.0)


def attention_backward_flops(  # beyond module 5
    batch_heads: int, seq_q: int, seq_k: int, head_dim: int, *, causal: bool = False
) -> float:
    """Return the operations of one backward pass, which has five products; the forward pass has two."""
    return 2.5 * attention_flops(batch_heads, seq_q, seq_k, head_dim, causal=causal)


def training_flops(  # beyond module 5
    seq: int, layers: int, width: int, middle: int, vocabulary: int, window: int | None = None
) -> float:
    """Return the operations of training a causal transformer on one text, forward and backward.

    Each weight of a matrix product takes two operations per token in the forward pass and four in the
    backward pass, and embeddings take none.  The products of attention are counted in the same way,
    for the causal half of the scores and without recomputation.  Each layer has attention with four
    projections and a feed-forward network of width ``middle``; a token attends to ``window`` tokens,
    or None for all before it.

    Source: Chowdhery et al. (2022), PaLM, appendix B, which does not halve the count for the causal mask.
    """
    weights = layers * (4 * width * width + 2 * width * middle) + width * vocabulary
    # All rows see ``window`` keys, but for the triangle of the first rows.
    seen = seq if window is None else min(window, seq)
    triangle = attention_flops(1, seen, seen, width, causal=True)
    attention = layers * (triangle + attention_flops(1, seq - seen, seen, width))
    return 3.0 * (2.0 * seq * weights + attention)


#: Number of matrix products of each rung, forward and backward.  The naive rung does not keep P
#: and recomputes S, like the others.  flash2 computes S and dP twice, unless it adds to dQ by atomics.
PRODUCTS = {"naive": (2, 5), "flash1": (2, 5), "flash2": (2, 7), "flash2 atomic": (2, 5)}


def score_matrix_bytes(batch_heads: int, seq_q: int, seq_k: int, itemsize: int) -> int:
    """Return the size of S in bytes, which the naive baseline stores and fused kernels do not."""
    return batch_heads * seq_q * seq_k * itemsize


class Traffic(NamedTuple):
    """The memory traffic of one array, in elements: ``reads`` from global memory and ``writes`` to it."""

    reads: int
    writes: int

    @property
    def moved(self) -> int:
        """Elements read and written."""
        return self.reads + self.writes


def total(counts: dict[str, Traffic]) -> Traffic:
    """Return the sum over all arrays."""
    return Traffic(sum(x.reads for x in counts.values()), sum(x.writes for x in counts.values()))


class HeadShape(NamedTuple):
    """The sizes of one head: query rows, key columns, head_dim and value_dim, and its bounds.

    Columns i + lower to i + upper are visible to row ``i``.  A lower bound of -seq_q or less, or an upper
    bound of seq_k or more, means no bound; an upper one of 0 is a causal mask.
    """

    seq_q: int
    seq_k: int
    head_dim: int
    value_dim: int
    lower: int
    upper: int

    @property  # beyond module 5
    def pairs(self) -> int:  # beyond module 5
        """Number of visible scores."""
        return sum(self.seen(row, row + 1) for row in range(self.seq_q))

    @property
    def transposed(self) -> HeadShape:
        """The shape with queries and keys exchanged."""
        return HeadShape(
            self.seq_k, self.seq_q, self.head_dim, self.value_dim, -self.upper, -self.lower
        )

    def seen(self, start: int, stop: int) -> int:
        """Return the number of keys that are visible to at least one row from ``start`` to ``stop - 1``."""
        return max(min(stop + self.upper, self.seq_k) - max(start + self.lower, 0), 0)

    def tile_visits(self, block: int, other: int) -> int:
        """Return the keys in visited tiles of ``other`` keys, summed over the tiles of ``block`` rows."""
        visited = 0
        for row in range(0, self.seq_q, block):
            stop_row = min(row + block, self.seq_q)
            first = PLAIN.first_tile(row, other, self.seq_k, self.lower)
            stop = PLAIN.tiles_stop(stop_row, other, self.seq_k, self.upper)
            visited += max(min(stop * other, self.seq_k) - first * other, 0)
        return visited


#: The traffic of each array, by name.
Counts = dict[str, Traffic]


def summed(*parts: Counts) -> Counts:
    """Return the traffic of several steps by array, without arrays that are not accessed."""
    names = dict.fromkeys(name for part in parts for name in part)
    sums = {
        name: total({str(i): p[name] for i, p in enumerate(parts) if name in p}) for name in names
    }
    return {name: traffic for name, traffic in sums.items() if traffic.moved}


def _product(
    a: str, b: str, out: str, rows: int, cols: int, depth: int, tile: tuple[int, int]
) -> Counts:
    """Return the traffic of the product of (rows, depth) and (depth, cols).

    It reads its left operand once for each column of tiles, and its right one once for each row of tiles.
    """
    left = {a: Traffic(ceil_div(cols, tile[1]) * rows * depth, 0)}
    right = {b: Traffic(ceil_div(rows, tile[0]) * cols * depth, 0)}
    return summed(left, right, {out: Traffic(0, rows * cols)})


def naive_traffic(shape: HeadShape, tile: tuple[int, int]) -> Counts:
    """Return the traffic of the forward pass of the naive rung (FlashAttention, Algorithm 0), by array.

    The softmax reads S to find the maximum, reads S and writes P, and reads and writes P for the
    division. A causal call has the same traffic.  The tile is that of the products.
    """
    seq_q, seq_k, dim, value_dim, *_ = shape
    return summed(
        _product("q", "k", "scores", seq_q, seq_k, dim, tile),
        {"scores": Traffic(3 * seq_q * seq_k, 2 * seq_q * seq_k)},
        {"lse": Traffic(0, seq_q), "lse_rest": Traffic(0, seq_q)},
        _product("scores", "v", "out", seq_q, value_dim, seq_k, tile),
    )


def naive_backward_traffic(  # beyond module 5
    shape: HeadShape, tile: tuple[int, int], readers: int = 1
) -> Counts:
    """Return the traffic of the backward pass of the naive rung, with S and dP in global memory.

    There are five products, and one pass that reads S and dP and overwrites them with P and dS. Each
    of ``readers`` threads reads L of a row; 1 counts these reads only once.

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
        dict.fromkeys(("lse", "lse_rest"), Traffic(readers * seq_q, 0)),
        _product("scores", "dout", "dv", seq_k, value_dim, seq_q, tile),
        _product("dp", "k", "dq", seq_q, dim, seq_k, tile),
        _product("dp", "q", "dk", seq_k, dim, seq_q, tile),
    )


def flash1_traffic(shape: HeadShape, tile: tuple[int, int]) -> Counts:
    """Return the traffic of the forward pass of FlashAttention, Algorithm 1, by array.

    For each key tile, every query row that it visits is read with its output, sum and maximum, and
    these three are written back.
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
        "lse_rest": Traffic(0, seq_q),
    }
    # END TASK 5.8


def flash1_backward_traffic(shape: HeadShape, tile: tuple[int, int]) -> Counts:  # beyond module 5
    """Return the traffic of the backward pass of FlashAttention, Algorithm 4, by array.

    For each key tile, every query row that it visits is read with its output, dO and L, and the dQ of
    the row is read and written.
    """
    (block_q, block_k), (seq_q, seq_k, dim, value_dim, *_) = tile, shape
    visited = shape.transposed.tile_visits(block_k, block_q)
    return {
        "q": Traffic(visited * dim, 0),
        "k": Traffic(seq_k * dim, 0),
        "v": Traffic(seq_k * value_dim, 0),
        "out": Traffic(visited * value_dim, 0),
        "dout": Traffic(visited * value_dim, 0),
        **dict.fromkeys(("lse", "lse_rest"), Traffic(visited, 0)),
        "dq": Traffic(visited * dim, (visited + seq_q) * dim),
        "dk": Traffic(0, seq_k * dim),
        "dv": Traffic(0, seq_k * value_dim),
    }


def flash2_traffic(shape: HeadShape, tile: tuple[int, int]) -> Counts:
    """Return the traffic of the forward pass of FlashAttention-2, by array, without divided keys.

    A query tile reads the key tiles that have a visible key, and its results are written once, at the
    end.
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
        "lse_rest": Traffic(0, seq_q),
    }
    # END TASK 5.8


def delta_traffic(shape: HeadShape) -> Counts:  # beyond module 5
    """Return the traffic of the preparation of the backward pass, D = rowsum(dO ∘ O)."""
    rows = Traffic(shape.seq_q * shape.value_dim, 0)
    return {"dout": rows, "out": rows, "delta": Traffic(0, shape.seq_q)}


def flash2_backward_traffic(  # beyond module 5
    shape: HeadShape,
    tile: tuple[int, int],
    readers: int = 1,
    key_tile: tuple[int, int] | None = None,
) -> Counts:
    """Return the traffic of the deterministic backward pass of FlashAttention-2, with two kernels.

    After D has been computed, one kernel is parallel over query tiles and writes dQ; each of its
    ``readers`` threads reads L and D of a row, and 1 counts these reads only once.  The other is
    parallel over key tiles, ``key_tile`` or the same, and writes dK and dV.
    """
    seq_q, _, dim, value_dim, *_ = shape
    visited = shape.tile_visits(*tile)
    by_queries = {
        "q": Traffic(seq_q * dim, 0),
        "dout": Traffic(seq_q * value_dim, 0),
        **dict.fromkeys(("lse", "lse_rest", "delta"), Traffic(readers * seq_q, 0)),
        "k": Traffic(visited * dim, 0),
        "v": Traffic(visited * value_dim, 0),
        "dq": Traffic(0, seq_q * dim),
    }
    return summed(delta_traffic(shape), by_queries, _by_keys(shape, key_tile or tile))


def flash2_atomic_traffic(shape: HeadShape, tile: tuple[int, int]) -> Counts:  # beyond module 5
    """Return the traffic of the backward pass of FlashAttention-2 with atomic additions to dQ.

    An atomic addition counts as one read and one write.
    """
    block_q, block_k = tile
    added = shape.transposed.tile_visits(block_k, block_q) * shape.head_dim
    dq = {"dq": Traffic(added, added + shape.seq_q * shape.head_dim)}  # zeros first
    return summed(delta_traffic(shape), dq, _by_keys(shape, tile))


def _by_keys(shape: HeadShape, tile: tuple[int, int]) -> Counts:  # beyond module 5
    """Return the traffic of the kernel by key tiles, which writes dK and dV."""
    (block_q, block_k), (_, seq_k, dim, value_dim, *_) = tile, shape
    visited = shape.transposed.tile_visits(block_k, block_q)  # rows, once for each key tile
    return {
        "k": Traffic(seq_k * dim, 0),
        "v": Traffic(seq_k * value_dim, 0),
        "q": Traffic(visited * dim, 0),
        "dout": Traffic(visited * value_dim, 0),
        **dict.fromkeys(("lse", "lse_rest", "delta"), Traffic(visited, 0)),
        "dk": Traffic(0, seq_k * dim),
        "dv": Traffic(0, seq_k * value_dim),
    }


#: The formula of each rung for the forward pass, a function of ``(shape, tile)``.
TRAFFIC = {
    "naive": naive_traffic,
    "flash1": flash1_traffic,
    "flash2": flash2_traffic,
}
