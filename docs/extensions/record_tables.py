"""Tables of the pages of results, each made from one record in docs/results when the site is built.

The directive ``{record-table} NAME`` inserts the conditions under which a record was measured and a table
that answers one question from it; ``TABLES`` lists them.  A table takes its device from ``:device:``, an
option of the directive, if there is a record of it on several.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import readme_table
from bench.long_context_tables import bert_table, chapters_table, perplexity_table, stages_table
from bench.long_range import lengths_table
from bench.long_range_tables import results_table, steps_tables
from bench.peer_figures import FIGURES, figure_of
from bench.ring_tables import data_parallel_table, ring_table
from bench.table_cells import cell, markdown
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

RESULTS = Path(__file__).resolve().parents[1] / "results"
GPU, CPU, OTHER_GPU = "nvidia-h200", "cpu-2-cores", "nvidia-h100"
GIGABYTE = 2**30
Record = dict[str, Any]
#: Of the tables that show a part of the lengths of a record.
LENGTHS = (1024, 8192)
QUANTITIES = (
    ("forward_ms", "forward, ms"), ("backward_ms", "backward, ms"), ("peak_mb", "peak, MiB"),
)  # fmt: skip
#: How the columns of PyTorch's backends are headed.
SDPA = {"FLASH": "PyTorch, flash", "CUDNN": "PyTorch, cuDNN", "EFFICIENT": "PyTorch, efficient"}
SDPA |= {"MATH": "PyTorch, math", "FlexAttention": "FlexAttention"}


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


def _rows(record: Record, group: str, **wanted: Any) -> list[Record]:
    return [
        row for row in record["rows"] if row["group"] == group and wanted.items() <= row.items()
    ]


def _rate(row: Record, direction: str, name: str) -> str:
    entry = row.get(direction, {}).get(name)
    return "" if entry is None else f"{entry['tflops']:.0f}"


def _mask(row: Record) -> str:
    return "causal" if row["case"] == "causal" else "full"


def _sides(
    rows: Iterable[Record], direction: str, names: dict[str, str], first: Callable[[Record], str]
) -> str:
    """Return a table of TFLOP/s: a line for each row, a column for each contestant."""
    lines = [[first(row), *(_rate(row, direction, name) for name in names)] for row in rows]
    return markdown([f"{direction}, TFLOP/s", *names.values()], lines)


def _call(row: Record) -> str:
    return f"d {row['head_dim']}, {_mask(row)}, N {row['length']:,}"


def attention_ratios(record: Record) -> str:
    """Return the geometric means of PyTorch's time over ours."""
    lines = []
    for figure in FIGURES:
        if ratios := figure_of(record["rows"], figure):
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            lines.append([figure.name, f"{mean:.2f}", str(len(ratios))])
    return markdown(["time of the second / time of the first", "ratio", "calls"], lines)


def attention_dense(record: Record) -> str:
    """Return TFLOP/s in bfloat16 of both tensor-core rungs and PyTorch's two fastest backends."""
    rows = [row for row in _rows(record, "dense", dtype="bfloat16") if row["length"] in LENGTHS]
    peers = {name: SDPA[name] for name in ("FLASH", "CUDNN")}
    forward = {"flash2_mma": "flash2_mma", "flash3_wgmma": "flash3_wgmma", **peers}
    backward = {**forward, "flash3_wgmma, deterministic": "flash3_wgmma, deterministic"}
    return "\n\n".join(
        _sides(rows, direction, names, _call)
        for direction, names in (("forward", forward), ("backward", backward))
    )


def attention_float32(record: Record) -> str:
    """Return TFLOP/s of float32 operands."""
    rows = [row for row in _rows(record, "float32") if row["length"] in LENGTHS]
    names = {"float32": "ours, float32", "tf32": "ours, TF32"}
    names |= {name: SDPA[name] for name in ("EFFICIENT", "MATH")}
    return "\n\n".join(_sides(rows, d, names, _call) for d in ("forward", "backward"))


