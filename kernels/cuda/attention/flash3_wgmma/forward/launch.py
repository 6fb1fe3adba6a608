"""The rung flash3_wgmma: which calls it takes, and what a launch takes beside the operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from kernels.cuda.attention import tensor_cores
from kernels.cuda.attention.flash3_wgmma.forward.kernel import forward_kernel
from kernels.cuda.attention.flash3_wgmma.launch_common import (
    CACHE_BYTES,
    KEPT_LAUNCHES,
    kept_launches,
    memory_layouts,
    readable,
    tensor_map,
    widths_of,
    with_mask_bits,
)
from kernels.cuda.attention.flash3_wgmma.layout import (
    ForwardLayout,
    Schedule,
    Shape,
    Widths,
    layout_of,
    schedule_of,
)
from kernels.cuda.attention.flash3_wgmma.packed_mask import has_words, packed_mask
from kernels.cuda.attention.options.extras import lasting_extras, own_extras
from kernels.cuda.attention.options.score_functions import Extras
from kernels.cuda.attention.options.visits import tiles_of
from kernels.cuda.attention.tensor_cores import lists_whole_tiles
from kernels.cuda.device.half import as_bits
from kernels.cuda.device.per_device import counters, multiprocessors
from kernels.cuda.device.vector import are_vectors
from kernels.cuda.ptx.wgmma import ROWS
from kernels.cuda.runtime.arrays import device_pointer, reshaped
from kernels.cuda.runtime.launcher import LATER
from kernels.problem.operands import Operands
from kernels.problem.question import Problem
from kernels.runtime.dtypes import NAMES
from kernels.runtime.targets import current_device
from kernels.scores.program import Features

CAPABILITY = (9, 0)

#: Calls whose tensor maps are kept together.
KEPT_MAPS = 1024


class Maps(NamedTuple):
    """How a forward kernel reads q, k and v.

    Attributes:
        q: The tensor map of q.
        k: Of the keys.
        v: Of their values.
        differs: 1 or 0 for the heads and for the batches of q, of k and of v, see :func:`tensor_map`.
    """

    q: Any
    k: Any
    v: Any
    differs: tuple[int, ...]


#: What :func:`maps_of` found, by where the arrays lie.
_kept_maps: dict[Any, Maps] = {}


def maps_of(problem: Problem, q: Any, k: Any, v: Any) -> Maps | None:
    """Return the tensor maps of a call, or None if the copy engine cannot read what is given.

    Arrays come and go at the same addresses, so most calls find all of theirs by one look.

    Args:
        problem: Without a seed.
        q: (batch, heads, seq_q, head_dim) on the device.
        k: (batch, heads, seq_k, head_dim).
        v: (batch, heads, seq_k, value_dim).
    """
    call = (
        problem, current_device(), device_pointer(q), q.shape, q.strides,
        device_pointer(k), k.shape, k.strides, device_pointer(v), v.shape, v.strides,
    )  # fmt: skip
    found = _kept_maps.get(call)
    if found is None and (found := read_maps(problem, q, k, v)) is not None:
        if len(_kept_maps) >= KEPT_MAPS:
            _kept_maps.clear()
        _kept_maps[call] = found
    return found


def read_maps(problem: Problem, q: Any, k: Any, v: Any) -> Maps | None:
    """Return what :func:`maps_of` does, worked out anew."""
    if not are_vectors(q, k, v):
        return None
    (layout, _), dtype = layout_for(problem), NAMES[problem.dtype]
    q_map, *q_differs = tensor_map(q, layout.block_q, dtype)
    k_map, *k_differs = tensor_map(k, layout.block_k, dtype)
    v_map, *v_differs = tensor_map(v, layout.block_k, dtype)
    return Maps(q_map, k_map, v_map, (*q_differs, *k_differs, *v_differs))


@lru_cache(maxsize=1024)
def layout_for(problem: Problem) -> tuple[ForwardLayout, Widths]:
    """Return the layout for a problem, and the widths its kernel is compiled for."""
    widths = widths_of(problem)
    return layout_of(widths, not problem.sinkless.is_plain), widths


@lru_cache(maxsize=KEPT_LAUNCHES)
def features_for(problem: Problem) -> Features:
    """Return what the kernel for a problem must have: not to ask what is seen of tiles that are whole."""
    features, (layout, _) = problem.features, layout_for(problem)
    tiles = layout.block_q, layout.block_k, False
    return features._replace(whole_tiles=lists_whole_tiles(problem, tiles))


def tile(problem: Problem) -> tuple[int, int]:
    """Return (block_q, block_k)."""
    layout, _ = layout_for(problem.unseeded)
    return layout.block_q, layout.block_k


def why_not(problem: Problem, tile: tuple[int, int] | None) -> str | None:
    """Return why this rung cannot run a problem with a tile, or None."""
    if problem.head_dim % 8 or problem.value_dim % 8:
        dims = problem.head_dim, problem.value_dim
        return f"its copies need a head_dim and a value dim that are multiples of 8, got {dims}"
    if problem.scale <= 0.0:
        return f"it takes a positive scale, got {problem.scale}"
    return tensor_cores.why_not_here(tile, CAPABILITY)


def forward(problem: Problem, tile: tuple[int, int], operands: Operands) -> None:
    """Fill out and lse.

    Args:
        problem: The checked call, in 16 bits.
        tile: Its own.
        operands: As kernels take them, on the device; out and lse are written.
    """
    problem, operands = with_mask_bits(problem, operands)
    unseeded, read, out = problem.unseeded, (operands.q, operands.k, operands.v), operands.out
    maps = maps_of(unseeded, *read)
    if maps is None:
        read = readable(*read)  # copies, which are there until the kernel is launched
        maps = read_maps(unseeded, *read)
        assert maps is not None, "copies lie as the copy engine needs it"
    lead, brought, own = out.shape[:2], (), ()
    lse = reshaped(operands.lse, (math.prod(lead), problem.seq_q))
    if problem.sequences is None:
        out, *_ = tensor_map(out, ROWS, NAMES[problem.dtype])
    else:  # tiles end within it
        out = as_bits(out)
    if not problem.is_plain:
        own = _own(problem, operands)
        brought = memory_layouts(out, *own)
    launch = _launch(unseeded, lead, maps.differs, current_device(), brought)
    launch(maps.q, maps.k, maps.v, out, lse, counters(), *own)


def _own(problem: Problem, operands: Operands) -> tuple[Any, ...]:
    """Return the arguments for a call's options: words of a mask, and ``own_extras``."""
    features, own = features_for(problem.unseeded), own_extras(problem, operands)
    if has_words(features):
        layout, _ = layout_for(problem.unseeded)
        own = packed_mask(operands.mask, layout.block_k), *own
    return own


