"""Draw calls of attention whose scores are extreme, and compare them with composed attention.

A call is either masked by numbers of the size of the largest float, in rows, columns, or anywhere, or its q
and k are so large that scores are up to 10¹².  Masked scores are compared with the textbook in the dtype of
sums, which rounds a score as the kernels do, and large ones with the textbook in float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kernels import launch
from kernels.problem.operands import make_operands
from kernels.reference.scores import packed_parts
from kernels.runtime.dtypes import acc_dtype, is_half, rounded

from ..attention.strategies import FEATURES, Case, cases, sum_to

#: How far P may be off, for a row that is compared.
ERROR = {np.dtype(np.float32): 4e-3, np.dtype(np.float64): 1e-6}
HALF_ERROR = 3e-2
#: Names of places in a mask.
PLACES = ("a row", "all", "columns", "anywhere", "a row and columns")
#: Options that would multiply an extreme mask, and a derivative would hide all else.
NOT_MASKED = frozenset(("bool mask", "score_mod", "softcap"))


@st.composite
def masked(draw: Any, cases: st.SearchStrategy[Case]) -> Case:
    """Draw a case and put extreme numbers into a floating mask."""
    case = draw(cases)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = case.q.dtype
    most = float(np.finfo(np.float32).max)  # a mask in float64 may be that of a float32 model
    if dtype == np.float16:
        most = 65504.0
    large = [-most, most / 2, -most / 2]
    large += [] if dtype == np.float16 else [-1e30] + ([-1e9, 1e10] if dtype != np.float64 else [])
    *_, seq_q, seq_k = case.problem().scores_shape
    mask = rng.standard_normal((seq_q, seq_k)) * draw(st.sampled_from([0.0, 1.0]))
    place, value = draw(st.sampled_from(PLACES)), draw(st.sampled_from(large))
    if place.startswith("a row"):
        mask[draw(st.integers(0, seq_q - 1))] = value
    if place.endswith("columns"):
        mask[:, rng.integers(0, seq_k, draw(st.integers(1, 5)))] = draw(st.sampled_from(large))
    if place == "all":
        mask[:] = value
    if place == "anywhere":
        mask[rng.random(mask.shape) < 0.3] = value
    return settled(replace(case, options={**case.options, "attn_mask": rounded(mask, dtype)}))


@st.composite
def scaled(draw: Any, cases: st.SearchStrategy[Case]) -> Case:
    """Draw a case and multiply q and k by powers of two."""
    case = draw(cases)
    powers = [4, 6] if case.q.dtype == np.float16 else [4, 6, 10, 16, 20]
    factors = (2.0 ** draw(st.sampled_from(powers)) for _ in range(2))
    q, k = (
        rounded(x.astype(np.float64) * factor, x.dtype)
        for x, factor in zip((case.q, case.k), factors, strict=True)
    )
    return settled(replace(case, q=q, k=k))


def extreme_cases(
    *sizes: Any, features: Any = FEATURES, taken: Any = None
) -> st.SearchStrategy[Case]:
    """Draw cases of either kind, those with large q and k also with an ordinary floating mask.

    Args:
        sizes: The dtypes, lengths, dims and leads of :func:`cases`.
        features: Names of options.
        taken: Returns a case with the options that a rung takes.
    """
    names = [name for name in features if name != "float mask"]
    of_masks = [name for name in names if name not in NOT_MASKED]
    # The gradient of a mask is not multiplied by the derivative of a score_mod that bends large scores.
    with_mask = [name for name in features if name != "score_mod"]
    plain, biased, to_mask = (
        cases(*sizes, features=own).map(taken or _same) for own in (names, with_mask, of_masks)
    )
    return scaled(plain) | scaled(biased) | masked(to_mask)


def _same(case: Case) -> Case:
    return case


def settled(case: Case) -> Case:
    """Return a case in which rows whose probabilities depend on roundings have no gradient."""
    sure = _roundings(case)[1]
    dout = (case.dout.astype(np.float64) * sure[..., None]).astype(case.dout.dtype)
    return replace(case, dout=dout, dlse=None if case.dlse is None else case.dlse * sure)


def _reference(case: Case) -> Case:
    """Return the case of the textbook."""
    own = case.plain()
    return own.in_dtype(acc_dtype(case.q.dtype)) if case.has_mask_gradient else own


def textbook(case: Case) -> dict[str, Any]:
    """Return out, lse and the gradients of composed attention."""
    found = _reference(case).run(launch.NUMPY, "naive")
    return found | dict(
        zip(("dq", "dk", "dv"), case.own(found[name] for name in ("dq", "dk", "dv")), strict=True)
    )


def _roundings(case: Case) -> tuple[Any, Any]:
    """Return by how much roundings may change lse, and the rows whose P they keep, (…, heads, seq_q).

    A product of q and k in the dtype of sums is off by up to (dim + 8) eps Σ|q||k|.  Each addition rounds,
    by eps where tensor cores truncate, and so do the scale, conversions, and the terms of split operands.
    The scores are computed with this error added and with it subtracted, and a score's error is the
    difference.  The largest error of a row bounds the error of its lse, and of log(P / (1 - P)).
    """
    own = _reference(case)
    problem, eps = own.problem(), float(np.finfo(acc_dtype(case.q.dtype)).eps)
    operands = make_operands(launch.NUMPY.memory, problem, *own.operands, own.options)
    operands = operands.viewed(launch.NUMPY.memory, problem)
    q, k, error = operands.q, operands.k, eps * (operands.q.shape[-1] + 8)

    def moved(by: float) -> Any:
        wider = operands.having(
            q=np.concatenate([q, (by * np.abs(q)).astype(q.dtype)], -1),
            k=np.concatenate([k, np.abs(k)], -1),
        )
        for scores, part in packed_parts(problem, wider):
            yield scores.tile(slice(0, part.q.shape[2]), slice(0, part.k.shape[2]))[0]

    changes, rows = [], []
    for near, low, high in zip(moved(0.0), moved(-error), moved(error), strict=True):
        s = np.stack([near, low, high])  # (3, batch, heads, rows, keys)
        with np.errstate(invalid="ignore"):  # of masked scores
            change = np.where(near > -np.inf, s.max(0) - s.min(0), 0.0).max(-1, initial=0.0)
            sink = -np.inf if operands.sink is None else operands.sink
            logits = np.concatenate([near, np.broadcast_to(sink, (*near.shape[:-1], 1))], -1)
            logits = np.sort(logits.astype(np.float64), axis=-1)
            others = np.logaddexp.reduce(logits[..., :-1], axis=-1) - logits[..., -1]
            changes.append(change)
            rows.append(
                (change < error_of(case) / 8) | (others + change < np.log(error_of(case) / 16))
            )
    change, sure = (np.concatenate(x, -1).reshape(problem.lse_shape) for x in (changes, rows))
    return change, sure


def error_of(case: Case) -> float:
    """Return the allowed error of a probability."""
    return HALF_ERROR if is_half(case.q.dtype) else ERROR[case.q.dtype]


def check(case: Case, actual: dict[str, Any], what: str) -> None:
    """Compare results with composed attention's, where these do not depend on roundings."""
    wanted, (change, sure), error = textbook(case), _roundings(case), error_of(case)
    problem, steepest = case.problem(), case.steepest()
    largest = {
        name: np.abs(getattr(case, name).astype(np.float64)).max() for name in ("q", "k", "v")
    }
    dout = np.abs(case.dout.astype(np.float64)).max() + (
        0.0 if case.dlse is None else np.abs(case.dlse).max()
    )
    kept = 1.0 / (1.0 - problem.dropout_p)
    dp = 2.0 * kept * dout * largest["v"] * case.v.shape[-1] ** 0.5 * steepest
    of_rows, of_cols = problem.seq_q**0.5, problem.seq_k**0.5
    share = max(case.q.size // max(case.k.size, 1), case.k.size // max(case.q.size, 1), 1)
    sizes = {
        "out": kept * largest["v"], "lse": 1.0 + np.abs(wanted["lse"]) * 1e-3 + change / error,
        "dv": kept * dout * of_rows * share, "dq": dp * abs(problem.scale) * largest["k"] * share,
        "dk": dp * abs(problem.scale) * largest["q"] * of_rows * share,
        "dmask": dp * of_rows * of_cols * share * problem.heads,
        "dsink": dp * problem.seq_q * share,
    }  # fmt: skip
    for name, expected in wanted.items():
        if expected is None or name not in actual:
            continue
        got = sum_to(np.asarray(actual[name]), expected.shape).astype(np.float64)
        with np.errstate(invalid="ignore"):  # both may be infinite
            apart = np.where(got == expected, 0.0, np.abs(got - expected.astype(np.float64)))
        if name == "out":
            apart = np.where(sure[..., None], apart, 0.0)
        excess = apart / (error * sizes[name] + 1e-30)
        assert not (excess.size and not excess.max() <= 1.0), (
            f"{name} {what} of {case}: off by {excess.max():.3g} times what is allowed"
        )