def attention_options(record: Record) -> str:
    """Return TFLOP/s of calls with an option, beside the backends that have it."""
    rows = [row for group in ("masks", "options") for row in _rows(record, group)]
    names = {"auto": "ours", **{name: SDPA[name] for name in ("FLASH", "CUDNN", "FlexAttention")}}

    def call(row: Record) -> str:
        return f"{row['case']}, d {row['head_dim']}"

    merged: dict[str, Record] = {}
    for (
        row
    ) in rows:  # a boolean mask is in both groups, with other peers and a reading of ours in each
        kept = merged.setdefault(call(row), {**row, "forward": {}, "backward": {}})
        for direction in ("forward", "backward"):
            kept[direction] = {**row[direction], **kept[direction]}
    ordered = sorted(merged.values(), key=lambda row: row["head_dim"])
    return "\n\n".join(_sides(ordered, d, names, call) for d in ("forward", "backward"))


def peers(record: Record) -> str:
    """Return milliseconds of a call for each case, a column for each contestant that can do one."""
    rows = [row for row in record["rows"] if "forward" in row]
    names = list(dict.fromkeys(row["peer"] for row in rows))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    workload = record["workload"]
    (dtype,) = {row["dtype"] for row in rows}
    found = {(row["case"], row["peer"]): row for row in rows}
    shown = [
        f"{workload['heads']} heads, {workload['length']:,} keys, head_dim {workload['head_dim']}, "
        f"{dtype}. An empty cell: the backend has no such option, or cannot compile it."
    ]
    for direction in ("forward", "backward"):
        head = [f"{direction}, ms", *(SDPA.get(name, "ours") for name in names)]
        lines = []
        for case in cases:
            entries = [found.get((case, name)) for name in names]
            times = [entry and entry[direction]["ms"]["median"] for entry in entries]
            lines.append([case, *("" if time is None else cell(time) for time in times)])
        shown.append(markdown(head, lines))
    return "\n\n".join(shown)


def product(record: Record) -> str:
    """Return the rates of a matrix product, ours and cuBLAS's."""
    (row,) = _rows(record, "product")
    rates = [f"{rate:.0f} TFLOP/s" for rate in row["tflops"].values()]
    return markdown(["measured", "ours", "cuBLAS"], [[f"{row['dtype']} {row['case']}", *rates]])


def call_overhead(record: Record) -> str:
    """Return the host time of small calls, and calls from an idle device beside cuDNN's."""
    host = [row for row in record["rows"] if "us" in row]
    idle = [row for row in record["rows"] if "us" not in row]
    lines = []
    for row in host:
        own, *others = row["us"].items()
        theirs = ", ".join(f"{us:.1f} ({name})" for name, us in others)
        lines.append([row["call"], f"{own[1]:.1f}", theirs])
    calls = markdown(["host time of a call, µs", "ours", "PyTorch"], lines)
    lines = []
    for row in idle:
        call = _call({**row, "case": "causal" if row["causal"] else "dense"})
        lines.append([call, *(f"{row[direction]:.2f}" for direction in ("forward", "backward"))])
    means = (
        math.exp(sum(math.log(row[d]) for row in idle) / len(idle)) for d in ("forward", "backward")
    )
    lines.append(["geometric mean", *(f"{mean:.2f}" for mean in means)])
    head = ["one call on an idle device, cuDNN's time / ours", "forward", "backward"]
    return calls + "\n\n" + markdown(head, lines)


def torch_operator(record: Record) -> str:
    """Return the times of our operator of PyTorch beside the backends of SDPA, in milliseconds."""
    names = list(record["rows"][0]["ms"])
    lines = []
    for row in record["rows"]:
        what = "GPT-2 small, a " + row["kind"]
        if row["kind"] == "call":
            batch, heads, seq, dim = row["shape"]
            what = f"one call: batch {batch}, {heads} heads, N {seq:,}, d {dim}"
        times = [row["ms"].get(name) for name in names]
        cells = [cell(None if ms is None else ms["median"]) for ms in times]
        lines.append([what, *cells, f"{row['ratio']['median']:.2f}"])
    heads = [name.removesuffix("_ATTENTION") for name in names]
    return markdown(["forward and backward, bfloat16, ms", *heads, "fastest other / ours"], lines)


