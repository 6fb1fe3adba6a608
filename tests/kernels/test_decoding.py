"""Attention on a cache, contiguous or in pages: values against float64, and bits whatever the batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels
from kernels.runtime.dtypes import BFLOAT16, FLOAT32, FLOAT_DTYPES, HALF_DTYPES, acc_dtype

from ..support.device.emulated_gpu import EMULATED_ONLY, emulated_gpu
from ..support.examples import at_most
from ..support.layouts import on_device
from ..support.tolerances import assert_close_arrays


class Drawn(NamedTuple):
    """What is drawn of sequences: dtypes, sizes of heads, and the largest length, batch and group."""

    dtypes: Any = FLOAT_DTYPES
    dims: tuple[int, ...] = (1, 5, 16, 20, 64, 72, 320)
    longest: int = 150
    batch: int = 4
    group: int = 3


class Place(NamedTuple):
    """Where a call runs: what places an array there, the compute capability, and what is drawn."""

    array: Callable[[Any], Any]
    cc: tuple[int, int] | None = None
    drawn: Drawn = Drawn()

    def attend(self, *operands: Any, **options: Any) -> list[Any]:
        """Return out and lse of a call with the arrays there, and then the arrays of keys and values."""
        with emulated_gpu(self.cc) if self.cc else nullcontext():
            own = [self.array(x) for x in operands]
            options = {
                name: self.array(x) if isinstance(x, np.ndarray) else x
                for name, x in options.items()
            }
            results = kernels.flash_attention_with_cache(*own, return_lse=True, **options)
            return [
                x.copy_to_host() if hasattr(x, "copy_to_host") else x for x in (*results, *own[1:3])
            ]


#: The kernels for a cache: loops on the CPU, CUDA cores, and both kinds of tensor cores.
PLACES = {
    "cpu": Place(np.asarray),
    "cuda": Place(on_device, drawn=Drawn(dims=(1, 5, 16, 20, 264), longest=40, batch=2)),
    "mma": Place(on_device, (8, 0), Drawn(HALF_DTYPES, (5, 8, 24), 40, 2)),
    "wgmma": Place(on_device, (9, 0), Drawn(HALF_DTYPES, (8, 72), 150, 2)),
}
MARKS = {"cpu": [], "cuda": [pytest.mark.emulated], "mma": EMULATED_ONLY, "wgmma": EMULATED_ONLY}


def on(*names: str) -> Any:
    """Run a test on the places of these names."""
    return pytest.mark.parametrize(
        "place", [pytest.param(PLACES[name], id=name, marks=MARKS[name]) for name in names]
    )


OPTIONS = (
    "is_causal",
    "window_size",
    "softcap",
    "alibi_slopes",
    "sink",
    "tree",
    "bias",
    "score_mod",
)


def score_mod(score: float, batch: int, head: int, row: int, col: int) -> float:
    return score + 0.125 * ((row - col) % 3) + 0.25 * head * batch


class Sequences:
    """Drawn sequences: their keys and values without a cache, and the same in one."""

    def __init__(self, draw: Callable[[Any], Any], sizes: Drawn):
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        self.dtype = draw(st.sampled_from(sizes.dtypes))
        self.batch, self.key_heads = draw(st.integers(1, sizes.batch)), draw(st.integers(1, 2))
        self.heads = self.key_heads * draw(st.integers(1, sizes.group))
        self.head_dim, self.value_dim = (draw(st.sampled_from(sizes.dims)) for _ in range(2))
        lengths = st.lists(st.integers(0, sizes.longest), min_size=self.batch, max_size=self.batch)
        self.lengths = np.array(draw(lengths), np.int32)
        self.capacity = -(-int(self.lengths.max() + 16) // 48) * 48
        self.keys, self.values = (
            self.normal(self.batch, self.key_heads, self.capacity, dim)
            for dim in (self.head_dim, self.value_dim)
        )

    def normal(self, *shape: int) -> Any:
        return self.rng.standard_normal(shape).astype(self.dtype)

    def in_cache(
        self, page_size: int | None, lengths: Any = None, shared: int = 0
    ) -> dict[str, Any]:
        """Return a cache of the first keys of each sequence, NaN elsewhere, and its table.

        Pages are in random order; the first ``shared`` pages of the first two sequences, if full, are the
        same, and so are their keys.  Entries that need no page are out of range.
        """
        lengths = self.lengths if lengths is None else lengths
        size = self.capacity if page_size is None else page_size
        count = self.capacity // size
        table = self.rng.permutation(self.batch * count + 3)[: self.batch * count]
        table = table.reshape(self.batch, count).astype(np.int32)
        if page_size is None:
            table = np.arange(self.batch, dtype=np.int32)[:, None]
        full = min(shared, int(lengths[:2].min()) // size) if self.batch > 1 else 0
        if page_size is not None and full:
            table[1, :full] = table[0, :full]
            for x in (self.keys, self.values):
                x[1, :, : full * size] = x[0, :, : full * size]
        pools: list[Any] = []
        for x in (self.keys, self.values):
            pool = np.full(
                (len(table) * count + 3 if page_size else self.batch, size, *x.shape[1::2]), np.nan
            )
            for b, length in enumerate(lengths):
                for p in range(length):
                    pool[table[b, p // size], p % size] = x[b, :, p]
            pools.append(pool.astype(self.dtype).transpose(0, 2, 1, 3))
        used = np.arange(count) * size < self.capacity if page_size is None else None
        if used is None:
            needed = -(-(lengths + 16) // size)
            table[np.arange(count) >= needed[:, None]] = self.rng.choice([-1, 10**6])
        more = {} if page_size is None else {"block_table": table}
        return {"k_cache": pools[0], "v_cache": pools[1], "cache_seqlens": lengths, **more}

    def options(self, names: Any, seq_q: int, longest: int) -> dict[str, Any]:
        number, sums = self.rng, acc_dtype(self.dtype)
        every: dict[str, Any] = {
            "is_causal": True,
            "window_size": (int(number.integers(-1, 40)), int(number.integers(-1, 4))),
            "softcap": 1.5,
            "alibi_slopes": number.random((self.batch, self.heads)[number.integers(2) :]).astype(
                sums
            ),
            "sink": number.standard_normal(self.heads).astype(sums),
            "score_mod": score_mod,
        }
        found = {name: every[name] for name in names if name in every}
        if "tree" in names:
            found["attn_mask"] = number.random((self.batch, 1, seq_q, seq_q)) < 0.6
        elif "bias" in names:
            found["attn_mask"] = self.normal(self.heads, seq_q, longest)
        return found


def expected(q: Any, keys: Any, values: Any, lengths: Any, **options: Any) -> tuple[Any, Any]:
    """Return out and lse in float64 by the formula, one sequence and head at a time."""
    (batch, heads, seq_q, head_dim), groups = q.shape, q.shape[1] // keys.shape[1]
    out, lse = np.zeros((*q.shape[:3], values.shape[3])), np.full(q.shape[:3], -np.inf)
    mask, slopes = options.get("attn_mask"), options.get("alibi_slopes")
    for b, h in np.ndindex(batch, heads):
        n = int(lengths[b])
        row, col = n - seq_q + np.arange(seq_q)[:, None], np.arange(n)
        k, v = (x[b, h // groups, :n].astype(np.float64) for x in (keys, values))
        s = q[b, h].astype(np.float64) @ k.T / np.sqrt(head_dim)
        if cap := options.get("softcap"):
            s = cap * np.tanh(s / cap)
        if "score_mod" in options:
            s = score_mod(s, b, h, row, col)  # type: ignore[arg-type]
        if slopes is not None:
            s = s - np.broadcast_to(slopes, (batch, heads))[b, h] * abs(row - col)
        left, right = options.get("window_size", (-1, -1))
        seen: Any = (col >= row - left if left >= 0 else True) & (
            col <= row + right if right >= 0 else s == s
        )
        if options.get("is_causal"):
            seen = seen & (col <= row)
        if mask is not None:
            own = np.broadcast_to(mask, (batch, heads, *mask.shape[-2:]))[b, h]
            if mask.dtype == bool:
                tail = min(n, seq_q)
                seen[:, n - tail :] &= own[:, seq_q - tail :]
            else:
                s = s + own[:, :n].astype(np.float64)
        s = np.where(seen, s, -np.inf)
        if "sink" in options:
            s = np.hstack([s, np.full((seq_q, 1), options["sink"][h])])
            v = np.vstack([v, np.zeros((1, v.shape[1]))])
        top = s.max(axis=1, initial=-np.inf)
        p = np.exp(s - np.where(np.isfinite(top), top, 0)[:, None])
        with np.errstate(divide="ignore", invalid="ignore"):
            lse[b, h] = np.where(np.isfinite(top), top, 0) + np.log(p.sum(axis=1))
            out[b, h] = np.nan_to_num(p @ v / p.sum(axis=1, keepdims=True))
    return out, lse


def rotated(x: Any, first: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Rotate the rows of each sequence, whose first one has a position."""
    found, pairs = x.astype(np.float64), cos.shape[1]
    for b, r in np.ndindex(len(x), x.shape[2]):
        c, s = cos[max(first[b] + r, 0)], sin[max(first[b] + r, 0)]
        for i in range(pairs):
            at = [2 * i, 2 * i + 1] if interleaved else [i, i + pairs]
            turn = np.array([[c[i], -s[i]], [s[i], c[i]]])
            found[b, :, r, at] = turn @ x[b, :, r, at].astype(np.float64)
    return found.astype(x.dtype)


