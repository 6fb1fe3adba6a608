"""With a seed a run is the same bit for bit: again, elsewhere, with any number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import booleans, integers
from reliability.determinism import differences, run_apart

import minitorch

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_processes_agree_bit_for_bit_whatever_their_threads() -> None:
    """Attention, layers, products, sums, and the losses and weights of a training with dropout."""
    runs = [run_apart("fast", 3, threads) for threads in ((1, 1), (4, 2))]
    assert differences(runs) == []
    assert len(runs[0]["losses"]) == 3 and len(runs[0]) > 20
    for key in ("weights", "losses", "softmax"):
        assert differences([runs[0], {**runs[1], key: ""}]) == [key]


def stepped(seed: int, batch: int, length: int, dropout: float, steps: int = 2) -> list[Any]:
    """Train a small transformer; return its losses and all its weights."""
    minitorch.manual_seed(seed)
    model = minitorch.DecoderLM(
        n_vocab=40, n_embd=48, n_head=3, n_positions=128, p_dropout=dropout, n_layer=1,
        middle_dim=96, attention="flash", backend=minitorch.FastBackend, dtype=np.float32,
    )  # fmt: skip
    optimizer, rng = minitorch.Adam(model.parameters(), lr=1e-2), np.random.default_rng(seed)
    losses = []
    for _ in range(steps):
        inputs, targets = rng.integers(0, 40, (2, batch, length))
        optimizer.zero_grad()
        loss = model.loss(inputs, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [np.array(losses), *(parameter.value.to_numpy() for parameter in model.parameters())]


@settings(max_examples=6)
@given(integers(0, 99), integers(1, 9), integers(1, 128), booleans())
def test_a_training_has_the_same_bits_with_one_thread_and_with_all(
    seed: int, batch: int, length: int, drops: bool
) -> None:
    dropout, threads = 0.2 * drops, numba.get_num_threads()
    with_all = stepped(seed, batch, length, dropout)
    try:
        numba.set_num_threads(1)
        with_one = stepped(seed, batch, length, dropout)
    finally:
        numba.set_num_threads(threads)
    for one, other in zip(with_one, with_all, strict=True):
        np.testing.assert_array_equal(one, other)


COMPILED_OR_LOADED = """
import hashlib
import numpy as np
from kernels.cpu.layers import fused, gelu

x = np.random.default_rng(0).standard_normal((300, 160)).astype(np.float32)
softmax = fused._softmax.serial
found = np.empty_like(x), gelu.gelu_backward(x[::-1], x)
softmax(x, found[0])
print(hashlib.sha256(b"".join(array.tobytes() for array in found)).hexdigest())
print(sum(softmax.stats.cache_hits.values()))
"""


@pytest.mark.slow
def test_what_a_process_compiles_is_what_the_next_one_finds_on_disk(tmp_path: Path) -> None:
    """A kernel calls its own copies of its helpers in both, and no other's that LLVM made otherwise."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILED_OR_LOADED]
    (first, compiled), (second, loaded) = (
        subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT
        ).stdout.split()
        for _ in range(2)
    )
    assert (compiled, loaded) == ("0", "1")
    assert first == second


@pytest.mark.cuda
def test_two_processes_agree_bit_for_bit_on_a_gpu() -> None:
    assert differences([run_apart("cuda", 20, None) for _ in range(2)]) == []
