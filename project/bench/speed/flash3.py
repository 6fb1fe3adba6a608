"""Hopper's rung on a GPU, forward and backward: whether it is right, and TFLOP/s beside PyTorch's backends.

python -m project.bench.speed.flash3 [head dims, as 64,128] [lengths, as 2048,8192]
python -m project.bench.speed.flash3 72,80,120,192,256 ""

The second form checks the layouts of other widths and times nothing; compiling takes most of its time.

A line for each width, mask and length.  All are timed in turn, over and over, and the medians count:
``atomic`` and ``determ.`` are our backward pass in both modes, delta and conversions included, ``call`` the
public function with all that Python does.  PyTorch is timed if it is there.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import kernels
from kernels import make_problem
from kernels.cuda.attention.flash3_wgmma.backward import launch as flash3_wgmma_backward
from kernels.cuda.attention.flash3_wgmma.forward import launch as flash3_wgmma
from kernels.cuda.runtime.arrays import empty_device, to_device, to_host
from kernels.problem.operands import Operands
from kernels.reference import attention as reference
from kernels.runtime.dtypes import FLOAT16, FLOAT32
from kernels.runtime.targets import EventTimer, why_no_cuda

#: Tokens of a batch, and columns of all heads.
TOKENS, HIDDEN = 16384, 2048
ROUNDS, LAUNCHES = 5, 4
#: What is checked: seq_q, seq_k, head_dim, value_dim, lower and upper bound.
CHECKED = (
    (300, 300, 64, 64, -300, 300),
    (1000, 1000, 64, 64, -1000, 0),
    (517, 700, 128, 128, -517, 183),
    (700, 700, 128, 128, -100, 50),
    (333, 333, 80, 96, -333, 0),
    (333, 333, 72, 128, -333, 0),
    (300, 260, 120, 64, -300, -60),
    (260, 300, 192, 128, -260, 40),
    (300, 300, 256, 256, -300, 0),
)


def _arrays(sizes: tuple[tuple[int, ...], ...], rng: np.random.Generator) -> list[Any]:
    return [rng.standard_normal(size, dtype=np.float32).astype(FLOAT16) for size in sizes]


def check(widths: list[int]) -> None:
    """Compare both modes with the textbook in float64; print the largest errors.

    Args:
        widths: Head dims of what is checked.

    Raises:
        SystemExit: If a gradient is off by more than four units of float16, or differs between two runs
            that were asked to be the same.
    """
    rng, failed = np.random.default_rng(0), False
    for seq_q, seq_k, head_dim, value_dim, lower, upper in CHECKED:
        if head_dim not in widths:
            continue
        sizes = (seq_q, head_dim), (seq_k, head_dim), (seq_k, value_dim), (seq_q, value_dim)
        host = _arrays(tuple((2, 3, *size) for size in sizes), rng)
        problem = replace(make_problem(*host[:3]), lower=lower, upper=upper)
        wide = [x.astype(np.float64) for x in host]
        textbook = replace(make_problem(*wide[:3]), lower=lower, upper=upper)
        expected = _textbook(textbook, wide)
        call = _call(problem, [to_device(x) for x in host])
        flash3_wgmma.forward(problem, (0, 0), call)
        for deterministic in (True, False):
            asked, runs = replace(problem, deterministic=deterministic), []
            for _ in range(3):
                flash3_wgmma_backward.backward(asked, (0, 0), call)
                runs.append([to_host(getattr(call, name)) for name in ("dq", "dk", "dv")])
            errors = [
                np.abs(x.astype(np.float64) - y).max() / max(1.0, np.abs(y).max())
                for x, y in zip([to_host(call.out), *runs[0]], expected, strict=True)
            ]
            same = all(
                np.array_equal(x, y) for run in runs[1:] for x, y in zip(run, runs[0], strict=True)
            )
            is_right = (
                np.isfinite(errors).all() and max(errors) <= 2**-8 and (same or not deterministic)
            )
            failed |= not is_right
            print(
                f"{(seq_q, seq_k, head_dim, value_dim, lower, upper)} deterministic {deterministic}: "
                f"errors {' '.join(f'{error:.1e}' for error in errors)} same {same} "
                f"{'right' if is_right else 'WRONG'}",
                flush=True,
            )
    if failed:
        raise SystemExit("wrong results; no speeds are measured")


def _textbook(problem: Any, wide: list[Any]) -> list[Any]:
    """Return out, dq, dk and dv in float64."""
    q, k, v, dout = wide
    shapes = {"dq": q.shape, "dk": k.shape, "dv": v.shape}
    operands = Operands(
        q, k, v, out=np.empty(dout.shape), lse=np.empty(dout.shape[:3]), dout=dout,
        **{name: np.empty(shape) for name, shape in shapes.items()},
    )  # fmt: skip
    reference.attention(problem, (1, 1), operands)
    reference.attention_backward(problem, (1, 1), operands)
    return [operands.out, operands.dq, operands.dk, operands.dv]


def _call(problem: Any, tensors: list[Any]) -> Operands:
    """Return what the kernels of a call take: (batch, heads, seq, dim) on the device."""
    q, k, v, dout = tensors
    gradients = {
        f"d{x}": empty_device(y.shape, FLOAT16) for x, y in zip("qkv", tensors, strict=False)
    }
    return Operands(
        q, k, v, out=empty_device(dout.shape, FLOAT16), lse=empty_device(dout.shape[:3], FLOAT32),
        dout=dout, **gradients,
    )  # fmt: skip


def _ours(host: list[Any], is_causal: bool) -> dict[str, Callable[[], Any]]:
    """Return what is timed of ours, by name."""
    tensors = [to_device(x) for x in host]
    problem = make_problem(*tensors[:3], is_causal=is_causal)
    call = _call(problem, tensors)
    atomic, ordered = (replace(problem, deterministic=flag) for flag in (False, True))

    def forward() -> None:
        flash3_wgmma.forward(problem, (0, 0), call)

    forward()

    def public() -> None:
        kernels.flash_attention_backward(
            call.dout, *tensors[:3], call.out, call.lse, is_causal=is_causal, deterministic=False
        )

    return {
        "forward": forward,
        "atomic": lambda: flash3_wgmma_backward.backward(atomic, (0, 0), call),
        "determ.": lambda: flash3_wgmma_backward.backward(ordered, (0, 0), call),
        "call": public,
    }


def _theirs(host: list[Any], is_causal: bool) -> dict[str, Callable[[], Any]]:
    """Return what is timed of PyTorch, by name; nothing if it is not there."""
    try:
        import torch  # type: ignore[import-not-found]
        from torch.nn.attention import (  # type: ignore[import-not-found]
            SDPBackend,
            sdpa_kernel,
        )
    except ImportError:
        return {}
    q, k, v, dout = (torch.from_numpy(x).cuda().requires_grad_(i < 3) for i, x in enumerate(host))
    timed: dict[str, Callable[[], Any]] = {}
    for name, backend in (
        ("FLASH", SDPBackend.FLASH_ATTENTION),
        ("CUDNN", SDPBackend.CUDNN_ATTENTION),
    ):

        def forward(backend: Any = backend) -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=is_causal
                )

        try:
            out = forward()
        except RuntimeError as error:
            print(f"PyTorch has no {name} for this: {str(error)[:80]}")
            continue

        def without_gradients(forward: Any = forward) -> None:
            with torch.no_grad():
                forward()

        def backward(out: Any = out) -> None:
            torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        timed |= {f"{name} forward": without_gradients, f"{name} backward": backward}
    return timed


def speed(widths: list[int], lengths: list[int]) -> None:
    """Print a line for each width, mask and length."""
    numbers = _arrays(((TOKENS * HIDDEN,),) * 4, np.random.default_rng(0)) if lengths else []
    for width in widths:
        for seq in lengths:
            shape = (TOKENS // seq, HIDDEN // width, seq, width)
            host = [x[: np.prod(shape)].reshape(shape) for x in numbers]
            for is_causal in (False, True):
                timed = {**_ours(host, is_causal), **_theirs(host, is_causal)}
                seconds: dict[str, list[float]] = {name: [] for name in timed}
                for run in timed.values():
                    run()  # compiles
                for _ in range(ROUNDS):
                    for name, run in timed.items():
                        with EventTimer() as timer:
                            for _ in range(LAUNCHES):
                                run()
                        seconds[name].append(timer.seconds / LAUNCHES)
                work = 4e-12 * host[0].size * seq / (2 if is_causal else 1)
                rates = {
                    name: work * (1 if "forward" in name else 2.5) / statistics.median(times)
                    for name, times in seconds.items()
                }
                line = " ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
                if "CUDNN backward" in rates:
                    line += f" | atomic / CUDNN {rates['atomic'] / rates['CUDNN backward']:.2f}"
                line += f" determ. / atomic {rates['determ.'] / rates['atomic']:.2f}"
                mask = "causal" if is_causal else "full"
                print(f"d {width} N {seq} {mask}: {line}", flush=True)


def main() -> None:
    """Check, then measure."""
    if (missing := why_no_cuda()) is not None:
        raise SystemExit(missing)
    widths, lengths = (
        [int(x) for x in sys.argv[i].split(",") if x] if len(sys.argv) > i else default
        for i, default in ((1, [64, 128]), (2, [512, 2048, 8192]))
    )
    check(widths)
    speed(widths, lengths)


if __name__ == "__main__":
    main()
