"""Draw attention problems: shapes that do not divide any tile, strided and broadcast operands."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

import kernels
from kernels import launch
from kernels.problem.operands import make_operands
from kernels.problem.options import ARRAY_ORDER
from kernels.problem.shapes import MAX_HEAD_DIM
from kernels.runtime.dtypes import acc_dtype, is_floating, is_half

from ..layouts import laid, layouts
from ..tolerances import TOLERANCES, assert_close_arrays

LENGTHS = st.integers(1, 40)
DIMS = st.sampled_from([1, 2, 3, 5, 8, 16, 17])
#: Heads wider than most of a rung's tables of tiles.
WIDE = st.sampled_from([3, 264, 320, MAX_HEAD_DIM])
LEAD = st.lists(st.integers(1, 3), max_size=3)
TILES = ((1, 1), (3, 5), (8, 4), (16, 16), (64, 64))


def neighbours(batch: int, head: int, row: int, col: int) -> bool:
    """Keep what is near, and every fifth column."""
    return row - col < 4 + head or col % 5 == batch


def checkers(batch: int, head: int, row: int, col: int) -> bool:
    """Keep every other score."""
    return (row + col + head) % 2 == 0


def bowl(score: float, batch: int, head: int, row: int, col: int) -> float:
    """Bend a score, more for later heads."""
    return score + (0.05 + 0.02 * head) * score * score - 0.01 * (row - col)


def slope_of_bowl(score: float, batch: int, head: int, row: int, col: int) -> float:
    return 1.0 + (0.1 + 0.04 * head) * score


def squash(score: float, batch: int, head: int, row: int, col: int) -> float:
    """Shrink scores of odd columns."""
    return 0.5 * score if col % 2 else score + 0.25 * batch


def slope_of_squash(score: float, batch: int, head: int, row: int, col: int) -> float:
    return 0.5 if col % 2 else 1.0


MASK_MODS = (neighbours, checkers)
SCORE_MODS = ((bowl, slope_of_bowl), (squash, slope_of_squash))
#: Names of the options that :func:`cases` draws beyond q, k, v, scale and bounds.
FEATURES = (
    "bool mask", "float mask", "softcap", "alibi", "dropout", "block mask", "mask_mod", "score_mod", "sink",
    "chunks", "dlse",
)  # fmt: skip


#: The tangents of q, k and v, as fields of ``Operands``.
TANGENTS = ("q_tangent", "k_tangent", "v_tangent")


@dataclass
class Case:
    """Operands of one attention call, its options, and the oracle's answer in float64."""

    q: Any
    k: Any
    v: Any
    dout: Any
    options: dict[str, Any]
    tile: tuple[int, int] | None = None
    dlse: Any = None

    @property
    def operands(self) -> tuple[Any, Any, Any]:
        return self.q, self.k, self.v

    @property
    def has_mask_gradient(self) -> bool:
        mask = self.options.get("attn_mask")
        return mask is not None and is_floating(mask.dtype)

    @property
    def has_sink(self) -> bool:
        return self.options.get("sink") is not None

    @property
    def has_table(self) -> bool:
        return self.options.get("score_table") is not None

    def problem(self, **more: Any) -> kernels.Problem:
        return kernels.make_problem(*self.operands, **{**self.options, **more})

    def forward(
        self,
        target: launch.Target,
        rung: str = "auto",
        tile: Any = None,
        place: Any = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Run one rung forward; return out, lse and the rest of lse by name.  See :meth:`run`."""
        operands, problem = self._asked(target, rung, place, more)
        names = ("out", "lse", "lse_rest")
        return dict(zip(names, launch.forward(target, problem, operands, tile), strict=True))

    def backward(
        self, target: launch.Target, given: dict[str, Any], rung: str = "auto", tile: Any = None,
        place: Any = None, **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Run the backward pass of one rung on what ``forward`` returns; return the gradients by name."""
        operands, problem = self._asked(target, rung, place, more)
        put = place or (lambda array: array)
        dlse = None if self.dlse is None else put(self.dlse)
        operands = operands.having(**given, dout=put(self.dout), dlse=dlse)
        wanted = self.has_mask_gradient, self.has_sink, self.has_table
        gradients = launch.backward(target, problem, operands, tile, *wanted)._asdict()
        return {name: array for name, array in gradients.items() if array is not None}

    def derive(
        self, tangents: Any, target: launch.Target, rung: str = "auto", tile: Any = None,
        place: Any = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Run the derivatives of one rung's two passes along tangents of q, k and v; None is a zero.

        Returns:
            out, lse, their tangents, and those of dq, dk and dv, under the names of these.
        """
        operands, problem = self._asked(target, rung, place, {})
        given = {"dout": self.dout, "dlse": self.dlse, **dict(zip(TANGENTS, tangents, strict=True))}
        put = place or (lambda array: array)
        operands = operands.having(**{n: x if x is None else put(x) for n, x in given.items()})
        (out, lse, _, *rest), (*gradients, dout, dlse) = (
            launch.BoundCall(target, problem, tile, wanted).in_full(problem, operands)
            for wanted in (launch.Wanted(tangent=True), launch.Wanted(True, tangent=True))
        )
        for one, other in zip(rest, (dout, dlse), strict=True):
            assert_close_arrays(one, other, one.dtype, "the gradient of dout or dlse")
        names = ("out", "lse", "out_tangent", "lse_tangent", "dq", "dk", "dv")
        return dict(zip(names, (out, lse, *rest, *gradients), strict=True))

    def _asked(self, target: launch.Target, rung: str, place: Any, more: Any) -> tuple[Any, Any]:
        """Return the operands and the problem of a call."""
        put, problem = place or (lambda array: array), self.problem(rung=rung, **more)
        arrays = dict(self.options)
        if arrays.get("attn_mask") is not None:
            arrays["attn_mask"] = put(arrays["attn_mask"])
        operands = map(put, self.operands)
        return make_operands(target.memory, problem, *operands, arrays=arrays), problem

    def run(
        self, target: launch.Target, rung: str = "auto", tile: Any = None, place: Any = None,
        stored_out: Any = None, **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Run one rung forward and backward.

        Args:
            target: Whose rung.
            rung: Its name.
            tile: For it.
            place: Puts an array of the host where the target has its memory.
            stored_out: What the backward pass takes for out; that of the forward pass when None.
            more: Options beside the case's own.

        Returns:
            out, lse and the gradients by name; dmask only if there is a floating mask, dsink if a sink.
        """
        found = self.forward(target, rung, tile, place, **more)
        given = found if stored_out is None else {**found, "out": stored_out}
        gradients = self.backward(target, given, rung, tile, place, **more)
        return {"out": found["out"], "lse": found["lse"], **gradients}

    def call(self, place: Any = None, kept: Any = None, **more: Any) -> dict[str, Any]:
        """Call the public functions on arrays, forward and backward.

        Args:
            place: Puts an array of the host where the call takes it; None leaves it there.
            kept: Converts out and lse before the backward pass receives them.
            more: Options beside the case's own, and ``tile``.

        Returns:
            out, lse and the gradients by name; dmask only if there is a floating mask, dsink if a sink.
        """
        put = place or (lambda array: array)
        q, k, v, dout = map(put, (*self.operands, self.dout))
        options = {**self.options, **more}
        for name in ARRAY_ORDER:
            if isinstance(options.get(name), np.ndarray):
                options[name] = put(options[name])
        found, lse = kernels.flash_attention_forward(q, k, v, **options)
        out, rows = (kept(x) if kept else x for x in (found, lse))
        dlse = None if self.dlse is None else put(self.dlse)
        gradients = kernels.flash_attention_backward(
            dout, q, k, v, out, rows, dlse=dlse,
            mask_gradient=self.has_mask_gradient, sink_gradient=self.has_sink, **options,
        )  # fmt: skip
        others = ("dmask",) * self.has_mask_gradient + ("dsink",) * self.has_sink
        names = ("out", "lse", "dq", "dk", "dv", *others)
        return dict(zip(names, (found, lse, *gradients), strict=True))

    def in_dtype(self, dtype: np.dtype[Any]) -> Case:
        """Return the case with floating operands rounded to a dtype, which keeps their strides."""
        options = {
            name: value.astype(dtype) if name in ARRAY_ORDER and is_floating(value.dtype) else value
            for name, value in self.options.items()
        }
        q, k, v, dout = (x.astype(dtype) for x in (*self.operands, self.dout))
        dlse = None if self.dlse is None else self.dlse.astype(acc_dtype(dtype))
        return Case(q, k, v, dout, options, self.tile, dlse)

    def plain(self) -> Case:
        """Return the case in float64, k and v with a head for each of q's.

        Groups of query heads that share a head of k and v are written out by repeating it.
        """
        options = dict(self.options)
        for name in ARRAY_ORDER:
            array = options.get(name)
            if array is not None and is_floating(array.dtype):
                options[name] = array.astype(np.float64)
        q, k, v, dout = (x.astype(np.float64) for x in (*self.operands, self.dout))
        if (chunk := options.pop("chunk_size", None)) is not None:
            seen, offset = options.get("mask_mod"), options.get("causal_offset", 0)
            options["mask_mod"] = lambda batch, head, row, col: (
                (row + offset) // chunk == col // chunk
                and (seen is None or seen(batch, head, row, col))
            )
            if not options.keys() & {"window_size", "alibi_slopes"} and not options.get(
                "is_causal"
            ):
                options.pop("causal_offset", None)
        if options.pop("enable_gqa", False):
            k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
        dlse = None if self.dlse is None else self.dlse.astype(np.float64)
        return Case(q, k, v, dout, options, self.tile, dlse)

    def own(self, gradients: Any) -> Any:
        """Sum gradients to the shapes of the operands, over groups of heads too."""
        for gradient, x in zip(gradients, self.operands, strict=True):
            if self.options.get("enable_gqa") and gradient.shape[-3] != x.shape[-3]:
                *lead, heads, seq, dim = gradient.shape
                parts = gradient.reshape(*lead, x.shape[-3], heads // x.shape[-3], seq, dim)
                gradient = parts.sum(axis=-3)
            yield sum_to(gradient, x.shape)

    def oracle(self, stored_out: Any = None) -> dict[str, Any]:
        """Return out, lse and the gradients, by the textbook, in float64."""
        results = self.plain().run(launch.NUMPY, "naive", stored_out=stored_out)
        dq, dk, dv = self.own([results[name] for name in ("dq", "dk", "dv")])
        return {**results, "dq": dq, "dk": dk, "dv": dv}

    def row_by_row(self) -> dict[str, Any]:
        """Return what the oracle does, each row attending to the keys that it sees and to no others.

        The textbook multiplies a key that some rows see by a probability of zero for the others, and
        0 · NaN is NaN: what is NaN there need not be so in a kernel that does not visit the key.  What
        is NaN here must.  For cases with bounds alone.
        """
        case = self.plain()
        problem = case.problem()
        out, lse = np.zeros(problem.out_shape), np.zeros(problem.lse_shape)
        operands = case.operands
        wide = [np.broadcast_to(x, (*problem.lead, *x.shape[-2:])) for x in operands]
        grads = [np.zeros(x.shape) for x in wide]
        for r in range(problem.seq_q):
            first, stop = max(r + problem.lower, 0), max(r + 1 + problem.upper, 0)
            rows, seen = np.s_[..., r : r + 1, :], np.s_[..., first:stop, :]
            q, k, v = wide[0][rows], wide[1][seen], wide[2][seen]
            if k.shape[-2] == 0:  # the row sees nothing
                lse[..., r] = -np.inf
                continue
            one = Case(q, k, v, case.dout[rows], {"scale": problem.scale}, case.tile)
            results = one.run(launch.NUMPY, "naive")
            out[rows], lse[..., r : r + 1] = results["out"], results["lse"]
            for grad, place, name in zip(
                grads, (rows, seen, seen), ("dq", "dk", "dv"), strict=True
            ):
                grad[place] += results[name]
        dq, dk, dv = self.own(grads)
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}

    def check(self, actual: dict[str, Any], what: str, dtype: Any = None) -> None:
        """Compare results with the oracle's; a gradient's rounding grows with its largest element.

        It grows with the slope of a score_mod, too: where P ∘ (dP - delta) cancels, its rounding is left,
        and multiplied by that.
        """
        # In 16 bits out is rounded, and rowsum(dout ∘ out) is of what was rounded: where dP and it cancel,
        # a gradient is no longer that of exact numbers, however well it is computed.
        halves = is_half(self.q.dtype) and dtype is None
        stored = actual["out"].astype(np.float64) if halves else None
        steepest = self.steepest()
        for name, expected in self.oracle(stored).items():
            if name not in actual:
                continue
            finite = np.abs(expected[np.isfinite(expected)])
            size = max(1.0, float(finite.max(initial=0.0)), self.cancelling(name) / 100)
            size *= steepest if name in ("dq", "dk") else 1.0
            summed = sum_to(actual[name], expected.shape)
            label = f"{name} {what} of {self}"
            sums = name in ("lse", "dsink")
            own = dtype or (acc_dtype(self.q.dtype) if sums else self.q.dtype)
            assert_close_arrays(summed, expected, own, what=label, size=size)

    def roundings(self, stored_out: Any) -> dict[str, Any]:
        """Return for out and the gradients the sums of magnitudes whose terms fp16 and bf16 kernels round.

        Kernels round P before P V and Pᵀ dO, and dS before dS K and dSᵀ Q.  The sums are those products of
        magnitudes: P |V|, Pᵀ |dO|, |dS| |K| and |dS|ᵀ |Q|.
        """
        plain, slope = self.plain(), self.steepest()
        sizes = replace(plain, v=np.abs(plain.v), dout=np.abs(plain.dout), dlse=None)
        found = sizes.run(launch.NUMPY, "naive")
        # A mask with an element for each score has dS as its gradient.
        problem, mask = plain.problem(), plain.options.get("attn_mask", 0.0)
        mask = np.where(mask, 0.0, -np.inf) if np.asarray(mask).dtype == bool else mask
        options = {
            **plain.options,
            "attn_mask": np.array(np.broadcast_to(mask, problem.scores_shape)),
        }
        ds = np.abs(
            replace(plain, options=options).run(launch.NUMPY, "naive", stored_out=stored_out)[
                "dmask"
            ]
        )
        factor = slope * abs(problem.scale)
        dq = factor * ds @ np.abs(plain.k)
        dk = factor * np.swapaxes(ds, -1, -2) @ np.abs(plain.q)
        dq, dk, dv = self.own([dq, dk, found["dv"]])
        return {"out": found["out"], "dq": dq, "dk": dk, "dv": dv}

    def check_halves(self, actual: dict[str, Any], what: str) -> None:
        """Compare fp16 or bf16 results with the oracle's, each element by its own bound.

        Each element may be as far off as rounding P, dS and the result to the dtype allows.  Rounding
        ``out`` changes D = rowsum(dO ∘ O), however exactly a gradient is computed, so the oracle for the
        gradients uses the stored ``out``.
        """
        stored = actual["out"].astype(np.float64)
        exact, from_stored, roundings = self.oracle(), self.oracle(stored), self.roundings(stored)
        unit = TOLERANCES[self.q.dtype] / 8  # half a unit in the last place
        for name, got in actual.items():
            expected = exact[name] if name in ("out", "lse") else from_stored[name]
            got, label = sum_to(got, expected.shape), f"{name} {what} of {self}"
            if name in ("lse", "dsink"):
                size = max(1.0, _largest(expected), self.cancelling(name) / 100)
                assert_close_arrays(got, expected, acc_dtype(self.q.dtype), label, size)
                continue
            assert got.dtype == self.q.dtype, f"{label} is {got.dtype}"
            # Gradients of each query head and of each repetition are rounded before they are added up.
            allowed = unit * (2 * roundings.get(name, 0.0) + np.abs(expected))
            allowed = 1.01 * allowed + 3e-5 * max(1.0, self.cancelling(name) / 100)
            excess = np.abs(got.astype(np.float64) - expected) / allowed
            worst = np.unravel_index(excess.argmax(), excess.shape)
            assert excess[worst] <= 1.0, (
                f"{label}: worst at {tuple(map(int, worst))}, got {got[worst]!r}, expected "
                f"{expected[worst]!r}, off by {excess[worst]:.3g} times what rounding allows"
            )

    def cancelling(self, name: str) -> float:
        """Return the size of what is left where terms of a gradient cancel: dP and D, times k or q."""
        of = {"dq": self.q.shape[:-1], "dk": self.k.shape[:-1]}
        if name not in (*of, "dmask", "dsink"):
            return 0.0
        of["dsink"] = self.problem().lead[-1:]
        of["dmask"] = getattr(self.options.get("attn_mask"), "shape", ())
        terms = math.prod(self.problem().scores_shape) / max(math.prod(of[name]), 1)
        largest = {each: _largest(getattr(self, each)) for each in ("q", "k", "v", "dout")}
        size = largest["dout"] * largest["v"] * max(self.q.shape[-1], self.v.shape[-1]) ** 0.5
        size *= self.steepest() / (1.0 - self.options.get("dropout_p", 0.0))
        size *= max(terms, 1.0) ** 0.5
        if name in ("dmask", "dsink"):
            return size
        return size * max(largest["q"], largest["k"]) * abs(self.problem().scale)

    def steepest(self) -> float:
        """Return the largest slope of score_mod at the case's scores, 1 at the least."""
        if "score_mod" not in self.options:
            return 1.0
        case, (_, slope) = self.plain(), self.options["score_mod"]
        scores = case.problem().scale * (case.q @ np.swapaxes(case.k, -1, -2))
        heads, (rows, cols) = case.problem().lead[-1:] or (1,), scores.shape[-2:]
        # The slopes of SCORE_MODS grow with the score, and with the head.
        places = (0, heads[0] - 1, rows - 1, cols - 1), (0, heads[0] - 1, 0, 0)
        ends = (float(scores.min()), float(scores.max()))
        return max(1.0, *(abs(slope(end, *place)) for end in ends for place in places))

    def check_what_is_not_finite(self, actual: dict[str, Any], planted: float) -> None:
        """Check the results of a :func:`planted` case: NaN where it must be, and nowhere else.

        The other elements are those of the oracle.  After an infinity what is not finite counts: it
        may be infinite by one order of sums and NaN by another.
        """
        bad: Any = np.isnan if np.isnan(planted) else lambda x: ~np.isfinite(x)
        with np.errstate(invalid="ignore"):
            most, least = self.oracle(), self.row_by_row()
        for name, got in actual.items():
            got = sum_to(got, least[name].shape)
            must, may, is_bad = bad(least[name]), bad(most[name]), bad(got)
            lost, stray = np.argwhere(must & ~is_bad), np.argwhere(is_bad & ~may)
            assert not len(lost), f"{name} of {self}: finite at {lost}"
            assert not len(stray), f"{name} of {self}: not finite at {stray}"
            wanted = np.where(is_bad, 0.0, least[name])
            finite = np.abs(wanted[np.isfinite(wanted)])
            size = max(1.0, float(finite.max(initial=0.0)))
            got = np.where(is_bad, got.dtype.type(0), got)
            what = f"the rest of {name} of {self}"
            assert_close_arrays(got, wanted, self.q.dtype, what=what, size=size)

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{name} {x.shape} strides {x.strides}"
            for name, x in zip("qkv", self.operands, strict=True)
        )
        options = {
            name: f"{x.dtype} {x.shape} strides {x.strides}" if isinstance(x, np.ndarray) else x
            for name, x in self.options.items()
        }
        return f"Case({shapes}, {self.q.dtype}, {options}, tile {self.tile})"


def _largest(x: Any) -> float:
    x = np.abs(np.asarray(x, np.float64))
    return float(x[np.isfinite(x)].max(initial=0.0))


def sum_to(gradient: Any, shape: tuple[int, ...]) -> Any:
    """Sum over what broadcasting repeated; written apart from the library's own."""
    if is_half(gradient.dtype):
        return sum_to(gradient.astype(np.float64), shape).astype(gradient.dtype)
    while gradient.ndim > len(shape):
        gradient = gradient.sum(axis=0)
    for axis, size in enumerate(shape):
        if size == 1 and gradient.shape[axis] != 1:
            gradient = gradient.sum(axis=axis, keepdims=True)
    return gradient


@st.composite
def operand(draw: Any, shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> Any:
    """Draw an array of a shape, laid out in memory in any way; one in eight is read-only."""
    array = laid(rng.standard_normal(shape).astype(dtype), draw(layouts(len(shape))))
    array.flags.writeable = draw(st.integers(0, 7)) > 0
    return array


@st.composite
def planted(draw: Any, cases: st.SearchStrategy[Case]) -> tuple[Case, float]:
    """Draw a problem in which one element of q, k, v or dout is NaN or infinite, and which it is."""
    case = draw(cases)
    name = draw(st.sampled_from(["q", "k", "v", "dout"]))
    array = np.array(getattr(case, name))
    value = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    array[tuple(draw(st.integers(0, size - 1)) for size in array.shape)] = value
    setattr(case, name, array)
    return case, value


@st.composite
def cases(
    draw: Any,
    dtypes: Any = (np.float32, np.float64),
    lengths: st.SearchStrategy[int] = LENGTHS,
    dims: st.SearchStrategy[int] = DIMS,
    leads: st.SearchStrategy[list[int]] = LEAD,
    tiles: Any = TILES,
    features: Any = (),
    keys: st.SearchStrategy[int] | None = None,
) -> Case:
    """Draw a problem: leading dimensions that broadcast, unequal lengths, bounds, any scale.

    Args:
        draw: Hypothesis's.
        dtypes: Of the operands.
        lengths: Of queries and of keys.
        dims: Of heads and values.
        leads: Leading dimensions.
        tiles: To choose from.
        features: Names of :data:`FEATURES` that the call may have, up to three at a time; a frozenset
            names those that it has.
        keys: Lengths of keys, if others than ``lengths``.
    """
    dtype = draw(st.sampled_from(dtypes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lead = draw(leads)
    seq_q, seq_k = draw(lengths), draw(lengths if keys is None else keys)
    head_dim, value_dim = draw(dims), draw(dims)

    def leading() -> list[int]:
        shape = [draw(st.sampled_from([n, n, 1])) for n in lead]
        return shape[draw(st.integers(0, len(lead))) :] if draw(st.booleans()) else shape

    # With groups the heads of q are a multiple of those of k and v; else all broadcast.
    key_heads, groups = draw(st.sampled_from([(1, 2), (2, 2), (2, 1), (1, 3)]))
    grouped = draw(st.sampled_from([False, False, True]))
    heads = ([key_heads * groups], [key_heads]) if grouped else ([], [])
    q = draw(operand((*leading(), *heads[0], seq_q, head_dim), dtype, rng))
    k = draw(operand((*leading(), *heads[1], seq_k, head_dim), dtype, rng))
    v = draw(operand((*leading(), *heads[1], seq_k, value_dim), dtype, rng))
    last = -3 if grouped else -2
    batch = np.broadcast_shapes(q.shape[:last], k.shape[:last], v.shape[:last])
    scores = (*batch, *q.shape[last:-2], seq_q, seq_k)
    options = draw(bounds(seq_q, seq_k))
    if grouped:
        options["enable_gqa"] = True
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.1, 1.0, -0.7, 3.0]))
    dout = draw(operand((*scores[:-1], value_dim), dtype, rng))
    dlse = None
    chosen = features
    if features and not isinstance(features, frozenset):
        chosen = draw(st.sets(st.sampled_from(features), max_size=3))
    for feature in sorted(chosen):
        if feature == "dlse":
            dlse = draw(operand((*scores[:-1], 1), acc_dtype(np.dtype(dtype)), rng))[..., 0]
        elif not (feature == "float mask" and "bool mask" in chosen):
            options |= draw(option(feature, scores, dtype, rng))
    return Case(q, k, v, dout, options, draw(st.sampled_from(tiles)), dlse)


def wide_cases(
    dtypes: Any, lengths: st.SearchStrategy[int] = LENGTHS, features: Any = ()
) -> st.SearchStrategy[Case]:
    """Draw a call with heads of up to the largest head_dim, in tiles of the rung's own."""
    return cases(dtypes, lengths, WIDE, st.just([]), tiles=(None,), features=features)


@st.composite
def bounds(draw: Any, seq_q: int, seq_k: int) -> dict[str, Any]:
    """Draw which columns a row sees: all, causal, a window, from any diagonal."""
    options: dict[str, Any] = {"is_causal": draw(st.booleans())}
    if draw(st.sampled_from([False, False, True])):
        sides = st.sampled_from([-1, 0, 1, 4, seq_k])
        options["window_size"] = draw(sides), draw(sides)
    if (options["is_causal"] or "window_size" in options) and draw(st.booleans()):
        options["causal_offset"] = draw(st.sampled_from([-3, -1, 1, 5, seq_k - seq_q]))
    return options


@st.composite
def option(
    draw: Any, feature: str, scores: tuple[int, ...], dtype: Any, rng: np.random.Generator
) -> dict[str, Any]:
    """Draw the options that make one of :data:`FEATURES`, for scores of a shape."""
    *lead, seq_q, seq_k = scores
    if feature in ("bool mask", "float mask"):
        shape = tuple(draw(st.sampled_from([n, n, 1])) for n in scores)
        shape = shape[draw(st.integers(0, len(lead))) :]
        if feature == "bool mask":
            layout = draw(layouts(len(shape)))
            return {"attn_mask": laid(rng.standard_normal(shape) > -0.5, layout)}
        return {"attn_mask": draw(operand(shape, dtype, rng))}
    if feature == "softcap":
        return {"softcap": draw(st.sampled_from([0.5, 2.0, 30.0]))}
    if feature == "alibi":
        heads = tuple(lead[-1:]) or (1,)
        slopes = rng.random(draw(st.sampled_from([heads, tuple(lead) or heads]))).astype(dtype)
        return {"alibi_slopes": laid(slopes, draw(layouts(slopes.ndim)))}
    if feature == "sink":
        sink = (2.0 * rng.standard_normal(tuple(lead[-1:]) or (1,))).astype(dtype)
        return {"sink": laid(sink, draw(layouts(1)))}
    if feature == "chunks":
        offset = draw(st.sampled_from([{}, {"causal_offset": seq_k - seq_q}]))
        return {"chunk_size": draw(st.sampled_from([1, 3, 16, 32, 50])), **offset}
    if feature == "dropout":
        rate = draw(st.sampled_from([0.1, 0.5, 0.9]))
        return {"dropout_p": rate, "seed": draw(st.integers(0, 2**64 - 1))}
    if feature == "mask_mod":
        return {"mask_mod": draw(st.sampled_from(MASK_MODS))}
    if feature == "score_mod":
        return {"score_mod": draw(st.sampled_from(SCORE_MODS))}
    size = draw(st.sampled_from([16, 32, (16, 32)]))
    block_q, block_k = size if isinstance(size, tuple) else (size, size)
    heads = draw(st.sampled_from([1, lead[-1] if lead else 1]))
    states = rng.integers(0, 4, (heads, -(-seq_q // block_q), -(-seq_k // block_k)))
    patterns = rng.random((2, block_q, block_k)) < 0.5
    return {"block_mask": kernels.BlockMask(states, seq_q, seq_k, size, patterns)}
