"""Tables of the pages of results, each made from one record in docs/results when the site is built.

A table answers one question; above it stand the conditions under which the record was measured.  ``TABLES``
lists them, and the extension ``measured`` puts them into the pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import attention_tables as attention
import readme_table
from bench.long_range import lengths_table, results_table, steps_tables
from bench.records import Record
from bench.table_cells import cell, columns, markdown
from measurements import attention as rungs
from measurements import calls, judging, long_context

RESULTS = Path(__file__).resolve().parents[1] / "results"
GIGABYTE = 2**30
#: How figures of the CPU are shown, if not by their names in the record.
SHOWN = {
    "elementwise and reductions": "10,000,000 numbers",
    "small calls, time": "small call",
    "recorded, time": "small call, recorded",
    "extra memory of N = 16,384": "extra memory of attention, N = 16,384",
    "first training step of a second process": "start of a script, and its first training step",
}


def command(record: Record, path: str) -> str:
    """Return the command that makes a record again: its own, unless it names a script that is no more."""
    own, known = record["command"], f"python project/measure.py {Path(path).stem}"
    return own if own.startswith((known, "make", ".ci")) else known


def conditions(record: Record, path: str) -> str:
    """Return the line that says how a record was made.

    Args:
        record: Of JSON.
        path: Of the record below docs/results.
    """
    versions = ", ".join(f"{key} {value}" for key, value in record["versions"].items())
    calls = ""
    if "tokens" in record and "hidden" in record:
        calls = (
            f"; {record['tokens']:,} tokens in a batch, {record['hidden']:,} columns over all heads"
        )
    return (
        f"**{record['device']}**, {record['cores']} cores, {record['date']}{calls}: "
        f"`{command(record, path)}` ([record](/results/{path}); {versions})"
    )


def rungs_forward(record: Record) -> str:
    """Return the forward pass of every rung in milliseconds, and in times of flash2."""
    base = "flash2"
    rows = [row for row in record["rows"] if "published" in row]
    names = [name for name in rows[0] if name not in ("length", base)]
    lines = []
    for row in rows:
        cells = [
            f"{cell(row[name]['forward_ms'])} ({row[name]['forward_ratio']:.1f}×)" for name in names
        ]
        lines.append([f"N = {row['length']:,}", *cells, cell(row[base]["forward_ms"])])
    return markdown([f"forward, ms (ratio to {base})", *names, base], lines)


def _model(row: Record) -> str:
    return f"{row['preset']}, {row['precision']}, context {row['context']:,}, batch {row['batch']}"


def _speeds(record: Record, kind: str, first: str, second: str) -> str:
    """Return tokens a second of two sides for all rows of a kind, and their ratio."""
    lines = []
    for row in record["rows"]:
        if row["kind"] == kind:
            rates = [row["tokens_per_second"][name]["median"] for name in (first, second)]
            lines.append([_model(row), *(f"{rate:,.0f}" for rate in rates), f"{row['value']:.2f}"])
    return markdown(["tokens per second", first, second, f"{first} / {second}"], lines)


def training_speed(record: Record) -> str:
    """Return tokens a second of our captured steps beside PyTorch's eager ones."""
    return _speeds(record, "speed", "ours", "PyTorch")


def training_steps(record: Record) -> str:
    """Return tokens a second of eager steps beside eager, and of captured beside compiled ones."""
    sides = {"eager": "PyTorch", "compiled": "PyTorch, compiled"}
    return "\n\n".join(_speeds(record, kind, "ours", theirs) for kind, theirs in sides.items())


def training_attention(record: Record) -> str:
    """Return tokens a second with flash attention beside naive attention."""
    return _speeds(record, "attention", "flash", "naive")


def training_memory(record: Record) -> str:
    """Return the peak of memory of a training step."""
    rows = [row for row in record["rows"] if row["kind"] == "memory"]
    return columns(rows, {
        "peak memory, GiB": _model,
        "ours": lambda row: f"{row['peak_bytes']['ours'] / GIGABYTE:.1f}",
        "PyTorch": lambda row: f"{row['peak_bytes']['PyTorch'] / GIGABYTE:.1f}",
        "ours / PyTorch": lambda row: f"{row['value']:.2f}",
    })  # fmt: skip


