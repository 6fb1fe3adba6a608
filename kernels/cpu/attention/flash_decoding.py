"""Flash-Decoding on the CPU, for few query rows and many keys: the keys are split, and the parts merged.

Computes   out, lse and lse_rest.
Source     Dao et al., Flash-Decoding (2023): the softmax of each part of the keys, and FlashAttention-2's
           rescaling, Algorithm 1, line 10, over the parts; Kwon et al., PagedAttention (2023).
Work item  the rows of all heads that share a head of k, against one part of the keys.
One lane   a part of a product for the scores, S is (rows, keys); one element of out for the rest.
Buffers    the results of each part: linear in seq_k / ``PART``.
Traffic    k and v are read once, in place; nothing is transposed.
Bits       a row's result depends on its own keys and their positions alone: sums of one row are in the
           same order whatever else the call holds, and a masked key adds 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from kernels.common.geometry import PLAIN
from kernels.common.online_softmax import LOG2_E
from kernels.cpu.attention.call_record import CallOptions
from kernels.cpu.attention.key_cache import IN_PLACE, form_of, load_tile
from kernels.cpu.attention.row_products import add_values, scores_of_row
from kernels.cpu.attention.tile_scores import (
    BOOL_MASK,
    FLOAT_MASK,
    TilePosition,
    blocks_hide,
    rows_of,
    view,
)
from kernels.cpu.attention.tiles import (
    ceil_div,
    grown,
    is_visible,
    make_end_row,
    multiply,
    pack_rows,
    power,
    shift_of,
    tile_in_table,
)
from kernels.cpu.matmul.vector_registers import LANES
from kernels.cpu.runtime.function_pointers import call, contiguous, take
from kernels.problem.cached_keys import Cached
from kernels.problem.operands import Operands, make_operands
from kernels.problem.options import AXES
from kernels.problem.question import Problem
from kernels.runtime.jit import FASTMATH, njit_cached
from kernels.runtime.memory import Bind, Memory, Run, start_of

#: Maximum number of rows for which this is faster: more rows fill the lanes of the other kernel.
MOST_ROWS = 8
#: Keys of a part, fixed so that sums do not depend on the number of threads; and keys of a tile.
PART, BLOCK_K = 512, 64
#: About how many rows a work item of a cache has, of all heads that share a key head.
MOST_LINES = 32
_OF_PARTS = "of_parts", "finished"


@njit(fastmath=FASTMATH)
def mask_tile(o, tile, where, first):
    """Apply the mask of a call on a cache: a boolean one is for the keys from position ``first`` on."""
    for r in range(tile.shape[0]):
        row = where.line + r - first
        if o.cache_mask == FLOAT_MASK:
            added = view(o.mask, tile.dtype)[where.batch, where.head, row]  # (capacity,)
            for c in range(where.width):
                tile[r, c] += added[where.lane + c]
        else:
            shown = view(o.mask, np.uint8)[where.batch, where.head, row]  # (seq_q,)
            for c in range(max(first - where.lane, 0), where.width):
                if shown[where.lane + c - first] == 0:
                    tile[r, c] = -np.inf


class Part(NamedTuple):
    """A part of the keys, and the query rows of the heads that share these keys."""

    b: Any  #: Index of the batch.
    key_head: Any  #: Index of the head of k.
    heads: Any  #: Heads of q that share it.
    sequence: Any  #: Index of the packed sequence.
    position: Any  #: Position of the first row.
    rows: Any  #: Rows of each head.
    before: Any  #: Position of the first query of a sequence in a cache; otherwise 0.
    first_k: Any  #: Row of k of the sequence's first key.
    seq_k: Any  #: Keys of the sequence.
    begin: Any  #: The first key of the part.


@njit
def tile_of(o, part, h, col, cols):
    """Return the position of the tile of the part's head ``h`` that begins at a key."""
    head = part.key_head * part.heads + h
    flat = part.b * o.q.shape[1] + head
    return TilePosition(part.b, head, flat, part.sequence, part.position, col, cols, np.int64(1))


