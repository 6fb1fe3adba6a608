"""Check calls on keys and values in a cache, contiguous or in pages, and make their problem."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import as_host_array, shown
from kernels.problem.option_values import Given, check_mask
from kernels.problem.options import DEFAULTS, OPTIONS, Options, check_types
from kernels.problem.question import Problem, problem_of
from kernels.problem.shapes import check_array, check_dtypes
from kernels.problem.signature import by_name
from kernels.runtime.dtypes import is_floating

NAME = "flash_attention_with_cache"
#: The sizes of a page, in keys, are multiples of the first up to the second.
PAGE_UNIT, MOST_PAGE = 16, 256
#: The options that these calls do not support, those of training and of other layouts.
_REFUSED = {
    "block_mask", "causal_offset", "chunk_size", "deterministic", "dropout_p", "enable_gqa", "mask_mod",
    "precision", "return_lse", "rung", "seed",
}  # fmt: skip
_OPTIONS = [name for name in OPTIONS if name not in _REFUSED]


class Cached(NamedTuple):
    """A checked attention call on a key/value cache.

    Lengths and the table are on the host, or on the device of the others; of a NumPy array, the values
    have been checked.
    """

    #: Rows and columns are positions in the sequence: query ``i`` of a sequence is row ``length - seq_q +
    #: i``, which the bounds, ``diagonal`` and a ``score_mod`` count by.  ``seq_k`` is the capacity.
    problem: Problem
    q: Any  #: (batch, heads, seq_q, head_dim)
    k_cache: Any  #: (pages, key heads, page size, head_dim); without a table a sequence is a page.
    v_cache: Any  #: (pages, key heads, page size, value_dim)
    k: Any  #: New keys, (batch, key heads, new, head_dim), or None.
    v: Any  #: New values, (batch, key heads, new, value_dim), or None.
    lengths: (
        Any  #: Keys of each sequence before the call, (batch,) int32; None for the whole capacity.
    )
    table: Any  #: Pages of each sequence, (batch, most pages) int32, or None.
    cos: Any  #: (positions, rotated pairs), of the dtype of q or float32, or None.
    sin: Any  #: As ``cos``.
    is_interleaved: bool  #: Whether the pairs are adjacent elements, not those of two halves.
    batch_invariant: bool  #: Whether sums must be split by the position of the key alone.
    arrays: dict[str, Any]  #: The options that are arrays, by name.

    @property
    def new(self) -> int:
        """Number of new keys of each sequence."""
        return 0 if self.k is None else int(self.k.shape[2])


def check_options(options: Options) -> None:
    """Check that a call on a cache supports its options; otherwise raise a ValueError."""
    for name, value in by_name(NAME, (), options).items():
        if name not in _OPTIONS:
            raise ValueError(
                f"{NAME} does not support {name}, got {shown(value)}; leave it out.  Its options are "
                f"{', '.join(_OPTIONS)}"
            )


def check_operands(call: Cached, options: Options) -> Problem:
    """Check the arrays and options of a call whose problem is still missing; return its problem.

    Raises:
        TypeError: If an array has the wrong dtype, or an option the wrong type.
        ValueError: If a shape, a length, an entry of the table or a value of an option is wrong.
    """
    q, k_cache, v_cache, k, v = call[1:6]
    check_dtypes(q, k_cache, v_cache)
    _check_shapes(call)
    batch, heads, seq_q, head_dim = q.shape
    _, key_heads, page_size, value_dim = v_cache.shape
    capacity = page_size * (1 if call.table is None else int(call.table.shape[1]))
    if k is not None:
        check_dtypes(q, k, v)
    check_values(call, capacity)
    mask = options.get("attn_mask")
    given: Any = {name: x for name, x in options.items() if name != "attn_mask"}
    check_types(**given)

    def of_shape(heads: int, dim: int) -> Any:
        # Not less than seq_q: a row may have a position before the first key.
        return _Shaped((max(batch, 1), heads, max(capacity, seq_q), dim), q.dtype)

    grouped: Any = {**given, "enable_gqa": heads != key_heads}
    square = problem_of(
        of_shape(heads, head_dim),
        of_shape(key_heads, head_dim),
        of_shape(key_heads, value_dim),
        grouped,
    )
    kind = _checked_mask(mask, call, capacity, {**DEFAULTS, **given})
    return replace(square, lead=(batch, heads), seq_q=seq_q, seq_k=capacity, mask=kind)


def check_values(call: Cached, capacity: int) -> None:
    """Check the lengths, the table and the angles, whose values differ from call to call."""
    _check_lengths(call, capacity)
    _check_rotary(call, capacity)


class _Shaped(NamedTuple):
    """The shape and the dtype of an array that is not made."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def _check_shapes(call: Cached) -> None:
    sizes: Any = [None if x is None else tuple(x.shape) for x in call[1:6]]
    q, k_cache, v_cache, k, v = sizes
    shapes = f"q {q}, k_cache {k_cache}, v_cache {v_cache}"
    if not len(q) == len(k_cache) == len(v_cache) == 4:
        raise ValueError(
            f"{NAME} needs q (batch, heads, seq_q, head_dim), and k_cache and v_cache (batch, key heads, "
            f"capacity, dim), or (pages, key heads, page size, dim) with a block_table; got {shapes}"
        )
    if k_cache[:3] != v_cache[:3] or (call.table is None and k_cache[0] != q[0]):
        raise ValueError(
            "k_cache and v_cache must agree in all sizes but the last, and without a block_table have the "
            f"batch of q; got {shapes}"
        )
    if min(q[1:]) < 1 or min(k_cache[1:]) < 1 or q[1] % k_cache[1]:
        raise ValueError(
            "the heads of q must be a multiple of those of the cache, and no size but the batch 0; got "
            f"{shapes}"
        )
    if call.table is not None:
        if call.table.ndim != 2 or len(call.table) != q[0]:
            raise ValueError(
                f"block_table must be (batch, pages of a sequence), one row for each of {q[0]} sequences, "
                f"got {tuple(call.table.shape)}"
            )
        if k_cache[2] % PAGE_UNIT or k_cache[2] > MOST_PAGE:
            raise ValueError(
                f"with a block_table the cache is (pages, key heads, page size, dim), and a page holds a "
                f"multiple of {PAGE_UNIT} keys, up to {MOST_PAGE}; got {k_cache[2]} keys in {shapes}.  "
                "Transpose a cache in another order: strides are free"
            )
    if (k is None) != (v is None):
        raise ValueError("k and v are appended together; pass both, or neither")
    if k is not None:
        for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
            if len(new) != 4 or (*new[:2], new[3]) != (q[0], cache[1], cache[3]) or k[2] != v[2]:
                raise ValueError(
                    "k and v must be (batch, key heads, new, dim), with the heads and sizes of the cache; "
                    f"got {name} {new} for {shapes}"
                )