@on("cpu", "cuda")
@at_most(40)
@given(data=st.data())
def test_each_sequence_attends_to_its_own_keys_and_to_no_others(place: Place, data: Any) -> None:
    """NaN lies in every place beyond a length; new keys may be appended, rotated by their position."""
    assert_attends(place, data)


@on("mma", "wgmma")
@at_most(5)
@given(data=st.data())
def test_on_tensor_cores_each_sequence_attends_to_its_own_keys(place: Place, data: Any) -> None:
    assert_attends(place, data)


def assert_attends(place: Place, data: Any) -> None:
    """Assert that a call with drawn options and new keys has the results of the formula."""
    longest = place.drawn.longest
    lengths = [0, longest, longest, 1100 if place.cc is None and longest > 100 else longest]
    sizes = place.drawn._replace(longest=data.draw(st.sampled_from(lengths)))
    s, seq_q = Sequences(data.draw, sizes), data.draw(st.sampled_from([1, 1, 2, 5, 11]))
    page_size = data.draw(st.sampled_from([None, 16, 48, 16]))
    call = s.in_cache(page_size, shared=0)
    new = data.draw(st.sampled_from([0, 1, seq_q]))
    lengths, q = s.lengths + new, s.normal(s.batch, s.heads, seq_q, s.head_dim)
    names = data.draw(st.lists(st.sampled_from(OPTIONS), max_size=3))
    options = s.options(names, seq_q, s.capacity)
    keys, values = s.keys.copy(), s.values.copy()
    own_q = q
    if new:
        fresh = [s.normal(s.batch, s.key_heads, new, x.shape[3]) for x in (keys, values)]
        call |= {"k": fresh[0], "v": fresh[1]}
        if s.head_dim > 4 and data.draw(st.booleans()):
            angles = np.arange(s.capacity)[:, None] / np.array([1.0, 7.0])
            turn = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
            interleaved = data.draw(st.booleans())
            call |= {
                "rotary_cos": turn[0],
                "rotary_sin": turn[1],
                "rotary_interleaved": interleaved,
            }
            own_q = rotated(q, lengths - seq_q, *turn, interleaved)
            fresh[0] = rotated(fresh[0], s.lengths, *turn, interleaved)
        for x, rows in zip((keys, values), fresh, strict=True):
            for b, length in enumerate(s.lengths):
                x[b, :, length : length + new] = rows[b]
    out, lse = place.attend(q, call.pop("k_cache"), call.pop("v_cache"), **call, **options)[:2]
    wanted = expected(own_q, keys, values, lengths, **options)
    assert_close_arrays(out, wanted[0], s.dtype, "out")
    assert_close_arrays(lse, wanted[1], acc_dtype(s.dtype), "lse", size=4.0)


