"""Draw calls of attention's public functions that may be nonsense, and judge what comes of them.

A call starts as a valid one of ``attention.strategies``.  Then operands get odd memory, values that are no
numbers, or are replaced by something else, and options by whatever fits no option.  It must either raise
a documented exception with a message that says what to do, or return what the textbook returns in float64;
and nothing that it was given, nor memory beside it, may change.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kernels.problem.options import OPTIONS
from kernels.runtime.dtypes import BFLOAT16, acc_dtype, is_floating, is_half

from ..attention.strategies import FEATURES, Case, cases, sum_to
from ..tolerances import assert_close_arrays
from .buffers import Untouched, check_margins, guarded_results, placed

#: What a function may raise on arrays.
DOCUMENTED = (TypeError, ValueError, BufferError)
#: A message that has one of these says what is expected or what to do, and none of the others.
SAYS = ("must", "need", "takes", "cannot", "missing", "got", "is for", "; ")
LEAKS = ("numba", "nopython", "llvm", "Traceback", "NoneType' object has no", "object is not")
#: Fits no option, or only by chance.
NONSENSE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 1.5, -2.0, np.nan, np.inf, -np.inf, 1e300, 1e-300, 5e-324,
    10**400, 2**63, -(2**63), "x", "", b"x", [], (), [1, 2], (0, 0), (1, 2, 3), (None, 1), {}, {1},
    np.float32(2.0), np.int8(3), np.uint64(5), np.bool_(True), np.array(1), np.array([1, 2]),
    np.array([]), 1j, Decimal("0.5"), object(), range(2), ..., int, len, [[1.0], [1.0, 2.0]],
    np.datetime64("2020"),
)  # fmt: skip
NAMES = (*OPTIONS, "tile")
#: Values that a float may have and seldom has.
ODD_VALUES = (
    np.nan, np.inf, -np.inf, 0.0, -0.0, 5e-324, 1e-45, 1e-40, 2e-38, 1e-30, 3e4, 1e30, 3e38, -3e38, 1e300,
)  # fmt: skip


class Lender:
    """What another library's array looks like from here: DLPack and a shape."""

    def __init__(self, array: Any, kind: int = 1):
        self.array, self.kind = array, kind
        self.shape, self.dtype = array.shape, array.dtype

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0


def _swapped(x: Any) -> Any:
    return x.astype(x.dtype.newbyteorder(">")) if x.dtype != BFLOAT16 else x


#: What an operand may be replaced by: most of it is refused, some is the same array.
REPLACEMENTS: dict[str, Any] = {
    "nothing": lambda x: None,
    "text": lambda x: "x",
    "number": lambda x: 3.0,
    "list": lambda x: np.asarray(x, np.float64).tolist(),
    "objects": lambda x: x.astype(object),
    "complex": lambda x: x.astype(np.complex64),
    "whole": lambda x: np.nan_to_num(x.astype(np.float64)).clip(-9, 9).astype(np.int32),
    "booleans": lambda x: x > 0,
    "long double": lambda x: x.astype(np.longdouble),
    "other float": lambda x: x.astype(np.float32 if x.dtype == np.float64 else np.float64),
    "half": lambda x: x.astype(np.float16),
    "records": lambda x: np.zeros(x.shape, [("a", "f4")]),
    "no dimension": lambda x: x.reshape(-1)[0] if x.size else x,
    "one dimension": lambda x: x.reshape(-1),
    "one more dimension": lambda x: x[None],
    "five more dimensions": lambda x: x.reshape((1,) * 5 + x.shape),
    "no rows": lambda x: x[..., :0, :] if x.ndim > 1 else x[:0],
    "one row more": lambda x: np.concatenate([x, x[..., :1, :]], -2) if x.ndim > 1 else x,
    "no columns": lambda x: x[..., :0],
    "wide": lambda x: np.zeros((*x.shape[:-1], 513), x.dtype),
    "transposed": lambda x: x.swapaxes(-1, -2) if x.ndim > 1 else x,
    "masked": lambda x: np.ma.MaskedArray(x),
    "swapped bytes": _swapped,
    "misaligned": lambda x: placed(x, misaligned=True),
    "columns first": np.asfortranarray,
    "of a subclass": lambda x: x.view(type("Sub", (np.ndarray,), {})),
    "a matrix": lambda x: x.view(np.matrix) if x.ndim == 2 else x,
    "lent": lambda x: Lender(x) if x.flags.writeable and x.dtype != BFLOAT16 else x,
    "lent by Metal": lambda x: Lender(x, 8),
    "zeros that repeat": lambda x: np.broadcast_to(x.dtype.type(0), x.shape),
    "far apart": lambda x: np.repeat(x, 40, axis=-1)[..., ::40],
}  # fmt: skip


@dataclass
class Draw:
    """A call and what was done to it.

    Attributes:
        case: The call as it is; operands may be anything.
        valid: Nothing was replaced: it must return.
        done: What was done, in words.
    """

    case: Case
    valid: bool = True
    done: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        try:
            return f"Draw({self.done}, {self.case})"
        except Exception:  # of operands that have no shape
            kinds = ", ".join(type(x).__name__ for x in (*self.case.operands, self.case.dout))
            return f"Draw({self.done}, operands {kinds}, options {self.case.options})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Let hypothesis show what was done, and not every element."""
        printer.text(repr(self))


