"""What the tests of attention on the device share: operands there, small draws, one run of a rung."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

import kernels
import minitorch
from kernels import launch
from kernels.array_call import heads_first
from kernels.cuda.runtime.arrays import is_device_array
from kernels.operand_types import as_operand
from kernels.problem.options import OPTIONS
from kernels.problem.packed_sequences import Sequences
from kernels.runtime.dtypes import FLOAT16, FLOAT64
from kernels.runtime.targets import EMULATED

from ..layouts import laid, layouts, on_device
from ..tolerances import assert_close_arrays
from .strategies import Case, bounds, cases, option

#: Those that compute in the dtype of their operands, float32 or float64.
RUNGS = [rung.name for rung in launch.CUDA.rungs if FLOAT64 in rung.dtypes]
#: Those whose operands have 16 bits.
HALVES = [rung.name for rung in launch.CUDA.rungs if FLOAT16 in rung.dtypes]
#: Options that flash1, the algorithm of 2022, does not have; of a window it has the right side.
LATER_OPTIONS = {name for name, option in OPTIONS.items() if not option.in_2022} - {"window_size"}
#: Options that packed sequences take.
PACKED_FEATURES = ("softcap", "alibi", "dropout", "mask_mod", "score_mod", "sink")
RESULTS = ("out", "lse", "dq", "dk", "dv")
# On a GPU flash1 is compiled for each tile and each pair of dims: there are few of them.
TILES = ((1, 2), (3, 5), (4, 4), (5, 2)) if EMULATED else ((3, 5), (5, 2))
LEADS = st.sampled_from([[], [2], [1, 2], [2, 1]])
DIMS = st.integers(1, 5) if EMULATED else st.sampled_from([3, 4])


def tiny(*dtypes: Any, features: Any = ()) -> st.SearchStrategy[Case]:
    """Draw what the emulated GPU finishes in a second."""
    sizes = {"lengths": st.integers(1, 9), "dims": DIMS, "leads": LEADS}
    return cases(dtypes or (np.float32, np.float64), **sizes, tiles=TILES, features=features)


def forwards(array: Any) -> Any:
    """Put an array on the device, where a rung takes no negative strides."""
    return on_device(array if min(array.strides, default=0) >= 0 else array.copy())


def _fetched(results: dict[str, Any]) -> dict[str, Any]:
    """Return results on the host."""
    assert all(is_device_array(x) for x in results.values()), "a result left the device"
    return {name: x.copy_to_host() for name, x in results.items()}


def run(case: Case, rung: str = "auto", tile: Any = None, **more: Any) -> dict[str, Any]:
    """Run one rung forward and backward; the results come back to the host."""
    return _fetched(case.run(launch.CUDA, rung, tile, forwards, **more))


def forward(case: Case, rung: str) -> dict[str, Any]:
    """Run one rung forward; return out, lse and the rest of lse on the host."""
    return _fetched(case.forward(launch.CUDA, rung, place=forwards))


def backward(case: Case, given: dict[str, Any], rung: str, **more: Any) -> dict[str, Any]:
    """Run the backward pass of one rung on what the forward pass returned; see :func:`forward`."""
    given = {name: forwards(array) for name, array in given.items()}
    return _fetched(case.backward(launch.CUDA, given, rung, place=forwards, **more))


def fitting(rung: str, tile: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return a tile that a rung takes: flash2 reads whole vectors of four, tensor cores have their own."""
    if tile is None or rung not in ("auto", "flash2"):
        return None if rung in HALVES else tile
    block_q, block_k = tile
    return 4 * ((block_q + 3) // 4), 4 * ((block_k + 3) // 4)


def check(actual: Any, expected: Any, case: Case, what: str) -> None:
    """Compare; a gradient is a sum of products, so its rounding grows with the largest element."""
    finite = np.abs(expected[np.isfinite(expected)])
    size = max(1.0, float(finite.max(initial=0.0)))
    assert_close_arrays(actual, expected, case.q.dtype, what=f"{what} of {case}", size=size)


def taken_by(rung: str, case: Case) -> Case:
    """Return a case without the options that a rung does not have."""
    if rung != "flash1":
        return case
    options = {name: x for name, x in case.options.items() if name not in LATER_OPTIONS}
    if options.get("window_size") is not None:
        options["window_size"] = (-1, options["window_size"][1])
    elif not options.get("is_causal"):
        options.pop("causal_offset", None)
    return replace(case, options=options)


def draw(seed: int, *shapes: tuple[int, ...], dtype: Any = np.float64) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@dataclass(repr=False)
class Packed(Case):
    """A call on packed sequences: q, k, v and dout have no leading dimension but heads."""

    sums: tuple[Any, Any] = ([0], [0])

    def problem(self, **more: Any) -> kernels.Problem:
        lengths = self.q.shape[-2], self.k.shape[-2]
        return replace(super().problem(**more), sequences=Sequences(*self.sums, *lengths))

    def call(self, place: Any = None, kept: Any = None, **more: Any) -> dict[str, Any]:
        put, options = place or (lambda array: array), {**self.options, **more}
        q, k, v, dout = (put(x.swapaxes(0, 1)) for x in (*self.operands, self.dout))
        out, lse = kernels.flash_attention_varlen_forward(q, k, v, *self.sums, **options)
        out, lse = (kept(x) if kept else x for x in (out, lse))
        gradients = kernels.flash_attention_varlen_backward(
            dout, q, k, v, out, lse, *self.sums, dlse=put(self.dlse), sink_gradient=self.has_sink,
            **options,
        )  # fmt: skip
        names = (*RESULTS, *("dsink",) * self.has_sink)
        results = dict(zip(names, (out, lse, *gradients), strict=True))
        of_rows = ("lse", "dsink")
        return {n: x if n in of_rows else heads_first(as_operand(x)) for n, x in results.items()}

    def alone(self, number: int) -> tuple[slice, slice, Case]:
        """Return the rows and the keys of one sequence, and the call of that sequence alone."""
        rows, cols = (slice(*sums[number : number + 2]) for sums in self.sums)
        options = dict(self.options)
        if mod := options.get("mask_mod"):
            options["mask_mod"] = lambda batch, *place: mod(number, *place)
        if mods := options.get("score_mod"):
            options["score_mod"] = tuple(
                lambda score, batch, *place, own=own: own(score, number, *place) for own in mods
            )
        dlse = None if self.dlse is None else self.dlse[:, rows]
        q, k, v, dout = self.q[:, rows], self.k[:, cols], self.v[:, cols], self.dout[:, rows]
        return rows, cols, Case(q, k, v, dout, options, self.tile, dlse)

    def in_dtype(self, dtype: np.dtype[Any]) -> Packed:
        return Packed(**vars(super().in_dtype(dtype)), sums=self.sums)

    def plain(self) -> Packed:
        return Packed(**vars(super().plain()), sums=self.sums)


def packed(
    seed: int, lengths_q: Any, lengths_k: Any, dims: Any, options: Any, **more: Any
) -> Packed:
    """Return sequences of some lengths; two heads of keys, and twice as many of queries in groups."""
    sums = np.cumsum([0, *lengths_q]), np.cumsum([0, *lengths_k])
    heads = 4 if options.get("enable_gqa") else 2
    (total_q, total_k), (head_dim, value_dim) = (int(s[-1]) for s in sums), dims
    shapes = (heads, total_q, head_dim), (2, total_k, head_dim), (2, total_k, value_dim)
    q, k, v, dout, dlse = draw(seed, *shapes, (heads, total_q, value_dim), (heads, total_q), **more)
    return Packed(q, k, v, dout, options, (3, 5), dlse, sums)


@st.composite
def packed_cases(
    draw: Any, dtypes: Any, lengths: Any, dims: Any, features: Any = PACKED_FEATURES
) -> Packed:
    """Draw up to four sequences, some of them empty; features as in :func:`cases`."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths_q = draw(st.lists(lengths | st.just(0), min_size=1, max_size=4).filter(any))
    lengths_k = draw(st.permutations(lengths_q))
    options = draw(bounds(max(lengths_q), max(lengths_k)))
    options["enable_gqa"] = draw(st.booleans())
    heads = 4 if options["enable_gqa"] else 2
    chosen = features
    if not isinstance(features, frozenset):
        chosen = draw(st.sets(st.sampled_from(features), max_size=3)) if features else ()
    for feature in sorted(chosen):
        options |= draw(option(feature, (heads, 1, 1), np.float32, rng))
    case = packed(draw(st.integers(0, 99)), lengths_q, lengths_k, (draw(dims),) * 2, options)
    return case.in_dtype(draw(st.sampled_from(dtypes)))


@st.composite
def in_layouts(draw: Any, cases: st.SearchStrategy[Any]) -> Any:
    """Draw a case, and how its operands lie in memory."""
    case = draw(cases)
    for name in ("q", "k", "v", "dout"):
        array = getattr(case, name)
        setattr(case, name, laid(array, draw(layouts(array.ndim))))
    return case


def by_tensors(
    case: Case,
    put: Any,
    attention: Any = minitorch.Tensor.flash_attention,
    make: Any = minitorch.from_dlpack,
    **more: Any,
) -> dict[str, Any]:
    """Return the results of the tensors' method, or of another function, on the memory of arrays."""
    options, leaves = {**case.options, **more}, {}

    def leaf(name: str, array: Any) -> Any:
        if put is None and not array.flags.writeable:
            array.flags.writeable = True  # memory that cannot be written to is not lent
        leaves[name] = make(array if put is None else put(array), requires_grad=True)
        return leaves[name]

    mask = options.get("attn_mask")
    if case.has_mask_gradient:
        options["attn_mask"] = leaf("dmask", mask)
    elif mask is not None and put is not None:
        options["attn_mask"] = minitorch.from_dlpack(put(mask))
    if case.has_sink:
        options["sink"] = leaf("dsink", options["sink"].astype(case.problem().acc_dtype))
    q, k, v = (leaf(f"d{n}", x) for n, x in zip("qkv", case.operands, strict=True))
    if isinstance(case, Packed):
        q, k, v = (x.permute(1, 0, 2) for x in (q, k, v))
        out, lse = q.flash_attention_varlen(k, v, *case.sums, return_lse=True, **options)
        out = out.permute(1, 0, 2)
    else:
        out, lse = attention(q, k, v, return_lse=True, **options)
    for result, gradient in ((out, case.dout), (lse, case.dlse)):
        if gradient is not None:
            result.backward(minitorch.from_numpy(np.array(gradient), out.backend))
    return {"out": out, "lse": lse, **{name: x.grad for name, x in leaves.items()}}
