"""How far the gradients of one training step are from exact ones: ours, and PyTorch's beside them.

    python project/gradient_errors.py --device cuda --preset gpt2-small --after 60
    python project/gradient_errors.py --quick                           tiny sizes, on any machine

Three models with the same weights take the gradients of the same batch: ours in float32, PyTorch's in
float32, and PyTorch's in float64, which counts as exact.  For each kind of parameter, all layers together,
two numbers a side: the root mean square of the errors beside that of the exact gradients, and by which part
of itself a gradient is too short, which is what sums that are cut off instead of rounded show.  The bias of
keys adds the same to all scores of a row, which softmax takes no notice of: its exact gradient is 0.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from typing import Any

import numpy as np
from bench.measuring import command_line, name_of, write_record
from bench.torch_attention import load_torch
from bench.training_contestants import OURS, THEIRS, Batches, Run, size_of
from common.command_line import COUNT, FROM_ZERO, OneLineParser
from training.gpt_presets import PRESETS

import minitorch
from kernels.runtime.targets import why_no_cuda


def our_gradients(run: Run, inputs: Any, targets: Any) -> dict[str, Any]:
    """Return the gradients of our model by parameter, in float64."""
    model = run.model
    assert model is not None
    run.gpt.optimizer.zero_grad()
    with minitorch.matmul_precision("float32"):
        model.loss(inputs, targets).backward()
    found = {name: p.value.grad for name, p in model.named_parameters()}
    return {
        name: gradient.detach().to_numpy().astype(np.float64)
        for name, gradient in found.items()
        if gradient is not None
    }


def their_gradients(run: Run, inputs: Any, targets: Any) -> dict[str, Any]:
    """Return the gradients of PyTorch's model likewise."""
    run.gpt.gradients(inputs, targets)
    return {name: w.grad.double().cpu().numpy() for name, w in run.gpt.weights.items()}


def errors(found: list[Any], exact: list[Any]) -> tuple[float, float]:
    """Return the error of gradients relative to their size, and by which part of it they are too short."""
    a, b = (np.concatenate([x.ravel() for x in some]) for some in (found, exact))
    size = float(b @ b)
    return float(np.sqrt((a - b) @ (a - b) / size)), 1.0 - float(a @ b) / size


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each kind of parameter."""
    size = size_of(args.preset, quick=args.quick)._replace(
        **{"batch": args.batch} if args.batch else {}
    )
    ours = Run(OURS, size, args.device, "float32", clip=PRESETS[args.preset].get("clip"))
    batches = iter(Batches(size))
    for _ in range(args.after):
        ours.gpt.step(*map(np.ascontiguousarray, next(batches)), size.lr)
    batch = [np.ascontiguousarray(x) for x in next(batches)]
    peers = {
        precision: Run(THEIRS, size, args.device, precision, attention, source=ours.model)
        for precision, attention in (("float32", "flash"), ("float64", "naive"))
    }
    exact = their_gradients(peers["float64"], *batch)
    sides = {
        OURS: our_gradients(ours, *batch), THEIRS: their_gradients(peers["float32"], *batch)
    }  # fmt: skip
    kinds = defaultdict(list)
    for name in exact:
        kinds[re.sub(r"t_layer_\d+\.", "", name)].append(name)
    rows = []
    for kind, names in kinds.items():
        row: dict[str, Any] = {"parameter": kind, "layers": len(names)}
        for side, gradients in sides.items():
            row[side], row[f"{side}, too short"] = errors(
                [gradients[name] for name in names], [exact[name] for name in names]
            )
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| parameter | ours | PyTorch | ours / PyTorch | too short: ours | PyTorch |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        ours, theirs = row[OURS], row[THEIRS]
        if min(ours, theirs) > 1.0:  # beside rounding in float64
            lines.append(f"| {row['parameter']} | exact is 0 | | | | |")
            continue
        short = " | ".join(f"{row[f'{side}, too short']:.1e}" for side in (OURS, THEIRS))
        quotient = f"{ours / theirs:.2f}" if theirs else "-"
        lines.append(f"| {row['parameter']} | {ours:.1e} | {theirs:.1e} | {quotient} | {short} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    argv = sys.argv[1:] if argv is None else argv
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="(default: cuda where there is one, else cpu)")
    add("--preset", choices=[*PRESETS], default="gpt2-small", help="(default: %(default)s)")
    add("--batch", type=COUNT, metavar="N", help="texts (default: the preset's)")
    add("--after", type=FROM_ZERO, default=0, metavar="N", help="steps of training (default: 0)")
    add("--quick", action="store_true", help="tiny sizes")
    add("--json", metavar="FILE", help="also write the rows there")
    args = parser.parse_args(argv)
    if load_torch() is None:
        sys.exit("gradient_errors compares with PyTorch: pip install torch")
    args.device = args.device or ("cuda" if why_no_cuda() is None else "cpu")
    rows = measure(args)
    if args.json:
        command = command_line("project/gradient_errors.py", argv)
        write_record(args.json, command, name_of(args.device), rows=rows)
    print(table(rows))


if __name__ == "__main__":
    main()