def make_part(real):
    """Return the kernel of one part of the keys for one dtype."""
    end_row = make_end_row(real)

    @njit(fastmath=FASTMATH)
    def keys_at(o, form, array, b, head, place, count, buffer):
        """Return rows of k or v from a place in the sequence on, (at most ``count``, dim): of one page."""
        page = b
        if o.pages.address != 0:
            size = o.k.shape[2]
            page = np.int64(view(o.pages, np.int32)[b, place // size, 0, 0])
            place %= size
            count = min(count, size - place)
        if form == IN_PLACE:
            return rows_of(array, page, head, place, count, real)
        load_tile(form, array, page, head, place, buffer[:count])
        return buffer[:count]

    @njit(fastmath=FASTMATH)
    def largest_of(s, line, tops):
        """Return the maximum of a line of (tiles, lines, BLOCK_K) scores."""
        # Lane by lane, because LLVM does not vectorise a maximum.
        tops[:] = -np.inf
        for t in range(len(s)):
            s_row = s[t, line]  # (BLOCK_K,)
            for c in range(0, BLOCK_K, LANES):
                for lane in range(LANES):
                    tops[lane] = max(tops[lane], s_row[c + lane])
        found = real(-np.inf)
        for lane in range(LANES):
            found = max(found, tops[lane])
        return found

    @njit(fastmath=FASTMATH)
    def exponentials(s, line, shift):
        """Overwrite a line of (tiles, lines, BLOCK_K) scores with P = exp(S - m), and return their sum."""
        total = real(0)
        for t in range(len(s)):
            s_row, own = s[t, line], real(0)  # (BLOCK_K,)
            for c in range(BLOCK_K):
                s_row[c] = power(s_row[c], shift, real(LOG2_E))
                own += s_row[c]
            total += own  # a tile whose keys are all masked changes nothing
        return total

    @njit(fastmath=FASTMATH)
    def merge(of_parts, first, stop, acc, row_max, row_sum):
        """Merge the parts of a group, (parts, lines, value_dim + 2), in order, by maximum and sum."""
        lines, value_dim = acc.shape
        log2_e = real(LOG2_E)
        for line in range(lines):
            largest = real(-np.inf)
            for part in range(first, stop):
                largest = max(largest, of_parts[part, line, value_dim])
            total, acc_row = real(0), acc[line]  # (value_dim,)
            acc_row[:] = 0
            for part in range(first, stop):
                own = contiguous(of_parts[part, line])  # (value_dim + 2,)
                _, weight = grown(own[value_dim], largest, log2_e)
                total += weight * own[value_dim + 1]
                for i in range(value_dim):
                    acc_row[i] += weight * own[i]
            row_max[line], row_sum[line] = largest, total

    @njit(fastmath=FASTMATH)
    def fill_scores(settings, part, q_scaled, s, is_hidden, buffer):
        """Fill (tiles, lines, BLOCK_K) scores of a part, and tell which tiles are hidden from all rows."""
        o = settings[0]
        slope = np.empty((0, BLOCK_K), real)  # (0, BLOCK_K)
        for t in range(len(s)):
            col = part.begin + t * BLOCK_K
            cols = min(BLOCK_K, part.seq_k - col)
            if part.heads == 1 and blocks_hide(o, tile_of(o, part, 0, col, cols), part.rows):
                s[t], is_hidden[t] = real(-np.inf), 1
                continue
            # 7: load K_j     8: S = Q_i K_jᵀ
            done = 0
            while done < cols:
                place = part.first_k + col + done
                k = keys_at(o, o.k_form, o.k, part.b, part.key_head, place, cols - done, buffer)
                for line in range(len(q_scaled)):
                    scores_of_row(q_scaled, line, k, s[t], done)
                done += len(k)
            for h in range(part.heads):
                own = s[t, h * part.rows : (h + 1) * part.rows]  # (rows, BLOCK_K)
                here = tile_of(o, part, h, col, cols)
                if o.score_pass != 0:
                    call(o.score_pass, (own, slope, settings, here))
                if o.cache_mask != 0:
                    mask_tile(o, own, here, part.before)
                for r in range(part.rows):
                    at = part.position + r
                    if cols < BLOCK_K or at + o.lower > col or at + o.upper < col + BLOCK_K - 1:
                        for c in range(BLOCK_K):
                            visible = c < cols and is_visible(at, col + c, o.lower, o.upper)
                            own[r, c] = own[r, c] if visible else real(-np.inf)

    @njit(fastmath=FASTMATH)
    def add_part(settings, part, p, is_hidden, buffer, acc):
        """Add (P ∘ Z) V of a part to O, Z the dropout."""
        o, rows = settings[0], part.rows
        z = np.ones((rows if o.keep_pass != 0 else 0, BLOCK_K), real)  # (rows, BLOCK_K)
        for t in range(len(p)):
            if is_hidden[t] != 0:
                continue
            col = part.begin + t * BLOCK_K
            cols = min(BLOCK_K, part.seq_k - col)
            for h in range(part.heads if o.keep_pass != 0 else 0):
                call(o.keep_pass, (z, settings, tile_of(o, part, h, col, cols)))
                multiply(p[t, h * rows : (h + 1) * rows], z)
            done = 0
            while done < cols:
                place = part.first_k + col + done
                v = keys_at(o, o.v_form, o.v, part.b, part.key_head, place, cols - done, buffer)
                for line in range(len(acc)):
                    add_values(p[t], line, done, v, acc)
                done += len(v)

    @njit_cached(fastmath=FASTMATH)
    def part_item(settings, item):
        """Fold one part of the keys into all rows of the heads that share a head of k, for one tile.

        The item is the number of (batch, key head), times the tiles of the table, plus the number of the
        tile, times the parts, plus the number of the part.  The last part of a group to be finished
        merges all of them and fills the results.
        """
        o = settings[0]
        number, group = item % o.parts, item // o.parts
        key_heads, value_dim = o.k.shape[1], o.v.shape[3]
        b, key_head = group // o.tiles // key_heads, group // o.tiles % key_heads
        sequence, first_q, seq_q, first_k, seq_k, row = tile_in_table(o, group % o.tiles)
        before = np.int64(0)
        if o.lengths.address != 0:
            seq_k = view(o.lengths, np.int64)[b, 0, 0, 0]
            before = seq_k - seq_q
        rows, position = min(o.block_q, seq_q - row), before + row
        # The parts with keys that some row sees; the first one if there is none.
        stop = max(min(seq_k, position + rows + o.upper), 0)
        begin = max(position + o.lower, 0)
        first_part, parts_stop = begin // PART, ceil_div(stop, PART)
        if parts_stop <= first_part:
            first_part, parts_stop = np.int64(0), np.int64(1)
        if number < first_part or number >= parts_stop:
            return
        heads = o.q.shape[1] // key_heads
        first_head, lines = key_head * heads, heads * rows
        q_scaled = np.empty((lines, o.q.shape[3]), real)  # (lines, head_dim)
        for h in range(heads):
            q = rows_of(o.q, b, first_head + h, first_q + row, rows, real)  # (rows, head_dim)
            pack_rows(q, real(o.scale), q_scaled[h * rows : (h + 1) * rows])
        begin = max(number * PART, begin // BLOCK_K * BLOCK_K)
        tiles = max(ceil_div(min((number + 1) * PART, stop) - begin, BLOCK_K), 0)
        part = Part(b, key_head, heads, sequence, position, rows, before, first_k, seq_k, begin)
        s, is_hidden = np.empty((tiles, lines, BLOCK_K), real), np.zeros(tiles, np.uint8)
        buffer = np.empty((BLOCK_K if o.is_loaded else 0, max(value_dim, o.q.shape[3])), real)
        fill_scores(settings, part, q_scaled, s, is_hidden, buffer[:, : o.q.shape[3]])
        # m = rowmax S, P = exp(S - m), l = rowsum P
        row_max, row_sum = np.empty(lines, real), np.empty(lines, real)
        tops = np.empty(LANES, real)
        for line in range(lines):
            row_max[line] = largest_of(s, line, tops)
            row_sum[line] = exponentials(s, line, real(shift_of(row_max[line])))
        acc = np.zeros((lines, value_dim), real)
        add_part(settings, part, s, is_hidden, buffer[:, :value_dim], acc)
        if parts_stop - first_part > 1:
            of_group = view(o.of_parts, real)[group]  # (parts, lines, value_dim + 2)
            own = of_group[number]
            for line in range(lines):
                own[line, :value_dim] = acc[line]
                own[line, value_dim], own[line, value_dim + 1] = row_max[line], row_sum[line]
            if take(view(o.finished, np.int64)[group, :, 0, 0]) != parts_stop - first_part - 1:
                return
            merge(of_group, first_part, parts_stop, acc, row_max, row_sum)
        # 12: O_i = diag(l)^-1 O     13: L_i = m + log l
        for line in range(lines):
            h, r = first_head + line // rows, first_q + row + line % rows
            end = end_row(row_sum[line], real(shift_of(row_max[line])), b, h, o)
            inverse, view(o.lse, real)[b, h, r, 0], view(o.lse_rest, real)[b, h, r, 0] = end
            out = view(o.out, real)[b, h, r]  # (value_dim,)
            for i in range(value_dim):
                out[i] = acc[line, i] * inverse

    return part_item


def rows_of_a_sequence(problem: Problem) -> int:
    """Return the query rows of the longest sequence."""
    packed = problem.sequences
    return problem.seq_q if packed is None else int(packed.lengths[0].max(initial=0))


def pays(problem: Problem, operands: Operands) -> bool:
    """Tell whether this kernel is the fastest for a call."""
    in_rows = all(x.strides[-1] == x.itemsize or x.shape[-1] == 1 for x in (operands.k, operands.v))
    return 0 < rows_of_a_sequence(problem) <= MOST_ROWS and in_rows


def forward(problem: Problem, operands: Operands) -> Bind:
    """Fill out, lse and lse_rest for contiguous rows of k and v; see ``flash2.forward``."""
    o, packed = operands, problem.sequences
    options = CallOptions(problem, o, (rows_of_a_sequence(problem), BLOCK_K), True, listed=False)
    k, v = o.k, o.v
    if k.strides[1] == v.strides[1] == 0:  # one head for all
        k, v = k[:, :1], v[:, :1]
    options.name(k=k, v=v)
    longest = problem.seq_k if packed is None else int(packed.lengths[1].max(initial=0))
    return _run(options, (o.q, o.out, o.lse, o.lse_rest), k.shape[1], longest)


def _run(options: CallOptions, arrays: tuple[Any, ...], key_heads: int, longest: int) -> Bind:
    """Run the kernel on q, out, lse and its rest; ``longest`` is the number of keys of a sequence."""
    q, out, lse, rest = arrays
    options.name(q=q, out=out, lse=lse[..., None], lse_rest=rest[..., None])
    options.settings["parts"] = parts = max(PLAIN.ceil_div(longest, PART), 1)
    groups = q.shape[0] * key_heads * options.tile_table(False)
    if parts == 1:
        return options.run(make_part, groups)
    lines = q.shape[1] // key_heads * options.tile[0]
    shape, dtype = (groups, parts, lines, out.shape[3] + 2), out.dtype

    def made() -> list[Any]:
        return [np.empty(shape, dtype), np.zeros((groups, 1, 1, 1), np.int64)]

    options.name(**dict(zip(_OF_PARTS, made(), strict=True)))
    bind = options.run(make_part, groups * parts)

    def bind_parts(names: Sequence[str]) -> Run:
        run = bind((*names, *_OF_PARTS))

        def run_parts(starts: Sequence[int], seed: int, *_: Any) -> bool:
            own = made()
            return run([*starts, *map(start_of, own)], seed, kept=own)

        return run_parts

    return bind_parts


def forward_cached(call: Cached, q: Any, lengths: Any) -> tuple[Any, Any]:
    """Return out and lse of a call on a cache; q is rotated.

    The lengths, (batch,) int64, include the new keys.  A work item has so few rows that the tiles of all
    heads that share a key head stay in cache.
    """
    problem, heads = call.problem, call.k_cache.shape[1]
    sums, shape = problem.acc_dtype, q.shape[:3]
    longest = int(lengths.max())
    rows = min(problem.seq_q, max(MOST_LINES * heads // problem.heads, 1))
    arrays = {**call.arrays, "attn_mask": None}
    # The number of keys here only tells how many threads are worth it.
    own = replace(problem, dtype=sums, mask="", seq_k=max(longest, 1))
    operands = make_operands(Memory(), own, q.astype(sums, copy=False), q, q, arrays)
    of_heads = {name: x for name in AXES if (x := getattr(operands, name)) is not None}
    for name, x in of_heads.items():
        of_heads[name] = np.broadcast_to(x[..., None, None], (*shape[:2], 1, 1))
    operands = operands.having(**of_heads)
    options = CallOptions(own, operands, (rows, BLOCK_K), by_keys=True, listed=False)
    options.name(k=call.k_cache, v=call.v_cache, lengths=lengths[:, None, None, None])
    forms = options.settings["k_form"], options.settings["v_form"] = [*map(form_of, call[2:4])]
    options.settings["is_loaded"] = any(forms)
    if call.table is not None:
        options.name(pages=call.table[:, :, None, None])
    if (mask := call.arrays.get("attn_mask")) is not None:
        is_bool = problem.mask == "bool"
        options.settings["cache_mask"] = BOOL_MASK if is_bool else FLOAT_MASK
        mask = mask if is_bool else Memory().convert(mask, sums)
        options.name(mask=np.broadcast_to(mask, (*shape, mask.shape[-1])))
    out = np.empty((*shape, problem.value_dim), sums)
    lse, rest = np.empty(shape, sums), np.empty(shape, sums)
    _run(options, (operands.q, out, lse, rest), heads, longest)
    return Memory().convert(out, problem.dtype), lse