def training_losses(record: Record) -> str:
    """Return the largest differences of losses of a training run."""
    lines = []
    for row in record["rows"]:
        if row["kind"] != "losses":
            continue
        found = row.get("differences", {})
        model = f"{row['preset']}, {row['precision']}, {row['steps']} steps"
        if row["precision"] == "float32":
            lines.append([model, "our float32 and PyTorch's float32", f"{row['value']:.1e}"])
            for name, text in (
                ("ours from PyTorch float64", "our float32 and PyTorch's float64"),
                ("PyTorch from PyTorch float64", "PyTorch's float32 and its float64"),
                ("PyTorch, math attention", "PyTorch's float32 with fused and with math attention"),
            ):
                if name in found:
                    lines.append([model, text, f"{found[name]:.1e}"])
        else:
            lines += [
                [model, f"{side} bfloat16 and PyTorch's float32", f"{found[name]:.1e}"]
                for name, side in (("ours", "our"), ("PyTorch", "PyTorch's"))
            ]
    head = ["model", "compared losses", "largest relative difference"]
    return markdown(head, lines)


def cpu_calls(record: Record) -> str:
    """Return every call on the CPU in milliseconds beside PyTorch or NumPy."""
    lines = []
    for row in record["rows"]:
        figure, _, other = row["figure"].removesuffix("'s").rpartition(" / ")
        what = SHOWN.get(figure, figure)
        lines += [
            [what if call["call"] in ("a step", "a token") else f"{what}: {call['call']}",
             cell(call["ms"]), f"{cell(call['their_ms'])} ({other})",
             f"{call['ratio']:.2f}"]
            for call in row["calls"]
        ]  # fmt: skip
    return markdown(["time, ms", "ours", "other", "other / ours"], lines)


def cpu_costs(record: Record) -> str:
    """Return the figures of the CPU that have no other side."""
    lines = [
        [SHOWN.get(what, what), f"{row['value']:.3g} {unit}"]
        for row in record["rows"]
        if not row["calls"]
        for what, _, unit in [row["figure"].rpartition(", ")]
    ]
    return markdown(["measurement", "this library"], lines)


def gradient_errors(record: Record) -> str:
    """Return the errors of one step's gradients by parameter; one without a gradient has none."""
    rows = [row for row in record["rows"] if row["parameter"] != "attention.k_projection.bias"]
    return columns(rows, {
        "relative root mean square error": lambda row: f"`{row['parameter']}`",
        "ours": lambda row: f"{row['ours']:.1e}",
        "PyTorch": lambda row: f"{row['PyTorch']:.1e}",
    })  # fmt: skip


def lra_lengths(record: Record) -> str:
    """Return the time of nine attentions by length, and from which length on each is faster than flash."""
    precision = record.get("precision", "float32")
    call = f"batch 1, {record['heads']} heads, head_dim {record['head_dim']}, {precision}, no mask"
    return (
        f"{call}. A dash means that there was not enough memory.\n\n{lengths_table(record['rows'])}"
    )


def _dashes(record: Record) -> str:
    """Return what a dash stands for, and how the record was timed if it says so."""
    if "interleaved" not in record.get("note", ""):
        return "A dash means not measured."
    return (
        "Times are medians of interleaved rounds, in which every step uses the same batch; a warm-up run "
        "is not counted. A dash means not measured."
    )


def lra_results(record: Record) -> str:
    """Return accuracy, time and memory of the trainings on each task."""
    return f"{_dashes(record)}\n\n{results_table(record['rows'])}"


def lra_steps(record: Record) -> str:
    """Return speed-up and memory of training steps on each task."""
    return f"{_dashes(record)}\n\n{steps_tables(record['rows'])}"


def bert_table(record: Record) -> str:
    """Return the time of a step of BERT on padded and packed batches, beside PyTorch's on padded ones."""
    return columns(record["rows"], {
        "context": lambda row: str(row["context"]),
        "padding": lambda row: f"{row['padding']:.0%}",
        "packed, ms/step": lambda row: f"{row['ms']['packed']['median']:.3g}",
        "padded, ms/step": lambda row: f"{row['ms']['padded']['median']:.3g}",
        "PyTorch, ms/step": lambda row: f"{row['ms']['PyTorch']['median']:.3g}",
        "speedup: packed over padded": lambda row: f"{row['unpadding']['median']:.2f}",
        "packed over PyTorch": lambda row: f"{row['ratio']['packed']['median']:.2f}",
        "padded over PyTorch": lambda row: f"{row['ratio']['padded']['median']:.2f}",
    })  # fmt: skip


