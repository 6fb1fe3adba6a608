"""Wrong calls of attention on arrays: ``kernels.flash_attention_*``, packed sequences too."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import kernels
from kernels import BlockMask

# Wrong types are what is tested.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportReturnType=false

forward, backward = kernels.flash_attention_forward, kernels.flash_attention_backward
packed = kernels.flash_attention_varlen_forward


def attend(**options: Any) -> Any:
    return lambda o: forward(o.x, o.x, o.x, **options)


def back(**options: Any) -> Any:
    return lambda o: backward(o.out, o.x, o.x, o.x, o.out, o.lse, **options)


def pack(cu_q: Any, cu_k: Any = (0, 5), **options: Any) -> Any:
    return lambda o: packed(o.rows, o.rows, o.rows, cu_q, cu_k, **options)


def cached(pages: Any = ((0, 1),), lengths: Any = (20,), page_size: int = 16, **more: Any) -> Any:
    """Call attention on a cache of 3 pages, one sequence of which has up to two."""
    cache = np.ones((3, 1, page_size, 4), np.float32)
    call: dict[str, Any] = {"cache_seqlens": lengths, "block_table": pages, "v_cache": cache}
    call |= {"q": np.ones((1, 2, 1, 4), np.float32), "k_cache": cache, **more}
    return lambda o: kernels.flash_attention_with_cache(**call)


NEW = np.ones((1, 1, 2, 4), np.float32)


def raises_late(batch: int, head: int, row: int, col: int) -> bool:
    if row > 2:
        raise ValueError("no such row")
    return True


def unknown(s: Any, batch: int, head: int, row: int, col: int) -> Any:
    return math.gamma(1 + s)


def from_table(s: Any, batch: int, head: int, row: int, col: int, table: Any) -> Any:
    return s + table[0]


TABLE = np.ones(3)


def reads_beyond(score: float, batch: int, head: int, row: int, col: int) -> float:
    return score * TABLE[col]


def in_float8(dtype: str, dim: int, **options: Any) -> Any:
    return lambda o: forward(
        *[np.zeros((2, 4, dim), dtype)] * 3, precision="float8_e4m3", **options
    )


OPERANDS = [
    (lambda o: forward([[1.0]], o.x, o.x), TypeError, "q must be", "got list", "convert"),
    (lambda o: forward(*[o.x.astype(int)] * 3), TypeError, "float32", "q of int64", "astype"),
    (lambda o: forward(o.x, o.wide, o.x), TypeError, "the same dtype", "float32, float64"),
    (lambda o: forward(o.x, np.ma.MaskedArray(o.x), o.x), TypeError, "masked array", "filled"),
    (lambda o: forward(*[np.array(1.0)] * 3), ValueError, "two dimensions or more", "q ()"),
    (lambda o: forward(o.x, o.x[..., :3], o.x), ValueError, "same head_dim", "4 and 3"),
    (lambda o: forward(o.x, o.x, o.x[:, :4]), ValueError, "same length", "5 and 4", "v (2, 4, 4)"),
    (lambda o: forward(o.x[:, :0], o.x, o.x), ValueError, "at least one row", "leave the call out"),
    (lambda o: forward(*[o.x[:0]] * 3), ValueError, "must not be empty", "(0, 5, 4)"),
    (lambda o: forward(*[o.x[..., :0]] * 3), ValueError, "from 1 to 512", "got 0"),
    (lambda o: forward(*[np.ones((3, 576))] * 3), ValueError, "to 512, got 576", "attn_implementation"),
    (lambda o: forward(o.x, np.ones((3, 5, 4), np.float32), o.x), ValueError, "broadcast"),
    (lambda o: forward(o.x[:1], o.x, o.x, enable_gqa=True), ValueError, "multiple"),
    (lambda o: forward(*[o.x[0]] * 3, enable_gqa=True), ValueError, "enable_gqa needs heads"),
    (lambda o: forward(o.x, o.x), TypeError, "missing", "'v'"),
    (attend(causal=True), TypeError, "no option 'causal'", "mean is_causal"),
    (lambda o: forward(o.x, o.x, o.x, None, attn_mask=None), TypeError, "attn_mask twice"),
    (lambda o: forward(*[o.x] * 3, None, 0.0, False, None, False, 0), TypeError, "at most"),
]  # fmt: skip

OPTIONS = [
    (attend(attn_mask=[[True]]), TypeError, "attn_mask must be an array", "got list"),
    (attend(is_causal=np.array([True])), TypeError, "is_causal must be True", "shape (1,)"),
    (attend(attn_mask=np.ones((5, 5), int)), TypeError, "boolean", "int64", "write mask != 0"),
    (attend(attn_mask=np.zeros((5, 5))), TypeError, "float32", "got float64", "convert"),
    (attend(attn_mask=np.ones((4, 5), bool)), ValueError, "(4, 5)", "(2, 5, 5)"),
    (attend(dropout_p=1.0), ValueError, "[0, 1)", "1.0", "0 turns dropout off"),
    (attend(dropout_p=np.nan, seed=1), ValueError, "[0, 1)", "nan"),
    (attend(dropout_p=True), TypeError, "dropout_p must be a number", "True (bool)"),
    (attend(dropout_p=0.1), ValueError, "needs a seed", "pass seed="),
    (attend(seed=-1), ValueError, "from 0 to 2**64 - 1", "-1", "seed % 2**64"),
    (attend(dropout_p=0.1, seed=2**64), ValueError, "2**64 - 1", "18446744073709551616"),
    (attend(seed=1.0), TypeError, "seed must be a whole number or None", "1.0 (float)"),
    (attend(enable_gqa="yes"), TypeError, "enable_gqa must be True or False", "'yes'"),
    (attend(deterministic=0), TypeError, "deterministic must be True", "0 (int)"),
    (attend(return_lse=1), TypeError, "return_lse must be True or False", "1 (int)"),
    (attend(scale=0.0), ValueError, "finite and not zero", "0.0", "None gives"),
    (attend(scale=float("nan")), ValueError, "finite and not zero", "nan"),
    (attend(scale="1"), TypeError, "scale must be a number or None", "'1' (str)"),
    (attend(causal_offset=1), ValueError, "is_causal", "without any", "set one"),
    (attend(is_causal=True, causal_offset=1.0), TypeError, "causal_offset must be a whole"),
    (attend(window_size=3), TypeError, "(left, right)", "3 (int)"),
    (attend(window_size=(True, 1)), TypeError, "two whole numbers", "(True, 1)"),
    (attend(window_size=(-2, 0)), ValueError, "-1 for no bound", "(-2, 0)"),
    (attend(chunk_size=0), ValueError, "chunk_size must be 1 or more", "got 0"),
    (pack((0, 2, 5), (0, 2, 5), chunk_size=2, mask_mod=raises_late), ValueError, "chunk_size=2"),
    (attend(softcap=-1.0), ValueError, "must be positive", "0 to turn it off", "-1.0"),
    (attend(softcap=np.nan), ValueError, "must be positive", "nan"),
    (attend(softcap=np.inf), ValueError, "1e+30", "inf"),
    (attend(softcap=1e-300), ValueError, "from 1e-30 to 1e+30", "1e-300"),
    (attend(alibi_slopes=0.5), TypeError, "alibi_slopes must be an array", "float"),
    (attend(alibi_slopes=["a", "b"]), TypeError, "floating", "<U1", "convert"),
    (attend(alibi_slopes=[[1.0], [1.0, 2.0]]), ValueError, "equal lengths", "pad the shorter"),
    (attend(alibi_slopes=[1.0]), ValueError, "shape (2,)", "got (1,)"),
    (attend(alibi_slopes=[np.nan, 1.0]), ValueError, "alibi_slopes", "nan", "usually"),
    (attend(alibi_slopes=[1e300, 1.0]), ValueError, "1e+28", "1.e+300"),
    (attend(alibi_slopes=[1.0, 1.0], causal_offset=2**31), ValueError, "2147483648", "-2**31"),
    (attend(sink=[1, 2]), TypeError, "must be floating", "int64", "convert"),
    (attend(sink=[1.0]), ValueError, "shape (2,)", "query head", "got (1,)"),
    (back(sink_gradient=True), ValueError, "with sink", "leave it"),
    (attend(block_mask=np.ones((1, 1))), TypeError, "kernels.BlockMask", "shape (1, 1)"),
    (attend(block_mask=BlockMask.causal(6, 5)), ValueError, "6 rows and 5 columns", "5 and 5"),
    (attend(block_mask=BlockMask.stack([BlockMask.causal(5, 5)] * 3)), ValueError, "3 heads", "2"),
    (lambda o: kernels.score_derivative(None), TypeError, "must be a function", "got None"),
    (lambda o: kernels.score_derivative(unknown), ValueError, "`math.gamma(1 + s)`"),
    (attend(score_table="x"), TypeError, "score_table"),
    (attend(score_table=TABLE), ValueError, "read by a score_mod", "got none"),
    (attend(score_mod=from_table, score_table=TABLE.astype(int)), ValueError, "floating", "int64"),
    (attend(score_mod=unknown, score_table=TABLE), TypeError, "(score, batch, head, row, col, table)"),
    (attend(score_mod=from_table), TypeError, "(score, batch, head, row, col)"),
    (lambda o: kernels.varying(None), TypeError, "varying marks a function", "got NoneType"),
    (attend(mask_mod="causal"), TypeError, "mask_mod must be a function", "'causal'"),
    (attend(mask_mod=lambda row, col: True), TypeError, "(batch, head, row, col)", "(row, col)"),
    (attend(mask_mod=lambda b, h, r, c: 1 // r), ValueError, "never raise", "ZeroDivisionError"),
    (attend(mask_mod=raises_late), ValueError, "never raise", "naive"),
    (attend(score_mod=reads_beyond), ValueError, "never raise", "naive"),
    (attend(score_mod=lambda s, b, h, r, c: "a"), TypeError, "must return a number", "'a' (str)"),
    (attend(score_mod=(abs,) * 4), TypeError, "a pair", "tuple"),
    (attend(precision="fp8"), ValueError, "'tf32'", "'fp8'"),
    (attend(precision=np.float16), TypeError, "precision must be a name", "float16"),
    (lambda o: forward(*[o.wide] * 3, precision="tf32"), ValueError, "float32 operands", "float64"),
    (in_float8("float32", 64), ValueError, "operands of 16 bits", "float32", "convert"),
    (in_float8("float16", 256), ValueError, "up to 128", "(256, 256)"),
    (in_float8("float16", 20), ValueError, "multiples of 8", "(20, 20)"),
    (in_float8("float16", 64, softcap=3.0), ValueError, "support the options scale, is_causal"),
    (in_float8("float16", 64, scale=-1.0), ValueError, "positive scale", "-1.0"),
    (attend(rung="warp9"), ValueError, "'warp9'", "'flash2'", "'auto'"),
    (attend(rung="flash1"), ValueError, "cannot run", "cpu target", "use 'auto'"),
    (attend(rung=None), TypeError, "rung must be the name", "None"),
    (attend(tile=(0, 4)), ValueError, "each from 1 to 4096", "(0, 4)", "None uses"),
    (attend(tile=(5000, 4)), ValueError, "each from 1 to 4096", "(5000, 4)"),
    (attend(tile=8), TypeError, "(block_q, block_k)", "8 (int)", "None for"),
]  # fmt: skip

GRADIENTS = [
    (lambda o: backward(o.out[:1], o.x, o.x, o.x, o.out, o.lse), ValueError, "dout", "(2, 5, 4)"),
    (lambda o: backward(o.wide, o.x, o.x, o.x, o.out, o.lse), TypeError, "dout must be float32"),
    (lambda o: backward(o.out, o.x, o.x, o.x, o.out, o.lse[..., None]), ValueError, "lse"),
    (lambda o: backward(o.out, o.x, o.x, o.x, o.out, o.lse.astype(float)), TypeError,
     "lse must be float32"),
    (back(mask_gradient=True), ValueError, "floating attn_mask", "leave it"),
    (back(mask_gradient="yes"), TypeError, "mask_gradient must be True", "'yes'"),
    (back(score_mod=unknown), ValueError, "`math.gamma(1 + s)`", "(function, derivative)"),
    (lambda o: backward(o.x, o.x), TypeError, "missing", "'lse'"),
]  # fmt: skip

PACKED = [
    (pack([[0], [1, 5]]), ValueError, "cu_seqlens_q", "equal lengths"),
    (pack([0, 4]), ValueError, "end with the 5 query rows", "[0 4]"),
    (pack([1, 5]), ValueError, "begin with 0", "[1 5]"),
    (pack([0, 4, 3, 5], [0, 1, 2, 5]), ValueError, "never decrease", "[0 4 3 5]"),
    (pack(np.array([0, 2**63 + 5, 5], np.uint64), [0, 2, 5]), ValueError, "never decrease"),
    (pack([0, 2, 5]), ValueError, "the same number of sequences", "2 and 1", "the same length"),
    (pack([0, 5], attn_mask=np.ones((5, 5), bool)), ValueError, "not support attn_mask"),
    (pack([0, 5], block_mask=BlockMask.causal(5, 5)), ValueError, "not support block_mask"),
    (lambda o: packed(o.rows[None], o.rows, o.rows, [0, 5], [0, 5]), ValueError, "(total, heads, dim)"),
    (lambda o: packed(o.rows.tolist(), o.rows, o.rows, [0, 5], [0, 5]), TypeError, "q must be"),
    (cached(page_size=24), ValueError, "a multiple of 16 keys, up to 256", "got 24"),
    (cached(pages=[[0, 3]]), ValueError, "block_table[0, 1] is 3", "pages 0 to 2"),
    (cached(pages=[[0, -1]]), ValueError, "block_table[0, 1] is -1"),
    (cached(pages=[0, 1]), ValueError, "one row for each of 1 sequences"),
    (cached(pages=[[0.0, 1.0]]), TypeError, "block_table must be whole numbers"),
    (cached(lengths=[33]), ValueError, "cache_seqlens[0] is 33", "from 0 to 32"),
    (cached(lengths=[-1]), ValueError, "cache_seqlens[0] is -1"),
    (cached(lengths=[31], k=NEW, v=NEW), ValueError, "is 31", "appends 2 keys"),
    (cached(lengths=[1, 2]), ValueError, "a length for each of 1 sequences"),
    (cached(lengths=None, k=NEW, v=NEW), ValueError, "needs cache_seqlens"),
    (cached(k=NEW), ValueError, "pass both, or neither"),
    (cached(k=NEW[:, :, :, :3], v=NEW), ValueError, "with the heads and sizes of the cache"),
    (cached(q=np.ones((1, 2, 4), np.float32)), ValueError, "needs q (batch, heads, seq_q, head_dim)"),
    (cached(q=np.ones((1, 2, 1, 4))), TypeError, "the same dtype", "float64"),
    (cached(v_cache=np.ones((3, 2, 16, 4), np.float32)), ValueError, "agree in all sizes but the last"),
    (cached(dropout_p=0.5), ValueError, "does not support dropout_p"),
    (cached(causl=True), TypeError, "no option 'causl'"),
    (cached(attn_mask=np.ones((1, 32), bool)), ValueError, "boolean (…, 1, 1)", "floating (…, 1, 32)"),
    (cached(rotary_cos=np.ones((32, 2), np.float32)), ValueError, "rotary_cos and rotary_sin"),
    (cached(rotary_cos=np.ones((9, 2)), rotary_sin=np.ones((9, 2))), ValueError, "has 9 positions"),
    (cached(batch_invariant=1), TypeError, "batch_invariant must be True or False"),
]  # fmt: skip
