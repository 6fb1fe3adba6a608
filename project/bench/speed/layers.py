"""Layers and optimiser of a training step on a GPU: microseconds, GB/s, and PyTorch's beside them.

python -m project.bench.speed.layers          GPT-2 small at 16k tokens
python -m project.bench.speed.layers host     what Python takes to launch attention

GB/s counts what a kernel has to read and write at least.  All of a line are timed in turn, over and over,
and the medians count.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import kernels
from kernels.cuda.layers import fused
from kernels.cuda.runtime.arrays import empty_device, to_device
from kernels.runtime.dtypes import BFLOAT16, FLOAT16, FLOAT32, rounded
from kernels.runtime.targets import EventTimer, cuda, why_no_cuda
from minitorch import CudaBackend, Tensor, from_numpy
from minitorch.layers.linear_cross_entropy import linear_cross_entropy

ROUNDS, LAUNCHES = 9, 5
#: Tokens, width and vocabulary, and the rows whose logits are there at a time.
TOKENS, WIDTH, WORDS, ROWS = 16_384, 768, 50_304, 4096
#: Parameters of GPT-2 small, about: a table, and matrices and vectors of twelve layers.
SHAPES = [
    (WORDS, WIDTH),
    (1024, WIDTH),
    *[(WIDTH, WIDTH)] * 48,
    *[(WIDTH, 4 * WIDTH)] * 24,
    *[(WIDTH,)] * 98,
]
Step = Callable[[], Any]


def _normal(*shape: int, dtype: Any = BFLOAT16) -> Any:
    rng = np.random.default_rng(sum(shape))
    return to_device(rounded(rng.standard_normal(shape, dtype=np.float32), np.dtype(dtype)))


def _torch() -> Any:
    try:
        import torch  # type: ignore[import-not-found]
    except ImportError:
        return None
    return torch


def line(name: str, gigabytes: float, steps: dict[str, Step]) -> None:
    """Print the medians of some steps that do the same."""
    seconds: dict[str, list[float]] = {key: [] for key in steps}
    for step in steps.values():
        step()
    for _ in range(ROUNDS):
        for key, step in steps.items():
            with EventTimer() as timer:
                for _ in range(LAUNCHES):
                    step()
            seconds[key].append(timer.seconds / LAUNCHES)
    medians = {key: statistics.median(times) for key, times in seconds.items()}
    text = "  ".join(
        f"{key} {1e6 * t:.0f} us {gigabytes / t:.0f} GB/s" for key, t in medians.items()
    )
    print(f"{name:32} {text}", flush=True)


def norms() -> None:
    """Time layer norm, alone and of residual + dropout."""
    x, residual, dout, dhidden = (_normal(TOKENS, WIDTH) for _ in range(4))
    gamma, beta = (_normal(WIDTH, dtype=FLOAT32) for _ in range(2))
    size, noise = 2e-9 * TOKENS * WIDTH, fused.Noise(1, 0.1, 1 / 0.9)
    torch, peer = _torch(), {}
    if torch is not None:
        of = torch.nn.functional
        t = [torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        w = [torch.randn(WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        for one in (*t[:2], *w):
            one.requires_grad_(True)

        def forward() -> Any:
            return of.layer_norm(t[0], (WIDTH,), *w)

        def residual_forward() -> Any:
            hidden = t[1] + of.dropout(t[0], 0.1)
            return hidden, of.layer_norm(hidden, (WIDTH,), *w)

        out, both = forward(), residual_forward()
        peer = {
            "norm": forward,
            "norm back": lambda: torch.autograd.grad(out, (t[0], *w), t[2], retain_graph=True),
            "residual": residual_forward,
            "residual back": lambda: torch.autograd.grad(
                both, (*t[:2], *w), (t[2], t[2]), retain_graph=True
            ),
        }

    _, mean, rstd = fused.layer_norm(x, gamma, beta, 1e-5)
    kept = gamma, mean, rstd
    own: dict[str, tuple[str, int, Step]] = {
        "norm": ("layer norm", 2, lambda: fused.layer_norm(x, gamma, beta, 1e-5)),
        "norm back": ("its gradient", 3, lambda: fused.layer_norm_backward(dout, x, *kept)),
        "residual": (
            "residual + dropout, norm",
            4,
            lambda: fused.residual_layer_norm(x, residual, gamma, beta, 1e-5, noise),
        ),
        "residual back": (
            "its gradient",
            5,
            lambda: fused.residual_layer_norm_backward(dout, dhidden, x, *kept, noise),
        ),
    }
    for key, (name, tensors, step) in own.items():
        line(name, tensors * size, {"own": step, **({"torch": peer[key]} if peer else {})})


def losses() -> None:
    """Time cross entropy, and the head with its loss in chunks."""
    rows = ROWS
    logits, ids = _normal(rows, WORDS), to_device(np.arange(rows) % WORDS)
    size = 2e-9 * rows * WORDS
    dlosses = _normal(rows, dtype=FLOAT32)
    _, *kept = fused.cross_entropy(logits, ids)
    torch, forward, backward = _torch(), {}, {}
    if torch is not None:
        t = torch.randn(rows, WORDS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        targets = torch.arange(rows, device="cuda")
        forward["torch"] = lambda: torch.nn.functional.cross_entropy(t, targets)
        loss = forward["torch"]()
        backward["torch"] = lambda: torch.autograd.grad(loss, t, retain_graph=True)
    own = fused.cross_entropy, fused.cross_entropy_backward
    line(f"cross entropy, {rows} rows", size, {"own": lambda: own[0](logits, ids), **forward})
    line("its gradient", 2 * size, {"own": lambda: own[1](dlosses, ids, *kept), **backward})
    x = from_numpy(np.zeros((TOKENS, WIDTH), np.float32), CudaBackend).to(BFLOAT16)
    table = from_numpy(np.zeros((WORDS, WIDTH), np.float32), CudaBackend).to(BFLOAT16)
    for operand in (x, table):
        operand.requires_grad_(True)
    targets = np.arange(TOKENS) % WORDS
    weights = table.permute(1, 0)
    line(f"head and loss, {TOKENS} rows", 0.0,
         {"own": lambda: linear_cross_entropy(x, weights, targets)})  # fmt: skip


def optimiser() -> None:
    """Time a step of AdamW with masters, and the norm of the gradients."""
    moved = [
        fused.Moved(
            _normal(*shape, dtype=FLOAT32),
            _normal(*shape),
            to_device(np.zeros(shape, np.float32)),
            to_device(np.zeros(shape, np.float32)),
            len(shape) > 1,
            empty_device(shape, BFLOAT16),
        )
        for shape in SHAPES
    ]
    count = 1e-9 * sum(int(np.prod(shape)) for shape in SHAPES)
    grads = [one.grad for one in moved]
    clip = fused.clip_of(grads, 1.0)
    numbers = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "step": 3}
    line(
        f"AdamW, {1e3 * count:.0f} M",
        28 * count,
        {"own": lambda: fused.adam_many(moved, clip, **numbers)},
    )
    line("norm of gradients", 2 * count, {"own": lambda: fused.clip_of(grads, 1.0)})


def host() -> None:
    """Print how long Python takes for one forward call of attention, on arrays and on tensors."""
    arrays = [_normal(1, 2, 64, 64, dtype=FLOAT16) for _ in range(3)]
    tensors = [from_numpy(np.ones((1, 2, 64, 64), np.float16), CudaBackend) for _ in range(3)]
    learnt = [t.detach() for t in tensors]
    for t in learnt:
        t.requires_grad_(True)

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return q.flash_attention(k, v, is_causal=True, **options)

    own = kernels.flash_attention_forward
    calls: dict[str, Step] = {
        "arrays": lambda: own(*arrays, is_causal=True),
        "arrays, flash2_mma": lambda: own(*arrays, is_causal=True, rung="flash2_mma"),
        "arrays, dropout": lambda: own(*arrays, is_causal=True, dropout_p=0.1, seed=1),
        "tensors": lambda: attend(*tensors),
        "tensors with gradient": lambda: attend(*learnt),
        "tensors, dropout": lambda: attend(*tensors, dropout_p=0.1),
    }
    readings: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(40):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(50):
                call()
            readings[name].append((time.perf_counter() - start) / 50)
            cuda.synchronize()
    for name, times in readings.items():
        print(f"{name:24} {1e6 * statistics.median(times):.1f} us, least {1e6 * min(times):.1f}")


def main() -> None:
    """Measure."""
    if (missing := why_no_cuda()) is not None:
        raise SystemExit(missing)
    cuda.current_context()
    host()
    if "host" not in sys.argv[1:]:
        norms()
        losses()
        optimiser()


if __name__ == "__main__":
    main()