def _check_lengths(call: Cached, capacity: int) -> None:
    """Check the lengths and the table if they are on the host."""
    for name, array in (("cache_seqlens", call.lengths), ("block_table", call.table)):
        if array is not None and array.dtype != np.int32:
            raise TypeError(f"{name} must be int32, got {array.dtype}; convert it")
    lengths, new = call.lengths, call.new
    if lengths is not None and tuple(lengths.shape) != (call.q.shape[0],):
        raise ValueError(
            f"cache_seqlens must be (batch,), a length for each of {call.q.shape[0]} sequences, or one "
            f"number for all, got the shape {tuple(lengths.shape)}"
        )
    if lengths is None and new:
        raise ValueError(
            f"a call that appends {new} keys needs cache_seqlens, where they begin: without it all "
            f"{capacity} places of the cache are taken"
        )
    whole = np.full(call.q.shape[0], capacity, np.int32) if lengths is None else lengths
    if not isinstance(whole, np.ndarray):
        return
    wrong = (whole < 0) | (whole.astype(np.int64) + new > capacity)
    if wrong.any():
        b = int(wrong.argmax())
        raise ValueError(
            f"cache_seqlens[{b}] is {whole[b]}, and the call appends {new} keys, but a sequence has from 0 "
            f"to {capacity} keys here; use a larger cache, or more pages for a sequence"
        )
    if isinstance(call.table, np.ndarray):
        pages, size = call.k_cache.shape[0], call.k_cache.shape[2]
        is_used = np.arange(call.table.shape[1]) * size < (whole + new)[:, None]
        wrong = is_used & ((call.table < 0) | (call.table >= pages))
        if wrong.any():
            b, place = map(int, np.argwhere(wrong)[0])
            raise ValueError(
                f"block_table[{b}, {place}] is {call.table[b, place]}, but the cache has pages 0 to "
                f"{pages - 1}, and the {whole[b] + new} keys of this sequence need that page; allocate it"
            )


def _check_rotary(call: Cached, capacity: int) -> None:
    cos, sin = call.cos, call.sin
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos and rotary_sin are used together; pass both, or neither")
    if cos is None:
        return
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_array(name, table)
        if not is_floating(np.dtype(table.dtype)):
            raise TypeError(f"{name} must be floating, got {table.dtype}; convert it")
    dim = call.q.shape[3]
    if not (
        cos.ndim == 2 and tuple(cos.shape) == tuple(sin.shape) and 1 <= cos.shape[1] <= dim // 2
    ):
        raise ValueError(
            "rotary_cos and rotary_sin must be (positions, pairs), equal, with at most head_dim / 2 = "
            f"{dim // 2} pairs, got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if isinstance(call.lengths, np.ndarray) or call.lengths is None:
        longest = capacity if call.lengths is None else int(call.lengths.max(initial=0)) + call.new
        if cos.shape[0] < longest:
            raise ValueError(
                f"rotary_cos has {cos.shape[0]} positions, but the longest sequence has {longest}; pass "
                "the angles of all positions, from 0"
            )


def _checked_mask(mask: Any, call: Cached, capacity: int, every: Any) -> str:
    """Check ``attn_mask``: a boolean one is for the last seq_q keys, a floating one for all positions."""
    if mask is None:
        return ""
    check_array("attn_mask", mask)
    batch, heads, seq_q, head_dim = call.q.shape
    keys = seq_q if np.dtype(mask.dtype).kind == "b" else capacity
    if len(mask.shape) < 2 or tuple(mask.shape[-2:]) != (seq_q, keys):
        raise ValueError(
            f"attn_mask of {NAME} must be boolean (…, {seq_q}, {seq_q}), for the last seq_q keys of each "
            f"sequence, or floating (…, {seq_q}, {capacity}), for all positions of the cache; got "
            f"{mask.dtype} of shape {tuple(mask.shape)}"
        )
    return check_mask(mask, Given((batch, heads), seq_q, keys, head_dim, call.q.dtype, every))


def host_integers(name: str, values: Any) -> npt.NDArray[np.int32]:
    """Return a list or an array of whole numbers on the host as int32."""
    array = as_host_array(name, values)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be whole numbers of int32, got {array.dtype}; convert it")
    if array.size and not -(2**31) <= int(array.min()) <= int(array.max()) < 2**31:
        raise ValueError(f"{name} must fit int32, got numbers up to {array.max()}")
    return array.astype(np.int32, copy=False)
