"""With a seed, runs are equal bit for bit: again, in another process, with any number of threads.

    python project/reliability/determinism.py                  a minute or two on two cores
    python project/reliability/determinism.py --device cuda    the same process again, on a GPU

Each run is a process of its own.  It computes pieces, forward and backward: attention with each of its
options, the layers, products, sums; and it trains the character GPT with dropout.  What comes out is told
by a hash of its bytes, and the losses by their digits.  On the CPU the number of threads differs from run
to run, numba's, OpenMP's and those of BLAS.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT)]
import train_gpt  # noqa: E402
from bench import measuring  # noqa: E402
from common.command_line import FROM_ZERO, OneLineParser  # noqa: E402
from tqdm import tqdm  # noqa: E402
from training.loop_options import BACKENDS  # noqa: E402

import minitorch  # noqa: E402
from kernels import BlockMask  # noqa: E402
from minitorch import Tensor  # noqa: E402
from minitorch.training.model_files import read_checkpoint  # noqa: E402

ROOT = PROJECT.parent
RECORD = ROOT / "docs" / "results" / "reliability" / "determinism.json"
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


def _random(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _hash(*arrays: Any) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        array = array.to_numpy() if isinstance(array, Tensor) else array
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


# -- one run -----------------------------------------------------------------------------------------


def attention_pieces(tensor: Callable[..., Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the name of each call of attention and a hash of its result and its gradients."""
    for name, options in CALLS.items():
        rows = 1 if name == "one row" else 150
        operands = [tensor(_random(2, 4, seq, 32)) for seq in (rows, 150, 150)]
        out = operands[0].flash_attention(*operands[1:], **options())
        (out * out).sum().backward()
        yield f"attention, {name}", _hash(out, *(x.grad for x in operands))


def layer_pieces(tensor: Callable[..., Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the same of layers, products and sums, of sizes that threads share."""
    layers: dict[str, Callable[[Tensor], Tensor]] = {
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
    for name, layer in layers.items():
        minitorch.manual_seed(1)
        x = tensor(_random(1100, 160))
        out = layer(x)
        (out * out).sum().backward()
        yield name, _hash(out, x.grad)
    for rows, depth, columns in ((5, 7, 3), (300, 90, 200), (1100, 160, 130), (20, 3000, 30)):
        a, b = tensor(_random(rows, depth)), tensor(_random(depth, columns))
        out = a @ b
        (out * out).sum().backward()
        yield f"product {rows} x {depth} x {columns}", _hash(out, a.grad, b.grad)
    norm = minitorch.LayerNorm1d(160, 1e-5, tensor(_random(1)).backend, dtype=np.float32)
    x = tensor(_random(1100, 160))
    out = norm(x)
    (out * out).sum().backward()
    yield "layer norm", _hash(out, x.grad, *(p.value.grad for p in norm.parameters()))


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

    found: dict[str, Any] = {**dict(attention_pieces(tensor)), **dict(layer_pieces(tensor))}
    return {"pieces": found, **(training(backend, steps) if steps else {})}


# -- the comparison ----------------------------------------------------------------------------------


def run_apart(backend: str, steps: int, threads: tuple[int, int] | None) -> dict[str, Any]:
    """Return what :func:`one_run` finds in a process of its own.

    Args:
        backend: "fast" or "cuda".
        steps: Of the training; 0 for none.
        threads: Numba's, and those of OpenMP and BLAS; None leaves them alone.

    Raises:
        RuntimeError: If it fails.
    """
    environment = dict(os.environ)
    if threads is not None:
        environment["NUMBA_NUM_THREADS"] = str(threads[0])
        environment.update(dict.fromkeys(OTHERS, str(threads[1])))
    command = [sys.executable, str(Path(__file__).resolve()), "--one-run", backend]
    done = subprocess.run(
        [*command, "--steps", str(steps)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"a run failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def differences(runs: list[dict[str, Any]]) -> list[str]:
    """Return the names of what is not the same in all runs."""
    first, found = runs[0], set()
    for other in runs[1:]:
        found |= {
            name for name in first["pieces"] if first["pieces"][name] != other["pieces"][name]
        }
        found |= {key for key in ("losses", "weights") if first.get(key) != other.get(key)}
    return sorted(found)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.choice("--device", ("cpu", "cuda"), "cpu", "to run on")
    parser.option("--steps", FROM_ZERO, 60, "of each training")
    parser.add_argument("--json", default=str(RECORD), help="the record (default: %(default)s)")
    parser.add_argument("--one-run", choices=sorted(BACKENDS), help=argparse.SUPPRESS)
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if args.one_run:
        print(json.dumps(one_run(args.one_run, args.steps)))
        return 0
    on_cpu = args.device == "cpu"
    plans = list(THREADS) if on_cpu else [None, None]
    backend = "fast" if on_cpu else "cuda"
    runs = [run_apart(backend, args.steps, plan) for plan in tqdm(plans, unit="run")]
    different = differences(runs)
    measuring.write_record(
        args.json,
        measuring.command_line("project/reliability/determinism.py", argv),
        measuring.name_of(args.device),
        runs=len(runs),
        pieces=len(runs[0]["pieces"]),
        steps=args.steps,
        different=len(different),
        last_loss=runs[0].get("losses", [0.0])[-1],
        threads_of_numba_and_of_others=", ".join(
            f"{own} and {other}" for own, other in filter(None, plans)
        ),
        which_differ=different,
    )
    print(
        f"{len(runs)} runs, {len(runs[0]['pieces'])} pieces and a training of {args.steps} steps "
        f"each: {'not the same: ' + ', '.join(different) if different else 'the same bits in all'}"
    )
    return int(bool(different))


if __name__ == "__main__":
    raise SystemExit(main())
