"""What the tests of attention over several ranks run on each of them; ``mpiexec`` starts this module."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import minitorch
from minitorch.distributed import positions, ring_attention, world

from ...support.tolerances import assert_close_arrays

GROUP = world()
#: The same draws on every rank, and no second look at one that failed: the others would not follow.
DRAWN = settings(
    derandomize=True, database=None, deadline=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


class Case(NamedTuple):
    """One attention, of which each rank holds a part."""

    q: Any
    k: Any
    v: Any
    dout: Any
    sums: Any
    layout: str
    options: dict[str, Any]


@st.composite
def cases(draw: Any, methods: Any = st.just("ring")) -> tuple[Case, str]:
    """Draw a whole sequence whose rows the ranks can share, every option, and a method."""
    method, layout = draw(methods), draw(st.sampled_from(["zigzag", "contiguous"]))
    chunk = draw(st.integers(1, 12))
    seq = chunk * GROUP.size * (2 if layout == "zigzag" else 1)
    share = GROUP.size if method == "ulysses" else 1
    key_heads, groups = share * draw(st.integers(1, 2)), draw(st.integers(1, 2))
    heads, dim, value_dim = key_heads * groups, draw(st.integers(1, 5)), draw(st.integers(1, 5))
    packed, dtype = draw(st.booleans()), draw(st.sampled_from([np.float32, np.float64]))
    lead = () if packed else draw(st.sampled_from([(), (1,), (2,)]))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))

    def array(heads: int, dim: int) -> Any:
        shape = (seq, heads, dim) if packed else (*lead, heads, seq, dim)
        return random.standard_normal(shape).astype(dtype)

    sums = None
    if packed:
        inner = draw(st.lists(st.integers(0, seq), max_size=6))
        sums = np.array([0, *sorted(inner), seq])
    options: dict[str, Any] = {"enable_gqa": groups > 1, "is_causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["window_size"] = draw(st.tuples(st.integers(-1, seq), st.integers(-1, seq)))
    if draw(st.booleans()):
        options |= {"dropout_p": 0.3, "seed": draw(st.integers(0, 2**64 - 1))}
    if draw(st.booleans()):
        options["softcap"] = 2.0
    own = (
        array(heads, dim),
        array(key_heads, dim),
        array(key_heads, value_dim),
        array(heads, value_dim),
    )
    return Case(*own, sums, layout, options), method


def computed(case: Case, method: str = "", rows: Any = slice(None)) -> list[Any]:
    """Return out, dq, dk and dv, on one device unless a method is given."""
    axis = 0 if case.sums is not None else case.q.ndim - 2
    own = [minitorch.from_numpy(np.take(x, rows, axis) if method else x) for x in case[:4]]
    q, k, v, dout = own
    for leaf in (q, k, v):
        leaf.requires_grad_(True)
    if method:
        place = {"layout": case.layout, "cu_seqlens": case.sums, "method": method}
        out = ring_attention(q, k, v, GROUP, **place, **case.options)
    elif case.sums is not None:
        out = q.flash_attention_varlen(k, v, case.sums, case.sums, **case.options)
    else:
        out = q.flash_attention(k, v, **case.options)
    out.backward(dout)
    results = [out.to_numpy(), *(x.grad.to_numpy() for x in (q, k, v))]
    return results if method else [np.take(x, rows, axis) for x in results]


@settings(DRAWN, max_examples=40)
@given(cases(st.sampled_from(["ring", "ring", "all-gather", "ulysses"])))
def all_methods_are_one_device(drawn: tuple[Case, str]) -> None:
    """Compare out and gradients of this rank's rows, and two runs bit for bit."""
    case, method = drawn
    axis = 0 if case.sums is not None else case.q.ndim - 2
    rows = positions(case.q.shape[axis], GROUP, case.layout)
    found = computed(case, method, rows)
    for name, x, wanted in zip(
        ("out", "dq", "dk", "dv"), found, computed(case, "", rows), strict=True
    ):
        what = f"{name} of {method}, {case.layout}, {case.q.shape}, {case.sums}, {case.options}"
        assert_close_arrays(
            x, wanted, case.q.dtype, what=what, size=max(1.0, float(abs(wanted).max(initial=0)))
        )
    for x, again in zip(found, computed(case, method, rows), strict=True):
        np.testing.assert_array_equal(x, again)


if __name__ == "__main__":
    all_methods_are_one_device()
