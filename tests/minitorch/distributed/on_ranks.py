"""What the tests of several ranks run on each; ``mpiexec`` starts this module with the name of a check."""

from __future__ import annotations

import os
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import minitorch
from minitorch import CudaBackend, FastBackend
from minitorch.distributed import (
    GradientAverage,
    MPIGroup,
    check_same,
    grid,
    positions,
    ring_attention,
    world,
)
from minitorch.distributed.nccl_group import NcclGroup

from ...support.tolerances import assert_close_arrays

#: A launcher such as torchrun names the rank; then arrays travel over NCCL.
GROUP: Any = NcclGroup() if "RANK" in os.environ else world()
#: The same draws on every rank, and no second look at one that failed: the others would not follow.
DRAWN = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
DTYPES = st.sampled_from([np.float16, np.float32, np.float32, np.float64, np.float64])


class Case(NamedTuple):
    """One attention, of which each rank holds a part; q, k, v and dout are of the whole sequence."""

    q: Any
    k: Any
    v: Any
    dout: Any
    sums: Any
    layout: str
    method: str
    options: dict[str, Any]

    @property
    def rows(self) -> int:
        """The dimension of the sequence."""
        return 0 if self.sums is not None else self.q.ndim - 2


@st.composite
def cases(draw: Any) -> Case:
    """Draw a sequence whose rows the ranks can share, with every option."""
    method = draw(st.sampled_from(["ring", "ring", "all-gather", "ulysses"]))
    layout = draw(st.sampled_from(["zigzag", "contiguous"]))
    seq = draw(st.integers(1, 12)) * GROUP.size * (2 if layout == "zigzag" else 1)
    share = GROUP.size if method == "ulysses" else 1
    key_heads, groups = share * draw(st.integers(1, 2)), draw(st.integers(1, 2))
    dim, value_dim = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    packed, dtype = draw(st.booleans()), draw(DTYPES)
    lead = () if packed else draw(st.sampled_from([(), (1,), (2,)]))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))

    def array(heads: int, dim: int) -> Any:
        shape = (seq, heads, dim) if packed else (*lead, heads, seq, dim)
        return random.standard_normal(shape).astype(dtype)

    heads = key_heads * groups
    operands = (
        array(heads, dim),
        array(key_heads, dim),
        array(key_heads, value_dim),
        array(heads, value_dim),
    )
    sums = None
    if packed:
        sums = np.array([0, *sorted(draw(st.lists(st.integers(0, seq), max_size=6))), seq])
    options: dict[str, Any] = {"enable_gqa": groups > 1, "is_causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["window_size"] = draw(st.tuples(st.integers(-1, seq), st.integers(-1, seq)))
    if draw(st.booleans()):
        options |= {"dropout_p": 0.3, "seed": draw(st.integers(0, 2**64 - 1))}
    if draw(st.booleans()):
        options["softcap"] = 2.0
    return Case(*operands, sums, layout, method, options)


def computed(
    operands: tuple[Any, ...], attend: Callable[..., Any], backend: Any = FastBackend
) -> list[Any]:
    """Return out, dq, dk and dv."""
    q, k, v, dout = (minitorch.from_numpy(x, backend) for x in operands)
    for leaf in (q, k, v):
        leaf.requires_grad_(True)
    out = attend(q, k, v)
    out.backward(dout)
    gradients: list[Any] = [q.grad, k.grad, v.grad]
    return [out.to_numpy(), *(x.to_numpy() for x in gradients)]


def on_ranks(case: Case, backend: Any = FastBackend) -> list[Any]:
    """Return the results of this rank."""
    rows = positions(case.q.shape[case.rows], GROUP, case.layout)
    place = {"layout": case.layout, "method": case.method, "cu_seqlens": case.sums}
    return computed(
        tuple(np.take(x, rows, case.rows) for x in case[:4]),
        lambda q, k, v: ring_attention(q, k, v, GROUP, **place, **case.options),
        backend,
    )


def on_one_device(case: Case) -> list[Any]:
    """Return the rows of this rank, computed in float64 by one device."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        if case.sums is None:
            return q.flash_attention(k, v, **case.options)
        return q.flash_attention_varlen(k, v, case.sums, case.sums, **case.options)

    whole = computed(tuple(x.astype(np.float64) for x in case[:4]), attend)
    rows = positions(case.q.shape[case.rows], GROUP, case.layout)
    return [np.take(x, rows, case.rows) for x in whole]


def check(case: Case) -> None:
    """Assert that the ranks compute what one device does, to rounding, and in two runs the same bits."""
    found = on_ranks(case)
    for name, x, wanted in zip(("out", "dq", "dk", "dv"), found, on_one_device(case), strict=True):
        what = f"{name} by {case.method} of {case}"
        size = max(1.0, float(abs(wanted).max(initial=0.0)))
        assert_close_arrays(x, wanted, case.q.dtype, what=what, size=size)
    for x, again in zip(found, on_ranks(case), strict=True):
        np.testing.assert_array_equal(x, again)


@settings(DRAWN)
@given(cases())
def attention(case: Case) -> None:
    """Every method with every option is one device."""
    check(case)


def many_heads() -> None:
    """Keys and values of megabytes, too, which go round in shares of their heads."""
    random, seq, dim = np.random.default_rng(3), 512 * GROUP.size, 64
    options = {"is_causal": True, "enable_gqa": True, "dropout_p": 0.3, "seed": 5}
    for sums in (None, [0, 700, seq]):
        shapes = [(2, h, seq, dim) if sums is None else (seq, h, dim) for h in (14, 7, 7, 14)]
        q, k, v, dout = (random.standard_normal(shape) for shape in shapes)
        check(Case(q, k, v, dout, sums, "zigzag", "ring", options))


def device() -> None:
    """Tensors on a device travel through the host."""
    random, seq = np.random.default_rng(2), 4 * GROUP.size
    options = {"is_causal": True, "dropout_p": 0.3, "seed": 5}
    for method, heads, sums, dtype in (
        ("ring", 2, None, np.float16),
        ("ring", 1, [0, 3, seq], np.float64),
        ("all-gather", 1, None, np.float64),
        ("ulysses", GROUP.size, None, np.float64),
    ):
        shape = (heads, seq, 2) if sums is None else (seq, heads, 2)
        q, k, v, dout = (random.standard_normal(shape).astype(dtype) for _ in range(4))
        case = Case(q, k, v, dout, sums, "zigzag", method, options)
        for x, wanted in zip(on_ranks(case, CudaBackend), on_one_device(case), strict=True):
            assert_close_arrays(x, wanted, dtype, what=method)


def captured() -> None:
    """Steps whose gradients are averaged give the same bits, captured and eager."""
    found = []
    for wrap in (lambda step: step, minitorch.graph_step):
        minitorch.manual_seed(3)
        w = minitorch.Parameter(minitorch.rand((4, 5), CudaBackend).to(np.float32))
        optimizer = minitorch.AdamW([w], lr=0.1)
        average = GradientAverage([w], GROUP)

        def step(x: Any, w: Any = w, optimizer: Any = optimizer, average: Any = average) -> Any:
            optimizer.zero_grad()
            loss = (minitorch.from_numpy(x, CudaBackend) @ w.value).exp().sum()
            with average.during_backward():
                loss.backward()
            optimizer.step()
            return loss.detach()

        take, random = wrap(step), np.random.default_rng(GROUP.rank)
        losses = [take(random.random((3, 4), np.float32)).item() for _ in range(9)]
        found.append((losses, w.value.to_numpy().tobytes()))
    assert take.is_captured and len({*losses}) == 9, take.why_eager
    assert found[0] == found[1]


def default_seed() -> None:
    """Without a seed the bits are those of one device after the same ``manual_seed``, on every rank."""
    q = np.zeros((1, 8 * GROUP.size, 4))
    v = np.random.default_rng(1).standard_normal(q.shape)
    case = Case(q, q, v, v, None, "zigzag", "ring", {"dropout_p": 0.5})
    minitorch.manual_seed(3)
    wanted = on_one_device(case)
    minitorch.manual_seed(3 if GROUP.rank == 0 else 100 + GROUP.rank)
    for x, y in zip(on_ranks(case), wanted, strict=True):
        assert_close_arrays(x, y, np.float64)


@settings(DRAWN, max_examples=20)
@given(DTYPES, st.lists(st.integers(0, 5), max_size=3), st.integers(0, 2**16))
def exchanges(dtype: Any, shape: list[int], seed: int) -> None:
    """Each operation of a group moves or adds what it says."""
    group = GROUP.host
    size, rank = group.size, group.rank
    every = np.random.default_rng(seed).standard_normal((size, size, *shape)).astype(dtype)
    own, out = every[rank].copy(), np.empty_like(every[0])

    gathered = np.empty_like(every)
    group.all_gather(own, gathered).wait()
    np.testing.assert_array_equal(gathered, every)

    group.all_to_all(own, out).wait()
    np.testing.assert_array_equal(out, every[:, rank])

    message = own.copy()
    group.broadcast(message, size - 1).wait()
    np.testing.assert_array_equal(message, every[size - 1])

    source = (rank - 1) % size
    with group.together():
        transfers = [group.receive(out, source), group.send(own, (rank + 1) % size)]
    for transfer in transfers:
        transfer.wait()
    np.testing.assert_array_equal(out, every[source])

    if dtype == np.float16:
        if not isinstance(group, MPIGroup):
            return
        with pytest.raises(TypeError, match="convert it to float32"):
            group.all_reduce(own)
        return
    part = np.empty_like(own[0])
    group.reduce_scatter(own, part).wait()
    assert_close_arrays(part, every[:, rank].sum(axis=0), dtype, size=size)
    for operation in ("sum", "mean", "max", "min"):
        total = own.copy()
        group.all_reduce(total, operation).wait()
        assert_close_arrays(total, getattr(every, operation)(axis=0), dtype, size=size)
        totals = np.empty((size, *total.shape), dtype)
        group.all_gather(total, totals).wait()
        for other in totals:  # ranks that add up gradients must keep equal weights
            np.testing.assert_array_equal(other, total)


def grids() -> None:
    """A grid has a row and a column of ranks for each rank, in their order."""
    for ring in range(1, GROUP.size + 1):
        if GROUP.size % ring:
            with pytest.raises(ValueError, match=rf"the group has {GROUP.size}"):
                grid(GROUP, 1, ring)
            continue
        found = grid(GROUP, GROUP.size // ring, ring)
        for group, wanted in (
            (found.ring, [GROUP.rank // ring * ring + i for i in range(ring)]),
            (found.data, [GROUP.rank % ring + i * ring for i in range(GROUP.size // ring)]),
        ):
            ranks = np.empty((group.size, 1), np.int64)
            group.all_gather(np.array([GROUP.rank]), ranks).wait()
            assert ranks[:, 0].tolist() == wanted
            assert wanted[group.rank] == GROUP.rank
    GROUP.barrier()


def wrong_calls() -> None:
    """Every rank gets the same error, in words, and none waits for another."""
    x = minitorch.from_numpy(np.ones((1, 3, 6, 4), np.float32))
    flat = minitorch.from_numpy(np.ones((6, 3, 4), np.float32))
    longer = minitorch.from_numpy(np.ones((1, 3, 6 + 2 * GROUP.rank, 4), np.float32))
    odd = minitorch.from_numpy(np.ones((1, 3, 5, 4), np.float32))
    calls: tuple[Any, ...] = (
        ((longer,) * 3, {}, ValueError, "rank 0 has q"),
        ((x,) * 3, {"softcap": float(GROUP.rank)}, ValueError, "rank 1"),
        ((odd,) * 3, {}, ValueError, "does not divide into 4 equal chunks"),
        ((x,) * 3, {"method": "ulysses"}, ValueError, "do not both divide by 2; use method='ring'"),
        ((x,) * 3, {"method": "tree"}, ValueError, "method must be one of"),
        ((x,) * 3, {"layout": "striped"}, ValueError, "layout must be one of"),
        ((x, odd, odd), {}, ValueError, "must agree in all sizes but heads and dim"),
        ((x,) * 3, {"cu_seqlens": [0, 12]}, ValueError, "shape \\(total, heads, dim\\)"),
        ((flat,) * 3, {"cu_seqlens": [0, 6]}, ValueError, "end with the 12 query rows"),
        ((flat,) * 3, {"cu_seqlens": [0.0, 12.0]}, TypeError, "whole numbers"),
        ((x,) * 3, {"dropout_p": 2.0}, ValueError, "dropout_p must be"),
        ((x, x, np.ones(3)), {}, TypeError, "v must be a tensor"),
    )
    for operands, options, error, words in calls:
        with pytest.raises(error, match=words):
            ring_attention(operands[0], operands[1], operands[2], GROUP, **options)
    facts = {"numpy": "2.0", "--lr": 0.1 * GROUP.rank}
    with pytest.raises(ValueError, match=r"--lr is 0\.0 on rank 0 and 0\.1 on rank 1"):
        check_same(GROUP, facts)
    with pytest.raises(ValueError, match="b is missing on rank 0 and 1 on rank 1"):
        check_same(GROUP, {"a": 1, **({"b": 1} if GROUP.rank else {})})
    check_same(GROUP, {"a": 1})
    array = np.ones((2, 3))
    for call, error, words in (
        (lambda: GROUP.send(array, 2), ValueError, "to must be a rank from 0 to 1, got 2"),
        (lambda: GROUP.receive(array.T, 0), ValueError, "must be contiguous"),
        (lambda: GROUP.all_reduce([1.0]), TypeError, "must be a NumPy array"),
        (lambda: GROUP.all_reduce(array, "product"), ValueError, "operation must be one of"),
        (lambda: GROUP.all_gather(array, array), ValueError, "in a group of 2"),
        (lambda: GROUP.reduce_scatter(np.ones((3, 2)), array), ValueError, "a part for each rank"),
        (lambda: GROUP.all_to_all(array, np.ones((3, 3))), ValueError, "in a group of 2"),
    ):
        with pytest.raises(error, match=words):
            call()


def memory() -> None:
    """A rank needs its share of one device's memory, and less than two blocks of keys and values."""
    heads, rows, dim = 4, 4096, 32
    share = np.ones((1, heads, rows, dim), np.float32)
    whole = np.ones((1, heads, rows * GROUP.size, dim), np.float32)

    def peaks(array: Any, attend: Callable[..., Any]) -> Any:
        """Return the most memory in the forward and in the backward pass, in blocks of a rank."""
        q, k, v, dout = (minitorch.from_numpy(array) for _ in range(4))
        for leaf in (q, k, v):
            leaf.requires_grad_(True)
        found = []
        for is_traced in (False, True):  # the first call compiles, which is slow under tracemalloc
            q.grad = k.grad = v.grad = None
            if is_traced:
                tracemalloc.start()
            out: Any = attend(q, k, v)
            found = [tracemalloc.get_traced_memory()[1]]
            tracemalloc.reset_peak()
            out.backward(dout)
            found.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        return np.array(found) / (2 * share.nbytes)

    alone = np.zeros(2)
    if GROUP.rank == 0:
        alone = peaks(whole, lambda q, k, v: q.flash_attention(k, v, is_causal=True))
    GROUP.broadcast(alone).wait()
    own = peaks(share, lambda q, k, v: ring_attention(q, k, v, GROUP, is_causal=True))

    forward, backward = own - alone / GROUP.size
    assert forward < 2.0, forward
    assert backward < 2.0, backward


CHECKS = (
    attention, many_heads, device, captured, default_seed, exchanges, grids, wrong_calls, memory,
)  # fmt: skip

if __name__ == "__main__":
    {check.__name__: check for check in CHECKS}[sys.argv[1]]()
