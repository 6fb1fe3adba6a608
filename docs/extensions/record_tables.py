"""Tables of the pages of results, each made from one record in docs/results when the site is built.

The directive ``{record-table} NAME`` inserts the conditions under which a record was measured and a table
that answers one question from it; ``TABLES`` lists them.  A table takes its device from ``:device:``, an
option of the directive, if there is a record of it on several.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import attention_tables as attention
import readme_table
from bench.long_range import lengths_table, results_table, steps_tables
from bench.records import Record
from bench.table_cells import cell, columns, markdown
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from measurements import attention as rungs
from measurements import calls, judging, long_context
from sphinx.util.docutils import SphinxDirective

RESULTS = Path(__file__).resolve().parents[1] / "results"
GPU, CPU, OTHER_GPU = "nvidia-h200", "cpu-2-cores", "nvidia-h100"
GIGABYTE = 2**30
#: How figures of the CPU are shown, if not by their names in the record.
SHOWN = {
    "elementwise and reductions": "10,000,000 numbers",
    "small calls, time": "small call",
    "recorded, time": "small call, recorded",
    "extra memory of N = 16,384": "extra memory of attention, N = 16,384",
    "first training step of a second process": "start of a script, and its first training step",
}


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
        f"**{record['device']}**, {record['cores']} cores, {record['date']}{calls}: `{record['command']}` "
        f"([record](/results/{path}); {versions})"
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


class Table(NamedTuple):
    """A table of a page.

    Attributes:
        record: Name of the file that it is made from.
        make: Returns Markdown of a record.
        device: Folder of the record; a directive may name another.
    """

    record: str
    make: Callable[[Record], str]
    device: str = GPU


TABLES = {
    "attention-ratios": Table("against_torch", attention.attention_ratios),
    "attention-dense": Table("against_torch", attention.attention_dense),
    "attention-float32": Table("against_torch", attention.attention_float32),
    "attention-options": Table("against_torch", attention.attention_options),
    "option-costs": Table("against_torch", attention.option_costs),
    "functions-64": Table("functions_64", attention.user_functions),
    "functions-128": Table("functions_128", attention.user_functions),
    "product": Table("against_torch", attention.product),
    "call-overhead": Table("calls", calls.table),
    "peers": Table("peers", attention.peers),
    "rungs": Table("bench_attention", rungs.table),
    "rungs-forward": Table("bench_attention", rungs_forward),
    "training-speed": Table("bench_training", training_speed),
    "training-steps": Table("bench_training", training_steps),
    "training-attention": Table("bench_training", training_attention),
    "training-memory": Table("bench_training", training_memory),
    "training-losses": Table("bench_training", training_losses),
    "cpu-calls": Table("bench_cpu", cpu_calls, CPU),
    "cpu-costs": Table("bench_cpu", cpu_costs, CPU),
    "accuracy": Table("against_torch", attention.accuracy),
    "gradient-errors": Table("gradient_errors", gradient_errors),
    "lra-lengths": Table("lra_lengths", lra_lengths, CPU),
    "lra-results": Table("lra", lra_results),
    "lra-short": Table("lra_short", lra_results, OTHER_GPU),
    "lra-steps": Table("lra_steps", lra_steps),
    "torch-operator": Table("torch", attention.torch_operator),
    "pathx": Table("pathx", long_context.stages_table, OTHER_GPU),
    "perplexity": Table("perplexity", judging.perplexity_table, OTHER_GPU),
    "bert": Table("bert", bert_table, OTHER_GPU),
    "chapters": Table("chapter_break", judging.chapter_table, OTHER_GPU),
    "ring": Table("ring", ring_table, OTHER_GPU),
    "data-parallel": Table("data_parallel", data_parallel_table, OTHER_GPU),
}


def as_markdown(name: str, device: str | None = None) -> str:
    """Return the conditions and the table.

    Args:
        name: Of the table.
        device: Folder of the record; None takes the table's own.

    Raises:
        ValueError: If there is no such table, or no such record.
    """
    if name == "summary":
        return readme_table.table().replace("(docs/results/", "(/results/")
    if name not in TABLES:
        raise ValueError(f"there is no table {name!r}; there are {['summary', *TABLES]}")
    table = TABLES[name]
    path = f"{device or table.device}/{table.record}.json"
    if not (RESULTS / path).exists():
        raise ValueError(f"the table {name!r} needs docs/results/{path}, which does not exist")
    record = json.loads((RESULTS / path).read_text(encoding="utf-8"))
    return f"{conditions(record, path)}\n\n{table.make(record)}"


class Measured(SphinxDirective):
    """Insert Markdown that is made from records, which :meth:`text` returns."""

    required_arguments = 1

    def text(self) -> str:
        """Return the Markdown.

        Raises:
            ValueError: If there is no such record.
        """
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        """Return the parsed page part."""
        try:
            text = self.text()
        except ValueError as error:
            raise self.error(str(error)) from None
        for path in RESULTS.glob("*/*.json"):
            self.env.note_dependency(str(path))
        box = nodes.container(classes=["measured"])
        self.state.nested_parse(StringList(text.splitlines(), self.arguments[0]), 0, box)
        return [box]


class RecordTable(Measured):
    """Insert a table that is made from a record."""

    option_spec = {"device": directives.unchanged}  # noqa: RUF012  # as docutils has it

    def text(self) -> str:
        """Return the conditions and the table."""
        return as_markdown(self.arguments[0], self.options.get("device"))


def setup(app: Any) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("record-table", RecordTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
