"""Flash-Decoding on the CPU, for few query rows and many keys: the keys are split, and the parts merged.

Computes   out, lse and lse_rest.
Source     Dao et al., Flash-Decoding (2023): FlashAttention-2, Algorithm 1, on each part of the keys, and
           the same rescaling once more over the parts.
Work item  the rows of one head against one part of the keys.
One lane   one key of a tile for the scores, S is (rows, lanes); one element of out for the rest.
Buffers    the results of each part: linear in seq_k / ``PART``.
Traffic    k and v are read once, in place; nothing is transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit

from kernels.common.geometry import PLAIN
from kernels.common.online_softmax import LOG2_E
from kernels.cpu.attention.call_record import CallOptions
from kernels.cpu.attention.tile_scores import TilePosition, blocks_hide, rows_of
from kernels.cpu.attention.tiles import (
    grown,
    inverse_sum,
    is_visible,
    log_sum_exp,
    make_end_row,
    merge_weight,
    pack_rows,
    power,
    shift_of,
    tile_in_table,
)
from kernels.cpu.runtime.function_pointers import call, contiguous
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.jit import FASTMATH, njit_cached
from kernels.runtime.memory import Bind, Run, start_of

#: Maximum number of rows for which this is faster: more rows fill the lanes of the other kernel.
MOST_ROWS = 8
#: Keys of a part, fixed so that sums do not depend on the number of threads; and keys of a tile.
PART, BLOCK_K = 512, 64


@njit(fastmath=FASTMATH)
def scores_of_row(q_row, k, s_row):
    """Write S = q_row · k, q_row scaled, (head_dim,), for each contiguous row of k, (cols, head_dim)."""
    for c in range(k.shape[0]):
        key, total = contiguous(k[c]), q_row[0] * 0  # (head_dim,)
        for d in range(len(q_row)):
            total += q_row[d] * key[d]
        s_row[c] = total


@njit(fastmath=FASTMATH)
def add_values(weights, v, acc):
    """Add weights · v to acc, (value_dim,); v is (cols, value_dim), with contiguous rows."""
    for c in range(v.shape[0]):
        weight, value = weights[c], contiguous(v[c])  # (value_dim,)
        for i in range(len(acc)):
            acc[i] += weight * value[i]


def make_part(real):
    """Return the kernel of one part of the keys for one dtype."""
    end_row = make_end_row(real)

    @njit_cached(fastmath=FASTMATH)
    def part_item(settings, item):
        """Fill the results of all rows of one head against one part of the keys.

        The item is the number of (batch, head) times the tiles of the table, plus the number of
        the tile, times the parts, plus the number of the part.  Of the record, out is (parts ·
        batch, heads, seq_q, value_dim), and so lse and its rest.
        """
        o = settings[0]
        part, rest = item % o.parts, item // o.parts
        flat = rest // o.tiles
        b, h = flat // o.q.shape[1], flat % o.q.shape[1]
        own = part * o.q.shape[0] + b
        sequence, first_q, seq_q, first_k, seq_k, row = tile_in_table(o, rest % o.tiles)
        rows, value_dim = min(o.block_q, seq_q - row), o.v.shape[3]
        lower, upper, log2_e, minus_inf = o.lower, o.upper, real(LOG2_E), real(-np.inf)
        q = rows_of(o.q, b, h, first_q + row, rows, real)  # (rows, head_dim)
        q_scaled = np.empty(q.shape, real)  # (rows, head_dim)
        pack_rows(q, real(o.scale), q_scaled)
        # 5: O = 0, l = 0, m = -inf
        acc, row_sum = np.zeros((rows, value_dim), real), np.zeros(rows, real)
        row_max = np.full(rows, -np.inf, real)  # (rows,)
        s, p_row = np.empty((rows, o.block_k), real), np.empty(o.block_k, real)
        slope = np.empty((0, o.block_k), real)  # (0, block_k)
        z = np.ones((rows if o.keep_pass != 0 else 0, o.block_k), real)  # (rows, block_k)
        begin = max(part * PART, (row + lower) // o.block_k * o.block_k)
        stop = min(min((part + 1) * PART, seq_k), row + rows + upper)
        # 6: for 1 <= j <= T_c
        for col in range(begin, stop, o.block_k):
            cols = min(o.block_k, seq_k - col)
            here = TilePosition(b, h, flat, sequence, row, col, cols, np.int64(1))
            if blocks_hide(o, here, rows):
                continue
            # 7: load K_j, V_j
            k = rows_of(o.k, b, h, first_k + col, cols, real)  # (cols, head_dim)
            v = rows_of(o.v, b, h, first_k + col, cols, real)  # (cols, value_dim)
            # 8: S = Q_i K_jᵀ
            for r in range(rows):
                scores_of_row(q_scaled[r], k, s[r])
            if o.score_pass != 0:
                call(o.score_pass, (s, slope, settings, here))
            if o.keep_pass != 0:
                call(o.keep_pass, (z, settings, here))
            for r in range(rows):
                s_row, new_max = s[r], row_max[r]  # (block_k,)
                for c in range(cols):
                    visible = is_visible(row + r, col + c, lower, upper)
                    s_row[c] = s_row[c] if visible else minus_inf
                    new_max = max(new_max, s_row[c])
                # 9: m_new = max(m, rowmax S), P = exp(S - m_new), l = e^(m - m_new) l + rowsum P
                total, (shift, rescale) = real(0), grown(row_max[r], new_max, log2_e)
                for c in range(cols):
                    p_row[c] = power(s_row[c], shift, log2_e)
                    total += p_row[c]
                row_sum[r] = rescale * row_sum[r] + total
                row_max[r] = new_max
                # 10: O = e^(m - m_new) O + (P ∘ Z) V_j, Z the dropout
                if o.keep_pass != 0:
                    for c in range(cols):
                        p_row[c] *= z[r, c]
                for i in range(value_dim):
                    acc[r, i] *= rescale
                add_values(p_row, v, acc[r])
        # 12: O_i = diag(l)^-1 O     13: L_i = m + log l
        out = rows_of(o.out, own, h, first_q + row, rows, real)  # (rows, value_dim)
        lse = rows_of(o.lse, own, h, first_q + row, rows, real)  # (rows, 1)
        rest = rows_of(o.lse_rest, own, h, first_q + row, rows, real)  # (rows, 1)
        for r in range(rows):
            row_end = end_row(row_sum[r], real(shift_of(row_max[r])), b, h, o)
            inverse, lse[r, 0], rest[r, 0] = row_end
            for i in range(value_dim):
                out[r, i] = acc[r, i] * inverse

    return part_item


@njit_cached(fastmath=FASTMATH)
def merge_parts(of_parts, extra, out, lse, rest):
    """Merge the parts by their sums, together with an additional key in each row, whose value is 0.

    Args:
        of_parts: Flat: out (parts, rows, value_dim), then lse and its rest, (parts, rows) each.
        extra: (rows,), the score of the additional key; minus infinity if there is none.
        out: (rows, value_dim), written, and so lse and rest.
        lse: (rows,).
        rest: (rows,).
    """
    rows, value_dim = out.shape
    parts = len(of_parts) // (rows * (value_dim + 2))
    end = parts * rows * value_dim
    out_parts = of_parts[:end].reshape(parts, rows, value_dim)
    logs = of_parts[end:].reshape(2, parts, rows)
    lse_parts, rest_parts = logs[0], logs[1]
    for r in range(rows):
        largest = extra[r]
        for part in range(parts):
            largest = max(largest, lse_parts[part, r])
        shift = out.dtype.type(shift_of(largest))
        total = out.dtype.type(merge_weight(extra[r], 0, shift))
        for part in range(parts):
            total += merge_weight(lse_parts[part, r], rest_parts[part, r], shift)
        inverse = out.dtype.type(inverse_sum(total))
        row = out[r]  # (value_dim,)
        row[:] = 0
        for part in range(parts):
            weight = merge_weight(lse_parts[part, r], rest_parts[part, r], shift) * inverse
            own = out_parts[part, r]  # (value_dim,)
            for i in range(value_dim):
                row[i] += weight * own[i]
        lse[r], rest[r] = log_sum_exp(shift, total)


def rows_of_a_sequence(problem: Problem) -> int:
    """Return the query rows of the longest sequence."""
    packed = problem.sequences
    return problem.seq_q if packed is None else int(packed.lengths[0].max(initial=0))


def pays(problem: Problem, operands: Operands) -> bool:
    """Tell whether this kernel is the fastest for a call."""
    in_rows = all(x.strides[-1] == x.itemsize or x.shape[-1] == 1 for x in (operands.k, operands.v))
    return 0 < rows_of_a_sequence(problem) <= MOST_ROWS and in_rows


def forward(problem: Problem, operands: Operands) -> Bind | None:
    """Fill out, lse and lse_rest for contiguous rows of k and v; see ``flash2.forward``."""
    o = operands
    packed = problem.sequences
    longest = problem.seq_k if packed is None else int(packed.lengths[1].max(initial=0))
    parts = max(PLAIN.ceil_div(longest, PART), 1)
    block_q = rows_of_a_sequence(problem)
    own = problem.sinkless if parts > 1 else problem
    options = CallOptions(own, o, (block_q, BLOCK_K), by_keys=True, listed=False)
    results, rows, dim = (o.out, o.lse, o.lse_rest), o.lse.size, o.out.shape[-1]
    logs = parts * rows * dim, parts * rows * (dim + 1)  # where lse and its rest begin
    size = parts * rows * (dim + 2) if parts > 1 else 0
    memory = np.empty(size, o.lse.dtype)
    of_parts = np.split(memory, logs) if size else results
    out, lse, rest = (
        x.reshape(-1, *own.shape[1:]) for x, own in zip(of_parts, results, strict=True)
    )
    options.name(q=o.q, k=o.k, v=o.v, out=out, lse=lse[..., None], lse_rest=rest[..., None])
    options.settings["parts"] = parts
    tiles = options.tile_table(False)
    bind = options.run(make_part, o.q.shape[0] * o.q.shape[1] * tiles * parts)
    if not size:
        return bind
    none, extra = np.full(o.lse.shape, -np.inf, o.lse.dtype), o.extra_logits()
    _merge(memory, none if extra is None else extra, *results)
    if extra is not None:
        return None
    layout, dtype = (o.out.shape, o.out.strides), o.lse.dtype
    offsets = [place * dtype.itemsize for place in (0, *logs)]

    def bind_parts(names: Sequence[str]) -> Run:
        run = bind(names)

        def run_parts(starts: Sequence[int], seed: int, results: Sequence[Any], *_: Any) -> bool:
            memory, (shape, strides), (out, *logs) = np.empty(size, dtype), layout, results
            start = start_of(memory)
            run([*starts[:-3], start + offsets[0], start + offsets[1], start + offsets[2]], seed)
            _merge(memory, none, np.ndarray(shape, dtype, out, 0, strides), *logs)
            return True

        return run_parts

    return bind_parts


def _merge(of_parts: Any, extra: Any, out: Any, lse: Any, rest: Any) -> None:
    """Fill out, lse and its rest from those of all parts; see :func:`merge_parts`."""
    merged = out.reshape(-1, out.shape[-1])  # a copy if out is not contiguous
    merge_parts(of_parts, extra.reshape(-1), merged, lse.reshape(-1), rest.reshape(-1))
    if not out.flags.c_contiguous:
        out[...] = merged.reshape(out.shape)
