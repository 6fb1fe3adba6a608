"""Tables of the records of ``run_pathx``, ``perplexity``, ``chapter_break`` and ``bench_bert``."""

from __future__ import annotations

from bench.record_files import Record
from bench.table_cells import markdown

#: How a continuation is chosen.
SCORES = "likelihood", "gain"


def _with_interval(row: Record, key: str, form: str) -> str:
    return f"{row[key]:{form}} ({row['low']:{form}} to {row['high']:{form}})"


def stages_table(record: Record) -> str:
    """Return what each stage of a training on Path-X and Path-256 took and reached."""
    lines = []
    for row in record["rows"]:
        low, high = row["interval"]
        lines.append([
            row["stage"], f"{row['length']:,}", f"{row['steps']:,}", f"{row['seconds']:.0f}",
            f"{row['test_accuracy']:.1%}", f"{low:.1%} to {high:.1%}",
        ])  # fmt: skip
    return markdown(["stage", "tokens", "steps", "time, s", "accuracy", "95 % interval"], lines)


def perplexity_table(record: Record) -> str:
    """Return the perplexity of each model by the context that it is given."""
    runs = [{row["context"]: row for row in run["by_context"]} for run in record["rows"]]
    lines = []
    for context in sorted({context for run in runs for context in run}):
        found = [run.get(context) for run in runs]
        stride = next(row["stride"] for row in found if row is not None)
        cells = ("" if row is None else f"{row['perplexity']:.3f}" for row in found)
        lines.append([f"{context:,}", str(stride), *cells])
    names = [f"perplexity after training with context {max(run):,}" for run in runs]
    return markdown(["context", "stride", *names], lines)


def chapters_table(record: Record) -> str:
    """Return how often the first model finds the next chapter, by context."""
    run = record["rows"][0]
    lines = []
    for context in sorted({row["context"] for row in run["by_context"]}):
        own = {row["score"]: row for row in run["by_context"] if row["context"] == context}
        lines.append(
            [f"{context:,}", *(_with_interval(own[name], "accuracy", ".1%") for name in SCORES)]
        )
    gained = run["longest_minus_shortest"]
    cells = (_with_interval(gained[name], "mean", "+.1%") for name in SCORES)
    lines.append(["longest minus shortest context", *cells])
    return markdown(["context", *(f"accuracy by {name}" for name in SCORES)], lines)


def bert_table(record: Record) -> str:
    """Return the time of a step of BERT on padded and packed batches, beside PyTorch's on padded ones."""
    lines = []
    for row in record["rows"]:
        times = (f"{row['ms'][name]['median']:.3g}" for name in ("packed", "padded", "PyTorch"))
        over = row["unpadding"], row["ratio"]["packed"], row["ratio"]["padded"]
        lines.append([
            str(row["context"]), f"{row['padding']:.0%}", *times, *(f"{x['median']:.2f}" for x in over),
        ])  # fmt: skip
    head = [
        "context", "padding", "packed, ms/step", "padded, ms/step", "PyTorch, ms/step",
        "speedup: packed over padded", "packed over PyTorch", "padded over PyTorch",
    ]  # fmt: skip
    return markdown(head, lines)