def rungs(record: Record) -> str:
    """Return milliseconds and MiB of every rung by length."""
    rows = record["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row if name != "length"))
    mask = "a causal mask" if record["causal"] else "no mask"
    shown = [
        f"batch {record['batch']}, {record['heads']} heads, head_dim {record['head_dim']}, float32, "
        f"{mask}. An empty cell: left out, since one pass takes too long or the memory is too small."
    ]
    for key, title in QUANTITIES:
        lines = [
            [f"N = {row['length']:,}", *(_figure(row.get(name, {}).get(key)) for name in names)]
            for row in rows
        ]
        shown.append(markdown([title, *names], lines))
    return "\n\n".join(shown)


def _figure(value: float | None) -> str:
    return "" if value is None else cell(value)


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
    return markdown([f"forward ms, × of {base}", *names, base], lines)


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
    lines = [
        [
            _model(row),
            *(f"{row['peak_bytes'][name] / GIGABYTE:.1f}" for name in ("ours", "PyTorch")),
            f"{row['value']:.2f}",
        ]
        for row in record["rows"]
        if row["kind"] == "memory"
    ]
    return markdown(["peak memory, GiB", "ours", "PyTorch", "ours / PyTorch"], lines)


def training_losses(record: Record) -> str:
    """Return the largest differences of losses of a training run."""
    lines = []
    for row in record["rows"]:
        if row["kind"] != "losses":
            continue
        found = row.get("differences", {})
        model = f"{row['preset']}, {row['precision']}, {row['steps']} steps"
        if row["precision"] == "float32":
            lines.append([model, "our float32 from PyTorch's float32", f"{row['value']:.1e}"])
            for name, text in (
                ("ours from PyTorch float64", "our float32 from PyTorch's float64"),
                ("PyTorch from PyTorch float64", "PyTorch's float32 from its float64"),
                ("PyTorch, math attention", "PyTorch's two attentions from each other"),
            ):
                if name in found:
                    lines.append([model, text, f"{found[name]:.1e}"])
        else:
            lines += [
                [model, f"{side} bfloat16 from PyTorch's float32", f"{found[name]:.1e}"]
                for name, side in (("ours", "our"), ("PyTorch", "PyTorch's"))
            ]
    head = ["model", "what differs", "largest relative difference of a loss"]
    return markdown(head, lines)


def cpu_calls(record: Record) -> str:
    """Return every call on the CPU in milliseconds beside PyTorch or NumPy."""
    lines = []
    for row in record["rows"]:
        what, _, other = row["figure"].rpartition(" / ")
        lines += [
            [f"{what}: {call['call']}", cell(call["ms"]), f"{cell(call['their_ms'])} ({other})",
             f"{call['ratio']:.2f}"]
            for call in row["calls"]
        ]  # fmt: skip
    return markdown(["ms", "ours", "other", "other / ours"], lines)


def cpu_costs(record: Record) -> str:
    """Return the figures of the CPU that have no other side."""
    lines = [
        [what, f"{row['value']:.3g} {unit}"]
        for row in record["rows"]
        if not row["calls"]
        for what, _, unit in [row["figure"].rpartition(", ")]
    ]
    return markdown(["measured", "ours"], lines)


def accuracy(record: Record) -> str:
    """Return errors of out and of the gradients, beside PyTorch's most accurate backend."""
    lines = []
    for row in _rows(record, "accuracy"):
        found = row["errors"]
        peer = next(name for name in ("MATH", "EFFICIENT") if name in found)
        ours = [entry for name, entry in found.items() if name not in ("MATH", "EFFICIENT")]
        cells = []
        for key in ("error", "gradient_error"):
            cells += [f"{max(each[key] for each in ours):.1e}", f"{found[peer][key]:.1e}"]
        call = f"{row['dtype']}, d {row['head_dim']}, {_mask(row)}, N {row['length']:,}"
        lines.append([call, *cells])
    head = ["largest error against float64", "out: ours", "PyTorch", "gradients: ours", "PyTorch"]
    return markdown(head, lines)


def gradient_errors(record: Record) -> str:
    """Return the errors of one step's gradients by parameter; one without a gradient has none."""
    lines = [
        [f"`{row['parameter']}`", f"{row['ours']:.1e}", f"{row['PyTorch']:.1e}"]
        for row in record["rows"]
        if row["parameter"] != "attention.k_projection.bias"
    ]
    return markdown(["relative root mean square of the error", "ours", "PyTorch"], lines)


def lra_lengths(record: Record) -> str:
    """Return the time of nine attentions by length, and from which length on each is faster than flash."""
    precision = record.get("precision", "float32")
    call = f"batch 1, {record['heads']} heads, head_dim {record['head_dim']}, {precision}, no mask"
    return f"{call}. A dash: not enough memory.\n\n{lengths_table(record['rows'])}"


def _dashes(record: Record) -> str:
    """Return what a dash stands for, and the record's note if it has one."""
    note = f"; {record['note']}" if "note" in record else ""
    return f"A dash: not measured{note}."


def lra_results(record: Record) -> str:
    """Return accuracy, time and memory of the trainings on each task."""
    return f"{_dashes(record)}\n\n{results_table(record['rows'])}"


def lra_steps(record: Record) -> str:
    """Return speed-up and memory of training steps on each task."""
    return f"{_dashes(record)}\n\n{steps_tables(record['rows'])}"


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
    "attention-ratios": Table("against_torch", attention_ratios),
    "attention-dense": Table("against_torch", attention_dense),
    "attention-float32": Table("against_torch", attention_float32),
    "attention-options": Table("against_torch", attention_options),
    "product": Table("against_torch", product),
    "call-overhead": Table("calls", call_overhead),
    "peers": Table("peers", peers),
    "rungs": Table("bench_attention", rungs),
    "rungs-forward": Table("bench_attention", rungs_forward),
    "training-speed": Table("bench_training", training_speed),
    "training-steps": Table("bench_training", training_steps),
    "training-attention": Table("bench_training", training_attention),
    "training-memory": Table("bench_training", training_memory),
    "training-losses": Table("bench_training", training_losses),
    "cpu-calls": Table("bench_cpu", cpu_calls, CPU),
    "cpu-costs": Table("bench_cpu", cpu_costs, CPU),
    "accuracy": Table("against_torch", accuracy),
    "gradient-errors": Table("gradient_errors", gradient_errors),
    "lra-lengths": Table("lra_lengths", lra_lengths, CPU),
    "lra-results": Table("lra", lra_results),
    "lra-short": Table("lra_short", lra_results, OTHER_GPU),
    "lra-steps": Table("lra_steps", lra_steps),
    "torch-operator": Table("torch", torch_operator),
    "pathx": Table("pathx", stages_table, OTHER_GPU),
    "perplexity": Table("perplexity", perplexity_table, OTHER_GPU),
    "bert": Table("bert", bert_table, OTHER_GPU),
    "chapters": Table("chapter_break", chapters_table, OTHER_GPU),
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


class RecordTable(SphinxDirective):
    """Insert a table that is made from a record."""

    required_arguments = 1
    option_spec = {"device": directives.unchanged}  # noqa: RUF012  # as docutils has it

    def run(self) -> list[nodes.Node]:
        """Return the parsed page part."""
        name, device = self.arguments[0], self.options.get("device")
        try:
            text = as_markdown(name, device)
        except ValueError as error:
            raise self.error(str(error)) from None
        for path in RESULTS.glob("*/*.json"):
            self.env.note_dependency(str(path))
        box = nodes.container(classes=["measured"])
        self.state.nested_parse(StringList(text.splitlines(), name), 0, box)
        return [box]


def setup(app: Any) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("record-table", RecordTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