def _work(
    problem: Problem, lead: tuple[int, int], differs: tuple[int, ...], extras: Extras
) -> tuple[int, Shape, Schedule]:
    """Return blocks, the kernel's ``shape``, and its schedule.

    Args:
        problem: The checked call.
        lead: Batches and heads of out.
        differs: Of q, k and v, see :func:`tensor_map`.
        extras: Of the kernel.
    """
    (layout, _), (batch, heads) = layout_for(problem.unseeded), lead
    tiles, lines = tiles_of(problem.seq_q, layout.block_q, extras), batch * heads
    bytes_a_head = 2 * problem.seq_k * (problem.head_dim + problem.value_dim)
    schedule = schedule_of(tiles, lines, bytes_a_head, CACHE_BYTES)
    shape = Shape(problem.seq_q, problem.seq_k, heads, *differs)
    return min(multiprocessors(), tiles * lines), shape, schedule


@kept_launches
def _launch(
    problem: Problem,
    lead: tuple[int, int],
    differs: tuple[int, ...],
    device: int,
    memory_layouts: Any,
) -> Callable[..., None]:
    """Return the launch of a call, but for where its arrays begin, and for its seed.

    Args:
        problem: Without a seed.
        lead: Batches and heads of out.
        differs: Of q, k and v, see :func:`tensor_map`.
        device: That it is for.
        memory_layouts: Of the arrays of a call, see :func:`memory_layouts`.
    """
    (layout, widths), features = layout_for(problem), features_for(problem)
    extras = lasting_extras(problem, layout.block_q, layout.block_k)
    blocks, shape, schedule = _work(problem, lead, differs, extras)
    mask_words = LATER if has_words(features) else 0
    kernel = forward_kernel(layout, widths, NAMES[problem.dtype], features)
    where = blocks, layout.threads
    return kernel.prepared(where, shape, problem.scale, schedule, mask_words, extras)


#: What is kept from call to call.
KEPT = layout_for, features_for, _launch
