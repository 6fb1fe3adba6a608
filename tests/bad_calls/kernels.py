"""Wrong calls of attention on arrays: ``kernels.flash_attention_*``, packed sequences too."""

from __future__ import annotations

from typing import Any

import numpy as np

import kernels
from kernels import BlockMask

from .cases import wrong

# Wrong types are what is tested.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportReturnType=false

forward, backward = kernels.flash_attention_forward, kernels.flash_attention_backward
packed = kernels.flash_attention_varlen_forward
packed_backward = kernels.flash_attention_varlen_backward
HUGE = 10**400


def attend(**options: Any) -> Any:
    return lambda o: forward(o.x, o.x, o.x, **options)


def back(**options: Any) -> Any:
    return lambda o: backward(o.out, o.x, o.x, o.x, o.out, o.lse, **options)


def pack(cu_q: Any, cu_k: Any = (0, 5), **options: Any) -> Any:
    return lambda o: packed(o.rows, o.rows, o.rows, cu_q, cu_k, **options)


def raises_late(batch: int, head: int, row: int, col: int) -> bool:
    if row > 2:
        raise ValueError("no such row")
    return True


TABLE = np.ones(3)


def reads_beyond(score: float, batch: int, head: int, row: int, col: int) -> float:
    return score * TABLE[col]


def no_result(*place: int) -> None:
    pass


OPERANDS = {
    "q a list": wrong(
        lambda o: forward([[1.0]], o.x, o.x), TypeError, "q must be", "got list", "convert"
    ),
    "k nothing": wrong(lambda o: forward(o.x, None, o.x), TypeError, "k must be", "got NoneType"),
    "q a number of NumPy": wrong(
        lambda o: forward(np.float32(1), o.x, o.x), TypeError, "q must be an array", "got float32"
    ),
    "v text": wrong(lambda o: forward(o.x, o.x, "v"), TypeError, "v must be", "got str"),
    "whole numbers": wrong(
        lambda o: forward(*[o.x.astype(int)] * 3), TypeError, "float32", "q of int64", "astype"
    ),
    "booleans": wrong(lambda o: forward(*[o.mask] * 3), TypeError, "q of bool", "astype"),
    "complex numbers": wrong(
        lambda o: forward(*[o.x.astype(complex)] * 3), TypeError, "q of complex128", "astype"
    ),
    "objects": wrong(lambda o: forward(*[o.x.astype(object)] * 3), TypeError, "q of object"),
    "long doubles": wrong(
        lambda o: forward(*[o.x.astype(np.longdouble)] * 3), TypeError, "q of float128", "astype"
    ),
    "records": wrong(
        lambda o: forward(*[np.zeros((2, 3), [("a", "f4")])] * 3), TypeError, "attention needs",
        "'a'"
    ),
    "texts": wrong(lambda o: forward(*[np.array([["a"]])] * 3), TypeError, "q of <U1"),
    "two dtypes": wrong(
        lambda o: forward(o.x, o.wide, o.x), TypeError, "the same dtype", "float32, float64", "convert"
    ),
    "masked arrays": wrong(
        lambda o: forward(o.x, np.ma.MaskedArray(o.x), o.x), TypeError, "masked array", "filled"
    ),
    "no dimensions": wrong(
        lambda o: forward(*[np.array(1.0)] * 3), ValueError, "two dimensions or more", "q ()"
    ),
    "a vector": wrong(
        lambda o: forward(o.x[0, 0], o.x, o.x), ValueError, "(seq, head_dim)", "q (4,)"
    ),
    "head dims": wrong(
        lambda o: forward(o.x, o.x[..., :3], o.x), ValueError, "same head_dim", "4 and 3",
        "(2, 5, 3)"
    ),
    "lengths": wrong(
        lambda o: forward(o.x, o.x, o.x[:, :4]), ValueError, "same length", "5 and 4", "v (2, 4, 4)"
    ),
    "no rows": wrong(
        lambda o: forward(o.x[:, :0], o.x, o.x), ValueError, "at least one row",
        "leave the call out"
    ),
    "no heads": wrong(
        lambda o: forward(*[o.x[:0]] * 3), ValueError, "must not be empty", "(0, 5, 4)"
    ),
    "no head dim": wrong(
        lambda o: forward(*[o.x[..., :0]] * 3), ValueError, "from 1 to 256", "got 0"
    ),
    "wide heads": wrong(
        lambda o: forward(*[np.ones((1, 2, 257))] * 3), ValueError, "from 1 to 256", "got 257",
        "more heads"
    ),
    "batches": wrong(
        lambda o: forward(o.x, np.ones((3, 5, 4), np.float32), o.x), ValueError, "broadcast",
        "repeat"
    ),
    "groups": wrong(
        lambda o: forward(o.x[:1], o.x, o.x, enable_gqa=True), ValueError, "multiple",
        "1, 2 and 2 heads"
    ),
    "groups without heads": wrong(
        lambda o: forward(*[o.x[0]] * 3, enable_gqa=True), ValueError, "enable_gqa needs heads",
        "(5, 4)"
    ),
    "too few operands": wrong(lambda o: forward(o.x, o.x), TypeError, "missing", "'v'"),
    "an unknown option": wrong(
        attend(causal=True), TypeError, "no option 'causal'", "mean is_causal"
    ),
    "an option twice": wrong(
        lambda o: forward(o.x, o.x, o.x, None, attn_mask=None), TypeError, "attn_mask twice",
        "give it once"
    ),
    "too many by position": wrong(
        lambda o: forward(*[o.x] * 3, None, 0.0, False, None, False, 0), TypeError, "at most",
        "by name"
    ),
}  # fmt: skip

