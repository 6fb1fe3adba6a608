"""The kernels that a call of attention launches, compiled without a GPU: registers, spills, instructions.

A call on a fake device says which kernels a GPU would compile.  A spilled tile, a product that waits for
the last one, or a load of single elements costs a large part of the speed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

import kernels
from kernels.common.philox import MULTIPLIER_0, MULTIPLIER_1
from kernels.cuda.attention import flash1
from kernels.cuda.runtime.arrays import to_device
from kernels.cuda.runtime.kernel import Kernel
from kernels.cuda.runtime.sizes import GPU
from kernels.problem.shapes import MAX_HEAD_DIM
from kernels.runtime.dtypes import BFLOAT16, FLOAT16
from kernels.runtime.jit import fingerprint

from ...support.attention.strategies import MASK_MODS, SCORE_MODS
from ...support.device.compiling import (
    FLOAT32,
    FLOAT64,
    GENERATION,
    assert_in_registers,
    assert_is_kernel,
    assert_no_float64,
    needs_nvvm,
    needs_ptxas,
    ptx_of,
)
from ...support.device.fake_device import fake_device, shared_bytes

ROWS, COLS, HEADS = 300, 400, 2
#: Kernels of other packages, which have tests of their own.
OTHERS = ("product", "fill_flat", "sum_middle", "convert", "pack_mask")


class Call(NamedTuple):
    """A call: rung, dtype, head_dim and value_dim; options; rows; compute capability of the device.

    With ``tangents``, its derivatives along them take the place of its two passes.
    """

    rung: str
    dtype: Any
    dims: tuple[int, int] = (64, 64)
    options: Mapping[str, Any] = MappingProxyType({})
    rows: int = ROWS
    cc: tuple[int, int] = (9, 0)
    tangents: bool = False

    @property
    def name(self) -> str:
        """The rung, dtype, dims and options in words."""
        options = ",".join(f"{name} {_short(value)}" for name, value in self.options.items())
        return (
            f"{self.rung} {self.dtype} {self.dims} {options} {self.rows} {self.cc}"
            + " tangents" * self.tangents
        )

    def kernels(self) -> dict[str, Kernel]:
        """Return the kernels that the call launches, in both passes, by name."""
        rng, made = np.random.default_rng(0), {}
        with fake_device(self.cc) as device:
            for name, value in self.options.items():
                is_shape = name == "attn_mask"
                made[name] = to_device(rng.random(value[0]).astype(value[1])) if is_shape else value
            head, value = self.dims
            sizes = (self.rows, head), (COLS, head), (COLS, value), (self.rows, value)
            q, k, v, dout = (to_device(np.zeros((1, HEADS, *x), self.dtype)) for x in sizes)
            if self.tangents:
                made["rung"] = self.rung
                kernels.flash_attention_double_backward(q, k, v, dout, q, k, v, **made)
                return {one.name: one for one in device.kernels if one.name not in OTHERS}
            out, lse = kernels.flash_attention_forward(q, k, v, rung=self.rung, **made)
            if "precision" not in made or not made["precision"].startswith("float8"):
                is_bias = "attn_mask" in made and made["attn_mask"].dtype != bool
                kernels.flash_attention_backward(
                    dout, q, k, v, out, lse, rung=self.rung, mask_gradient=is_bias,
                    sink_gradient="sink" in made, **made,
                )  # fmt: skip
        return {
            f"{n} {one.name}": one for n, one in enumerate(device.kernels) if one.name not in OTHERS
        }


def _short(value: Any) -> str:
    if isinstance(value, kernels.BlockMask):
        return f"{value.block_q} x {value.block_k}"
    if isinstance(value, tuple) and callable(value[0]):
        value = value[0]
    return getattr(value, "__name__", str(value)[:24])


@lru_cache(8)
def launched(call_name: str) -> dict[str, Kernel]:
    """Return the kernels of a call of ``BY_NAME``."""
    return BY_NAME[call_name].kernels()


def _score(score: float, batch: int, head: int, row: int, col: int) -> float:
    return score * 1.5


def _slope(score: float, batch: int, head: int, row: int, col: int) -> float:
    return 1.5


def less_logarithm(score: float, batch: int, head: int, row: int, col: int) -> float:
    return score - 0.3 * math.log(1.0 + abs(row - col))


def one(score: float, batch: int, head: int, row: int, col: int) -> float:
    return 1.0


def _blocks(shape: tuple[int, int]) -> kernels.BlockMask:
    states = np.arange(9 * 9).reshape(1, 9, 9) % 3
    rows, cols = (-(-n // s) for n, s in zip((ROWS, COLS), shape, strict=True))
    partial = np.arange(shape[0] * shape[1]).reshape(1, *shape) % 3 > 0
    return kernels.BlockMask(states[:, :rows, :cols], ROWS, COLS, shape, partial)


SCORES = HEADS, ROWS, COLS
SLOPES = np.array([0.5, 0.25], np.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "boolean mask": {"attn_mask": (SCORES[1:], bool)},
    "floating mask": {"attn_mask": (SCORES, BFLOAT16)},
    "dropout": {"dropout_p": 0.1, "seed": 3},
    "softcap": {"softcap": 20.0},
    "alibi": {"alibi_slopes": SLOPES},
    "sink": {"sink": SLOPES},
    "block mask": {"block_mask": _blocks((48, 64))},
    "mask_mod": {"mask_mod": kernels.varying(MASK_MODS[0])},
    "score_mod": {"score_mod": SCORE_MODS[0]},
}
ATOMIC = {"deterministic": False}


def some(*names: str) -> dict[str, Any]:
    """Return several options at once, which take more registers than each of them."""
    return {key: value for name in names for key, value in OPTIONS[name].items()}


#: Every option at once.
EVERYTHING = {
    name: value for options in OPTIONS.values() for name, value in options.items()
    if name not in ("mask_mod", "score_mod", "block_mask")
} | {
    "attn_mask": (SCORES, FLOAT32), "mask_mod": kernels.varying(MASK_MODS[1]),
    "score_mod": (_score, _slope), "is_causal": True,
}  # fmt: skip

#: Calls of plain CUDA cores: every kernel, and every option.
EVERYWHERE = {
    call.name: call
    for dtype in (FLOAT32, FLOAT64)
    for call in (
        Call("naive", dtype), Call("flash1", dtype),
        Call("flash2", dtype, (80, 33), ATOMIC if dtype == FLOAT32 else {}),
        Call("flash2", dtype, options=EVERYTHING | {"attn_mask": (SCORES, dtype)}),
    )
} | {
    call.name: call for call in (
        Call("flash2", FLOAT32, (80, 33), EVERYTHING, tangents=True),
        Call("flash2", FLOAT64, tangents=True),
    )
}  # fmt: skip
#: Calls whose kernels keep their tiles in registers: an option at the width where the fewest are free, and
#: calls that share kernels next to each other, for one worker to compile.
IN_REGISTERS = {
    call.name: call for call in (
        *(Call("flash2", FLOAT32, (dim, dim)) for dim in (64, 128)),
        *(Call("flash2", FLOAT32, options=OPTIONS[x]) for x in ("boolean mask", "dropout", "block mask")),
        *(Call("flash2", FLOAT32, (dim, dim), tangents=True) for dim in (64, 128)),
        Call("flash2_mma", FLOAT16), Call("flash2_mma", FLOAT16, options=ATOMIC),
        Call("flash2_mma", FLOAT16, (128, 128), ATOMIC),
        *(Call("flash2_mma", FLOAT16, (256, 256), options) for options in ({}, ATOMIC)),
        Call("flash2_mma", FLOAT16, (512, 512)),
        *(Call("flash2_mma", BFLOAT16, options=OPTIONS[x]) for x in ("softcap", "boolean mask", "dropout")),
        Call("flash2_mma", BFLOAT16, (128, 128), cc=(8, 0)),
        *(Call("flash2_mma", FLOAT16, (dim, dim), tangents=True) for dim in (64, 128)),
        Call("flash2_mma", FLOAT32), Call("flash2_mma", FLOAT32, options=ATOMIC),
        Call("flash2_mma", FLOAT32, (128, 128), {"precision": "tf32"}),
        *(Call("flash3_wgmma", BFLOAT16, (dim, dim), options)
          for dim in (64, 128) for options in ({}, ATOMIC)),
        *(Call("flash3_wgmma", BFLOAT16, dims, ATOMIC) for dims in ((192, 128), (256, 256))),
        Call("flash3_wgmma", FLOAT16,
             options=some("mask_mod", "score_mod", "softcap", "alibi", "sink") | ATOMIC),
        Call("flash3_wgmma", BFLOAT16, (128, 128), some("floating mask", "block mask", "dropout") | ATOMIC),
        Call("flash3_wgmma", BFLOAT16, (128, 128),
             some("boolean mask") | {"score_mod": (less_logarithm, one)}),
        Call("flash3_wgmma", FLOAT16, options={"precision": "float8_e4m3"}),
        Call("flash3_wgmma", FLOAT16, (128, 128), {"precision": "float8_e4m3+blocks+hadamard"}),
    )
}  # fmt: skip
BY_NAME = EVERYWHERE | IN_REGISTERS

#: Kernel → bytes a thread that may be spilled: numbers of an item, addresses of copies, and those of
#: Hopper's scheduler thread, which has 24 registers; nothing is stored in a loop.
SPILLED = {
    "flash2_dq": 16, "flash2_dkdv": 16, "flash2_mma_forward": 96, "flash2_mma_dq": 64,
    "flash2_mma_dkdv": 64, "flash2_mma_roles": 64, "flash2_mma_jvp": 64, "flash3_forward": 96,
    "flash3_float8": 96, "flash3_dkdv": 96, "flash3_dq": 16,
}  # fmt: skip
#: Kernel → bytes a thread that may be spilled where options are compiled in.
SPILLED_WITH_OPTIONS = {
    **SPILLED, "flash2_forward": 192, "flash2_dq": 96, "flash2_dkdv": 144,
    "flash3_forward": 224, "flash3_dkdv": 288, "flash3_dq": 32, "flash2_own_rows": 16, "flash2_dmask": 288,
}  # fmt: skip
#: Kernel → what its PTX contains: copies and accesses of whole vectors.
TEXTS = {
    "flash2_forward": ("ld.shared.v4",), "flash2_dq": ("ld.shared.v4",), "flash2_dkdv": ("ld.shared.v4",),
    **dict.fromkeys(
        ("flash2_mma_forward", "flash2_mma_jvp", "flash2_mma_dq_tangent", "flash2_mma_dkdv_tangent"),
        ("cp.async.cg.shared.global", "mma.sync.aligned.m16n8k16"),
    ),
    "flash3_forward": ("bulk.tensor.4d.shared", "bulk.tensor.4d.global", "setmaxnreg.inc"),
    "flash3_preprocess": ("ld.global.v4.u32", "st.global.v4.u32"), "flash3_dkdv": ("setmaxnreg.inc",),
    "flash3_float8": ("cvt.rn.satfinite.e4m3x2.f32", "setmaxnreg.inc"),
    "float8_rows": ("ld.global.v4.u32",), "float8_values": ("ld.global.v4.u32",),
}  # fmt: skip
#: Kernel and width → products: of the first tile, of the loop, and of the next item's first.
PRODUCTS = {
    ("flash3_forward", 64): 20, ("flash3_forward", 128): 32, ("flash3_forward", 256): 37,
    ("flash3_float8", 64): 14, ("flash3_float8", 128): 20,
}  # fmt: skip


@needs_nvvm
@pytest.mark.parametrize("name", EVERYWHERE)
def test_kernels_of_cuda_cores_compile_in_their_own_dtype(name: str) -> None:
    dtype = EVERYWHERE[name].dtype
    cc = GENERATION[dtype]
    for kernel in launched(name).values():
        ptx = ptx_of(kernel, cc)
        assert_is_kernel(ptx, cc)
        if "score_mod" not in name:  # with every option, loops are too long to be unrolled
            assert not re.search(r"\b(ld|st)\.local", ptx), kernel.name
        if dtype == FLOAT32:  # Python's constants, a user's too, are numbers of the dtype
            assert_no_float64(ptx, "fma|mul|add|sub")


@needs_ptxas
@pytest.mark.parametrize("name", IN_REGISTERS)
def test_tiles_stay_in_registers_and_no_product_waits_for_the_last(name: str) -> None:
    call = IN_REGISTERS[name]
    is_hopper = call.rung == "flash3_wgmma"
    has_options = bool(call.options.keys() - {"deterministic", "precision"})
    for kernel in launched(name).values():
        kind = kernel.name.replace("flash2_split", "flash2_mma")  # the same kernels
        allowed = (SPILLED_WITH_OPTIONS if has_options else SPILLED).get(kind, 0)
        # Of tiles in local memory the smallest would take 128 bytes.
        local = 32 if kernel.name in ("flash3_dkdv", "flash3_dq") else None
        cc = (9, 0, "a") if call.cc == (9, 0) else call.cc
        ptx = assert_in_registers(kernel, cc, allowed, local)
        missing = [text for text in TEXTS.get(kind, ()) if text not in ptx]
        assert not missing, f"{kernel.name} has no {missing}"
        products = ptx.count("wgmma.mma_async.sync.aligned.m64n")
        if is_hopper and (wanted := PRODUCTS.get((kernel.name, call.dims[0]))):
            assert products == wanted
    is_atomic = call.options.get("deterministic") is False
    if is_atomic and call.rung == "flash2_mma":
        (kernel,) = (x for x in launched(name).values() if x.name.endswith(("_dkdv", "_roles")))
        assert "red.global.add.v4.f32" in ptx_of(kernel, (9, 0, "a"))


def _ptx(call: Call, name: str) -> str:
    (kernel,) = (x for x in call.kernels().values() if x.name == name)
    return ptx_of(kernel, (9, 0, "a"))


@needs_nvvm
def test_dropout_draws_its_bits_with_words_of_32_bits() -> None:
    ptx = _ptx(Call("flash2", FLOAT32, options=OPTIONS["dropout"]), "flash2_forward")
    # 7 rounds of two products, once for eight columns.
    assert len(re.findall(r"mul\.hi\.u32", ptx)) == 14
    assert not re.search(rf"mul\.lo\.s64.*({MULTIPLIER_0}|{MULTIPLIER_1})", ptx)


def slanted(score: float, batch: int, head: int, row: int, col: int) -> float:
    return score - 0.02 * (head + 1) * abs(row - col) + 0.5 * (col - row)


@needs_nvvm
def test_a_score_mod_of_distances_converts_one_place_of_a_tile() -> None:
    call = Call("flash3_wgmma", BFLOAT16, options={"score_mod": (slanted, one)})
    ptx = _ptx(call, "flash3_forward")
    assert "cvt.rn.f32.s64" not in ptx
    # A head and a distance in tiles that are whole, and in those at an edge; of elements there are 64.
    assert ptx.count("cvt.rn.f32.s32") + ptx.count("cvt.rn.f32.u32") <= 6


@needs_nvvm
def test_what_was_compiled_before_changes_no_fingerprint() -> None:
    """Otherwise a kernel with a user's function would never be found on disk."""

    def prints(dtype: Any) -> list[str]:
        call = Call("flash3_wgmma", dtype, options={"score_mod": (slanted, one)})
        return [fingerprint(kernel.source) for kernel in call.kernels().values()]

    before = prints(FLOAT16)
    _ptx(Call("flash3_wgmma", BFLOAT16, options={"score_mod": (slanted, one)}), "flash3_forward")
    assert prints(FLOAT16) == before
    assert prints(BFLOAT16)[0] != before[0]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("options", [{}, OPTIONS["dropout"]], ids=["plain", "dropout"])
