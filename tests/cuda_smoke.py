"""One small case of every rung on a GPU, to be run under NVIDIA's compute-sanitizer.

compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.cuda_smoke
compute-sanitizer --tool racecheck --error-exitcode 1 python -m tests.cuda_smoke
"""

from __future__ import annotations

import numpy as np

import kernels
from kernels import launch, reference
from kernels.targets import cuda, why_no_cuda

from .tolerances import assert_close_arrays

#: seq_q, seq_k, head_dim and value_dim that divide no tile.
SHAPES = ((70, 33, 24, 40), (37, 101, 20, 7))


def main() -> None:
    """Run every rung forward and backward and compare with the textbook."""
    if (missing := why_no_cuda()) is not None:
        raise SystemExit(missing)
    rng = np.random.default_rng(0)
    calls = [(rung.name, True) for rung in launch.CUDA.rungs] + [("flash2", False)]
    for rung, deterministic in calls:
        for seq_q, seq_k, head_dim, value_dim in SHAPES:
            sizes = ((seq_q, head_dim), (seq_k, head_dim), (seq_k, value_dim), (seq_q, value_dim))
            q, k, v, dout = (rng.standard_normal((2, *size), dtype=np.float32) for size in sizes)
            problem = kernels.make_problem(
                q, k, v, is_causal=True, rung=rung, deterministic=deterministic
            )
            q_, k_, v_, dout_ = (cuda.to_device(x) for x in (q, k, v, dout))
            out, lse = launch.forward(launch.CUDA, problem, q_, k_, v_)
            results = launch.backward(launch.CUDA, problem, dout_, q_, k_, v_, out, lse)
            q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
            true_out, true_lse = reference.attention(problem, q, k, v)
            gradients = reference.attention_backward(problem, dout, q, k, v, true_out, true_lse)
            for name, got, expected in zip(
                ("out", "dq", "dk", "dv"), (out, *results), (true_out, *gradients), strict=True
            ):
                what = f"{name} by {rung}"
                size = max(1.0, float(np.abs(expected).max()))
                assert_close_arrays(got.copy_to_host(), expected, np.float32, what, size)
        print(f"{rung}{'' if deterministic else ' with atomics'}: right")


if __name__ == "__main__":
    main()