@on("cpu")
@at_most(25)
@given(data=st.data())
def test_with_batch_invariant_a_row_has_the_same_bits_in_any_batch(place: Place, data: Any) -> None:
    """A prompt gives the same bits in one call and in chunks, alone and among others, in any pages."""
    longest = data.draw(st.sampled_from([60, 572]))
    assert_invariant(place, data, Drawn((FLOAT32, BFLOAT16), longest=longest), longest)


@on("cuda", "mma", "wgmma")
@at_most(4)
@given(data=st.data())
def test_with_batch_invariant_a_row_has_the_same_bits_on_every_gpu(place: Place, data: Any) -> None:
    """A part is 16 tiles of keys, which are 64 keys on CUDA cores."""
    assert_invariant(place, data, place.drawn._replace(dims=(8,), longest=70, group=2), 7)


def assert_invariant(place: Place, data: Any, sizes: Drawn, most: int) -> None:
    """Assert that chunks of at most so many rows at the end of a prompt have the bits of all of them."""
    s = Sequences(data.draw, sizes)
    names = data.draw(st.lists(st.sampled_from(OPTIONS[1:5]), max_size=2))
    options: dict[str, Any] = s.options(names, 1, s.capacity) | {"is_causal": True}
    if np.ndim(options.get("alibi_slopes", 0)) == 2:
        options["alibi_slopes"] = options["alibi_slopes"][0]
    b = int(s.lengths.argmax())
    length = max(int(s.lengths[b]), 1)
    q = s.normal(s.batch, s.heads, length, s.head_dim)

    def attend(stop: int, rows: int, alone: bool, page_size: Any, **more: Any) -> Any:
        """Return the results of the rows before position ``stop`` of sequence b."""
        lengths = np.minimum(s.lengths, stop)
        lengths[b] = stop
        call = s.in_cache(page_size, lengths)
        own = slice(b, b + 1) if alone else slice(None)
        for name in ("block_table", "cache_seqlens"):
            if name in call:
                call[name] = call[name][own]
        if page_size is None:
            call |= {name: call[name][own] for name in ("k_cache", "v_cache")}
        queries = q[own, :, stop - rows : stop], call.pop("k_cache"), call.pop("v_cache")
        results = place.attend(*queries, **call, **options, batch_invariant=True)[:2]
        return [x[0 if alone else b] for x in results]

    start = first = max(length - most, 0)
    whole = attend(length, length - first, False, data.draw(st.sampled_from([None, 16])))
    while start < length:
        rows = min(data.draw(st.sampled_from([1, 1, 3, 9, 64])), length - start)
        page_size, alone = data.draw(st.sampled_from([None, 16, 48])), data.draw(st.booleans())
        part = attend(start + rows, rows, alone, page_size)
        for x, y in zip(part, whole, strict=True):
            assert np.array_equal(x, y[:, start - first : start - first + rows])
        start += max(rows, length // 6)


@on("cuda", "mma", "wgmma")
def test_with_batch_invariant_the_capacity_does_not_change_a_bit(place: Place) -> None:
    rng = np.random.default_rng(0)
    q, *rows = (rng.standard_normal((1, 2, n, 8)).astype(np.float16) for n in (1, 2100, 2100))
    found = [
        place.attend(
            q, *(x[:, :1, :capacity] for x in rows),
            cache_seqlens=np.array([300], np.int32), batch_invariant=True,
        )[:2]
        for capacity in (300, 2100)
    ]  # fmt: skip
    for x, y in zip(*found, strict=True):
        assert np.array_equal(x, y)


@on("cpu", "cuda")
def test_sequences_share_the_pages_of_a_prefix(place: Place) -> None:
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((2, 4, 1, 16, 8)).astype(np.float32)
    table = np.array([[2, 0], [2, 3]], np.int32)
    lengths = np.array([20, 18], np.int32)
    q = rng.standard_normal((2, 2, 1, 8)).astype(np.float32)
    out, *_ = place.attend(q, *cache, cache_seqlens=lengths, block_table=table)
    keys, values = (np.stack([np.concatenate(list(x[row]), 1) for row in table]) for x in cache)
    assert_close_arrays(out, expected(q, keys, values, lengths)[0], FLOAT32)


@on("cpu", "cuda")
def test_an_empty_batch_has_empty_results(place: Place) -> None:
    q, cache = np.ones((0, 2, 1, 4), np.float32), np.ones((0, 1, 8, 4), np.float32)
    out, lse, *_ = place.attend(q, cache, cache, cache_seqlens=np.zeros(0, np.int32))
    assert out.shape == (0, 2, 1, 4) and lse.shape == (0, 2, 1)


@on("cpu", "cuda")
def test_only_the_places_of_new_keys_are_written(place: Place) -> None:
    cache, ones = np.zeros((3, 2, 16, 4), np.float32), np.ones((1, 2, 3, 4), np.float32)
    *_, k_cache, v_cache = place.attend(
        ones, cache.copy(), cache.copy(), ones, 2 * ones,
        cache_seqlens=np.array([15], np.int32), block_table=np.array([[2, 0]], np.int32),
    )  # fmt: skip
    wanted = cache.copy()
    wanted[2, :, 15], wanted[0, :, :2] = 1, 1
    assert np.array_equal(k_cache, wanted) and np.array_equal(v_cache, 2 * wanted)


def test_a_cache_that_new_rows_would_not_reach_is_refused() -> None:
    cache, new = np.zeros((1, 1, 16, 4), np.float32), np.ones((1, 1, 1, 4), np.float32)
    swapped = cache.astype(cache.dtype.newbyteorder())
    options: Any = {"cache_seqlens": 3}
    kernels.flash_attention_with_cache(new, swapped, cache, **options)
    for caches in ((swapped, cache), (cache, swapped)):
        with pytest.raises(ValueError, match=r"are written to ._cache in place.*native byte order"):
            kernels.flash_attention_with_cache(new, *caches, new, new, **options)