@st.composite
def draws(draw: Any) -> Draw:
    """Draw a call; a third of them is valid."""
    dtypes = draw(st.sampled_from([(np.float32, np.float64)] * 3 + [(np.float16, BFLOAT16)]))
    lengths = st.sampled_from([1, 2, 3, 5, 16, 17, 40, 70, 130])
    dims = st.sampled_from([1, 2, 3, 5, 8, 16, 17, 64])
    case = draw(cases(dtypes, lengths, dims, features=FEATURES))
    drawn = Draw(case)
    for fault in draw(st.lists(st.sampled_from([plant, odd_operand, odd_option]), max_size=2)):
        fault(draw, drawn)
    return drawn


ARRAYS = ("q", "k", "v", "dout")


def _sites(case: Case) -> list[str]:
    extra = [name for name in ("attn_mask", "alibi_slopes") if name in case.options]
    return [*ARRAYS, *extra, *(["dlse"] if case.dlse is not None else [])]


def _get(case: Case, name: str) -> Any:
    return case.options[name] if name in case.options else getattr(case, name)


def _set(case: Case, name: str, value: Any) -> None:
    if name in case.options:
        case.options = {**case.options, name: value}
    else:
        setattr(case, name, value)


def plant(draw: Any, drawn: Draw) -> None:
    """Write odd values into an array, at one place or many."""
    name = draw(st.sampled_from(_sites(drawn.case)))
    array = _get(drawn.case, name)
    if not isinstance(array, np.ndarray) or not is_floating(array.dtype) or not array.size:
        return
    value = draw(st.sampled_from(ODD_VALUES))
    array = np.array(array)
    with np.errstate(all="ignore"):
        if draw(st.booleans()):
            array[tuple(draw(st.integers(0, n - 1)) for n in array.shape)] = value
        else:
            array[...] = np.where(np.arange(array.size).reshape(array.shape) % 3 == 0, value, array)
    _set(drawn.case, name, array)
    if name == "alibi_slopes":
        drawn.valid = False
    drawn.done.append(f"{value!r} in {name}")


def odd_operand(draw: Any, drawn: Draw) -> None:
    """Replace an array by something else."""
    name = draw(st.sampled_from(_sites(drawn.case)))
    array = _get(drawn.case, name)
    if not isinstance(array, np.ndarray):
        return
    kind = draw(st.sampled_from(sorted(REPLACEMENTS)))
    with np.errstate(all="ignore"):
        _set(drawn.case, name, REPLACEMENTS[kind](array))
    drawn.valid = False
    drawn.done.append(f"{kind} for {name}")


def odd_option(draw: Any, drawn: Draw) -> None:
    """Give an option a value that fits none."""
    name = draw(st.sampled_from(NAMES))
    value = draw(st.sampled_from(NONSENSE))
    drawn.case.options = {**drawn.case.options, name: value}
    drawn.valid = False
    drawn.done.append(f"{name}={value!r:.40}")


# -- the judge -------------------------------------------------------------------------------------


def attempt(drawn: Draw) -> str:
    """Make a drawn call, forward and backward; return "right", "refused" or "returned".

    Raises:
        AssertionError: If it was refused though valid, or by an undocumented exception or a message that
            helps nobody, or if the result is wrong or anything has changed.
    """
    case = drawn.case
    lie = {name: _get(case, name) for name in _sites(case)}
    for name, x in lie.items():
        if type(x) is np.ndarray and x.dtype.kind in "bfV" and x.flags.aligned and x.size:
            lie[name] = placed(x)
            _set(case, name, lie[name])
    untouched = Untouched(lie)
    unraisable: list[str] = []
    hook = sys.unraisablehook
    sys.unraisablehook = lambda found: unraisable.append(f"{found.exc_value!r} in {found.object!r}")
    try:
        with guarded_results() as made, np.errstate(all="ignore"):
            try:
                actual = _results(case)
            except DOCUMENTED as error:
                _check_message(drawn, error)
                return "refused"
            finally:
                check_margins(made)
                untouched.check(repr(drawn))
    finally:
        sys.unraisablehook = hook
        assert not unraisable, f"{unraisable} in {drawn}"
    return _judge(drawn, actual)


def _results(case: Case) -> dict[str, Any]:
    """Return what the public functions make of a case, by name; a test puts something else in its place."""
    return case.call()


def _check_message(drawn: Draw, error: Exception) -> None:
    text = str(error)
    assert not drawn.valid, f"{type(error).__name__}: {text} for {drawn}"
    helps = len(text) > 20 and any(word in text for word in SAYS)
    assert helps and not any(word in text for word in LEAKS), f"{error!r} for {drawn}"


