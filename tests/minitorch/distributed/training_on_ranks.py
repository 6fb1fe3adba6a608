"""What the tests of data parallel training run on each rank; ``mpiexec`` starts it with a check's name."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minitorch
from minitorch.distributed import (
    GradientAverage,
    ShardedOptimizer,
    grid,
    positions,
    spread_sequence,
)

from .on_ranks import DRAWN, GROUP

VOCABULARY, SEQ, STEPS = 11, 6, 4
FEW = settings(DRAWN, max_examples=15)


def model(seed: int, dtype: Any = np.float64, **options: Any) -> Any:
    """Return a small model, the same on all ranks."""
    minitorch.manual_seed(seed)
    return minitorch.DecoderLM(
        VOCABULARY, 12, 2, options.pop("seq", SEQ), 0.0, n_layer=1, middle_dim=16,
        backend=minitorch.FastBackend, dtype=dtype, **options,
    )  # fmt: skip


def batches(seed: int, count: int, share: int) -> Any:
    """Return ids and targets, (count, ranks, share, 2, SEQ)."""
    random = np.random.default_rng(seed)
    return random.integers(0, VOCABULARY, (count, GROUP.size, share, 2, SEQ))


def loss_of(own: Any, part: Any) -> Any:
    """Return the mean loss of a batch, (examples, 2, SEQ)."""
    return own.loss(part[:, 0], part[:, 1])


@FEW
@given(
    seed=st.integers(0, 99),
    share=st.integers(1, 3),
    parts=st.integers(1, 3),
    bucket_bytes=st.sampled_from([1, 700, 4 << 20]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def gradients(seed: int, share: int, parts: int, bucket_bytes: int, dtype: Any) -> None:
    """Averages are the gradients of one device with all examples, accumulated or not, in the same bits."""
    own, whole = model(seed, dtype=dtype), model(seed, dtype=dtype)
    drawn = batches(seed, parts, share)  # (parts, ranks, share, 2, SEQ)
    loss_of(whole, drawn.reshape(-1, 2, SEQ)).backward()
    average = GradientAverage(own.parameters(), GROUP, bucket_bytes)
    runs = []
    for _ in range(2):
        for p in own.parameters():
            p.value.grad = None
        for part in drawn[:-1, GROUP.rank]:
            (loss_of(own, part) / parts).backward()
        with average.during_backward():
            (loss_of(own, drawn[-1, GROUP.rank]) / parts).backward()
        runs.append([p.value.grad.to_numpy().copy() for p in own.parameters()])
    for one, two, p in zip(*runs, whole.parameters(), strict=True):
        np.testing.assert_array_equal(one, two)
        assert one.dtype == dtype
        np.testing.assert_allclose(
            one, p.value.grad.to_numpy(), atol=1e-13 if dtype == np.float64 else 1e-6
        )


def train(own: Any, optimizer: Any, parts: Any, average: Any = None) -> list[float]:
    """Train on batches and return the losses of this rank."""
    losses = []
    for part in parts:
        optimizer.zero_grad()
        loss = loss_of(own, part)
        if average is None:
            loss.backward()
        else:
            with average.during_backward():
                loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@FEW
@given(
    seed=st.integers(0, 99),
    make=st.sampled_from([minitorch.AdamW, minitorch.Adam, minitorch.SGD]),
    sharded=st.booleans(),
    max_norm=st.sampled_from([None, 0.1]),
)
def curves(seed: int, make: Any, sharded: bool, max_norm: float | None) -> None:
    """The losses are those of one device with the whole batch, with a shared state and clipping, too."""
    drawn = batches(seed, STEPS, 2)  # (steps, ranks, 2, 2, SEQ)
    whole, own = model(seed), model(seed)

    class Clipped(make):
        """An optimiser that clips all gradients first."""

        def step(self) -> None:
            if max_norm is not None:
                minitorch.clip_grad_norm_(self.parameters, max_norm)
            super().step()

    expected = train(whole, Clipped(whole.parameters(), lr=0.01), drawn.reshape(STEPS, -1, 2, SEQ))
    if sharded:
        optimizer: Any = ShardedOptimizer(own.parameters(), GROUP, make, max_norm=max_norm, lr=0.01)
    else:
        optimizer = Clipped(own.parameters(), lr=0.01)
    average = GradientAverage(own.parameters(), GROUP, 1000)
    losses = np.array([train(own, optimizer, drawn[:, GROUP.rank], average)]).T  # (steps, 1)
    GROUP.all_reduce(losses).wait()
    np.testing.assert_allclose(losses[:, 0] / GROUP.size, expected, rtol=1e-9)
    for p, q in zip(own.parameters(), whole.parameters(), strict=True):
        np.testing.assert_allclose(p.value.to_numpy(), q.value.to_numpy(), atol=1e-9)


def state() -> None:
    """A rank keeps moments for its share only, and a training goes on from the shares."""
    drawn = batches(3, 2 * STEPS, 2)[:, GROUP.rank]
    runs = []
    for stops in (False, True):
        own = model(1)
        optimizer = ShardedOptimizer(own.parameters(), GROUP, minitorch.AdamW, lr=0.01)
        average = GradientAverage(own.parameters(), GROUP)
        losses = train(own, optimizer, drawn[:STEPS], average)
        if stops:
            saved = optimizer.state_dict()
            optimizer = ShardedOptimizer(own.parameters(), GROUP, minitorch.AdamW, lr=0.5)
            optimizer.load_state_dict(saved)
            assert optimizer.lr == 0.01
        runs.append(losses + train(own, optimizer, drawn[STEPS:], average))
        kept = np.array([sum(p.value.size for p in optimizer.own.parameters)])
        most = max(p.value.size for p in own.parameters())
        total = sum(p.value.size for p in own.parameters())
        assert abs(int(kept[0]) - total / GROUP.size) <= most
        GROUP.all_reduce(kept).wait()
        assert kept[0] == total
    assert runs[0] == runs[1]


def other_weights() -> None:
    """A rank with other weights is named on every rank."""
    own = model(GROUP.rank // 2)  # those of ranks 0 and 1 are the same
    with pytest.raises(ValueError, match="those of rank 2 are not those of rank 0"):
        GradientAverage(own.parameters(), GROUP)


@FEW
@given(
    seed=st.integers(0, 99),
    method=st.sampled_from(["ring", "all-gather"]),
    layout=st.sampled_from(["zigzag", "contiguous"]),
    rotary_theta=st.sampled_from([None, 100.0]),
)
def rings(seed: int, method: str, layout: str, rotary_theta: float | None) -> None:
    """Two rings of ranks, each with other sequences, train as one device does."""
    data, ring = grid(GROUP, 2, GROUP.size // 2)
    seq = 4 * ring.size
    random = np.random.default_rng(seed)
    drawn = random.integers(0, VOCABULARY, (STEPS, data.size, 2, 2, seq))
    options = {"seq": seq, "rotary_theta": rotary_theta, "n_kv_head": 1}
    whole, own = model(seed, **options), model(seed, **options)
    optimizer = minitorch.AdamW(whole.parameters(), lr=0.01)
    expected = train(whole, optimizer, drawn.reshape(STEPS, -1, 2, seq))
    spread_sequence(own, ring, method=method, layout=layout)
    average = GradientAverage(own.parameters(), GROUP)
    mine = drawn[:, data.rank][..., positions(seq, ring, layout)]
    optimizer = ShardedOptimizer(own.parameters(), data, minitorch.AdamW, lr=0.01)
    losses = np.array([train(own, optimizer, mine, average)]).T  # (steps, 1)
    GROUP.all_reduce(losses).wait()
    np.testing.assert_allclose(losses[:, 0] / GROUP.size, expected, rtol=1e-9)


CHECKS = (gradients, curves, state, other_weights, rings)

if __name__ == "__main__":
    {check.__name__: check for check in CHECKS}[sys.argv[1]]()
