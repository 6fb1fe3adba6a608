"""The results of Hopper's backward kernels: a consumer's rows of its accumulators in 16 bits."""

from __future__ import annotations

from collections.abc import Callable

from kernels.cuda.attention.flash3_wgmma.layout import WARPGROUP_BARRIER, KernelForm
from kernels.cuda.attention.flash3_wgmma.tiles import make_put_tile, make_write_tile
from kernels.cuda.device.warpgroups import LINE, WARPGROUP
from kernels.cuda.ptx.barriers import bar_sync, fence_proxy_async
from kernels.cuda.ptx.bulk import cp_async_bulk_commit_group, wait_for_reads
from kernels.cuda.ptx.fragments import square_place
from kernels.cuda.ptx.wgmma import ROWS
from kernels.cuda.runtime.kernel import device_function


def make_write_results(form: KernelForm, second_offset: int) -> Callable[..., None]:
    """Return ``write_results(own, memory, first, second, item, pairs)``, which writes 64 rows of an item.

    ``first`` and ``second`` are a result, its accumulators and its factor: of dK and dV in a kernel by
    keys, where one that is not computed is not read, and else of dQ alone.  They pass through the tiles of
    K and V, or of Q, which no one reads any more; ``pairs`` is overwritten.  ``second_offset`` is the
    offset of the tile for the second result.
    """
    by_keys, is_packed = form.by_keys, form.features.packed
    has_first, has_second = (form.parts.dk, form.parts.dv) if by_keys else (True, False)
    panel = form.sides[0] * LINE
    put_first, put_second = (make_put_tile(n, panel, is_packed) for n in form.panels)
    write_first, write_second = (make_write_tile(n, form.dtype, panel) for n in form.widths)

    @device_function
    def write_results(own, memory, first, second, item, pairs):
        r, c = square_place(own.lane)
        line, is_seen = own.me * ROWS + own.warp * 16 + r, item.first < item.stop
        if has_first:
            factors = first[2], first[2]
            write_first(memory, line, c, first[1], factors, (is_seen, is_seen), pairs)
        if has_second:
            factors = second[2], second[2]
            to = memory + second_offset
            write_second(to, line, c, second[1], factors, (is_seen, is_seen), pairs)
        fence_proxy_async()  # the copy engine sees them
        bar_sync(WARPGROUP_BARRIER + own.me, WARPGROUP)  # all rows of the warpgroup are there
        own_rows = memory + own.me * (ROWS * LINE)
        begin, size = (item.first_k, item.cols) if by_keys else (item.first_q, item.rows)
        row, left = begin + item.place + own.me * ROWS, size - item.place - own.me * ROWS
        if is_packed or own.thread == 0:
            if has_first:
                put_first(first[0], own_rows, own.thread, item.b, item.h, row, left)
            if has_second:
                to = own_rows + second_offset
                put_second(second[0], to, own.thread, item.b, item.h, row, left)
            cp_async_bulk_commit_group()
            wait_for_reads()  # the copies have read the tiles
        bar_sync(WARPGROUP_BARRIER + own.me, WARPGROUP)  # and copied: another item may come

    return write_results