OPTIONS = {
    "mask a list": wrong(
        attend(attn_mask=[[True]]), TypeError, "attn_mask must be an array", "got list"
    ),
    "mask a flag": wrong(
        attend(attn_mask=True), TypeError, "attn_mask must be an array", "got bool"
    ),
    "mask a number of NumPy": wrong(
        attend(attn_mask=np.float32(2)), TypeError, "attn_mask must be an array", "got float32"
    ),
    "causal an array": wrong(
        attend(is_causal=np.array([True])), TypeError, "is_causal must be True", "shape (1,)"
    ),
    "mask a BlockMask": wrong(
        attend(attn_mask=BlockMask.causal(5, 5)), TypeError, "attn_mask", "got BlockMask"
    ),
    "mask of whole numbers": wrong(
        attend(attn_mask=np.ones((5, 5), int)), TypeError, "boolean", "int64", "write mask != 0"
    ),
    "mask of complex numbers": wrong(
        attend(attn_mask=np.ones((5, 5), complex)), TypeError, "boolean", "complex128"
    ),
    "mask of another dtype": wrong(
        attend(attn_mask=np.zeros((5, 5))), TypeError, "float32", "got float64", "convert"
    ),
    "mask of another shape": wrong(
        attend(attn_mask=np.ones((4, 5), bool)), ValueError, "(4, 5)", "(2, 5, 5)",
        "mask[:, None, None, :]"
    ),
    "mask with a batch": wrong(
        attend(attn_mask=np.ones((3, 2, 5, 5), bool)), ValueError, "(3, 2, 5, 5)",
        "does not broadcast"
    ),
    "mask masked": wrong(
        attend(attn_mask=np.ma.MaskedArray(np.ones((5, 5), bool))), TypeError, "masked array",
        "filled"
    ),
    "dropout 1": wrong(attend(dropout_p=1.0), ValueError, "[0, 1)", "1.0", "0 turns dropout off"),
    "dropout below 0": wrong(attend(dropout_p=-0.1), ValueError, "[0, 1)", "-0.1"),
    "dropout NaN": wrong(attend(dropout_p=np.nan, seed=1), ValueError, "[0, 1)", "nan"),
    "dropout huge": wrong(attend(dropout_p=HUGE, seed=1), ValueError, "[0, 1)", "401 digits"),
    "dropout a flag": wrong(
        attend(dropout_p=True), TypeError, "dropout_p must be a number", "True (bool)"
    ),
    "dropout text": wrong(
        attend(dropout_p="0.1"), TypeError, "dropout_p must be a number", "'0.1' (str)"
    ),
    "dropout complex": wrong(attend(dropout_p=1j), TypeError, "dropout_p must be a number", "1j"),
    "dropout an array": wrong(
        attend(dropout_p=np.array(0.1)), TypeError, "dropout_p", "an array of shape ()"
    ),
    "dropout unseeded": wrong(attend(dropout_p=0.1), ValueError, "needs a seed", "pass seed="),
    "seed below 0": wrong(attend(seed=-1), ValueError, "from 0 to 2**64 - 1", "-1", "seed % 2**64"),
    "seed beyond": wrong(
        attend(dropout_p=0.1, seed=2**64), ValueError, "2**64 - 1", "18446744073709551616"
    ),
    "seed a float": wrong(
        attend(seed=1.0), TypeError, "seed must be a whole number or None", "1.0 (float)"
    ),
    "seed a flag": wrong(
        attend(seed=True), TypeError, "seed must be a whole number", "True (bool)"
    ),
    "causal a number": wrong(
        attend(is_causal=1), TypeError, "is_causal must be True or False", "1 (int)"
    ),
    "causal nothing": wrong(attend(is_causal=None), TypeError, "True or False", "None (NoneType)"),
    "gqa text": wrong(
        attend(enable_gqa="yes"), TypeError, "enable_gqa must be True or False", "'yes'"
    ),
    "deterministic": wrong(
        attend(deterministic=0), TypeError, "deterministic must be True", "0 (int)"
    ),
    "return_lse": wrong(
        attend(return_lse=1), TypeError, "return_lse must be True or False", "1 (int)"
    ),
    "scale zero": wrong(attend(scale=0.0), ValueError, "finite and not zero", "0.0", "None gives"),
    "scale infinite": wrong(attend(scale=np.inf), ValueError, "finite and not zero", "inf"),
    "scale NaN": wrong(attend(scale=float("nan")), ValueError, "finite and not zero", "nan"),
    "scale huge": wrong(attend(scale=HUGE), ValueError, "finite and not zero", "401 digits"),
    "scale text": wrong(
        attend(scale="1"), TypeError, "scale must be a number or None", "'1' (str)"
    ),
    "scale an array": wrong(
        attend(scale=np.ones(1)), TypeError, "scale must be a number", "shape (1,)"
    ),
    "offset alone": wrong(
        attend(causal_offset=1), ValueError, "is_causal", "without any", "set one"
    ),
    "offset a float": wrong(
        attend(is_causal=True, causal_offset=1.0), TypeError, "causal_offset must be a whole",
        "1.0 (float)"
    ),
    "offset NaN": wrong(
        attend(is_causal=True, causal_offset=np.nan), TypeError, "whole number", "nan"
    ),
    "window a number": wrong(attend(window_size=3), TypeError, "(left, right)", "3 (int)"),
    "window an array": wrong(
        attend(window_size=np.ones(2, int)), TypeError, "(left, right)", "shape (2,)"
    ),
    "window of three": wrong(
        attend(window_size=(1, 1, 1)), TypeError, "two whole numbers", "(1, 1, 1)"
    ),
    "window of floats": wrong(
        attend(window_size=(1.0, 1)), TypeError, "two whole numbers", "(1.0, 1)"
    ),
    "window of flags": wrong(
        attend(window_size=(True, 1)), TypeError, "two whole numbers", "(True, 1)"
    ),
    "window below -1": wrong(attend(window_size=(-2, 0)), ValueError, "-1 for no bound", "(-2, 0)"),
    "chunk of nothing": wrong(attend(chunk_size=0), ValueError, "chunk_size must be 1 or more", "got 0"),
    "chunk text": wrong(attend(chunk_size="4"), TypeError, "chunk_size must be a whole number", "'4'"),
    "chunks and mask_mod of packed sequences": wrong(
        pack((0, 2, 5), (0, 2, 5), chunk_size=2, mask_mod=raises_late), ValueError, "chunk_size=2",
        "not both", "(row + 0) // 2"
    ),
    "softcap below 0": wrong(
        attend(softcap=-1.0), ValueError, "must be positive", "0 to turn it off", "-1.0"
    ),
    "softcap NaN": wrong(attend(softcap=np.nan), ValueError, "must be positive", "nan"),
    "softcap infinite": wrong(attend(softcap=np.inf), ValueError, "1e+30", "inf"),
    "softcap beyond float32": wrong(
        attend(softcap=1e300), ValueError, "from 1e-30 to 1e+30", "1e+300"
    ),
    "softcap nearly 0": wrong(attend(softcap=1e-300), ValueError, "from 1e-30 to 1e+30", "1e-300"),
    "softcap huge": wrong(attend(softcap=HUGE), ValueError, "from 1e-30", "401 digits"),
    "softcap nothing": wrong(attend(softcap=None), TypeError, "softcap must be a number", "None"),
    "slopes a number": wrong(
        attend(alibi_slopes=0.5), TypeError, "alibi_slopes must be an array", "float"
    ),
    "slopes texts": wrong(attend(alibi_slopes=["a", "b"]), TypeError, "floating", "<U1", "convert"),
    "slopes whole": wrong(
        attend(alibi_slopes=[1, 2]), TypeError, "must be floating", "int64", "convert"
    ),
    "slopes ragged": wrong(
        attend(alibi_slopes=[[1.0], [1.0, 2.0]]), ValueError, "equal lengths", "pad the shorter"
    ),
    "slopes too few": wrong(attend(alibi_slopes=[1.0]), ValueError, "shape (2,)", "got (1,)"),
    "slopes NaN": wrong(
        attend(alibi_slopes=[np.nan, 1.0]), ValueError, "alibi_slopes", "nan", "usually"
    ),
    "slopes beyond float32": wrong(
        attend(alibi_slopes=[1e300, 1.0]), ValueError, "1e+28", "1.e+300"
    ),
    "slopes far away": wrong(
        attend(alibi_slopes=[1.0, 1.0], causal_offset=2**31), ValueError, "2147483648", "-2**31"
    ),
    "sink a number": wrong(attend(sink=0.5), TypeError, "sink must be an array", "float"),
    "sink whole": wrong(attend(sink=[1, 2]), TypeError, "must be floating", "int64", "convert"),
    "sink too few": wrong(attend(sink=[1.0]), ValueError, "shape (2,)", "query head", "got (1,)"),
    "sink for each row": wrong(attend(sink=np.ones((2, 5))), ValueError, "shape (2,)", "(2, 5)"),
    "gradient of no sink": wrong(back(sink_gradient=True), ValueError, "with sink", "leave it"),
    "block mask an array": wrong(
        attend(block_mask=np.ones((1, 1))), TypeError, "kernels.BlockMask", "shape (1, 1)",
        "from_dense"
    ),
    "block mask of other lengths": wrong(
        attend(block_mask=BlockMask.causal(6, 5)), ValueError, "6 rows and 5 columns", "5 and 5",
        "build it"
    ),
    "block mask of other heads": wrong(
        attend(block_mask=BlockMask.stack([BlockMask.causal(5, 5)] * 3)), ValueError, "3 heads",
        "2", "or one"
    ),
    "varying nothing": wrong(
        lambda o: kernels.varying(None), TypeError, "varying marks a function", "got NoneType"
    ),
    "mask_mod text": wrong(
        attend(mask_mod="causal"), TypeError, "mask_mod must be a function", "'causal'"
    ),
    "mask_mod of two": wrong(
        attend(mask_mod=lambda row, col: True), TypeError, "(batch, head, row, col)", "(row, col)"
    ),
    "mask_mod without a result": wrong(
        attend(mask_mod=no_result), TypeError, "True or False", "None", "is a return missing?"
    ),
    "mask_mod with a number": wrong(
        attend(mask_mod=lambda b, h, r, c: 1), TypeError, "must return True or False", "got 1 (int)"
    ),
    "mask_mod that raises": wrong(
        attend(mask_mod=lambda b, h, r, c: 1 // r), ValueError, "never raise", "ZeroDivisionError"
    ),
    "mask_mod that raises later": wrong(
        attend(mask_mod=raises_late), ValueError, "never raise", "naive"
    ),
    "score_mod beyond its table": wrong(
        attend(score_mod=reads_beyond), ValueError, "never raise", "naive"
    ),
    "score_mod with text": wrong(
        attend(score_mod=lambda s, b, h, r, c: "a"), TypeError, "must return a number", "'a' (str)"
    ),
    "score_mods of three": wrong(attend(score_mod=(abs, abs, abs)), TypeError, "a pair", "tuple"),
    "precision unknown": wrong(attend(precision="fp8"), ValueError, "'tf32'", "'fp8'"),
    "precision a dtype": wrong(
        attend(precision=np.float16), TypeError, "precision must be a name", "float16"
    ),
    "precision of float64": wrong(
        lambda o: forward(*[o.wide] * 3, precision="tf32"), ValueError, "float32 operands",
        "float64", "None"
    ),
    "rung unknown": wrong(attend(rung="warp9"), ValueError, "'warp9'", "'flash2'", "'auto'"),
    "rung of another target": wrong(
        attend(rung="flash1"), ValueError, "cannot run", "cpu target", "use 'auto'"
    ),
    "rung nothing": wrong(attend(rung=None), TypeError, "rung must be the name", "None"),
    "tile of 0": wrong(
        attend(tile=(0, 4)), ValueError, "each from 1 to 4096", "(0, 4)", "None uses"
    ),
    "tile too large": wrong(attend(tile=(5000, 4)), ValueError, "each from 1 to 4096", "(5000, 4)"),
    "tile a number": wrong(attend(tile=8), TypeError, "(block_q, block_k)", "8 (int)", "None for"),
    "tile of floats": wrong(attend(tile=(4.0, 4)), TypeError, "two whole numbers", "(4.0, 4)"),
}  # fmt: skip

GRADIENTS = {
    "dout nothing": wrong(
        lambda o: backward(None, o.x, o.x, o.x, o.out, o.lse), TypeError, "dout must be an array",
        "NoneType"
    ),
    "dout of another shape": wrong(
        lambda o: backward(o.out[:1], o.x, o.x, o.x, o.out, o.lse), ValueError, "dout", "(2, 5, 4)",
        "(1, 5, 4)"
    ),
    "dout of another dtype": wrong(
        lambda o: backward(o.wide, o.x, o.x, o.x, o.out, o.lse), TypeError, "dout must be float32",
        "float64"
    ),
    "out a list": wrong(
        lambda o: backward(o.out, o.x, o.x, o.x, o.out.tolist(), o.lse), TypeError, "out must be",
        "got list"
    ),
    "lse of another shape": wrong(
        lambda o: backward(o.out, o.x, o.x, o.x, o.out, o.lse[..., None]), ValueError, "lse",
        "(2, 5, 1)"
    ),
    "lse of another dtype": wrong(
        lambda o: backward(o.out, o.x, o.x, o.x, o.out, o.lse.astype(float)), TypeError,
        "lse must be float32"
    ),
    "dlse a number": wrong(
        back(dlse=1.0), TypeError, "dlse must be an array", "got float", "convert"
    ),
    "dlse of another shape": wrong(
        lambda o: backward(o.out, o.x, o.x, o.x, o.out, o.lse, dlse=o.out), ValueError, "dlse",
        "(2, 5)"
    ),
    "no mask to learn": wrong(
        back(mask_gradient=True), ValueError, "floating attn_mask", "leave it"
    ),
    "a boolean mask to learn": wrong(
        lambda o: backward(o.out, o.x, o.x, o.x, o.out, o.lse, o.mask, mask_gradient=True),
        ValueError, "floating attn_mask"
    ),
    "mask_gradient text": wrong(
        back(mask_gradient="yes"), TypeError, "mask_gradient must be True", "'yes'"
    ),
    "no derivative": wrong(
        back(score_mod=lambda s, b, h, r, c: s), ValueError, "derivative", "(function, derivative)"
    ),
    "too few arguments": wrong(lambda o: backward(o.x, o.x), TypeError, "missing", "'lse'"),
}  # fmt: skip

PACKED = {
    "sums of floats": wrong(
        pack([0.0, 5.0]), TypeError, "whole numbers", "float64", "numpy.array([0, 2, 5])"
    ),
    "sums nothing": wrong(pack(None), TypeError, "cu_seqlens_q must be a vector", "object"),
    "sums ragged": wrong(pack([[0], [1, 5]]), ValueError, "cu_seqlens_q", "equal lengths"),
    "sums a matrix": wrong(pack([[0, 5]]), TypeError, "a vector", "shape (1, 2)"),
    "sums empty": wrong(pack([]), TypeError, "a vector", "shape (0,)"),
    "sums that end early": wrong(pack([0, 4]), ValueError, "end with the 5 query rows", "[0 4]"),
    "sums that begin late": wrong(pack([1, 5]), ValueError, "begin with 0", "[1 5]"),
    "sums that decrease": wrong(
        pack([0, 4, 3, 5], [0, 1, 2, 5]), ValueError, "never decrease", "[0 4 3 5]"
    ),
    "sums that wrap": wrong(
        pack(np.array([0, 2**63 + 5, 5], np.uint64), [0, 2, 5]), ValueError, "never decrease",
        "9223372036854775813"
    ),
    "counts": wrong(
        pack([0, 2, 5]), ValueError, "the same number of sequences", "2 and 1", "the same length"
    ),
    "a mask": wrong(
        pack([0, 5], attn_mask=np.ones((5, 5), bool)), ValueError, "not support attn_mask", "mask_mod"
    ),
    "a block mask": wrong(
        pack([0, 5], block_mask=BlockMask.causal(5, 5)), ValueError, "not support block_mask",
        "window_size"
    ),
    "four dimensions": wrong(
        lambda o: packed(o.rows[None], o.rows, o.rows, [0, 5], [0, 5]), ValueError,
        "(total, heads, dim)", "(1, 5, 2, 4)"
    ),
    "a list": wrong(
        lambda o: packed(o.rows.tolist(), o.rows, o.rows, [0, 5], [0, 5]), TypeError, "q must be",
        "got list"
    ),
    "heads": wrong(
        lambda o: packed(o.rows[:, :1].repeat(3, 1), o.rows, o.rows, [0, 5], [0, 5]), ValueError,
        "broadcast"
    ),
    "a gradient of another shape": wrong(
        lambda o: packed_backward(o.rows[:4], o.rows, o.rows, o.rows, o.rows, o.lse, [0, 5], [0, 5]),
        ValueError, "dout", "(2, 5, 4)"
    ),
}  # fmt: skip
