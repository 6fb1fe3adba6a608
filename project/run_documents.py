"""Classify long documents: micro-F1 by the number of tokens that are read, with memory and time beside it.

python project/run_documents.py                     sources of Python's library, see below
python project/run_documents.py --data DIR          DIR/LABEL/*.txt; a name under several labels has all
python project/run_documents.py --contexts 512,16384 --backend cuda --precision bfloat16
python project/run_documents.py --quick             a tiny size that runs in seconds

Without --data the documents are the sources of Python's standard library, the labels of a file are the
modules that most files import, and the import statements are blanked: the evidence is the use of a module.
One model is trained for each context, all alike.  The same command goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from bench.measuring import Peak
from bench.records import command_line, name_of, read_rows, write_record
from common.command_line import COUNT, FROM_ZERO, POSITIVE, PROBABILITY, OneLineParser, per_item
from data.documents import Documents, divided, encoded, python_library, read_folder, vocabulary
from data.sequence_sets import Examples
from data.text import library_folder
from training.document_loop import (
    DocumentTask,
    DocumentTraining,
    best_threshold,
    counts_of,
    gain_interval,
    micro_f1,
)
from training.lra_loop import INTERRUPTED
from training.lra_methods import BACKENDS, QUICK, Settings
from training.runs import resumable
from training.script_helpers import check_backend, curves, draw, ends_in_one_line, make_folder

Rows = list[dict[str, Any]]
MODEL = Settings(
    2000, batch=16, judge_every=100, layers=2, width=128, heads=4, hidden=256, dropout=0.1
)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    add = parser.add_argument
    add("--data", metavar="DIR", help="folder of labelled texts, DIR/LABEL/*.txt")
    add("--contexts", type=per_item(COUNT), metavar="N,…",
        help="tokens that are read (default: 512,1024,…,16384; with --quick 32,128)")  # fmt: skip
    parser.option("--shortest", COUNT, 512, "tokens of the shortest source file")
    parser.option("--vocabulary", COUNT, 16384, "different tokens at most")
    for name in ("steps", "batch", "judge-every", "layers", "width", "heads", "hidden"):
        add(f"--{name}", type=COUNT, metavar="N", help="(default: that of the size)")
    add("--dropout", type=PROBABILITY, metavar="P", help="of all branches (default: 0.1)")
    parser.option("--lr", POSITIVE, 1e-3, "highest learning rate")
    add("--recompute", action="store_true", help="recompute layers in the backward pass")
    parser.option("--seed", FROM_ZERO, 0, "of everything that is random")
    parser.choice("--backend", BACKENDS, "fast")
    parser.choice("--precision", ("float32", "bfloat16"), "float32")
    add("--quick", action="store_true", help="a tiny size that runs in seconds")
    add("--out", default="runs/documents", metavar="DIR",
        help="of checkpoints, picture and record documents.json (default: %(default)s)")  # fmt: skip
    args = parser.parse_args(argv)
    default = [32, 128] if args.quick else [2**i for i in range(9, 15)]
    args.contexts = sorted(set(args.contexts or default))
    if not 2 <= args.vocabulary <= 2**16:
        parser.error(f"--vocabulary must be from 2 to {2**16}, got {args.vocabulary}")
    return args


def documents_of(args: argparse.Namespace) -> Documents:
    """Return the documents that the options ask for; exit with one line if they are too few."""
    if args.data is not None:
        found = read_folder(args.data)
    elif args.quick:
        found = python_library(128, library_folder() / "email", 4)
    else:
        found = python_library(args.shortest)
    parts = divided(len(found.texts), args.seed)
    for name, rows in parts.items():
        if not found.targets[rows].any():
            sys.exit(
                f"{found.source}: too few for a part to {name} on, which would have {len(rows)} documents "
                "with labels or none; add documents"
            )
    missing = np.flatnonzero(~found.targets[parts["train"]].any(0))
    if len(missing):
        sys.exit(
            f"the label {found.labels[missing[0]]} has no documents to train on; add some, or remove it"
        )
    return found


def settings_of(args: argparse.Namespace) -> Settings:
    """Return the size of the models and of their training."""
    names = (
        "steps", "batch", "judge_every", "layers", "width", "heads", "hidden", "dropout", "precision"
    )  # fmt: skip
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return replace(QUICK if args.quick else MODEL, **given)


def tasks_of(args: argparse.Namespace, documents: Documents) -> list[DocumentTask]:
    """Return the documents cut to each context."""
    rows = divided(len(documents.texts), args.seed)
    ids = vocabulary([documents.texts[row] for row in rows["train"]], args.vocabulary)
    whole = [encoded(text, ids, args.contexts[-1]) for text in documents.texts]
    tasks = []
    for context in args.contexts:
        parts: dict[str, Any] = {
            part: Examples([whole[row][:context] for row in own], documents.targets[own])  # type: ignore[arg-type]
            for part, own in rows.items()
        }
        labels = len(documents.labels)
        task = DocumentTask(
            f"documents-{context}",
            documents.source,
            parts,
            args.vocabulary,
            labels,
            context=context,
        )
        tasks.append(task)
    return tasks


def train(
    args: argparse.Namespace, task: DocumentTask, row: dict[str, Any] | None
) -> dict[str, Any]:
    """Train on one context as far as it is not, and return its row of the record."""
    settings = settings_of(args)
    training = DocumentTraining(
        task, "flash", settings, args.seed, args.backend, Path(args.out) / task.name, args.lr, True,
        True, recompute=args.recompute,
    )  # fmt: skip
    if row is not None and row["done"] and training.done == settings.steps:
        return row
    peak = Peak("cuda" if args.backend == "cuda" else "cpu")
    peak.begin()
    row = training.run() | {"context": task.context, "labels": task.classes}
    row["peak_bytes"] = peak.bytes()
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

    def same(part: str) -> Any:
        return np.tile(share, (len(task.parts[part].y), 1))

    threshold = best_threshold(same("valid"), task.parts["valid"].y)
    return micro_f1(counts_of(same("test") >= threshold, task.parts["test"].y))


def table(rows: Rows) -> str:
    """Return the figures by context as a table."""
    lines = ["| tokens read | documents cut | micro-F1 | step, ms | peak memory, MB |",
             "|---:|---:|---:|---:|---:|"]  # fmt: skip
    for row in rows:
        step = "–" if row["step_ms"] is None else f"{row['step_ms']:.0f}"
        lines.append(
            f"| {row['context']:,} | {row['cut']:.0%} | {100 * row['micro_f1']:.1f} | {step} | "
            f"{row['peak_bytes'] / 1e6:,.0f} |"
        )
    return "\n".join(lines)


def draw_rows(rows: Rows, baseline: float, path: Path) -> None:
    """Draw micro-F1, the time of a step and the peak of memory by context."""
    contexts = [row["context"] for row in rows]
    figures = (
        ("micro-F1", [row["micro_f1"] for row in rows], baseline),
        ("time of a step, ms", [row["step_ms"] or 0.0 for row in rows], None),
        ("peak memory, MB", [row["peak_bytes"] / 1e6 for row in rows], None),
    )

    panels = []
    for name, values, level in figures:
        lines = [(name, contexts, values)]
        if level is not None:
            lines.append(("most frequent labels", contexts, [level] * len(rows)))
        panels.append(curves("tokens read", name, *lines, log_x=True))
    draw(path, *panels)


def run(args: argparse.Namespace, argv: list[str]) -> None:
    """Train on all contexts, write the record and draw the picture; exit after Ctrl-C."""
    out = Path(args.out)
    record = out / "documents.json"
    known = {row["context"]: row for row in read_rows(record, "context")}
    documents = documents_of(args)
    tasks = tasks_of(args, documents)
    frequency = documents.targets.sum(1).mean()
    print(f"{documents.source}; {len(documents.labels)} labels, {frequency:.1f} of a document")
    command = command_line("project/run_documents.py", argv, ("--out",))
    device = name_of("cuda" if args.backend == "cuda" else "cpu")
    baseline, rows, more = without_reading(tasks[-1]), [], {}
    for task in tasks:
        row = train(args, task, known.get(task.context))
        rows.append(row)
        if row["done"] and len(rows) > 1:
            first, last = (np.array(own["counts"]) for own in (rows[0], row))
            low, high = gain_interval(first, last)
            more = {"gain": row["micro_f1"] - rows[0]["micro_f1"], "gain_interval": [low, high]}
        write_record(record, command, device, labels=documents.labels, without_reading=baseline,
                     **more, rows=rows)  # fmt: skip
        if not row["done"]:
            print(f"stopped by Ctrl-C in {task.name}; the same command goes on")
            sys.exit(INTERRUPTED)
        print(f"{task.name}: micro-F1 {row['micro_f1']:.1%}; {row['seconds']:.0f} s")
    print(f"\n{table(rows)}\n\nmicro-F1 of the most frequent labels: {100 * baseline:.1f}")
    if more:
        low, high = more["gain_interval"]
        print(
            f"gain from {tasks[0].context} to {tasks[-1].context} tokens: {100 * more['gain']:+.1f} points "
            f"(95 % interval {100 * low:+.1f} to {100 * high:+.1f}, documents drawn with replacement)"
        )
    draw_rows(rows, baseline, out / "documents.png")
    print(f"record {record}")


def main(argv: list[str] | None = None) -> None:
    given = sys.argv[1:] if argv is None else argv
    args = parse_args(given)
    check_backend(f"--backend {args.backend}", BACKENDS[args.backend])
    make_folder(args.out)
    with ends_in_one_line("--batch or --contexts"), resumable(args.out):
        run(args, given)


if __name__ == "__main__":
    main()
