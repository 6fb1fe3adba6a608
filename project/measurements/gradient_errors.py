"""How far the gradients of one training step are from exact ones: ours, and PyTorch's beside them.

Three models with the same weights take the gradients of the same batch: ours in float32, PyTorch's in
float32, and PyTorch's in float64, which counts as exact.  For each kind of parameter, all layers together,
two numbers a side: the root mean square of the errors relative to that of the exact gradients, and by which
part of itself a gradient is too short, which shows sums that are cut off instead of rounded.  The bias of
keys adds the same to all scores of a row, which softmax ignores: its exact gradient is 0.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from bench.kit import Case, Measurement, Record, Run
from bench.training_contestants import OURS, THEIRS, Training, batches_of, size_of
from training.gpt_presets import PRESETS

import minitorch


def gradients_of(training: Training, batch: list[Any]) -> dict[str, Any]:
    """Return the gradients of a model, ours or PyTorch's, by parameter in float64."""
    model = training.model
    if model is None:
        training.gpt.gradients(*batch)
        return {name: w.grad.double().cpu().numpy() for name, w in training.gpt.weights.items()}
    training.gpt.optimizer.zero_grad()
    with minitorch.matmul_precision("float32"):
        model.loss(*batch).backward()
    found = {name: p.value.grad for name, p in model.named_parameters()}
    return {n: g.detach().to_numpy().astype(np.float64) for n, g in found.items() if g is not None}


def errors(found: list[Any], exact: list[Any]) -> tuple[float, float]:
    """Return the error of gradients relative to their size, and by which part of it they are too short."""
    a, b = (np.concatenate([x.ravel() for x in some]) for some in (found, exact))
    size = float(b @ b)
    return float(np.sqrt((a - b) @ (a - b) / size)), 1.0 - float(a @ b) / size


def cases(run: Run) -> Iterator[Case]:
    _ = run.pytorch
    size = size_of(run.preset, quick=run.is_quick)
    size = size._replace(batch=min(run.batch, size.batch) if run.is_quick else run.batch)
    clip = PRESETS[run.preset].get("clip")
    ours = Training(OURS, size, run.device, "float32", clip=clip)
    batches = batches_of(size)
    for batch in islice(batches, run.after):
        ours.gpt.step(*batch, size.lr)
    batch = next(batches)
    theirs, exact = (
        gradients_of(Training(THEIRS, size, run.device, *of, source=ours.model), batch)
        for of in (("float32", "flash"), ("float64", "naive"))
    )
    sides, kinds = {OURS: gradients_of(ours, batch), THEIRS: theirs}, defaultdict(list)
    for name in exact:
        kinds[re.sub(r"t_layer_\d+\.", "", name)].append(name)
    for kind, names in kinds.items():
        row: Record = {"layers": len(names)}
        for side, gradients in sides.items():
            parts = [[each[name] for name in names] for each in (gradients, exact)]
            row[side], row[f"{side}, too short"] = errors(*parts)
        yield {"parameter": kind}, lambda row=row: row


COMMON = {"preset": "gpt2-small", "batch": 8, "after": 0}
MEASUREMENT = Measurement(
    "gradient_errors", "How exact are the gradients of a step in float32, beside PyTorch's?", cases,
    {"cpu": {"normal": COMMON}, "cuda": {"normal": COMMON}}, minutes={"cpu": 5, "cuda": 1},
    choices={"preset": tuple(PRESETS)},
)  # fmt: skip
