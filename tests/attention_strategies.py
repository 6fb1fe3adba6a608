"""Draw attention problems: shapes that do not divide any tile, strided and broadcast operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

import kernels
from kernels import reference

from .tolerances import assert_close_arrays

LENGTHS = st.integers(1, 40)
DIMS = st.sampled_from([1, 2, 3, 5, 8, 16, 17])
LEAD = st.lists(st.integers(1, 3), max_size=3)
TILES = ((1, 1), (3, 5), (8, 4), (16, 16), (64, 64))


@dataclass
class Case:
    """Operands of one attention call, its options, and the oracle's answer in float64."""

    q: Any
    k: Any
    v: Any
    dout: Any
    options: dict[str, Any]
    tile: tuple[int, int]

    @property
    def operands(self) -> tuple[Any, Any, Any]:
        return self.q, self.k, self.v

    def problem(self, **more: Any) -> kernels.Problem:
        return kernels.make_problem(*self.operands, **self.options, **more)

    def plain(self) -> tuple[list[Any], dict[str, Any]]:
        """Return q, k, v and dout in float64, k and v with a head for each of q's, and the options.

        Groups of query heads that share a head of k and v are written out by repeating it.
        """
        q, k, v, dout = (x.astype(np.float64) for x in (*self.operands, self.dout))
        options = dict(self.options)
        if options.pop("enable_gqa", False):
            k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
        return [q, k, v, dout], options

    def own(self, gradients: Any) -> Any:
        """Sum gradients to the shapes of the operands, over groups of heads too."""
        for gradient, x in zip(gradients, self.operands, strict=True):
            if self.options.get("enable_gqa") and gradient.shape[-3] != x.shape[-3]:
                *lead, heads, seq, dim = gradient.shape
                parts = gradient.reshape(*lead, x.shape[-3], heads // x.shape[-3], seq, dim)
                gradient = parts.sum(axis=-3)
            yield sum_to(gradient, x.shape)

    def oracle(self) -> dict[str, Any]:
        """Return out, lse and the gradients, by the textbook, in float64."""
        (q, k, v, dout), options = self.plain()
        problem = kernels.make_problem(q, k, v, **options)
        out, lse = reference.attention(problem, q, k, v)
        gradients = reference.attention_backward(problem, dout, q, k, v, out, lse)
        dq, dk, dv = self.own(gradients)
        lse = np.broadcast_to(lse, problem.lse_shape)
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}

    def row_by_row(self) -> dict[str, Any]:
        """Return what the oracle does, each row attending to the keys that it sees and to no others.

        The textbook multiplies a hidden key by a probability of zero, and 0 · NaN is NaN: what
        is NaN there need not be so in a kernel that does not visit the key.  What is NaN here must.
        """
        (q, k, v, dout), options = self.plain()
        problem = kernels.make_problem(q, k, v, **options)
        out, lse = np.zeros(problem.out_shape), np.zeros(problem.lse_shape)
        wide = [np.broadcast_to(x, (*problem.lead, *x.shape[-2:])) for x in (q, k, v)]
        grads = [np.zeros(x.shape) for x in wide]
        scale: dict[str, Any] = {"scale": problem.scale}
        for r in range(problem.seq_q):
            rows, seen = np.s_[..., r : r + 1, :], np.s_[..., : max(r + 1 + problem.diagonal, 0), :]
            operands = wide[0][rows], wide[1][seen], wide[2][seen]
            if operands[1].shape[-2] == 0:  # the row sees nothing
                lse[..., r] = -np.inf
                continue
            one = kernels.make_problem(*operands, **scale)
            out[rows], lse[..., r : r + 1] = reference.attention(one, *operands)
            results = out[rows], lse[..., r : r + 1]
            parts = reference.attention_backward(one, dout[rows], *operands, *results)
            for grad, place, part in zip(grads, (rows, seen, seen), parts, strict=True):
                grad[place] += part
        dq, dk, dv = self.own(grads)
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}

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
        return f"Case({shapes}, {self.q.dtype}, {self.options}, tile {self.tile})"


def sum_to(gradient: Any, shape: tuple[int, ...]) -> Any:
    """Sum over what broadcasting repeated; written apart from the library's own."""
    while gradient.ndim > len(shape):
        gradient = gradient.sum(axis=0)
    for axis, size in enumerate(shape):
        if size == 1 and gradient.shape[axis] != 1:
            gradient = gradient.sum(axis=axis, keepdims=True)
    return gradient


@st.composite
def operand(draw: Any, shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> Any:
    """Draw an array of a shape: contiguous, permuted, a slice of a larger one, or repeated."""
    kind = draw(st.sampled_from(["contiguous", "permuted", "sliced", "reversed", "read-only"]))
    if kind == "permuted":
        order = draw(st.permutations(range(len(shape))))
        stored = rng.standard_normal([shape[i] for i in order])
        return stored.astype(dtype).transpose(np.argsort(order))
    if kind == "sliced":
        return rng.standard_normal([n + 2 for n in shape]).astype(dtype)[
            tuple(slice(1, n + 1) for n in shape)
        ]
    array = rng.standard_normal(shape).astype(dtype)
    if kind == "reversed":
        return array[..., ::-1, :]
    if kind == "read-only":
        array.flags.writeable = False
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
) -> Case:
    """Draw a problem: leading dimensions that broadcast, unequal lengths, causal or not, any scale."""
    dtype = draw(st.sampled_from(dtypes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lead = draw(leads)
    seq_q, seq_k = draw(lengths), draw(lengths)
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
    options: dict[str, Any] = {"is_causal": draw(st.booleans())}
    if options["is_causal"] and draw(st.booleans()):
        options["causal_offset"] = draw(st.sampled_from([-3, -1, 1, 5, seq_k - seq_q]))
    if grouped:
        options["enable_gqa"] = True
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.1, 1.0, -0.7, 3.0]))
    last = -3 if grouped else -2
    batch = np.broadcast_shapes(q.shape[:last], k.shape[:last], v.shape[:last])
    lead_shape = (*batch, *q.shape[last:-2])
    dout = draw(operand((*lead_shape, seq_q, value_dim), dtype, rng))
    tile = draw(st.sampled_from(tiles))
    return Case(q, k, v, dout, options, tile)