def _judge(drawn: Draw, actual: dict[str, Any]) -> str:
    """Compare results with the textbook's in float64, as far as rounding lets one."""
    case = _readable(drawn.case)
    if case is None:
        return "returned"
    with np.errstate(all="ignore"):
        most = _largest(case)
        given = (*case.operands, case.dout, *([] if case.dlse is None else [case.dlse]))
        exact = [np.isfinite(np.asarray(x, np.float64)).all() for x in given]
        infinite = any(np.isinf(np.asarray(x, np.float64)).any() for x in given)
        if most > (1e2 if case.q.dtype == np.float16 else 1e3):
            _check_kinds(actual, case)
            return "returned"
        halves = is_half(case.q.dtype)
        stored = actual["out"].astype(np.float64) if halves else None
        expected = case.oracle(stored)
    for name, wanted in expected.items():
        if wanted is None or name not in actual:
            continue
        got = sum_to(actual[name], wanted.shape)
        own = acc_dtype(case.q.dtype) if name in ("lse", "dsink") else case.q.dtype
        if name == "dmask":
            own = _get(case, "attn_mask").dtype
        finite = np.abs(wanted[np.isfinite(wanted)])
        # A gradient's rounding grows with the number of scores that it sums over.
        terms = max(1.0, actual["lse"].size / 128.0)
        size = max(1.0, float(finite.max(initial=0.0))) * max(1.0, most) * terms
        if not all(exact):  # where the textbook is no number a kernel may know better
            known = np.isfinite(wanted)
            if (
                infinite
            ):  # a row whose scores are all minus infinity is 0 to one and NaN to the other
                known &= np.isfinite(got)
            got, wanted = np.where(known, got, got.dtype.type(0)), np.where(known, wanted, 0.0)
        assert_close_arrays(got, wanted, own, what=f"{name} of {drawn}", size=size)
    return "right" if all(exact) else "returned"


def _readable(case: Case) -> Case | None:
    """Return a case whose operands are plain arrays, or None where the oracle cannot read them."""
    case = replace(case, options=dict(case.options))
    case.options.pop("tile", None)
    for name in _sites(case):
        x = _get(case, name)
        if x is None:
            case.options.pop(name, None)
            continue
        if isinstance(x, Lender):
            x = x.array
        if isinstance(x, list):
            x = np.asarray(x, np.float64)
        if not isinstance(x, np.ndarray):
            return None
        x = np.asarray(x)
        x = x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
        _set(case, name, x)
    case.options = {name: value for name, value in case.options.items() if value is not None}
    case.options |= {"rung": "auto", "precision": None}
    return case


def _largest(case: Case) -> float:
    """Return a bound of the scores, and of other numbers beyond which rounding decides."""
    plain = case.plain()

    def most(x: Any) -> float:
        x = np.abs(np.asarray(x, np.float64))
        return float(x[np.isfinite(x)].max(initial=0.0))

    q, k, v, dout = map(most, (*plain.operands, case.dout))
    head_dim = plain.q.shape[-1]
    scale = case.options.get("scale")
    scale = 1.0 / head_dim**0.5 if scale is None else abs(float(scale))
    score = q * k * head_dim * scale
    mask = case.options.get("attn_mask")
    if mask is not None and is_floating(mask.dtype):
        score += most(mask)
    if (slopes := case.options.get("alibi_slopes")) is not None:
        offset = abs(int(case.options.get("causal_offset", 0)))
        score += most(slopes) * (sum(plain.q.shape[-2:-1]) + plain.k.shape[-2] + offset)
    # Beyond 1e28 a product on the way overflows float32, be its other factor 0 in the end.
    factors = max(q * max(scale, 1.0), k) / 1e25
    sizes = [score, v, dout, 0.0 if case.dlse is None else most(case.dlse)]
    return max(factors, max(sizes) / 10.0)


def _check_kinds(actual: dict[str, Any], case: Case) -> None:
    """Check dtypes of results whose values rounding decides."""
    for name, got in actual.items():
        own = acc_dtype(case.q.dtype) if name in ("lse", "dsink") else case.q.dtype
        assert name == "dmask" or got.dtype == own, f"{name} is {got.dtype}, not {own}"


class Notes:
    """A file that holds the draw under way, for the parent of a process that dies of it.

    The environment variable ``MINITORCH_FUZZ_NOTES`` names it; without one nothing is written.
    """

    def __init__(self) -> None:
        path = os.environ.get("MINITORCH_FUZZ_NOTES")
        self.file = open(path, "a", encoding="utf-8") if path else None  # noqa: SIM115
        self.counts: dict[str, int] = {}
        if self.file:
            faulthandler.enable(self.file)

    def begin(self, drawn: Any) -> None:
        """Note a draw before it runs."""
        if self.file:
            self.file.seek(0)
            self.file.truncate()
            self.file.write(f"{self.counts}\n{drawn!r}\n")
            self.file.flush()

    def count(self, outcome: str) -> None:
        """Count how a draw ended."""
        self.counts[outcome] = self.counts.get(outcome, 0) + 1
        if sum(self.counts.values()) % 500 == 0:
            gc.collect()  # of mods that were compiled for one draw each