def _measured(record: Record) -> list[Record]:
    return [row for row in record["rows"] if "length" in row]


def ring_table(record: Record) -> str:
    """Return the times of ring attention by length, beside one GPU, the model and PyTorch."""
    lines = []
    for row in _measured(record):
        for way, name in {"forward": "forward", "both": "forward and backward"}.items():
            lines.append([
                f"{row['length']:,}, {name}",
                *(cell(1e3 * row[f"{whose}_{way}_seconds"]) for whose in ("one", "all")),
                f"{row[f'efficiency_{way}']:.2f}",
                cell(1e3 * row[f"predicted_{way}_seconds"]),
                cell(1e3 * row["context_parallel"][way]["seconds"]),
                f"{row[f'beside_torch_{way}']:.2f}",
            ])  # fmt: skip
    head = [
        "tokens, pass", "one GPU, ms", f"{record['gpus']} GPUs, ms", "efficiency", "model, ms",
        "PyTorch, ms", "PyTorch's time / ours",
    ]  # fmt: skip
    first = _measured(record)[0]
    call = (
        f"Causal, bfloat16, batch 1, {first['heads']} heads, head_dim {first['head_dim']}; messages have a "
        f"latency of {1e6 * first['latency']:.0f} µs and {first['bandwidth'] / 1e9:.0f} GB/s"
    )
    steps = [
        f"A training step on {row['train']:,} tokens of context ({row['layers']} layers, width "
        f"{row['width']}, activations recomputed) takes {row['step_seconds']:.1f} s."
        for row in record["rows"]
        if "train" in row
    ]
    return "\n\n".join([f"{call}.", markdown(head, lines), *steps])


def data_parallel_table(record: Record) -> str:
    """Return the steps of data parallel training, ours and PyTorch's, beside those of one GPU."""
    (row,) = record["rows"]
    lines = []
    for name, own in (("this library", ""), ("PyTorch's DDP, eager", "torch_")):
        one, every = (row[f"{own}{whose}_seconds"] for whose in ("one", "all"))
        tokens = record["gpus"] * row["batch_per_gpu"] * row["context"] / every
        lines.append([name, cell(1e3 * one), cell(1e3 * every), f"{one / every:.2f}", cell(tokens)])
    head = [
        "a step", "one GPU, ms", f"{record['gpus']} GPUs, ms", "efficiency", "tokens/s",
    ]  # fmt: skip
    batch = f"{row['batch_per_gpu']} x {row['context']:,} tokens per GPU"
    call = f"{row['preset']}, {row['precision']}, {batch}"
    return f"{call}.\n\n{markdown(head, lines)}"


#: What makes Markdown of a record, by the name of the table on a page.
TABLES: dict[str, Callable[[Record], str]] = {
    "attention-ratios": attention.attention_ratios,
    "attention-dense": attention.attention_dense,
    "attention-float32": attention.attention_float32,
    "attention-options": attention.attention_options,
    "option-costs": attention.option_costs,
    "functions-64": attention.user_functions,
    "functions-128": attention.user_functions,
    "product": attention.product,
    "call-overhead": calls.table,
    "peers": attention.peers,
    "rungs": rungs.table,
    "rungs-forward": rungs_forward,
    "training-speed": training_speed,
    "training-steps": training_steps,
    "training-attention": training_attention,
    "training-memory": training_memory,
    "training-losses": training_losses,
    "cpu-calls": cpu_calls,
    "cpu-costs": cpu_costs,
    "accuracy": attention.accuracy,
    "gradient-errors": gradient_errors,
    "lra-lengths": lra_lengths,
    "lra-results": lra_results,
    "lra-short": lra_results,
    "lra-steps": lra_steps,
    "torch-operator": attention.torch_operator,
    "pathx": long_context.stages_table,
    "perplexity": judging.perplexity_table,
    "bert": bert_table,
    "chapters": judging.chapter_table,
    "ring": ring_table,
    "data-parallel": data_parallel_table,
}


def as_markdown(name: str, path: str) -> str:
    """Return the conditions and the table.

    Args:
        name: Of the table.
        path: Of its record below docs/results.
    """
    if name == "summary":
        return readme_table.table().replace("(docs/results/", "(/results/")
    record = json.loads((RESULTS / path).read_text(encoding="utf-8"))
    return f"{conditions(record, path)}\n\n{TABLES[name](record)}"
