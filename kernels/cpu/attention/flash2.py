"""FlashAttention-2 forward on the CPU: the paper's loop, with a vector lane in place of a CUDA thread.

Computes   out, lse and lse_rest.
Source     FlashAttention-2, Algorithm 1.
Work item  one query tile of one head, and of one sequence if sequences are packed; threads take items
           from a table, the longest first.
One lane   keeps row_max, row_sum and acc for one query row.  Tiles are therefore stored with the lanes
           along the contiguous axis: S is (cols, lanes), and no maximum or sum runs across lanes.
Buffers    per work item, in the first- and second-level cache; nothing of size seq_q x seq_k.
Base 2     exp(x) = exp2(x · log2(e)), and exp2 is the cheaper function.  The maximum is subtracted before
           that: S · log2(e) could overflow, and a product less a rounded product is not 0 where both
           factors are the same.
Options    the bounds of causal masks and windows are applied here; all others are passes over the tile in
           ``tile_scores``, called by their address, so that this kernel is compiled once for all options.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from kernels.common.online_softmax import LARGE, LOG2_E, PATIENCE
from kernels.cpu.attention import flash_decoding
from kernels.cpu.attention.call_record import CallOptions
from kernels.cpu.attention.mods import why_not_compiled
from kernels.cpu.attention.tangents import (
    add_score_tangents,
    add_value_tangents,
    row_tangents,
    write_row_tangents,
)
from kernels.cpu.attention.tile_scores import TilePosition, rows_of
from kernels.cpu.attention.tiles import (
    ceil_div,
    empty_tile,
    entries,
    first_full_tile,
    first_tile,
    full_tiles_stop,
    grown,
    hide_out_of_bounds,
    lanes_for,
    make_end_row,
    multiply,
    pack_transposed,
    power,
    rescale_rows,
    tile_in_table,
    tile_of,
    tiles_stop,
    transpose,
    zero_tile,
)
from kernels.cpu.matmul.tile_product import add_product, set_product
from kernels.cpu.runtime.function_pointers import call
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.jit import FASTMATH, njit_cached
from kernels.runtime.memory import Bind

#: (block_q, block_k): rows are lanes, and the number of keys keeps S in the cache.
TILE = (128, 64)
#: For block masks with blocks of fewer rows than the tile above, which would visit more keys, and for the
#: JVP, which keeps twice as many numbers of a row in the cache.
NARROW_TILE = (64, 64)


def tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) for a problem."""
    mask = problem.block_mask
    return TILE if mask is None or mask.block_q % TILE[0] == 0 else NARROW_TILE


class Running(NamedTuple):
    """The state of the online softmax between key tiles; each array has one number per query row (lane)."""

    row_max: Any  #: m when the sums were last rescaled.
    row_sum: Any  #: l.
    shift: Any  #: row_max, or 0 for a row whose keys so far are all masked.
    rescale: Any  #: e^(m_old - m), for O.


@njit(fastmath=FASTMATH)
def softmax_step(s, running):
    """Fold a tile of scores (cols, lanes) into ``Running``, and overwrite it with P = exp(S - m).

    Returns whether O must be rescaled, as l has been: if some e^m has grown by more than
    2**``PATIENCE``.
    """
    log2_e, least = s.dtype.type(LOG2_E), s.dtype.type(PATIENCE / LOG2_E)
    row_max, row_sum, shift, rescale = running
    cols, lanes = s.shape
    # m = max(m_old, rowmax S)
    new_max = row_max.copy()  # (lanes,)
    for c in range(cols):
        s_row = s[c]  # (lanes,)
        for lane in range(lanes):
            new_max[lane] = max(new_max[lane], s_row[lane])
    grows = False
    for lane in range(lanes):
        grows |= new_max[lane] - row_max[lane] > least
    # P = exp(S - m), l = e^(m_old - m) l + rowsum P
    if grows:
        for lane in range(lanes):
            shift[lane], rescale[lane] = grown(row_max[lane], new_max[lane], log2_e)
            row_max[lane] = new_max[lane]
            row_sum[lane] *= rescale[lane]
    p = s
    for c in range(cols):
        s_row, p_row = s[c], p[c]  # (lanes,)
        for lane in range(lanes):
            p_row[lane] = power(s_row[lane], shift[lane], log2_e)
            row_sum[lane] += p_row[lane]
    return grows


