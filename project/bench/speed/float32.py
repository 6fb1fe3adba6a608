"""Attention of float32 on tensor cores beside PyTorch's float32 backends: errors, and TFLOP/s; on a GPU.

python -m project.bench.speed.float32 [head dims, as 64,128] [lengths, as 512,4096]

Errors are those of a small call against float64, root mean square and largest, as shares of the root mean
square of what is right.  All are timed in turn, over and over, and the medians count; our times are those
of the public functions, with splitting, delta and conversions; PyTorch's MATH is left out of long calls.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import kernels
from kernels.runtime.targets import EventTimer, why_no_cuda

#: Tokens of a batch, and columns of all heads.
TOKENS, HIDDEN = 16384, 2048
ROUNDS, LAUNCHES, CHECKED, LONGEST_MATH = 5, 3, 1024, 2048
#: What we run: name → options.
OURS: dict[str, dict[str, Any]] = {
    "float32": {"precision": "float32", "deterministic": False},
    "float32, deterministic": {"precision": "float32"},
    "tf32": {"precision": "tf32", "deterministic": False},
}
THEIRS = ("EFFICIENT_ATTENTION", "MATH")
GRADIENTS = ("out", "dq", "dk", "dv")


def _arrays(torch: Any, heads: int, seq: int, width: int) -> list[Any]:
    random = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(1, heads, seq, width, device="cuda", generator=random) for _ in range(4)]


def _ours(
    arrays: list[Any], options: dict[str, Any], is_causal: bool
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return our forward and our backward pass."""
    q, k, v, dout = arrays
    own = {**options, "rung": "flash2_mma", "is_causal": is_causal}
    out, lse = kernels.flash_attention_forward(q, k, v, **own)
    return (
        lambda: kernels.flash_attention_forward(q, k, v, **own)[0],
        lambda: kernels.flash_attention_backward(dout, q, k, v, out, lse, **own),
    )


def _theirs(
    torch: Any, arrays: list[Any], backend: str | None, is_causal: bool
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return PyTorch's forward and backward pass on a backend, or its formula where None."""
    from torch.nn.attention import SDPBackend, sdpa_kernel  # type: ignore[import-not-found]

    *operands, dout = arrays
    leaves = [x.detach().clone().requires_grad_() for x in operands]

    def forward(own: Any = operands) -> Any:
        with sdpa_kernel(getattr(SDPBackend, backend)) if backend else nullcontext():
            if backend:
                return torch.nn.functional.scaled_dot_product_attention(*own, is_causal=is_causal)
            q, k, v = own
            scores = q @ k.mT / q.shape[-1] ** 0.5
            if is_causal:
                scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1) > 0, -torch.inf)
            return torch.softmax(scores, -1) @ v

    out = forward(leaves)
    return forward, lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def errors(torch: Any, width: int) -> None:
    """Print the errors of all, full and causal."""
    for is_causal in (False, True):
        arrays = _arrays(torch, 4, CHECKED, width)
        wide = _theirs(torch, [x.double() for x in arrays], None, is_causal)
        wanted = [wide[0](), *wide[1]()]
        runs = {name: _ours(arrays, options, is_causal) for name, options in OURS.items()}
        runs |= {name: _theirs(torch, arrays, name, is_causal) for name in THEIRS}
        for name, (forward, backward) in runs.items():
            line = f"d {width} {'causal' if is_causal else 'full':6} {name:23}"
            results = (forward(), *backward())
            for what, found, right in zip(GRADIENTS, results, wanted, strict=True):
                off = torch.as_tensor(found, device="cuda").double() - right
                size = right.square().mean().sqrt()
                worst = (off.abs().max() / size).item()
                line += f"  {what} {(off.square().mean().sqrt() / size).item():.1e} {worst:.1e}"
            print(line, flush=True)


def times(torch: Any, width: int, seq: int) -> None:
    """Print TFLOP/s of all, full and causal, and ours over PyTorch's best."""
    heads = HIDDEN // width * TOKENS // seq
    for is_causal in (False, True):
        arrays = _arrays(torch, heads, seq, width)
        runs = {name: _ours(arrays, options, is_causal) for name, options in OURS.items()}
        peers = [name for name in THEIRS if name != "MATH" or seq <= LONGEST_MATH]
        runs |= {name: _theirs(torch, arrays, name, is_causal) for name in peers}
        work = 4e-12 * heads * seq * seq * width * (0.5 if is_causal else 1.0)
        for direction, factor in (0, 1.0), (1, 2.5):
            seconds: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(ROUNDS + 1):
                for name, passes in runs.items():
                    with EventTimer() as timer:
                        for _ in range(LAUNCHES):
                            passes[direction]()
                    seconds[name].append(timer.seconds / LAUNCHES)
            # The first round compiles, and warms up.
            speed = {n: factor * work / statistics.median(s[1:]) for n, s in seconds.items()}
            best = max(speed[name] for name in peers)
            line = f"d {width} N {seq:5} {'causal' if is_causal else 'full':6} "
            line += "backward" if direction else "forward "
            for name, found in speed.items():
                ratio = f" ({found / best:.2f})" if name in OURS else ""
                line += f"  {name} {found:.1f}{ratio}"
            print(line, flush=True)


def main() -> None:
    """Compare errors and speed."""
    if (missing := why_no_cuda()) is not None:
        raise SystemExit(missing)
    import torch  # type: ignore[import-not-found]  # an optional peer

    texts = [*sys.argv[1:], *("64,128", "512,2048,16384")[len(sys.argv) - 1 :]]
    widths, lengths = ([int(x) for x in text.split(",") if x] for text in texts)
    for width in widths:
        errors(torch, width)
        for seq in lengths:
            times(torch, width, seq)


if __name__ == "__main__":
    main()
