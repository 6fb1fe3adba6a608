"""Attention on keys and values in a cache, contiguous or in pages, for decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kernels import launch
from kernels.array_call import check_on_host, results_of, target_of, with_arrays
from kernels.bound_calls import CallLookup, find
from kernels.common.arguments import flag
from kernels.common.geometry import ceil_div
from kernels.cpu.attention import flash_decoding
from kernels.cpu.attention.key_cache import append
from kernels.cuda.attention.flash_decoding import cached as cuda_decoding
from kernels.cuda.runtime.repeated import Repeat, address_of
from kernels.interop.libraries import context_of, library_of
from kernels.operand_types import as_operand
from kernels.problem.cached_keys import (
    NAME,
    Cached,
    check_operands,
    check_options,
    check_values,
    host_integers,
)
from kernels.problem.operands import Operands, make_operands
from kernels.problem.question import Problem
from kernels.runtime.memory import start_of


def flash_attention_with_cache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    *,
    cache_seqlens: Any = None,
    block_table: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = False,
    batch_invariant: bool = False,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Attend to the keys and values of a cache, each sequence to its own length, and append new ones first.

    Names mean what they mean in FlashAttention's ``flash_attn_with_kvcache``; the dimensions are those of
    this library, heads before positions.  Strides are free: pass a transposed view of a cache in another
    order.  There is no backward pass.

    Args:
        q: Queries of the last positions, (batch, heads, seq_q, head_dim), of any type and dtype that
            :func:`flash_attention_forward` accepts.  Query ``i`` has the position ``length - seq_q + i``
            in its sequence, where the length includes the new keys.  ``heads`` is a multiple of the key
            heads, and adjacent ones share one.
        k_cache: Keys, (batch, key heads, capacity, head_dim), or with a ``block_table`` the pool of all
            pages, (pages, key heads, page size, head_dim).  A page holds 16 to 256 keys, a multiple of 16.
        v_cache: Values, as ``k_cache``, with value_dim in place of head_dim.
        k: New keys, (batch, key heads, new, head_dim), which are written to the cache at positions
            ``cache_seqlens`` and after, in place.  The caller adds ``new`` to ``cache_seqlens`` itself.
        v: New values, (batch, key heads, new, value_dim).
        cache_seqlens: Number of keys of each sequence before the call, (batch,) int32, or one number for
            all; None means the whole capacity.  What the cache holds beyond a length is never read.
        block_table: Pages of each sequence, (batch, most pages) int32: position ``p`` is in page
            ``block_table[b, p // page_size]``.  Entries beyond a length may be anything.  Sequences may
            share pages that are only read; a page that new keys are written to must belong to one
            sequence, which is not checked.
        rotary_cos: Cosines, (positions, pairs), pairs at most head_dim / 2: the new keys, and the queries,
            are rotated by the angle of their position before they are used.
        rotary_sin: Sines, like ``rotary_cos``.
        rotary_interleaved: Rotate elements (2i, 2i + 1) together, instead of (i, i + pairs).
        batch_invariant: Make the results of a query the same bits in every batch, for every number of
            queries in the call, and for every layout of pages: a prompt that is processed in one call, in
            chunks, or one token at a time gives the same results.
        return_lse: Also return lse.
        options: Options of :func:`make_problem`: masks, bounds, scale, softcap, ALiBi's slopes, sinks and
            ``score_mod``; others are refused with a list of these.  Rows and columns are positions, so
            ``is_causal``, which is False unless given, as in both libraries, is aligned to the lower
            right, and a ``score_mod`` receives positions.  A boolean ``attn_mask`` is (…, seq_q, seq_q)
            and applies to the last seq_q keys of each sequence, such as a tree of drafts; a floating one
            is (…, seq_q, capacity), or (…, seq_q, most pages · page size).

    Returns:
        out (batch, heads, seq_q, value_dim), and with ``return_lse`` also lse (batch, heads, seq_q), the
        natural logarithm of the sum of the exponentials of each row's scores.  A query that sees no key
        has zeros and minus infinity.

    Raises:
        TypeError: If an array or an option has the wrong dtype or type.
        ValueError: If a shape, a length, an entry of the table or the value of an option is invalid, an
            option is not supported, or new keys are for a cache that can only be read as a copy, such as
            one in foreign byte order.  Lengths and tables on a device are not checked.

    Source: Dao et al., Flash-Decoding (2023); Kwon et al., PagedAttention (2023).
    """
    flags = {"rotary_interleaved": rotary_interleaved, "batch_invariant": batch_invariant}
    flags = tuple([flag(name, value) for name, value in flags.items()])
    return_lse = flag("return_lse", return_lse)
    if isinstance(cache_seqlens, (int, np.integer)):
        cache_seqlens = np.full(len(as_operand(q)), cache_seqlens, np.int64)
    integers = _as_array("cache_seqlens", cache_seqlens), _as_array("block_table", block_table)
    given = q, k_cache, v_cache, k, v, *integers, rotary_cos, rotary_sin
    library = library_of(q)
    with context_of(q):
        arrays = [x for x in given if x is not None]
        rest = NAME, tuple([x is None for x in given]), flags
        found = find(arrays, options, *rest)  # type: ignore[arg-type]
        known = found and found.call
        if found is None or known is None or not known.reads_given:
            results = results_of(library, _checked(found, given, flags, options))
        elif library is None:
            results = tuple(known.repeat.arrays(found.starts, 0))
        else:
            results = tuple(library.repeat(known.repeat, found.starts, 0, q))
    return results if return_lse else results[0]