@njit
def start_of_rows(lanes, dtype):
    """Return the ``Running`` of rows before the first key tile."""
    zeros = np.zeros((2, lanes), dtype)
    return Running(np.full(lanes, -np.inf, dtype), zeros[0], zeros[1], np.empty(lanes, dtype))


def make_forward(real, along=False):
    """Return the forward kernel for one dtype; ``along`` tells whether it fills tangents, too."""
    end_row = make_end_row(real)

    @njit_cached(fastmath=FASTMATH)
    def forward_item(settings, item):
        """Fill one query tile of the results: loop over the key tiles that it visits.

        The item is the number of (batch, head) times the tiles of the table, plus the number of
        the tile.
        """
        o = settings[0]
        # a copy: behind a pointer, LLVM must assume that any store to a tile changes it
        lower, upper, block_q, block_k = o.lower, o.upper, o.block_q, o.block_k
        # 3: for 1 <= i <= T_r, every head at once
        flat = item // o.tiles
        b, h = flat // o.q.shape[1], flat % o.q.shape[1]
        sequence, first_q, seq_q, first_k, seq_k, row = tile_in_table(o, item % o.tiles)
        rows = min(block_q, seq_q - row)
        q = rows_of(o.q, b, h, first_q + row, rows, real)  # (rows, head_dim)
        k = rows_of(o.k, b, h, first_k, seq_k, real)  # (seq_k, head_dim)
        v = rows_of(o.v, b, h, first_k, seq_k, real)  # (seq_k, value_dim)
        out = rows_of(o.out, b, h, first_q + row, rows, real)  # (rows, value_dim)
        lse = rows_of(o.lse, b, h, first_q + row, rows, real)  # (rows, 1)
        rest = rows_of(o.lse_rest, b, h, first_q + row, rows, real)  # (rows, 1)
        value_dim = v.shape[1]
        lanes = lanes_for(rows)
        # 4: load Q_i, transposed and scaled
        q_t = empty_tile(q.shape[1], lanes, real)  # (head_dim, lanes)
        pack_transposed(q, real(o.scale), q_t)
        # 5: O = 0, l = 0, m = -inf
        acc = zero_tile(value_dim, lanes, real)  # (value_dim, lanes)
        running = start_of_rows(lanes, real)
        s_tile = empty_tile(block_k, lanes, real)  # (block_k, lanes)
        slope_tile = zero_tile(block_k * o.modifies_scores, lanes, real)  # (block_k or 0, lanes)
        z_tile = zero_tile(block_k if o.keep_pass != 0 else 0, lanes, real)  # (block_k, lanes)
        moved = row_tangents(o, b, h, first_q + row, rows, first_k, seq_k, q_t) if along else None
        first = first_tile(row, block_k, seq_k, lower)
        stop = tiles_stop(row + rows, block_k, seq_k, upper)
        first_full = first_full_tile(row + rows, block_k, lower)
        full_stop = full_tiles_stop(row, block_k, seq_k, upper)
        begin, end = entries(o, flat, row // block_q, ceil_div(seq_q, block_q), first, stop)
        # 6: for 1 <= j <= T_c
        for entry in range(begin, end):
            j, partial = tile_of(o, entry)
            # 7: load K_j, V_j, but only columns that may be visible
            col = max(j * block_k, row + lower)
            cols = min(min((j + 1) * block_k, seq_k), row + rows + upper) - col
            if cols <= 0:
                continue
            k_tile = k[col : col + cols]  # (cols, head_dim)
            v_tile = v[col : col + cols]  # (cols, value_dim)
            here = TilePosition(b, h, flat, sequence, col, row, rows, partial)
            # 8: S = Q_i K_jᵀ
            s, slope = s_tile[:cols], slope_tile[:cols]  # (cols, lanes)
            set_product(o.product, s, k_tile, q_t)
            if o.score_pass != 0:
                call(o.score_pass, (s, slope, settings, here))
            if j < first_full or j >= full_stop:
                hide_out_of_bounds(s, col, row, -upper, -lower)
            # 9: m_new = max(m, rowmax S), P = exp(S - m_new), l = e^(m - m_new) l + rowsum P
            grows = softmax_step(s, running)
            p = s  # the same memory
            if along:
                add_score_tangents(o.product, moved, k_tile, col, p, slope, running, grows)
            if o.keep_pass != 0:
                z = z_tile[:cols]  # (cols, lanes)
                call(o.keep_pass, (z, settings, here))
                multiply(p, z)
            # 10: O = diag(e^(m - m_new)) O + (P ∘ Z) V_j, Z the dropout
            if grows:
                rescale_rows(acc, running.rescale)
            add_product(o.product, acc, v_tile.T, p)
            if along:
                add_value_tangents(o.product, moved, p, v_tile, col)
        # 12: O_i = diag(l)^-1 O     13: L_i = m + log l
        acc_t = empty_tile(lanes, value_dim, real)  # (lanes, value_dim)
        transpose(acc, acc_t)
        for r in range(rows):
            shift, acc_row = running.shift[r], acc_t[r]  # (value_dim,)
            inverse, lse[r, 0], rest[r, 0] = end_row(running.row_sum[r], shift, b, h, o)
            for i in range(value_dim):
                out[r, i] = acc_row[i] * inverse
            running.rescale[r] = inverse
        if along:
            write_row_tangents(moved, out, running.rescale)

    return forward_item


make_jvp = partial(make_forward, along=True)


def forward(problem: Problem, size: tuple[int, int], operands: Operands) -> Bind | None:
    """Fill out, lse and lse_rest; return None if no call can be bound to other arrays."""
    if size == tile(problem) and flash_decoding.pays(problem, operands):
        return flash_decoding.forward(problem, operands)
    return forward_by_tiles(problem, size, operands)


def forward_by_tiles(
    problem: Problem, size: tuple[int, int], o: Operands, along: bool = False
) -> Bind:
    """Do what :func:`forward` says, by the kernel whose scores are those of the backward pass.

    With ``along``, also fill the tangents of out and lse.
    """
    options = CallOptions(problem, o, size, by_keys=False, order=int(along))
    logs = {"lse": o.lse[..., None], "lse_rest": o.lse_rest[..., None]}
    options.name(q=o.q, k=o.k, v=o.v, out=o.out, **logs)
    if along:
        options.name_tangents(o)
    items = o.q.shape[0] * o.q.shape[1] * options.tile_table(False)
    return options.run(make_jvp if along else make_forward, items)


def jvp_tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) of the JVP for a problem."""
    return NARROW_TILE


def jvp(problem: Problem, size: tuple[int, int], operands: Operands) -> Bind:
    """Fill out, lse, lse_rest and the tangents of out and lse."""
    return forward_by_tiles(problem, size, operands, along=True)


def is_large(lse: Any) -> bool:
    """Tell whether some scores are so large that their rounding errors change probabilities."""
    return bool((np.abs(lse) > LARGE).any())


def with_scores_by_tiles(problem: Problem, o: Operands) -> Operands:
    """Return the operands of a backward pass with the lse of the scores that it computes.

    ``flash_decoding`` adds the products of q and k in another order.  Where scores are large, exp(S - L)
    with the L of the other sums is not a probability.
    """
    if not (flash_decoding.pays(problem, o) and is_large(o.lse)):
        return o
    out, lse, rest = (np.empty(x.shape, x.dtype) for x in (o.out, o.lse, o.lse))
    whole = o.forward_problem(problem)
    forward_by_tiles(whole, tile(whole), o.having(out=out, lse=lse, lse_rest=rest))
    return o.having(lse=lse, lse_rest=rest)


def why_not(problem: Problem, size: tuple[int, int] | None) -> str | None:
    """Return why this rung cannot run a problem, or None."""
    return why_not_compiled(problem)