@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT32], ids=str)
def test_every_device_has_the_shared_memory_for_every_width(
    dtype: Any, options: dict[str, Any], deterministic: bool
) -> None:
    options = {**options, "deterministic": deterministic}
    widest = MAX_HEAD_DIM if dtype == FLOAT16 else 256  # without precision="tf32"
    for width, rows in product(range(16, widest + 1, 16), (4, ROWS)):
        call = Call("flash2_mma", dtype, (width, width), options, rows, (8, 6))
        for kernel in call.kernels().values():
            assert kernel.shared_bytes <= shared_bytes(call.cc), (kernel.name, width)


def test_the_derivatives_of_heads_up_to_256_fit_every_device_with_tensor_cores() -> None:
    for width in (16, 64, 80, 128, 144, 256):
        call = Call("flash2_mma", FLOAT16, (width, width), cc=(8, 6), tangents=True)
        for kernel in call.kernels().values():
            assert kernel.shared_bytes <= shared_bytes(call.cc), (kernel.name, width)


@pytest.mark.parametrize("dims", [(64, 264), (MAX_HEAD_DIM, 8)])
def test_heads_too_wide_for_hoppers_kernels_run_on_those_of_ampere(dims: tuple[int, int]) -> None:
    names = {kernel.name for kernel in Call("auto", BFLOAT16, dims).kernels().values()}
    assert {"flash2_mma_forward", "flash2_mma_dq", "flash2_mma_dkdv"} <= names


def test_flash1_divides_the_memory_as_the_paper_says() -> None:
    # 1: B_c = ceil(M / 4d), B_r = min(ceil(M / 4d), d)
    assert flash1.paper_tile(8192, 64) == (32, 32)
    assert flash1.paper_tile(8192, 16) == (16, 128)
    assert flash1.paper_tile(8193, 256) == (9, 9)


@pytest.mark.parametrize("itemsize", [4, 8])
def test_flash1_fits_the_shared_memory_with_every_width(itemsize: int) -> None:
    elements = GPU.flash1_bytes // itemsize
    # In float64, rounding up the paper's tile of a wider head may exceed the memory.
    widest = MAX_HEAD_DIM if itemsize == 4 else 256
    for head_dim in range(1, widest + 1):
        for value_dim in {1, head_dim, max(head_dim - 1, 1), widest}:
            dims = head_dim, value_dim
            tile, backward_tile = flash1.paper_tiles(elements, *dims)
            assert flash1.forward_elements(tile, *dims) <= elements, dims
            assert flash1.backward_elements(backward_tile, *dims) <= elements, dims
