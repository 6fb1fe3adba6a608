"""FlashAttention-2 backward on the CPU: the outer loop is over key tiles, and each lane is a key.

Computes   dq, dk and dv.
Source     FlashAttention-2, Algorithm 2.
Work item  a group of key tiles and a part of the query rows of one head; threads take the next item.
           There are as many groups as parts, and as many phases: in phase n, group i is paired with part
           i - n.  No two items of a phase thus add to the same rows of dq, dk or dv, the order of every
           sum is independent of the number of threads, and there is one dq.
One lane   keeps dk and dv for one key.  S, P, dP and dS are stored as (rows, lanes).
Buffers    per work item, in the first- and second-level cache; nothing of size seq_q x seq_k.
Base 2     as in the forward kernel.
Options    as in the forward kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kernels.common.geometry import PLAIN
from kernels.cpu.attention import flash2, flash_decoding
from kernels.cpu.attention.call_record import CallOptions
from kernels.cpu.attention.gradient_tiles import (
    add_dq,
    add_key_gradients,
    add_row_products,
    buffers_for,
    fill_gradient,
    fill_large_scores,
    fill_scores,
    has_large,
    load_keys,
    piece_of,
    query_rows,
    shaped,
)
from kernels.cpu.attention.tangents import (
    add_delta_tangents,
    fill_gradient_tangents,
    key_tangents,
    moved_rows,
    piece_of_keys,
)
from kernels.cpu.attention.tile_scores import TilePosition, rows_of
from kernels.cpu.attention.tiles import (
    ceil_div,
    empty_tile,
    entries,
    first_tile,
    lanes_for,
    tile_in_table,
    tile_of,
    tiles_stop,
)
from kernels.cpu.matmul.tile_product import add_product
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.jit import FASTMATH, njit_cached
from kernels.runtime.memory import Bind, Run, start_of

#: Target number of work items of the backward pass, fixed so that sums do not depend on the number of
#: threads.
ITEMS = 8
#: (block_q, block_k) where all heads have enough query rows for the work items: dk and dv are read and
#: written once per query tile.
TILE = (256, 64)


def make_backward(real, along=False):
    """Return the backward kernel for one dtype; with ``along``, it fills the tangents of its results."""

    @njit_cached(fastmath=FASTMATH)
    def backward_item(settings, item):
        """Add the contributions of a group of key tiles and a part of the query rows to dq, dk and dv.

        The item is the index of the part times the number of (batch, head), plus the index of
        (batch, head); the last part, which has the most visible keys in a causal call, comes
        first.
        """
        o = settings[0]
        # a copy: behind a pointer, LLVM must assume that any store to a tile changes it
        lower, upper, block_q, block_k = o.lower, o.upper, o.block_q, o.block_k
        batch_heads = o.q.shape[0] * o.q.shape[1]
        flat, part = item % batch_heads, o.parts - 1 - item // batch_heads
        b, h = flat // o.q.shape[1], flat % o.q.shape[1]
        tau, columns = real(o.scale), lanes_for(o.q.shape[3])
        part_start, part_stop = part * o.part_rows, min((part + 1) * o.part_rows, o.q.shape[2])
        if o.phase == 0:
            count = part_stop - part_start
            own = query_rows(o, b, h, part_start, count, real)
            own.dq[:] = 0
            # 4: D = rowsum(dO ∘ O), added to delta, which holds the negative gradient of lse
            add_row_products(own.dout, rows_of(o.out, b, h, part_start, count, real), own.delta)
            if along:
                add_delta_tangents(o, b, h, part_start, count, own.dout)
        # 5: for 1 <= j <= T_c: key tiles j, j + parts, j + 2 parts, …
        for number in range((part + o.phase) % o.parts, o.tiles, o.parts):
            sequence, first_q, seq_q, first_k, seq_k, col = tile_in_table(o, number)
            cols, key = min(block_k, seq_k - col), first_k + col
            k, v = rows_of(o.k, b, h, key, cols, real), rows_of(o.v, b, h, key, cols, real)
            dk, dv = rows_of(o.dk, b, h, key, cols, real), rows_of(o.dv, b, h, key, cols, real)
            if o.phase == 0:
                dk[:] = 0
                dv[:] = 0
            # the rows of the part, as rows of the sequence
            start_row, stop_row = max(part_start - first_q, 0), min(part_stop - first_q, seq_q)
            first = max(first_tile(col, block_q, seq_q, -upper), start_row // block_q)
            stop = min(tiles_stop(col + cols, block_q, seq_q, -lower), ceil_div(stop_row, block_q))
            begin, end = entries(o, flat, col // block_k, ceil_div(seq_k, block_k), first, stop)
            if begin >= end or start_row >= stop_row:
                continue
            # 6: load K_j, V_j     7: dK_j = 0, dV_j = 0
            tile, buffers = load_keys(k, v, tau), buffers_for(o, lanes_for(cols), real)
            dq_buffer = empty_tile(block_q, columns, real)  # (block_q, columns)
            tangents = key_tangents(o, b, h, key, cols, real) if along else None
            # 8: for 1 <= i <= T_r, but only rows with a visible column in the tile
            for entry in range(begin, end):
                i, partial = tile_of(o, entry)
                # only rows with a visible column
                row = max(max(i * block_q, start_row), col - upper)
                last = min(min((i + 1) * block_q, stop_row), col + cols - lower)
                while row < last:
                    rows, left, right, bounded = piece_of(row, last, col, cols, lower, upper)
                    width, end_lane = right - left, left + lanes_for(right - left)
                    here = TilePosition(b, h, flat, sequence, row, col + left, width, partial)
                    piece = shaped(buffers, rows, end_lane - left)
                    # 9: load Q_i, dO_i, L_i, D_i
                    own = query_rows(o, b, h, first_q + row, rows, real)  # (rows, …) each
                    # 10: S = Q_i K_jᵀ
                    if has_large(own.lse):
                        keys = k[left:right]  # (width, head_dim)
                        fill_large_scores(piece, own.q, keys, tau, settings, here, bounded)
                    else:
                        k_t = tile.k_t[:, left:end_lane]  # (head_dim, lanes)
                        fill_scores(piece, own.q, k_t, settings, here, bounded)
                    # 11: P = exp(S - L_i)     13: dP = dO_i V_jᵀ     14: dS = P ∘ (dP - D_i)
                    if along:
                        moved = moved_rows(o, b, h, first_q + row, rows, real)
                        near = piece_of_keys(tile, tangents, left, right, rows)
                        fill_gradient_tangents(piece, own, moved, near, dq_buffer, settings, here)
                    else:
                        fill_gradient(piece, own, tile.v_t[:, left:end_lane], settings, here)
                    p, ds = piece.s, piece.dp  # the same memory
                    # 12: dV_j += (P ∘ Z)ᵀ dO_i
                    add_product(o.product, tile.dv[:, left:end_lane], own.dout.T, p)
                    # 15: dQ_i += dS K_j
                    k_rows = tile.k_rows[left:right]  # (width, columns)
                    add_dq(o.product, ds[:, :width], k_rows, dq_buffer, own.dq)
                    # 16: dK_j += dSᵀ Q_i
                    add_product(o.product, tile.dk[:, left:end_lane], own.q.T, ds)
                    row += rows
            # 18: write dK_j, dV_j
            add_key_gradients(tile, tau, dk, dv)

    return backward_item


make_double_backward = partial(make_backward, along=True)


def backward_tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k) for a problem."""
    mask, rows = problem.block_mask, TILE[0]
    tiles = math.prod(problem.lead) * (problem.seq_q // rows)
    joins = mask is not None and mask.block_q % rows != 0  # it would visit what either of them sees
    return flash2.tile(problem) if joins or tiles < ITEMS else TILE


def double_backward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill dq, dk and dv with their tangents; the only memory in addition is delta and its tangent."""
    _fill(problem, tile, operands, along=True)


def backward(problem: Problem, tile: tuple[int, int], operands: Operands) -> Bind:
    """Fill dq, dk and dv; the only memory in addition to these is delta."""
    few_rows = flash_decoding.pays(problem, operands)
    o = flash2.with_scores_by_tiles(problem, operands) if few_rows else operands
    bind = _fill(problem, tile, o)
    layout, has_dlse = (o.lse.shape, o.lse.dtype), o.dlse is not None

    def bind_with_delta(names: Sequence[str]) -> Run:
        run, lse = bind([*names, "delta"]), names.index("lse")
        dlse = names.index("dlse") if has_dlse else None

        def run_with_delta(
            starts: Sequence[int], seed: int, results: Any, array: Callable[[int], Any]
        ) -> bool:
            if few_rows and flash2.is_large(array(lse)):
                return False
            delta = _delta(None if dlse is None else array(dlse), *layout)
            return run([*starts, start_of(delta)], seed)

        return run_with_delta

    return bind_with_delta


def _fill(problem: Problem, tile: tuple[int, int], o: Operands, along: bool = False) -> Bind:
    """Fill dq, dk and dv, or their tangents, and bind the kernel to other arrays and delta."""
    batch_heads, seq_q = o.q.shape[0] * o.q.shape[1], o.q.shape[2]
    options = CallOptions(problem, o, tile, by_keys=True, order=1 + along)
    most = PLAIN.ceil_div(ITEMS, max(batch_heads, 1))
    part_rows = PLAIN.ceil_div(max(seq_q, 1), most * tile[0]) * tile[0]  # whole tiles
    parts = PLAIN.ceil_div(max(seq_q, 1), part_rows)
    options.tile_table(True, parts)
    options.name(
        dout=o.dout, q=o.q, k=o.k, v=o.v, lse=o.lse[..., None], lse_rest=o.lse_rest[..., None],
        delta=_delta(o.dlse, o.lse.shape, o.lse.dtype)[..., None], out=o.out,
        dq=o.dq, dk=o.dk, dv=o.dv,
    )  # fmt: skip
    if along:
        options.name_tangents(o)
        options.name(delta_tangent=_delta(None, o.lse.shape, o.lse.dtype)[..., None])
    options.settings["parts"], options.settings["part_rows"] = parts, part_rows
    return options.run(make_double_backward if along else make_backward, parts * batch_heads, parts)


def _delta(dlse: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return the array to which the kernel adds rowsum(dO ∘ O), (batch, heads, seq_q)."""
    return np.zeros(shape, dtype) if dlse is None else -dlse.reshape(shape)
