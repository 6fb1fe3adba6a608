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

import minitorch
from kernels import launch
from kernels.runtime.dtypes import acc_dtype, is_half, rounded

from ..attention.strategies import FEATURES, Case, cases, sum_to

#: How far P may be off, for a row that is compared.
ERROR = {np.dtype(np.float32): 4e-3, np.dtype(np.float64): 1e-6}
HALF_ERROR = 3e-2
#: Names of places in a mask.
PLACES = ("a row", "all", "a column", "anywhere", "a row and a column")


def masked(draw: Any, case: Case, rng: np.random.Generator) -> Case:
    """Return a case with extreme numbers in its floating mask."""
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
    if place.endswith("a column"):
        mask[:, draw(st.integers(0, seq_k - 1))] = draw(st.sampled_from(large))
    if place == "all":
        mask[:] = value
    if place == "anywhere":
        mask[rng.random(mask.shape) < 0.3] = value
    return replace(case, options={**case.options, "attn_mask": rounded(mask, dtype)})


def scaled(draw: Any, case: Case) -> Case:
    """Return a case with larger q and k."""
    powers = [4, 6] if case.q.dtype == np.float16 else [4, 6, 10, 16, 20]
    factors = (2.0 ** draw(st.sampled_from(powers)) for _ in range(2))
    q, k = (
        rounded(x.astype(np.float64) * factor, x.dtype)
        for x, factor in zip((case.q, case.k), factors, strict=True)
    )
    return replace(case, q=q, k=k)


@st.composite
def extreme_cases(
    draw: Any, dtypes: Any, lengths: Any, dims: Any, leads: Any, features: Any = FEATURES
) -> Case:
    """Draw a case; rows whose probabilities depend on roundings have no gradient."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    is_masked = draw(st.booleans())
    # Large scores make their derivatives large, too: those of an extreme mask would hide all else.
    left_out = {"bool mask", "float mask", "score_mod", "softcap"} if is_masked else {"float mask"}
    features = [name for name in features if name not in left_out]
    case = draw(cases(dtypes, lengths, dims, leads, features=features))
    case = masked(draw, case, rng) if is_masked else scaled(draw, case)
    sure = ~_unsure(case, rng)
    dout = (case.dout.astype(np.float64) * sure[..., None]).astype(case.dout.dtype)
    dlse = None if case.dlse is None else case.dlse * sure
    return replace(case, dout=dout, dlse=dlse)


def textbook(case: Case) -> dict[str, Any]:
    """Return out, lse and the gradients of composed attention."""
    if "attn_mask" in case.options and case.has_mask_gradient:
        own = acc_dtype(case.q.dtype)
        plain = case.plain().in_dtype(own)
        found = plain.run(launch.NUMPY, "naive")
        dq, dk, dv = case.own([found[name] for name in ("dq", "dk", "dv")])
        return {**found, "dq": dq, "dk": dk, "dv": dv}
    return case.oracle()


def _unsure(case: Case, rng: np.random.Generator) -> Any:
    """Return the rows, (…, heads, seq_q), that another rounding of q would change."""
    own, noise = case.plain(), 2.0**-20 if acc_dtype(case.q.dtype) == np.float32 else 2.0**-48
    size, changed = np.abs(own.v).max(initial=1.0), 0.0
    out = own.run(launch.NUMPY, "naive")["out"]
    for _ in range(6):
        q = own.q * (1.0 + noise * rng.standard_normal(own.q.shape))
        other = replace(own, q=q).run(launch.NUMPY, "naive")["out"]
        changed = np.maximum(changed, np.abs(other - out).max(axis=-1, initial=0.0))
    return changed > error_of(case) / 20 * size


def error_of(case: Case) -> float:
    """Return the allowed error of a probability."""
    return HALF_ERROR if is_half(case.q.dtype) else ERROR[case.q.dtype]


def check(case: Case, actual: dict[str, Any], what: str) -> None:
    """Compare results with composed attention's, where these do not depend on roundings."""
    rng = np.random.default_rng(0)
    wanted, sure, error = textbook(case), ~_unsure(case, rng), error_of(case)
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
        "out": kept * largest["v"], "lse": 1.0 + np.abs(wanted["lse"]) * 1e-3,
        "dv": kept * dout * of_rows * share, "dq": dp * abs(problem.scale) * largest["k"] * share,
        "dk": dp * abs(problem.scale) * largest["q"] * of_rows * share,
        "dmask": dp * of_rows * of_cols * share * problem.heads,
        "dsink": dp * problem.seq_q * share,
    }  # fmt: skip
    for name, expected in wanted.items():
        if expected is None or name not in actual:
            continue
        got = sum_to(np.asarray(actual[name]), expected.shape).astype(np.float64)
        apart = np.where(got == expected, 0.0, np.abs(got - expected.astype(np.float64)))
        if name in ("out", "lse"):
            apart = np.where(sure[..., None] if name == "out" else sure, apart, 0.0)
        excess = apart / (error * sizes[name] + 1e-30)
        assert not (excess.size and not excess.max() <= 1.0), (
            f"{name} {what} of {case}: off by {excess.max():.3g} times what is allowed"
        )


def by_tensors(case: Case, backend: Any, wrap: Any = None, **options: Any) -> dict[str, Any]:
    """Return the results of ``Tensor.flash_attention`` by name, as arrays of NumPy."""
    wrap = wrap or (lambda array, **given: minitorch.from_numpy(np.array(array), backend, **given))
    q, k, v = (wrap(x, requires_grad=True) for x in case.operands)
    own = {**case.options, **options}
    for name, asks in (("attn_mask", case.has_mask_gradient), ("sink", case.has_sink)):
        if asks:
            array = case.options[name]
            array = array if name == "attn_mask" else array.astype(case.problem().acc_dtype)
            own[name] = wrap(array, requires_grad=True)
    out, lse = q.flash_attention(k, v, return_lse=True, **own)
    total = (out * wrap(case.dout)).sum()
    if case.dlse is not None:
        rows = np.where(np.isfinite(lse.to_numpy()), case.dlse, 0)
        finite = lse.where(wrap(np.isfinite(lse.to_numpy())), 0.0)
        total = total + (finite * wrap(rows.astype(case.dlse.dtype))).sum().to(total.dtype)
    total.backward()
    found = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    found |= {"dmask": own["attn_mask"].grad} if case.has_mask_gradient else {}
    found |= {"dsink": own["sink"].grad} if case.has_sink else {}
    return {name: x.to_numpy() for name, x in found.items()}
