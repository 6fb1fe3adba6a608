"""Classifiers of long inputs: Path-X, from small images to large ones, and documents by the tokens read.

python project/measure.py pathx --device cuda --precision bfloat16    8 to 256 pixels
python project/measure.py pathx --stages 8 16 32 --steps 2000 4000 9000
python project/measure.py documents                     sources of Python's library, see below
python project/measure.py documents --data DIR          DIR/LABEL/*.txt; a name under several labels has all
python project/measure.py documents --contexts 512 16384 --device cuda --precision bfloat16 --resume

``pathx`` begins each stage with the model of the stage before it.  Training images are drawn as they
are needed, or once into a file with --examples; options of a stage have one value for all stages or one
for each.

``documents``: without --data the documents are the sources of Python's standard library, the labels of
a file are the modules that most files import, and the import statements are blanked: the evidence is
the use of a module.  One model is trained for each context, all alike; micro-F1 is beside memory and
time.

Checkpoints and sets are in --folder: the same command goes on where it was interrupted.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench.kit import Case, Measurement, Panel, Record, Run, cell, markdown
from bench.measuring import Peak
from bench.training_contestants import BACKENDS
from data.documents import Documents, divided, encoded, python_library, read_folder, vocabulary
from data.sequence_sets import Examples
from data.text import library_folder
from scipy.stats import binomtest
from training.document_loop import (
    DocumentTask,
    DocumentTraining,
    best_threshold,
    counts_of,
    gain_interval,
    micro_f1,
)
from training.lra_loop import BEST, Training
from training.lra_methods import QUICK, Settings
from training.pathfinder_stages import STAGES, Stage, grown, stage_task, task_name
from training.runs import resumable
from training.saliency import held_out, panel, saliency, shares
from training.script_helpers import draw as draw_picture
from training.script_helpers import make_folder

import minitorch

#: Images whose saliency is measured, and of these the ones that are drawn.
MEASURED, DRAWN = 16, 4
OF_STAGES, SIZES = (
    ("steps", "batch", "lr", "attention"),
    ("layers", "width", "heads", "hidden", "judge_every", "judged"),
)


def settings_of(run: Run, **more: Any) -> Settings:
    """Return the size of the models and of their training."""
    return Settings(**run.chosen("steps", "batch", "dropout", *SIZES, "precision") | more)


# -- Path-X ----------------------------------------------------------------------------------------------


def stages(run: Run) -> Iterator[Case]:
    names = [*run.stages]
    if names != [name for name in STAGES if name in names]:
        sys.exit(
            f"--stages must be among {', '.join(STAGES)}, in this order, got {' '.join(names)}"
        )
    for option in OF_STAGES:
        if len(getattr(run, option)) not in (0, 1, len(names)):
            sys.exit(
                f"--{option} takes one value for all stages or one for each of {len(names)}, got "
                f"{len(getattr(run, option))}"
            )
    make_folder(run.folder)
    for number, name in enumerate(names):
        given = {x: own[number % len(own)] for x in OF_STAGES if (own := getattr(run, x))}
        stage = STAGES[name]._replace(**given, **({"recompute": True} if run.recompute else {}))
        before = names[number - 1] if number else None
        yield {"stage": name}, partial(trained_stage, run, name, stage, before)


def trained_stage(run: Run, name: str, stage: Stage, before: str | None) -> Record:
    """Train a stage as far as it is not, and return its row of the record."""
    folder, side = Path(run.folder), stage.task.size
    settings = settings_of(run, steps=stage.steps, batch=stage.batch, dropout=0.0)
    attention, options = stage.attention.replace("-", "_"), None
    if attention == "block_sparse":
        options = {"block_size": max(side, 16), "pattern": "dilated"}
    with resumable(run.folder):
        task = stage_task(
            name, folder / "sets", run.seed, {"valid": settings.judged, "test": run.tested},
            examples=run.examples or None, processes=0 if run.is_quick else None, before=before,
        )  # fmt: skip
        start = None if before is None else partial(grown, folder / task_name(before) / BEST, side)
        training = Training(
            task, attention, settings, run.seed, BACKENDS[run.device], folder / task.name, stage.lr, True,
            run.eager, start=start, options=options, recompute=stage.recompute,
        )  # fmt: skip
        row = training.run() | {"side": side, "recompute": stage.recompute}
    if row["done"]:
        right = binomtest(round(row["test_accuracy"] * row["tested"]), row["tested"])
        row["interval"] = [float(x) for x in right.proportion_ci(method="wilson")]
        row["saliency"] = show_saliency(run, name, stage, training.model)
    gc.collect()  # the captured step of this stage, and its memory
    return row


def show_saliency(
    run: Run, name: str, stage: Stage, model: minitorch.SequenceClassifier
) -> dict[str, float]:
    """Draw which pixels decide; return the mean saliency of the parts of images."""
    pictures, maps, panels = held_out(stage.task, run.seed, MEASURED), [], []
    model.eval()
    for picture in pictures:
        ids = picture.pixels.reshape(1, -1).astype(np.int64)
        maps.append(saliency(model, ids)[0])
        if len(panels) < DRAWN:
            away, joined = model(ids).to_numpy().astype(np.float64)[0]
            panels.append(panel(picture, maps[-1], 1.0 / (1.0 + np.exp(away - joined))))
    draw_picture(Path(run.folder) / f"saliency-{name}.png", *panels)
    return shares(pictures, maps)


def stages_table(record: Record) -> str:
    """Return what each stage took and reached."""
    lines = []
    for row in record["rows"]:
        low, high = row["interval"]
        lines.append([
            row["stage"], f"{row['length']:,}", f"{row['steps']:,}", f"{row['seconds']:.0f}",
            f"{row['test_accuracy']:.1%}", f"{low:.1%} to {high:.1%}",
        ])  # fmt: skip
    return markdown(["stage", "tokens", "steps", "time, s", "accuracy", "95 % interval"], lines)


# -- documents -------------------------------------------------------------------------------------------


def documents_of(run: Run) -> Documents:
    """Return the documents that the options ask for; exit with one line if they are too few."""
    if run.data:
        found = read_folder(run.data)
    elif run.is_quick:
        found = python_library(128, library_folder() / "email", 4)
    else:
        found = python_library(run.shortest)
    parts = divided(len(found.texts), run.seed)
    for name, rows in parts.items():
        if not found.targets[rows].any():
            sys.exit(
                f"{found.source}: too few for a part to {name} on, which would have {len(rows)} documents "
                "with labels or none; add documents"
            )
    missing = np.flatnonzero(~found.targets[parts["train"]].any(0))
    if len(missing):
        label = found.labels[missing[0]]
        sys.exit(f"the label {label} has no documents to train on; add some, or remove it")
    return found


def tasks_of(run: Run, documents: Documents) -> list[DocumentTask]:
    """Return the documents cut to each context."""
    rows, contexts = divided(len(documents.texts), run.seed), sorted({*run.contexts})
    ids = vocabulary([documents.texts[row] for row in rows["train"]], run.vocabulary)
    whole = [encoded(text, ids, contexts[-1]) for text in documents.texts]
    tasks = []
    for context in contexts:
        parts: dict[str, Any] = {
            part: Examples([whole[row][:context] for row in own], documents.targets[own])  # type: ignore[arg-type]
            for part, own in rows.items()
        }
        given = parts, run.vocabulary, len(documents.labels)
        tasks.append(
            DocumentTask(f"documents-{context}", documents.source, *given, context=context)
        )
    return tasks


def by_context(run: Run) -> Iterator[Case]:
    if not 2 <= run.vocabulary <= 2**16:
        sys.exit(f"--vocabulary must be from 2 to {2**16}, got {run.vocabulary}")
    make_folder(run.folder)
    documents = documents_of(run)
    tasks = tasks_of(run, documents)
    run.note(labels=documents.labels, without_reading=without_reading(tasks[-1]))
    for task in tasks:
        yield {"context": task.context}, partial(trained_context, run, task)
        counts = [np.array(row["counts"]) for row in run.rows if "counts" in row]
        if len(counts) > 1:
            gain = run.rows[-1]["micro_f1"] - run.rows[0]["micro_f1"]
            run.note(gain=gain, gain_interval=list(gain_interval(counts[0], counts[-1])))


def trained_context(run: Run, task: DocumentTask) -> Record:
    """Train on one context as far as it is not, and return its row of the record."""
    settings, folder = settings_of(run), Path(run.folder) / task.name
    with resumable(run.folder):
        training = DocumentTraining(
            task, "flash", settings, run.seed, BACKENDS[run.device], folder, run.lr, True, True,
            recompute=run.recompute,
        )  # fmt: skip
        peak = Peak(run.device)
        peak.begin()
        row = training.run() | {"labels": task.classes, "peak_bytes": peak.bytes()}
    lengths = [len(document) for document in task.parts["test"].X]
    row["mean_tokens"] = float(np.mean(lengths))
    row["cut"] = float(np.mean([length == task.context for length in lengths]))
    if row["done"]:
        row["micro_f1"] = row.pop("test_accuracy")
        row["counts"] = training.counts.tolist()
    return row


def without_reading(task: DocumentTask) -> float:
    """Return the micro-F1 of a rule that gives each document the most frequent labels."""
    share = task.parts["train"].y.mean(0)
    valid, test = (np.tile(share, (len(task.parts[part].y), 1)) for part in ("valid", "test"))
    threshold = best_threshold(valid, task.parts["valid"].y)
    return micro_f1(counts_of(test >= threshold, task.parts["test"].y))


def context_table(record: Record) -> str:
    lines = [
        [f"{row['context']:,}", f"{row['cut']:.0%}", f"{100 * row['micro_f1']:.1f}", cell(row["step_ms"]),
         f"{row['peak_bytes'] / 1e6:,.0f}"]
        for row in record["rows"]
    ]  # fmt: skip
    head = ["tokens read", "documents cut", "micro-F1", "step, ms", "peak memory, MB"]
    shown = [markdown(head, lines)]
    shown.append(f"micro-F1 of the most frequent labels: {100 * record['without_reading']:.1f}")
    if "gain" in record:
        low, high = record["gain_interval"]
        shown.append(
            f"gain of the longest context over the shortest: {100 * record['gain']:+.1f} points (95 % "
            f"interval {100 * low:+.1f} to {100 * high:+.1f}, documents drawn with replacement)"
        )
    return "\n\n".join(shown)


def context_panels(record: Record) -> list[Panel]:
    rows, found = record["rows"], []
    for name, key, scale in (
        ("micro-F1", "micro_f1", 1), ("time of a step, ms", "step_ms", 1),
        ("peak memory, MB", "peak_bytes", 1e-6),
    ):  # fmt: skip
        lines = {name: [(row["context"], scale * (row[key] or 0.0)) for row in rows]}
        if key == "micro_f1":
            level = record["without_reading"]
            lines["most frequent labels"] = [(row["context"], level) for row in rows]
        found.append(Panel(name, "tokens read", name, lines, log="x"))
    return found


MODEL: Record = {
    "width": 128, "heads": 4, "hidden": 256, "precision": "float32", "recompute": False, "seed": 0,
    "judged": 1000, "dropout": 0.1,
}  # fmt: skip
SMALL: Record = {name: getattr(QUICK, name) for name in SIZES}
PATHX = {
    "normal": {
        "stages": tuple(STAGES), **dict.fromkeys(OF_STAGES, ()), **MODEL, "layers": 4, "judge_every": 200,
        "tested": 4000, "examples": 0, "eager": False, "folder": "runs/pathx",
    },
    "quick": {"stages": ("8", "16"), **SMALL, "tested": 64, "steps": (30,), "batch": (8,)},
}  # fmt: skip
DOCUMENTS = {
    "normal": {
        "contexts": tuple(2**i for i in range(9, 15)), "data": "", "shortest": 512, "vocabulary": 16384,
        "steps": 2000, "batch": 16, "judge_every": 100, "layers": 2, "lr": 1e-3, **MODEL,
        "folder": "runs/documents",
    },
    "quick": {"contexts": (32, 128), **SMALL, "steps": 30, "batch": 8},
}  # fmt: skip
PRECISION = {"precision": ("float32", "bfloat16")}
MEASUREMENTS = (
    Measurement(
        "pathx", "Which accuracy does a classifier reach on Path-X and Path-256, stage by stage?", stages,
        {"cpu": PATHX, "cuda": PATHX}, table=stages_table,
        minutes={"cpu": 1e4, "cuda": 300},
        choices={**PRECISION, "attention": ("flash", "block-sparse")},
    ),
    Measurement(
        "documents", "How does the micro-F1 of a classifier of documents grow with the tokens read?",
        by_context, {"cpu": DOCUMENTS, "cuda": DOCUMENTS}, table=context_table, draw=context_panels,
        minutes={"cpu": 1e3, "cuda": 60}, choices=PRECISION,
    ),
)  # fmt: skip