def _as_array(name: str, values: Any) -> Any:
    """Return lengths or a table as an array, of whatever library; None for None."""
    return values if values is None or hasattr(values, "dtype") else host_integers(name, values)


@dataclass
class _Repeated:
    """How the calls of one key run."""

    problem: Problem  #: Checked.
    repeat: Repeat | None  #: The launches of the first one.
    reads_given: bool = False  #: Whether these take the caller's own arrays.


def _checked(
    found: CallLookup | None, given: Sequence[Any], flags: tuple[bool, ...], options: dict[str, Any]
) -> tuple[Any, Any]:
    """Check a call and return out and lse; keep how it runs if nothing is known of calls of its key."""
    operands = [as_operand(x) for x in given]
    for i, name in ((5, "cache_seqlens"), (6, "block_table")):
        if isinstance(operands[i], np.ndarray):
            operands[i] = host_integers(name, operands[i])
    target = target_of([x for x in operands[:5] if x is not None])
    known = found and found.call
    if known is None:
        check_options(options)  # type: ignore[arg-type]
    options, arrays = with_arrays(options)  # type: ignore[assignment,arg-type]
    call = Cached(known and known.problem, *operands, *flags, arrays)  # type: ignore[arg-type]
    if known is not None:
        check_values(call, known.problem.seq_k)
    else:
        if target is launch.CPU:
            names = "cache_seqlens", "block_table", "rotary_cos", "rotary_sin"
            check_on_host({**arrays, **dict(zip(names, operands[5:], strict=True))})
        call = call._replace(problem=check_operands(call, options))  # type: ignore[arg-type]
        if call.k is not None:
            _check_written({"k_cache": given[1], "v_cache": given[2]}, call)
    return _run(target, call, found)


def _check_written(caches: dict[str, Any], call: Cached) -> None:
    """Check that new rows reach the caller's caches: reading an array that is copied makes two copies."""
    for name, cache in caches.items():
        if _start(as_operand(cache)) != _start(getattr(call, name)):
            raise ValueError(
                f"new rows are written to {name} in place, but this array can only be read as a copy, and "
                "they would be lost; pass one in native byte order, without negative strides on a device"
            )


def _start(array: Any) -> int:
    return start_of(array) if isinstance(array, np.ndarray) else address_of(array)


def _run(target: launch.Target, call: Cached, found: CallLookup | None) -> tuple[Any, Any]:
    """Return out and lse of a checked call."""
    repeat, starts, known = None, list[int](), found and found.call
    if target is launch.CPU:
        results = _on_host(call)
    else:
        call, arrays = cuda_decoding.brought(call)
        starts = [address_of(x) for x in arrays]
        if known is not None and known.repeat is not None:
            return tuple(known.repeat.arrays(starts, 0))
        if found is None or known is not None:
            return cuda_decoding.forward(call)
        results, repeat = cuda_decoding.note(call, arrays)
    if found is not None and known is None:
        found.keep(_Repeated(call.problem, repeat), starts)
    return results


def _on_host(call: Cached) -> tuple[Any, Any]:
    q, lengths = append(call)
    problem = call.problem
    has_few_rows = problem.seq_q <= flash_decoding.MOST_ROWS or problem.score_mod
    if q.size and (has_few_rows or call.batch_invariant or not lengths.all()):
        return flash_decoding.forward_cached(call, q, lengths)
    out = np.zeros((*q.shape[:3], problem.value_dim), problem.dtype)
    lse = np.full(q.shape[:3], -np.inf, problem.acc_dtype)
    for b, length in enumerate(lengths.tolist()):
        own, operands = _of_sequence(call, q, b, length)
        out[b : b + 1], lse[b : b + 1], _ = launch.forward(launch.CPU, own, operands)
    return out, lse


def _of_sequence(call: Cached, q: Any, b: int, length: int) -> tuple[Problem, Operands]:
    """Return the call of one sequence on a contiguous copy of its keys and values."""
    problem, size = call.problem, call.k_cache.shape[2]
    pages = [b] if call.table is None else call.table[b, : ceil_div(length, size)]
    k, v = (x[pages].swapaxes(0, 1) for x in (call.k_cache, call.v_cache))
    k, v = (x.reshape(1, len(x), -1, x.shape[-1])[:, :, :length] for x in (k, v))
    arrays = dict(call.arrays)
    if (mask := arrays.get("attn_mask")) is not None:
        own = mask[b if len(mask) > 1 else 0] if mask.ndim == 4 else mask
        if problem.mask == "bool":
            own = own[..., -length:]
            before = np.ones((*own.shape[:-1], length - own.shape[-1]), bool)
            arrays["attn_mask"] = np.concatenate([before, own], -1)
        else:
            arrays["attn_mask"] = own[..., :length]
    if (slopes := arrays.get("alibi_slopes")) is not None and slopes.ndim == 2:
        arrays["alibi_slopes"] = slopes[b]
    first = length - problem.seq_q  # the position of the first query
    bounds = {
        name: min(max(getattr(problem, name) + first, -problem.seq_q), length)
        for name in ("lower", "upper")
    }
    diagonal = first if problem.slopes else 0
    lead = (1, problem.heads)
    own = replace(problem, lead=lead, seq_k=length, diagonal=diagonal, **bounds)
    return own, make_operands(launch.CPU.memory, own, q[b : b + 1], k, v, arrays)
