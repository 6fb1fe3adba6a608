"""With a seed, runs are equal bit for bit: again, in another process, with any number of threads.

Each run is a process of its own.  It computes pieces, forward and backward: attention with each of its
options, the layers, products, sums; and it trains the character GPT with dropout.  What comes out is told
by a hash of its bytes, and the losses by their digits.  On the CPU the number of threads differs from run
to run, numba's, OpenMP's and those of BLAS.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import train_gpt
from bench.kit import Figure, Measurement, Record, Run
from common.child import in_child
from training.loop_options import BACKENDS

import minitorch
from kernels import BlockMask
from minitorch import Tensor
from minitorch.training.model_files import read_checkpoint

#: Numbers of threads that the runs on the CPU have, numba's and everyone else's.
THREADS = ((1, 1), (2, 2), (4, 4), (4, 1), (1, 4), (2, 2))
#: What other libraries read their number of threads from.
OTHERS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
#: By name: options of a call of 4 heads, 150 x 150, 32.
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"is_causal": True},
    "window": lambda: {"window_size": (40, 10)},
    "dropout": lambda: {"dropout_p": 0.2, "seed": 3},
    "softcap": lambda: {"softcap": 5.0},
    "ALiBi": lambda: {"alibi_slopes": np.linspace(0.1, 0.4, 4, dtype=np.float32)},
    "boolean mask": lambda: {"attn_mask": _random(150, 150) > 0.0},
    "blocks": lambda: {"block_mask": BlockMask.butterfly(150, 150, 16)},
    "one row": lambda: {},
}
#: Functions of a tensor of 1100 x 160, a size that threads share.
LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: minitorch.softmax(x, 1),
    "GELU": minitorch.GELU,
    "dropout": lambda x: minitorch.dropout(x, 0.3),
    "loss": lambda x: minitorch.softmax_loss(x, np.arange(x.shape[0]) % x.shape[1]),
    "sum of rows": lambda x: x.sum(1),
    "sum of columns": lambda x: x.sum(0),
    "sum": lambda x: x.sum(),
    "element by element": lambda x: (x.exp() + 1.0).log() * x.sigmoid() / (x * x + 1.0),
    "broadcast": lambda x: x * x.sum(1).view(x.shape[0], 1) + x.sum(0),
}
PRODUCTS = ((5, 7, 3), (300, 90, 200), (1100, 160, 130), (20, 3000, 30))


def _random(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _hash(*arrays: Any) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        array = array.to_numpy() if isinstance(array, Tensor) else array
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


# -- one run -----------------------------------------------------------------------------------------


def pieces(tensor: Callable[..., Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the name of each piece, and a hash of its result and of its gradients."""

    def hashed(out: Tensor, *operands: Tensor) -> str:
        (out * out).sum().backward()
        return _hash(out, *(x.grad for x in operands))

    for name, options in CALLS.items():
        rows = 1 if name == "one row" else 150
        q, k, v = (tensor(_random(2, 4, seq, 32)) for seq in (rows, 150, 150))
        yield f"attention, {name}", hashed(q.flash_attention(k, v, **options()), q, k, v)
    for name, layer in LAYERS.items():
        minitorch.manual_seed(1)
        x = tensor(_random(1100, 160))
        yield name, hashed(layer(x), x)
    x = tensor(_random(1100, 160))
    norm = minitorch.LayerNorm1d(160, 1e-5, x.backend, dtype=np.float32)
    yield "layer norm", hashed(norm(x), x, *(p.value for p in norm.parameters()))
    for rows, depth, columns in PRODUCTS:
        a, b = tensor(_random(rows, depth)), tensor(_random(depth, columns))
        yield f"product {rows} x {depth} x {columns}", hashed(a @ b, a, b)


def training(backend: str, steps: int) -> dict[str, Any]:
    """Train the character GPT by its script; return the losses, and a hash of all weights."""
    with tempfile.TemporaryDirectory() as folder:
        with redirect_stdout(sys.stderr):
            train_gpt.main([
                "--backend", backend, "--steps", str(steps), "--out", folder, "--seed", "7",
                "--dropout", "0.1", "--width", "64", "--batch", "8", "--sample", "1",
                "--max-seconds", "1e6",
            ])  # fmt: skip
        losses = json.loads((Path(folder) / "result.json").read_text())["curve"]["train"]
        weights, _ = read_checkpoint(Path(folder) / "model.safetensors")
    return {"losses": losses, "weights": _hash(*(weights[name] for name in sorted(weights)))}


def one_run(backend: str, steps: int) -> dict[str, Any]:
    """Compute everything in this process; return names and hashes, and the losses."""

    def tensor(array: Any) -> Tensor:
        return minitorch.from_numpy(array, BACKENDS[backend], requires_grad=True)

    return {**dict(pieces(tensor)), **(training(backend, steps) if steps else {})}


# -- the comparison ----------------------------------------------------------------------------------


def run_apart(backend: str, steps: int, threads: tuple[int, int] | None) -> dict[str, Any]:
    """Return what :func:`one_run` finds in a process with so many threads of numba, and of all others."""
    given: dict[str, Any] = {}
    if threads:
        own, others = map(str, threads)
        given = {"NUMBA_NUM_THREADS": own, **dict.fromkeys(OTHERS, others)}
    return in_child(one_run, backend, steps, **given)


def differences(runs: list[dict[str, Any]]) -> list[str]:
    """Return the names of what is not the same in all runs."""
    return sorted(n for n in runs[0] if any(one[n] != runs[0][n] for one in runs[1:]))


def cases(run: Run) -> Record:
    on_cpu = run.device == "cpu"
    plans = list(THREADS[: run.runs]) if on_cpu else [None, None]
    runs = [run_apart("fast" if on_cpu else "cuda", run.steps, plan) for plan in plans]
    different, threads = (
        differences(runs),
        (f"{own} and {other}" for own, other in filter(None, plans)),
    )
    return {
        "runs": len(runs), "pieces": len(runs[0].keys() - {"losses", "weights"}), "steps": run.steps,
        "different": len(different), "last_loss": runs[0].get("losses", [0.0])[-1],
        "threads_of_numba_and_of_others": ", ".join(threads), "which_differ": different,
    }  # fmt: skip


def figures(record: Record) -> list[Figure]:
    return [Figure("results that differ", record["different"], 0, is_most=True)]


MEASUREMENT = Measurement(
    "determinism", "Does a seed give the same bits again, in another process, with any number of threads?",
    cases,
    {"cpu": {"normal": {"steps": 60, "runs": len(THREADS)}, "quick": {"steps": 2, "runs": 2}},
     "cuda": {"normal": {"steps": 60}, "quick": {"steps": 2}}},
    figures=figures, minutes={"cpu": 2, "cuda": 1}, folder="reliability",
)  # fmt: skip
