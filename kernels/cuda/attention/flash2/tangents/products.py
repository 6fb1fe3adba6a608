"""Tiles and their tangents in shared memory, and the products of both, which share loads."""

# An intrinsic's first argument is the compiler's; callers do not pass it.
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from kernels.cuda.attention.register_tiles import (
    Variant,
    make_load_fragment,
    make_load_pair,
    make_load_tile,
    set_all,
)
from kernels.cuda.device.shared_tiles import SharedTiles, round_up
from kernels.cuda.device.vector import VECTOR
from kernels.cuda.ptx.llvm import load_shared
from kernels.cuda.runtime.kernel import device_function, scalar_type
from kernels.runtime.targets import cuda


@cache
def make_loads(variant: Variant, tiles: SharedTiles) -> tuple[Callable[..., None], ...]:
    """Return ``load_queries(thread, inputs, tangents, rows, factor, shared)`` and ``load_keys``.

    The first loads Q and Q̇, times ``factor``, and the second, which has none, K, K̇, V and V̇.
    """
    block_q, block_k, one = variant.layout.block_q, variant.layout.block_k, variant.dtype.type(1)
    load_q = make_load_tile(variant, block_q, variant.head_width)
    q_tile, q_tangent_tile = tiles["q"], tiles["q_tangent"]
    load_pair, load_tangents = (
        make_load_pair(variant, block_k, tiles[f"k{of}"], tiles[f"v{of}"])
        for of in ("", "_tangent")
    )

    @device_function
    def load_queries(thread, inputs, tangents, rows, factor, shared):
        load_q(thread, inputs.q, rows, factor, shared, q_tile)
        load_q(thread, tangents.q, rows, factor, shared, q_tangent_tile)

    @device_function
    def load_keys(thread, inputs, tangents, rows, shared):
        load_pair(thread, (inputs.k, inputs.v), rows, one, shared)
        load_tangents(thread, (tangents.k, tangents.v), rows, one, shared)

    return load_queries, load_keys


@device_function
def _with_vector(total, fragment, j, vector):
    """Add the product of a vector and the j-th one of a fragment, in the order of ``make_multiply``."""
    w, x, y, z = vector
    total += w * fragment[j, 0]
    total += x * fragment[j, 1]
    total += y * fragment[j, 2]
    total += z * fragment[j, 3]
    return total


@cache
def make_products(
    variant: Variant, tiles: SharedTiles, of_values: bool = False, by_keys: bool = False
) -> Callable[..., None]:
    """Return ``products(lane, (s, s_tangent), shared)``, for tiles of Q and Q̇ that are scaled by τ already.

    It computes X = τ Q Kᵀ and Ẋ = τ (Q̇ Kᵀ + Q K̇ᵀ), or ``of_values`` dP = dO Vᵀ and ḋP = dO V̇ᵀ; all are
    transposed if ``by_keys``.
    """
    layout, real, zero = variant.layout, scalar_type(variant.dtype), variant.dtype.type(0)
    width = variant.value_width if of_values else variant.head_width
    stride, depth = layout.row_stride(width), round_up(width, VECTOR)
    lanes, rows_of_threads = layout.lanes, layout.rows_of_threads
    cols = (layout.block_q if by_keys else layout.block_k) // lanes
    names = ("dout", "v") if of_values else ("q", "k")
    names = names[::-1] if by_keys else names
    (a, b), (a_moves, b_moves) = (tiles[x] for x in names), (x != "dout" for x in names)
    a_tangent = tiles[f"{names[0]}_tangent"] if a_moves else a
    b_tangent = tiles[f"{names[1]}_tangent"] if b_moves else b
    load_fragment = make_load_fragment(cols, lanes, stride)

    @device_function
    def products(lane, registers, shared):
        (tx, ty), (s, s_tangent) = lane, registers
        of_b = cuda.local.array((cols, VECTOR), real)  # (cols, 4): of B
        of_tangent = cuda.local.array((cols, VECTOR), real)  # (cols, 4): of Ḃ
        set_all(s, zero)
        set_all(s_tangent, zero)
        for d in range(0, depth, VECTOR):
            load_fragment(of_b, shared, b, tx, d)
            if b_moves:
                load_fragment(of_tangent, shared, b_tangent, tx, d)
            for i in range(s.shape[0]):
                place = (ty + i * rows_of_threads) * stride + d
                vector = load_shared(shared, a + place)
                moved = load_shared(shared, a_tangent + place) if a_moves else vector
                for j in range(cols):
                    s[i, j] = _with_vector(s[i, j], of_b, j, vector)
                    total = s_tangent[i, j]
                    # Ẋ - L̇ needs the terms of Ẋ in the order in which they were added to L̇: Q K̇ᵀ first.
                    if a_moves and by_keys:
                        total = _with_vector(total, of_b, j, moved)
                    if b_moves:
                        total = _with_vector(total, of_tangent, j, vector)
                    if a_moves and not by_keys:
                        total = _with_vector(total, of_b, j, moved)
                    s_tangent[i, j] = total

    return products
